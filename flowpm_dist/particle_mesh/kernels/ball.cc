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
  const double near2 = ball.near * ball.near, far2 = ball.far * ball.far;
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
        sight.u = std::clamp((2 * chi - lower - upper) / (upper - lower), -1.0, 1.0);
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
        if (sight.placed && !near_shells(ball, sight.distance)) continue;
        // At the observer, where its weight may be infinite.
        if (ball.power > 0 && sight.distance == 0) continue;
        see(sight);
      }
      stop = std::max(stop, until);
    }
  }
}

// A part of a particle on the maps.
struct Hit {
  int32_t shell, ring;
  int32_t pixel[4];
  double weight[4], distance;
};

template <typename T>
FLOWPM_INLINE void deposit(const Ball<T>& ball, int64_t b, const Hit& hit, bool above, bool below) {
  const Amount<T> amount_of(ball, b, hit.distance);
  for (int64_t w = 0; w < ball.weights; ++w) {
    const double amount = amount_of.of(w);
    T* map = ball.out + ((b * ball.shells + hit.shell) * ball.weights + w) * ball.pixels();
    for (int i = above ? 0 : 2; i < (below ? 4 : 2); ++i) {
      map[hit.pixel[i]] += T(amount * hit.weight[i]);
    }
  }
}

// Some rows of a copy, and the bands of rings that their particles are sorted by.
template <typename T>
struct Rows {
  const Ball<T>& ball;
  const Rings& rings;
  int64_t b, copy, begin, count;
  const int32_t* band_of;
  Hits<Hit>* hits;  // of each piece
};

template <typename T>
FLOWPM_INLINE void find(const Rows<T>& rows, int64_t piece) {
  const int64_t from = rows.begin + piece_begin(rows.count, piece);
  const int64_t to = rows.begin + piece_begin(rows.count, piece + 1);
  Hits<Hit>& hits = rows.hits[piece];
  for_particles(rows.ball, rows.b, rows.copy, from, to, [&](const Sight& sight) {
    if (!sight.placed) {  // to be seen on the maps
      hits.add(0, {0, 0, {0, 0, 0, 0}, {kNotANumber}, 1.0});
      return;
    }
    const Corners corners(rows.rings, sight.x);
    Hit hit;
    hit.ring = int32_t(corners.ring);
    hit.distance = sight.distance;
    for (int i = 0; i < 4; ++i) hit.pixel[i] = int32_t(corners.pixel[i]);
    const int32_t above = rows.band_of[hit.ring], below = rows.band_of[hit.ring + 1];
    for_shells(rows.ball, sight.distance, -kInfinite, kInfinite, [&](int64_t shell, double share, double) {
      hit.shell = int32_t(shell);
      corners.weights(hit.weight);
      for (double& weight : hit.weight) weight *= share;
      hits.add(above, hit);
      if (below != above) hits.add(below, hit);
    });
  });
}

// All rows, and what each piece adds to the cotangents of factors and amounts.
template <typename T>
struct RowsVjp {
  const BallVjp<T>& call;
  const Rings& rings;
  int64_t b, count, by_factors, by_amounts;
  double* sums;  // [pieces, by_factors + by_amounts]: [segments, fields, kTerms], [nodes, weights]
};

template <typename T>
FLOWPM_INLINE void carry_back(const RowsVjp<T>& rows, int64_t piece, int64_t copy) {
  const BallVjp<T>& call = rows.call;
  const Ball<T>& ball = call.painted;
  const int64_t terms = Ball<T>::kTerms;
  const int64_t from = piece_begin(rows.count, piece), to = piece_begin(rows.count, piece + 1);
  double* by_factors = rows.sums + piece * (rows.by_factors + rows.by_amounts);
  double* by_amounts = by_factors + rows.by_factors;
  for_particles(ball, rows.b, copy, from, to, [&](const Sight& sight) {
    if (!sight.placed) return;
    const Corners corners(rows.rings, sight.x);
    const Amount<T> amount_of(ball, rows.b, sight.distance);
    const double inverse = sight.distance > 0 ? 1 / sight.distance : 0.0;
    double* damounts = by_amounts + amount_of.node * ball.weights;
    double to_distance = 0, to_theta = 0, to_phi = 0;
    for_shells(ball, sight.distance, -kInfinite, kInfinite, [&](int64_t shell, double share, double slope) {
      for (int64_t w = 0; w < ball.weights; ++w) {
        const int64_t map = (rows.b * ball.shells + shell) * ball.weights + w;
        const auto read = corners.read(call.dout + map * ball.pixels());
        const double amount = amount_of.of(w);
        damounts[w] += (1 - amount_of.share) * amount_of.per * share * read.value;
        damounts[ball.weights + w] += amount_of.share * amount_of.per * share * read.value;
        to_distance += (amount_of.slope(w) * share + amount * slope) * read.value;
        to_theta += amount * share * read.by_theta;
        to_phi += amount * share * read.by_phi;
      }
    });
    double back[3];
    corners.carry_back(sight.x, to_distance * inverse, to_theta, to_phi, back);
    const int64_t row = (rows.b * ball.segments + sight.segment) * ball.fields;
    for (int64_t f = 0; f < ball.fields; ++f) {
      const double c = factor_of(ball.factors + (row + f) * terms, sight.u);
      const T* s = ball.field[f] + 3 * sight.index;
      T* ds = call.dfield[f] + 3 * sight.index;
      double along = 0;
      for (int a = 0; a < 3; ++a) {
        ds[a] += T(c * back[a]);
        along += double(s[a]) * back[a];
      }
      double* sums = by_factors + (sight.segment * ball.fields + f) * terms;
      for (int64_t p = 0; p < terms; ++p, along *= sight.u) sums[p] += along;
    }
  });
}

template <typename T>
FLOWPM_INLINE void carry_back(const RowsVjp<T>& rows, int64_t piece) {
  for (int64_t copy = 0; copy < rows.call.painted.copies; ++copy) carry_back(rows, piece, copy);
}

FLOWPM_PART(find, Rows)
FLOWPM_PART(carry_back, RowsVjp)

}  // namespace

template <typename T>
void Ball<T>::run(const Parallel& parallel) const {
  const Ball& call = *this;
  const Rings rings_of{nside, rings};
  clear(call.out, call.batch * call.maps() * pixels(), parallel);
  const int64_t last = 4 * nside, bands = std::min(kBands, last - 1);
  // As many pixels in each band. A pole belongs to the ring next to it.
  std::vector<int32_t> band_of(last + 1);
  for (int64_t ring = 0; ring <= last; ++ring) {
    const int64_t start = rings_of.start(std::clamp<int64_t>(ring, 1, last - 1));
    band_of[ring] = int32_t(start * bands / pixels());
  }
  std::vector<Hits<Hit>> hits(kPieces, Hits<Hit>(bands));
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t number = 0; number < copies; ++number) {
      paint_rows(
          call.particles[0] * call.particles[1], call.particles[2], bands, hits, parallel,
          [&](int64_t begin, int64_t count) {
            const Rows<T> rows{call, rings_of, b, number, begin, count, band_of.data(),
                               hits.data()};
            parallel(kPieces, [&](int64_t piece) { find_clone(rows, piece); });
          },
          [&](int64_t band, const Hit& hit) {
            deposit(call, b, hit, band_of[hit.ring] == band, band_of[hit.ring + 1] == band);
          });
    }
  }
}

template <typename T>
void BallVjp<T>::run(const Parallel& parallel) const {
  const BallVjp& call = *this;
  const Ball<T>& ball = call.painted;
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
    const RowsVjp<T> all{call, rings, b, rows, by_factors, by_amounts, sums.data()};
    parallel(kPieces, [&](int64_t piece) { carry_back_clone(all, piece); });
    add_pieces(sums, 0, by_factors, call.dfactors + b * by_factors);
    add_pieces(sums, by_factors, by_amounts, call.damounts + b * by_amounts);
  }
}

template struct Ball<float>;
template struct Ball<double>;
template struct BallVjp<float>;
template struct BallVjp<double>;

}  // namespace flowpm
