// Paint layers of particles on maps of the sky, and its adjoint.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace flowpm {
namespace {

constexpr int64_t kPieces = 32;        // of a slab, in which it is handled: for any number of threads
constexpr int64_t kBands = 16;         // of rows of the maps
constexpr int64_t kAtOnce = 1 << 20;   // particles whose places are held

// The particles of a slab: its axis of distance runs over the slab's layers alone.
struct Range {
  int64_t begin[3], end[3];
  int64_t rows() const { return (end[0] - begin[0]) * (end[1] - begin[1]); }
  int64_t count() const { return rows() * (end[2] - begin[2]); }
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

// A particle on the sky: its image in the middle, and what its images share.
struct Sight {
  int64_t index;  // of the particle in a field
  int32_t layer;
  double x, y;    // [Mpc/h] from the line of sight
  double distance, shift;
};

// Calls see(sight) for the particles of rows `from` to `to` of a slab that are in front of us.
template <typename T, typename See>
void for_particles(const Sky<T>& sky, int64_t b, int64_t slab, int64_t from, int64_t to,
                   const See& see) {
  const int32_t* place = sky.places + 6 * slab;
  const double* direction = sky.directions + 5 * slab;
  const int ax = place[0], ay = place[1], az = place[2];
  const Range range = range_of(sky, slab);
  const int64_t columns = range.end[1] - range.begin[1];
  const int64_t n1 = sky.particles[1], n2 = sky.particles[2];
  for (int64_t row = from; row < to; ++row) {
    int64_t at[3] = {range.begin[0] + row / columns, range.begin[1] + row % columns, 0};
    for (at[2] = range.begin[2]; at[2] < range.end[2]; ++at[2]) {
      const int64_t layer = place[5] + at[az] - place[3];
      Sight sight;
      sight.index = ((b * sky.particles[0] + at[0]) * n1 + at[1]) * n2 + at[2];
      const T* factors = sky.factors + (b * sky.layers + layer) * sky.fields;
      double moved[3] = {0, 0, 0};
      for (int64_t f = 0; f < sky.fields; ++f) {
        const T* s = sky.field[f] + 3 * sight.index;
        for (int a = 0; a < 3; ++a) moved[a] += double(factors[f]) * double(s[a]);
      }
      sight.layer = int32_t(layer);
      sight.shift = direction[4] * moved[az];
      sight.distance = sky.distances[layer] + sight.shift;
      if (!(sight.distance > 0)) continue;
      const double lx = sky.lengths[ax], ly = sky.lengths[ay];
      sight.x = direction[0] + direction[1] * (double(at[ax]) * sky.spacing[ax] + moved[ax]);
      sight.y = direction[2] + direction[3] * (double(at[ay]) * sky.spacing[ay] + moved[ay]);
      sight.x -= lx * std::nearbyint(sight.x / lx);
      sight.y -= ly * std::nearbyint(sight.y / ly);
      see(sight);
    }
  }
}

// Calls image(px, py) [pixels] for the images of a particle that lie on the map.
template <typename T, typename Image>
void for_images(const Sky<T>& sky, const Sight& sight, int64_t slab, const Image& image) {
  const int32_t* place = sky.places + 6 * slab;
  const double size = sight.distance * sky.pixel, middle = 0.5 * double(sky.pixels) - 0.5;
  const double reach = (middle + 1) * size, lx = sky.lengths[place[0]], ly = sky.lengths[place[1]];
  const double x0 = std::ceil((-reach - sight.x) / lx), x1 = std::floor((reach - sight.x) / lx);
  if (x0 > x1) return;
  const double y0 = std::ceil((-reach - sight.y) / ly), y1 = std::floor((reach - sight.y) / ly);
  for (double i = x0; i <= x1; ++i) {
    for (double j = y0; j <= y1; ++j) {
      image((sight.x + i * lx) / size + middle, (sight.y + j * ly) / size + middle);
    }
  }
}

// A part of a particle on the maps.
struct Hit {
  int32_t layer, column, row;
  double x, y, shift, inverse;  // place in the pixel; from the layer [Mpc/h]; distance^-2
};

template <typename T>
void deposit(const Sky<T>& sky, int64_t b, const Hit& hit, int64_t begin, int64_t end) {
  const int64_t n = sky.pixels;
  const T* amounts = sky.amounts + (b * sky.layers + hit.layer) * sky.weights * 2;
  for (int64_t w = 0; w < sky.weights; ++w) {
    const double amount = (double(amounts[2 * w]) + double(amounts[2 * w + 1]) * hit.shift) *
                          hit.inverse;
    T* map = sky.out + (b * sky.maps + sky.first_map[hit.layer] + w) * n * n;
    for (int dy = 0; dy < 2; ++dy) {
      const int64_t row = hit.row + dy;
      if (row < begin || row >= end) continue;
      const double along = amount * (dy ? hit.y : 1 - hit.y);
      if (hit.column >= 0) map[row * n + hit.column] += T(along * (1 - hit.x));
      if (hit.column + 1 < n) map[row * n + hit.column + 1] += T(along * hit.x);
    }
  }
}

}  // namespace

template <typename T>
void paint_sky(const Sky<T>& call, const Parallel& parallel) {
  const int64_t n = call.pixels, bands = std::min(kBands, n);
  std::memset(call.out, 0, size_t(call.batch * call.maps * n * n) * sizeof(T));
  const auto edge = [&](int64_t band) { return band * n / bands; };
  std::vector<int32_t> band_of(n);
  for (int64_t band = 0; band < bands; ++band) {
    for (int64_t row = edge(band); row < edge(band + 1); ++row) band_of[row] = int32_t(band);
  }
  std::vector<std::vector<Hit>> hits(kPieces * bands);
  for (int64_t b = 0; b < call.batch; ++b) {
    for (int64_t slab = 0; slab < call.slabs; ++slab) {
      const Range range = range_of(call, slab);
      const int64_t deep = std::max<int64_t>(1, range.end[2] - range.begin[2]);
      const int64_t step = std::max<int64_t>(1, kAtOnce / deep);
      for (int64_t begin = 0; begin < range.rows(); begin += step) {
        const int64_t rows = std::min(step, range.rows() - begin);
        parallel(kPieces, [&](int64_t piece) {
          std::vector<Hit>* mine = hits.data() + piece * bands;
          for (int64_t band = 0; band < bands; ++band) mine[band].clear();
          const int64_t from = begin + piece * rows / kPieces;
          const int64_t to = begin + (piece + 1) * rows / kPieces;
          for_particles(call, b, slab, from, to, [&](const Sight& sight) {
            for_images(call, sight, slab, [&](double px, double py) {
              const double column = std::floor(px), row = std::floor(py);
              if (!(column >= -1 && column < n && row >= -1 && row < n)) return;
              Hit hit;
              hit.layer = sight.layer;
              hit.column = int32_t(column);
              hit.row = int32_t(row);
              hit.x = px - column;
              hit.y = py - row;
              hit.shift = sight.shift;
              hit.inverse = 1 / (sight.distance * sight.distance);
              const int32_t low = band_of[std::max<int64_t>(hit.row, 0)];
              const int32_t high = band_of[std::min<int64_t>(hit.row + 1, n - 1)];
              mine[low].push_back(hit);
              if (high != low) mine[high].push_back(hit);
            });
          });
        });
        parallel(bands, [&](int64_t band) {
          for (int64_t piece = 0; piece < kPieces; ++piece) {
            for (const Hit& hit : hits[piece * bands + band]) {
              deposit(call, b, hit, edge(band), edge(band + 1));
            }
          }
        });
      }
    }
  }
}

template <typename T>
void paint_sky_vjp(const SkyVjp<T>& call, const Parallel& parallel) {
  const Sky<T>& sky = call.sky;
  const int64_t n = sky.pixels, fields = sky.fields, weights = sky.weights;
  const int64_t each = fields + 2 * weights;
  const int64_t vectors = 3 * sky.batch * sky.particles[0] * sky.particles[1] * sky.particles[2];
  for (int64_t f = 0; f < fields; ++f) {
    parallel(kPieces, [&](int64_t piece) {
      const int64_t from = piece * vectors / kPieces, to = (piece + 1) * vectors / kPieces;
      std::memset(call.dfield[f] + from, 0, size_t(to - from) * sizeof(T));
    });
  }
  std::fill(call.dfactors, call.dfactors + sky.batch * sky.layers * fields, 0.0);
  std::fill(call.damounts, call.damounts + sky.batch * sky.layers * weights * 2, 0.0);
  for (int64_t b = 0; b < sky.batch; ++b) {
    for (int64_t slab = 0; slab < sky.slabs; ++slab) {
      const int32_t* place = sky.places + 6 * slab;
      const double* direction = sky.directions + 5 * slab;
      const int64_t rows = range_of(sky, slab).rows(), count = place[4];
      std::vector<double> sums(kPieces * count * each, 0.0);
      parallel(kPieces, [&](int64_t piece) {
        double* mine = sums.data() + piece * count * each;
        for_particles(
            sky, b, slab, piece * rows / kPieces, (piece + 1) * rows / kPieces,
            [&](const Sight& sight) {
              const T* amounts = sky.amounts + (b * sky.layers + sight.layer) * weights * 2;
              double* sum = mine + (sight.layer - place[5]) * each;
              const double size = sight.distance * sky.pixel;
              const double inverse = 1 / (sight.distance * sight.distance);
              const double middle = 0.5 * double(n) - 0.5;
              double to_x = 0, to_y = 0, to_distance = 0;
              for_images(sky, sight, slab, [&](double px, double py) {
                const double column = std::floor(px), row = std::floor(py);
                if (!(column >= -1 && column < n && row >= -1 && row < n)) return;
                const int64_t i = int64_t(column), j = int64_t(row);
                const double x = px - column, y = py - row;
                double slope_x = 0, slope_y = 0;
                for (int64_t w = 0; w < weights; ++w) {
                  const T* map =
                      call.dout + (b * sky.maps + sky.first_map[sight.layer] + w) * n * n;
                  const auto value = [&](int64_t r, int64_t c) {
                    return r >= 0 && r < n && c >= 0 && c < n ? double(map[r * n + c]) : 0.0;
                  };
                  const double m00 = value(j, i), m01 = value(j, i + 1);
                  const double m10 = value(j + 1, i), m11 = value(j + 1, i + 1);
                  const double low = m00 + x * (m01 - m00), high = m10 + x * (m11 - m10);
                  const double slope = (low + y * (high - low)) * inverse;
                  const double amount =
                      double(amounts[2 * w]) + double(amounts[2 * w + 1]) * sight.shift;
                  sum[fields + 2 * w] += slope;
                  sum[fields + 2 * w + 1] += slope * sight.shift;
                  to_distance += slope * (double(amounts[2 * w + 1]) -
                                          2 * amount / sight.distance);
                  slope_x += amount * inverse * ((1 - y) * (m01 - m00) + y * (m11 - m10));
                  slope_y += amount * inverse * (high - low);
                }
                to_x += slope_x / size;
                to_y += slope_y / size;
                to_distance -=
                    (slope_x * (px - middle) + slope_y * (py - middle)) / sight.distance;
              });
              double to[3] = {0, 0, 0};
              to[place[0]] = direction[1] * to_x;
              to[place[1]] = direction[3] * to_y;
              to[place[2]] = direction[4] * to_distance;
              const T* factors = sky.factors + (b * sky.layers + sight.layer) * fields;
              for (int64_t f = 0; f < fields; ++f) {
                const T* s = sky.field[f] + 3 * sight.index;
                T* ds = call.dfield[f] + 3 * sight.index;
                for (int a = 0; a < 3; ++a) {
                  ds[a] += T(double(factors[f]) * to[a]);
                  sum[f] += double(s[a]) * to[a];
                }
              }
            });
      });
      for (int64_t piece = 0; piece < kPieces; ++piece) {
        for (int64_t l = 0; l < count; ++l) {
          const double* sum = sums.data() + (piece * count + l) * each;
          const int64_t layer = b * sky.layers + place[5] + l;
          for (int64_t f = 0; f < fields; ++f) call.dfactors[layer * fields + f] += sum[f];
          for (int64_t w = 0; w < 2 * weights; ++w) {
            call.damounts[layer * 2 * weights + w] += sum[fields + w];
          }
        }
      }
    }
  }
}

#define FLOWPM_INSTANTIATE(T)                                        \
  template void paint_sky<T>(const Sky<T>&, const Parallel&);        \
  template void paint_sky_vjp<T>(const SkyVjp<T>&, const Parallel&);
FLOWPM_INSTANTIATE(float)
FLOWPM_INSTANTIATE(double)

}  // namespace flowpm
