// Paint layers of particles on maps of the sky, and its adjoint.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#include "hits.h"
#include "kernels.h"

namespace flowpm {
namespace {

// The particles of a slab: its axis of distance runs over the slab's layers alone.
struct Range {
  int64_t begin[3], end[3];
  int64_t rows() const { return (end[0] - begin[0]) * (end[1] - begin[1]); }
};

template <typename T>
Range range_of(const Sky<T>& sky, int64_t slab) {
  const int32_t* place = sky.places + 6 * slab;
  Range range;
  for (int a = 0; a < 3; ++a) {
    range.begin[a] = 0;
    range.end[a] = sky.particles[a];
  }
  range.begin[place[2]] = place[3];
  range.end[place[2]] = place[3] + place[4];
  return range;
}

// The length that is seen under an angle at a distance, over the angle and the distance: f_K / chi.
// `slope` is its derivative by the distance over itself.
struct Widening {
  double value = 1.0, slope = 0.0;
};

template <typename T>
FLOWPM_INLINE Widening widening(const Sky<T>& sky, int64_t b, double distance) {
  Widening wide;
  if (sky.columns == sky.weights || !(distance > 0)) return wide;
  const Amount<T> at(sky, b, distance);
  const double low = double(at.lower[sky.weights]);
  const double rise = double(at.lower[sky.columns + sky.weights]) - low;
  wide.value = low + at.share * rise;
  if (at.rise > 0) wide.slope = rise / (sky.step * wide.value);
  return wide;
}

// A particle on the sky: its image in the middle, and what its images share.
struct Sight {
  int64_t index;  // of the particle in a field
  int32_t layer;
  double x, y;    // [Mpc/h] from the line of sight
  double distance;
  Widening wide;
  bool placed;
};

// Calls see(sight) for the particles of rows `from` to `to` of a slab that may lie on a map.
template <typename T, typename See>
FLOWPM_INLINE void for_particles(const Sky<T>& sky, int64_t b, int64_t slab, int64_t from,
                                 int64_t to, const See& see) {
  const int32_t* place = sky.places + 6 * slab;
  const double* direction = sky.directions + 7 * slab;
  const int ax = place[0], ay = place[1], az = place[2];
  const Range range = range_of(sky, slab);
  const int64_t columns = range.end[1] - range.begin[1];
  const double lx = sky.lengths[ax], ly = sky.lengths[ay], per_x = 1 / lx, per_y = 1 / ly;
  const double farthest = farthest_move(sky.lengths);
  const double half = 0.5 * double(sky.pixels + 1) * sky.pixel;
  for (int64_t row = from; row < to; ++row) {
    int64_t at[3] = {range.begin[0] + row / columns, range.begin[1] + row % columns, 0};
    const int64_t first =
        ((b * sky.particles[0] + at[0]) * sky.particles[1] + at[1]) * sky.particles[2];
    for (at[2] = range.begin[2]; at[2] < range.end[2]; ++at[2]) {
      const int64_t layer = place[5] + at[az] - place[3], index = first + at[2];
      const T* factors = sky.factors + (b * sky.layers + layer) * sky.fields;
      double moved[3] = {0, 0, 0};
      for (int64_t f = 0; f < sky.fields; ++f) {
        for (int a = 0; a < 3; ++a) {
          moved[a] += double(factors[f]) * double(sky.field[f][3 * index + a]);
        }
      }
      Sight sight;
      sight.distance = sky.distances[layer] + direction[4] * moved[az];
      sight.wide = widening(sky, b, sight.distance);
      const double reach = half * sight.distance * sight.wide.value;
      sight.x = direction[0] + direction[1] * (double(at[ax]) * sky.spacing[ax] + moved[ax]);
      sight.y = direction[2] + direction[3] * (double(at[ay]) * sky.spacing[ay] + moved[ay]);
      sight.placed = has_place(moved, farthest);
      sight.x -= lx * std::nearbyint(sight.x * per_x);
      sight.y -= ly * std::nearbyint(sight.y * per_y);
      sight.index = index;
      sight.layer = int32_t(layer);
      // One behind us has a negative reach.
      const bool inside = std::abs(sight.x) <= reach && std::abs(sight.y) <= reach &&
                          near_shells(sky, sight.distance);
      if (inside || !sight.placed) see(sight);
    }
  }
}

// Calls image(px, py) [pixels] for the images of a particle that lie on the map.
template <typename T, typename Image>
FLOWPM_INLINE void for_images(const Sky<T>& sky, const Sight& sight, int64_t slab,
                              const Image& image) {
  const int32_t* place = sky.places + 6 * slab;
  const double length = sight.distance * sight.wide.value, middle = 0.5 * double(sky.pixels) - 0.5;
  const double per_pixel = 1 / (length * sky.pixel), reach = (middle + 1) * length * sky.pixel;
  const double lx = sky.lengths[place[0]], ly = sky.lengths[place[1]];
  if (2 * reach < std::min(lx, ly)) {  // only the nearest image can be seen
    image(sight.x * per_pixel + middle, sight.y * per_pixel + middle);
    return;
  }
  const double x0 = std::ceil((-reach - sight.x) / lx), x1 = std::floor((reach - sight.x) / lx);
  const double y0 = std::ceil((-reach - sight.y) / ly), y1 = std::floor((reach - sight.y) / ly);
  for (double i = x0; i <= x1; ++i) {
    for (double j = y0; j <= y1; ++j) {
      image((sight.x + i * lx) * per_pixel + middle, (sight.y + j * ly) * per_pixel + middle);
    }
  }
}

// A part of a particle on the maps.
struct Hit {
  int32_t shell, column, row;
  double x, y, distance, share;  // place in the pixel; share of the particle in the shell
};

template <typename T>
FLOWPM_INLINE void deposit(const Sky<T>& sky, int64_t b, const Hit& hit, int64_t begin, int64_t end) {
  const int64_t n = sky.pixels;
  const Amount<T> amount_of(sky, b, hit.distance);
  for (int64_t w = 0; w < sky.weights; ++w) {
    const double amount = amount_of.of(w) * hit.share;
    T* map = sky.out + ((b * sky.shells + hit.shell) * sky.weights + w) * n * n;
    for (int dy = 0; dy < 2; ++dy) {
      const int64_t row = hit.row + dy;
      if (row < begin || row >= end) continue;
      const double along = amount * (dy ? hit.y : 1 - hit.y);
      if (hit.column >= 0) map[row * n + hit.column] += T(along * (1 - hit.x));
      if (hit.column + 1 < n) map[row * n + hit.column + 1] += T(along * hit.x);
    }
  }
}

// Some rows of a slab, and the bands of rows of the maps that their particles are sorted by.
template <typename T>
struct Rows {
  const Sky<T>& sky;
  int64_t b, slab, begin, count;
  const int32_t* band_of;
  Hits<Hit>* hits;  // of each piece
};

template <typename T>
FLOWPM_INLINE void find(const Rows<T>& rows, int64_t piece) {
  const Sky<T>& sky = rows.sky;
  const int64_t n = sky.pixels, from = rows.begin + piece_begin(rows.count, piece);
  const int64_t to = rows.begin + piece_begin(rows.count, piece + 1);
  const double* cut = sky.directions + 7 * rows.slab + 5;
  Hits<Hit>& hits = rows.hits[piece];
  for_particles(sky, rows.b, rows.slab, from, to, [&](const Sight& sight) {
    if (!sight.placed) {  // to be seen on the maps
      hits.add(0, {0, 0, 0, 0.0, 0.0, 1.0, kNotANumber});
      return;
    }
    for_images(sky, sight, rows.slab, [&](double px, double py) {
      const double column = std::floor(px), row = std::floor(py);
      if (!(column >= -1 && column < n && row >= -1 && row < n)) return;
      Hit hit;
      hit.column = int32_t(column);
      hit.row = int32_t(row);
      hit.x = px - column;
      hit.y = py - row;
      hit.distance = sight.distance;
      const int32_t low = rows.band_of[std::max<int64_t>(hit.row, 0)];
      const int32_t high = rows.band_of[std::min<int64_t>(hit.row + 1, n - 1)];
      for_shells(sky, sight.distance, cut[0], cut[1], [&](int64_t shell, double share, double) {
        hit.shell = int32_t(shell);
        hit.share = share;
        hits.add(low, hit);
        if (high != low) hits.add(high, hit);
      });
    });
  });
}

// The rows of a slab, and what each piece adds to the cotangents of factors and amounts.
template <typename T>
struct RowsVjp {
  const SkyVjp<T>& call;
  int64_t b, slab, by_factors, by_amounts;
  double* sums;  // [pieces, by_factors + by_amounts]: [layers, fields], [nodes, weights]
};

template <typename T>
FLOWPM_INLINE void carry_back(const RowsVjp<T>& rows, int64_t piece) {
  const SkyVjp<T>& call = rows.call;
  const Sky<T>& sky = call.painted;
  const int64_t n = sky.pixels, fields = sky.fields, weights = sky.weights, slab = rows.slab;
  const int64_t columns = sky.columns;
  const int32_t* place = sky.places + 6 * slab;
  const double* direction = sky.directions + 7 * slab;
  const double middle = 0.5 * double(n) - 0.5;
  const int64_t count = range_of(sky, slab).rows();
  const int64_t from = piece_begin(count, piece), to = piece_begin(count, piece + 1);
  double* by_factors = rows.sums + piece * (rows.by_factors + rows.by_amounts);
  double* by_amounts = by_factors + rows.by_factors;
  for_particles(sky, rows.b, slab, from, to, [&](const Sight& sight) {
    if (!sight.placed) return;
    const Amount<T> amount_of(sky, rows.b, sight.distance);
    double* damounts = by_amounts + amount_of.node * columns;
    const double per_distance = 1 / sight.distance;
    const double per_pixel = per_distance / sky.pixel / sight.wide.value;
    double to_x = 0, to_y = 0, to_distance = 0, to_wide = 0;
    for_images(sky, sight, slab, [&](double px, double py) {
      const double column = std::floor(px), row = std::floor(py);
      if (!(column >= -1 && column < n && row >= -1 && row < n)) return;
      const int64_t i = int64_t(column), j = int64_t(row);
      const double x = px - column, y = py - row;
      double slope_x = 0, slope_y = 0;
      const double near = direction[5], far = direction[6];
      for_shells(sky, sight.distance, near, far, [&](int64_t shell, double share, double slope) {
        for (int64_t w = 0; w < weights; ++w) {
          const T* map = call.dout + ((rows.b * sky.shells + shell) * weights + w) * n * n;
          const auto value = [&](int64_t r, int64_t c) {
            return r >= 0 && r < n && c >= 0 && c < n ? double(map[r * n + c]) : 0.0;
          };
          const double m00 = value(j, i), m01 = value(j, i + 1);
          const double m10 = value(j + 1, i), m11 = value(j + 1, i + 1);
          const double low = m00 + x * (m01 - m00), high = m10 + x * (m11 - m10);
          const double read = low + y * (high - low), amount = amount_of.of(w);
          damounts[w] += (1 - amount_of.share) * amount_of.per * share * read;
          damounts[columns + w] += amount_of.share * amount_of.per * share * read;
          to_distance += (amount_of.slope(w) * share + amount * slope) * read;
          slope_x += amount * share * ((1 - y) * (m01 - m00) + y * (m11 - m10));
          slope_y += amount * share * (high - low);
        }
      });
      to_x += slope_x * per_pixel;
      to_y += slope_y * per_pixel;
      const double outwards = slope_x * (px - middle) + slope_y * (py - middle);
      to_distance -= outwards * (per_distance + sight.wide.slope);
      to_wide -= outwards / sight.wide.value;
    });
    if (columns > weights) {
      damounts[weights] += (1 - amount_of.share) * to_wide;
      damounts[columns + weights] += amount_of.share * to_wide;
    }
    double back[3] = {0, 0, 0};
    back[place[0]] = direction[1] * to_x;
    back[place[1]] = direction[3] * to_y;
    back[place[2]] = direction[4] * to_distance;
    const T* factors = sky.factors + (rows.b * sky.layers + sight.layer) * fields;
    for (int64_t f = 0; f < fields; ++f) {
      const T* s = sky.field[f] + 3 * sight.index;
      T* ds = call.dfield[f] + 3 * sight.index;
      for (int a = 0; a < 3; ++a) {
        ds[a] += T(double(factors[f]) * back[a]);
        by_factors[sight.layer * fields + f] += double(s[a]) * back[a];
      }
    }
  });
}

FLOWPM_PART(find, Rows)
FLOWPM_PART(carry_back, RowsVjp)

}  // namespace

template <typename T>
void Sky<T>::run(const Parallel& parallel) const {
  const Sky& call = *this;
  const int64_t n = pixels, bands = std::min(kBands, n);
  clear(call.out, call.batch * call.maps() * n * n, parallel);
  const auto edge = [&](int64_t band) { return band * n / bands; };
  std::vector<int32_t> band_of(n);
  for (int64_t band = 0; band < bands; ++band) {
    for (int64_t row = edge(band); row < edge(band + 1); ++row) band_of[row] = int32_t(band);
  }
  std::vector<Hits<Hit>> hits(kPieces, Hits<Hit>(bands));
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      const Range range = range_of(call, slab);
      paint_rows(
          range.rows(), range.end[2] - range.begin[2], bands, hits, parallel,
          [&](int64_t begin, int64_t count) {
            const Rows<T> rows{call, b, slab, begin, count, band_of.data(), hits.data()};
            parallel(kPieces, [&](int64_t piece) { find_clone(rows, piece); });
          },
          [&](int64_t band, const Hit& hit) {
            deposit(call, b, hit, edge(band), edge(band + 1));
          });
    }
  }
}

template <typename T>
void SkyVjp<T>::run(const Parallel& parallel) const {
  const SkyVjp& call = *this;
  const Sky<T>& sky = call.painted;
  const int64_t by_factors = sky.layers * sky.fields, by_amounts = sky.nodes * sky.columns;
  const int64_t vectors = 3 * sky.batch * sky.particles[0] * sky.particles[1] * sky.particles[2];
  for (int64_t f = 0; f < sky.fields; ++f) clear(call.dfield[f], vectors, parallel);
  for (int64_t b = 0; b < sky.batch; ++b) {
    std::vector<double> sums(kPieces * (by_factors + by_amounts), 0.0);
    for (int64_t slab = 0; slab < sky.slabs; ++slab) {
      const RowsVjp<T> rows{call, b, slab, by_factors, by_amounts, sums.data()};
      parallel(kPieces, [&](int64_t piece) { carry_back_clone(rows, piece); });
    }
    add_pieces(sums, 0, by_factors, call.dfactors + b * by_factors);
    add_pieces(sums, by_factors, by_amounts, call.damounts + b * by_amounts);
  }
}

template struct Sky<float>;
template struct Sky<double>;
template struct SkyVjp<float>;
template struct SkyVjp<double>;

}  // namespace flowpm
