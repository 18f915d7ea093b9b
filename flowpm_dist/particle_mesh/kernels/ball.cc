// Paint particles about an observer on maps of the whole sky, and its adjoint.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#include "healpix.h"
#include "hits.h"
#include "kernels.h"

namespace flowpm {
namespace {

// A copy of a particle as it is seen.
struct Sight {
  int64_t index;    // of the particle in a field
  int64_t segment;  // of its undisplaced distance
  double u;         // place in the segment, from -1 to 1
  double x[3], distance;
  bool placed;
};

template <typename T>
FLOWPM_INLINE double factor_of(const T* c, double u) {
  return ((double(c[3]) * u + double(c[2])) * u + double(c[1])) * u + double(c[0]);
}

// Calls see(sight) for what is seen of a copy of the particles of rows `from` to `to`.
template <typename T, typename See>
FLOWPM_INLINE void for_particles(const Ball<T>& ball, int64_t b, int64_t copy, int64_t from,
                                 int64_t to, const See& see) {
  const double* edges = ball.edges;
  const double farthest = farthest_move(ball.lengths);
  const double near2 = edges[0] * edges[0], far2 = edges[ball.segments] * edges[ball.segments];
  double origin[3];
  for (int a = 0; a < 3; ++a) {
    origin[a] = double(ball.copy[3 * copy + a]) * ball.lengths[a] - ball.observer[a];
  }
  // Counted from the lattice's beginning, so that a place has the same bits on any mesh.
  const auto place = [&](int axis, int64_t at) {
    return double(ball.first[axis] + at) * ball.spacing[axis] + origin[axis];
  };
  const int64_t n = ball.particles[2];
  const double last = double(n), per = 1 / ball.spacing[2], begin_z = place(2, 0);
  for (int64_t row = from; row < to; ++row) {
    const double x = place(0, row / ball.particles[1]), y = place(1, row % ball.particles[1]);
    const double across = x * x + y * y;
    if (across >= far2) continue;
    const double outer = std::sqrt(far2 - across), inner = std::sqrt(std::max(near2 - across, 0.0));
    const int64_t first = (b * ball.particles[0] * ball.particles[1] + row) * n;
    int64_t stop = 0;
    for (int side = 0; side < 2; ++side) {  // of the observer, along the row
      const double low = side ? inner : -outer, high = side ? outer : -inner;
      const double begin = std::floor((low - begin_z) * per);
      const double end = std::ceil((high - begin_z) * per) + 1;
      const int64_t until = int64_t(std::clamp(end, 0.0, last));
      for (int64_t at = std::max(stop, int64_t(std::clamp(begin, 0.0, last))); at < until; ++at) {
        const double z = place(2, at), square = across + z * z;
        if (!(square >= near2 && square < far2)) continue;
        const double chi = std::sqrt(square);
        const int64_t found = std::upper_bound(edges, edges + ball.segments + 1, chi) - edges - 1;
        Sight sight;
        sight.segment = std::clamp<int64_t>(found, 0, ball.segments - 1);
        const double lower = edges[sight.segment], upper = edges[sight.segment + 1];
        sight.u = (2 * chi - lower - upper) / (upper - lower);
        sight.index = first + at;
        double moved[3] = {0, 0, 0};
        const T* factors =
            ball.factors + (b * ball.segments + sight.segment) * ball.fields * Ball<T>::kTerms;
        for (int64_t f = 0; f < ball.fields; ++f) {
          const double c = factor_of(factors + f * Ball<T>::kTerms, sight.u);
          for (int a = 0; a < 3; ++a) {
            moved[a] += c * double(ball.field[f][3 * sight.index + a]);
          }
        }
        sight.placed = has_place(moved, farthest);
        sight.x[0] = x + moved[0];
        sight.x[1] = y + moved[1];
        sight.x[2] = z + moved[2];
        sight.distance = std::sqrt(sight.x[0] * sight.x[0] + sight.x[1] * sight.x[1] +
                                   sight.x[2] * sight.x[2]);
        // At the observer, where its weight may be infinite.
        if (ball.per_distance && sight.distance == 0) continue;
        see(sight);
      }
      stop = std::max(stop, until);
    }
  }
}

// Where the amounts for a distance lie among their nodes, and how far beyond the first of two.
template <typename T>
struct Node {
  int64_t lower;
  double share;
  bool inside;
  Node(const Ball<T>& ball, double distance) {
    const double along = distance / ball.step;
    lower = int64_t(std::min(along, double(ball.nodes - 2)));
    share = std::min(along - double(lower), 1.0);
    inside = along - double(lower) <= 1.0;
  }
};

// A particle on the maps.
struct Hit {
  int32_t segment, ring;
  int32_t pixel[4];
  double weight[4], distance;
};

template <typename T>
FLOWPM_INLINE void deposit(const Ball<T>& ball, int64_t b, const Hit& hit, bool above, bool below) {
  const Node<T> node(ball, hit.distance);
  const T* lower = ball.amounts + (b * ball.nodes + node.lower) * ball.weights;
  const T* upper = lower + ball.weights;
  const double per = ball.per_distance ? 1 / hit.distance : 1.0;
  for (int64_t w = 0; w < ball.weights; ++w) {
    const double first = double(lower[w]);
    const double amount = (first + node.share * (double(upper[w]) - first)) * per;
    T* map = ball.out + (b * ball.maps + ball.first_map[hit.segment] + w) * ball.pixels();
    for (int i = above ? 0 : 2; i < (below ? 4 : 2); ++i) {
      map[hit.pixel[i]] += T(amount * hit.weight[i]);
    }
  }
}

// Some rows of a copy, and the bands of rings that their particles are sorted by.
template <typename T>
struct Piece {
  const Ball<T>* ball;
  const Rings* rings;
  int64_t b, copy, from, to;
  const int32_t* band_of;
  Hits<Hit>* hits;
};

template <typename T>
FLOWPM_INLINE void find(const Piece<T>& piece) {
  const Ball<T>& ball = *piece.ball;
  for_particles(ball, piece.b, piece.copy, piece.from, piece.to, [&](const Sight& sight) {
    Hit hit;
    hit.segment = int32_t(sight.segment);
    if (!sight.placed) {  // to be seen on the maps
      piece.hits->add(0, {hit.segment, 0, {0, 0, 0, 0}, {kNotANumber}, 1.0});
      return;
    }
    Corners corners(*piece.rings, sight.x);
    hit.ring = int32_t(corners.ring);
    hit.distance = sight.distance;
    corners.weights(hit.weight);
    for (int i = 0; i < 4; ++i) hit.pixel[i] = int32_t(corners.pixel[i]);
    const int32_t above = piece.band_of[hit.ring], below = piece.band_of[hit.ring + 1];
    piece.hits->add(above, hit);
    if (below != above) piece.hits->add(below, hit);
  });
}

// What some rows add to the cotangents: those of fields, and their own sums.
template <typename T>
struct PieceVjp {
  const BallVjp<T>* call;
  const Rings* rings;
  int64_t b, from, to;
  double* dfactors;  // [segments, fields, kTerms]
  double* damounts;  // [nodes, weights]
};

template <typename T>
FLOWPM_INLINE void carry_back(const PieceVjp<T>& piece, int64_t copy) {
  const BallVjp<T>& call = *piece.call;
  const Ball<T>& ball = call.ball;
  const int64_t terms = Ball<T>::kTerms;
  for_particles(ball, piece.b, copy, piece.from, piece.to, [&](const Sight& sight) {
    if (!sight.placed) return;
    Corners corners(*piece.rings, sight.x);
    const Node<T> node(ball, sight.distance);
    const T* lower = ball.amounts + (piece.b * ball.nodes + node.lower) * ball.weights;
    const double inverse = sight.distance > 0 ? 1 / sight.distance : 0.0;
    const double per = ball.per_distance ? inverse : 1.0;
    double* damounts = piece.damounts + node.lower * ball.weights;
    double to_distance = 0, to_theta = 0, to_phi = 0;
    for (int64_t w = 0; w < ball.weights; ++w) {
      const int64_t map = piece.b * ball.maps + ball.first_map[sight.segment] + w;
      const auto read = corners.read(call.dout + map * ball.pixels());
      const double first = double(lower[w]), rise = double(lower[ball.weights + w]) - first;
      const double amount = (first + node.share * rise) * per;
      damounts[w] += (1 - node.share) * per * read.value;
      damounts[ball.weights + w] += node.share * per * read.value;
      double slope = node.inside ? rise / ball.step * per : 0.0;
      if (ball.per_distance) slope -= amount * inverse;
      to_distance += slope * read.value;
      to_theta += amount * read.by_theta;
      to_phi += amount * read.by_phi;
    }
    double to[3];
    corners.carry_back(sight.x, to_distance * inverse, to_theta, to_phi, to);
    const int64_t row = (piece.b * ball.segments + sight.segment) * ball.fields;
    for (int64_t f = 0; f < ball.fields; ++f) {
      const double c = factor_of(ball.factors + (row + f) * terms, sight.u);
      const T* s = ball.field[f] + 3 * sight.index;
      T* ds = call.dfield[f] + 3 * sight.index;
      double along = 0;
      for (int a = 0; a < 3; ++a) {
        ds[a] += T(c * to[a]);
        along += double(s[a]) * to[a];
      }
      double* sums = piece.dfactors + (sight.segment * ball.fields + f) * terms;
      for (int64_t p = 0; p < terms; ++p, along *= sight.u) sums[p] += along;
    }
  });
}

template <typename T>
FLOWPM_INLINE void carry_back(const PieceVjp<T>& piece) {
  for (int64_t copy = 0; copy < piece.call->ball.copies; ++copy) carry_back(piece, copy);
}

FLOWPM_CLONES void find_clone(const Piece<float>& piece) { find(piece); }
FLOWPM_CLONES void find_clone(const Piece<double>& piece) { find(piece); }
FLOWPM_CLONES void carry_back_clone(const PieceVjp<float>& piece) { carry_back(piece); }
FLOWPM_CLONES void carry_back_clone(const PieceVjp<double>& piece) { carry_back(piece); }

}  // namespace

template <typename T>
void paint_ball(const Ball<T>& call, const Parallel& parallel) {
  const Rings rings{call.nside, call.rings};
  clear(call.out, call.batch * call.maps * call.pixels(), parallel);
  const int64_t last = 4 * call.nside, bands = std::min(kBands, last - 1);
  // As many pixels in each band. A pole belongs to the ring next to it.
  std::vector<int32_t> band_of(last + 1);
  for (int64_t ring = 0; ring <= last; ++ring) {
    const int64_t start = rings.start(std::clamp<int64_t>(ring, 1, last - 1));
    band_of[ring] = int32_t(start * bands / call.pixels());
  }
  const int64_t all = call.particles[0] * call.particles[1];
  const int64_t step = std::max<int64_t>(1, kAtOnce / std::max<int64_t>(1, call.particles[2]));
  std::vector<Hits<Hit>> hits(kPieces, Hits<Hit>(bands));
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t copy = 0; copy < call.copies; ++copy) {
      for (int64_t begin = 0; begin < all; begin += step) {
        const int64_t rows = std::min(step, all - begin);
        parallel(kPieces, [&](int64_t piece) {
          hits[piece].clear();
          find_clone(Piece<T>{&call, &rings, b, copy, begin + piece * rows / kPieces,
                              begin + (piece + 1) * rows / kPieces, band_of.data(),
                              &hits[piece]});
        });
        parallel(bands, [&](int64_t band) {
          for (int64_t piece = 0; piece < kPieces; ++piece) {
            hits[piece].for_band(band, [&](const Hit& hit) {
              deposit(call, b, hit, band_of[hit.ring] == band, band_of[hit.ring + 1] == band);
            });
          }
        });
      }
    }
  }
}

template <typename T>
void paint_ball_vjp(const BallVjp<T>& call, const Parallel& parallel) {
  const Ball<T>& ball = call.ball;
  const Rings rings{ball.nside, ball.rings};
  const int64_t rows = ball.particles[0] * ball.particles[1];
  const int64_t by_factors = ball.segments * ball.fields * Ball<T>::kTerms;
  const int64_t by_amounts = ball.nodes * ball.weights, each = by_factors + by_amounts;
  for (int64_t f = 0; f < ball.fields; ++f) {
    clear(call.dfield[f], 3 * ball.batch * rows * ball.particles[2], parallel);
  }
  std::vector<double> sums(kPieces * each);
  for (int64_t b = 0; b < ball.batch; ++b) {
    std::fill(sums.begin(), sums.end(), 0.0);
    parallel(kPieces, [&](int64_t piece) {
      double* mine = sums.data() + piece * each;
      carry_back_clone(PieceVjp<T>{&call, &rings, b, piece * rows / kPieces,
                                   (piece + 1) * rows / kPieces, mine, mine + by_factors});
    });
    double* dfactors = call.dfactors + b * by_factors;
    double* damounts = call.damounts + b * by_amounts;
    std::fill(dfactors, dfactors + by_factors, 0.0);
    std::fill(damounts, damounts + by_amounts, 0.0);
    for (int64_t piece = 0; piece < kPieces; ++piece) {
      const double* part = sums.data() + piece * each;
      for (int64_t i = 0; i < by_factors; ++i) dfactors[i] += part[i];
      for (int64_t i = 0; i < by_amounts; ++i) damounts[i] += part[by_factors + i];
    }
  }
}

#define FLOWPM_INSTANTIATE(T)                                    \
  template void paint_ball<T>(const Ball<T>&, const Parallel&);  \
  template void paint_ball_vjp<T>(const BallVjp<T>&, const Parallel&);
FLOWPM_INSTANTIATE(float)
FLOWPM_INSTANTIATE(double)

}  // namespace flowpm
