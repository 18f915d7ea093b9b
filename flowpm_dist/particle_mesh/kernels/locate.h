// Where a rank's particles sit in its padded mesh block. Compiled for CPUs, and for GPUs by NVRTC,
// which has no standard library.
#pragma once

#ifdef __CUDACC_RTC__
#include "rtc_library.h"
#else
#include <cmath>
#include <cstdint>
#include <limits>
#endif

#ifdef __CUDACC__
#define FLOWPM_INLINE __host__ __device__ __forceinline__
#else
#define FLOWPM_INLINE inline __attribute__((always_inline))
#endif

namespace flowpm {

// Mesh cells; what strays further, or is not finite, takes no part.
constexpr double kFarthest = 1 << 30;

struct Geometry {
  int64_t batch = 0;
  int64_t particles[3] = {0, 0, 0};
  int64_t own[3] = {0, 0, 0};      // cells of the block without its halo
  int64_t step = 1;                // mesh cells per particle spacing; 0: not a whole number
  int64_t halo[3] = {0, 0, 0};     // 0: periodic
  int64_t mesh[3] = {0, 0, 0};     // cells of the padded block
  double per_cell[3] = {1, 1, 1};  // mesh cells per length

  FLOWPM_INLINE double mesh_factor() const { return double(own[0]) / double(particles[0]); }
  FLOWPM_INLINE int64_t particle_count() const { return particles[0] * particles[1] * particles[2]; }
  FLOWPM_INLINE int64_t cell_count() const { return mesh[0] * mesh[1] * mesh[2]; }
};

// A cell's number along an axis of the mesh, wrapped around.
template <typename Index>
FLOWPM_INLINE Index wrapped(const Geometry& g, int axis, Index cell) {
  const Index n = Index(g.mesh[axis]);
  if (cell >= 0 && cell < n) return cell;
  const Index rest = cell % n;
  return rest < 0 ? rest + n : rest;
}

constexpr int kRow = 32;  // particles located at a time, along z

template <typename T, int kLength = kRow>
struct Row {
  int32_t lower[3][kLength];
  T weight[3][kLength];  // of the upper cell
  int32_t index[kLength];
  int32_t inside[kLength];
  bool all;
};

// The lattice places of particles along an axis, where the mesh cells per spacing are not whole: the
// cell, and the rest as a length. As `Lattice.places` in base.py; all but the quotients is exact.
template <typename T>
FLOWPM_INLINE void lattice_places(const Geometry& g, int axis, int64_t cell, int count,
                                  int32_t* lower, T* rest) {
  const double n = double(g.particles[axis]), own = double(g.own[axis]);
  const double length = n * g.per_cell[axis], first = double(cell) * own;
  const double step = axis == 2 ? own : 0;
  for (int m = 0; m < count; ++m) {
    const double product = first + step * m, floor = std::floor(product / n);
    lower[m] = int32_t(floor);
    rest[m] = T((product - floor * n) / length);
  }
}

template <typename T, int kLength>
FLOWPM_INLINE void locate(const Geometry& g, int margin, int64_t i, int64_t j, int64_t k, int count,
                          const T* s, Row<T, kLength>& row) {
  T offset[3][kLength];
  const int64_t cell[3] = {i, j, k};
  const T scale[3] = {T(g.per_cell[0]), T(g.per_cell[1]), T(g.per_cell[2])};
  int32_t lattice[3][kLength];
  if (g.step == 0) {
    // The rest is added to the length, as compilers may round a sum after a product in two ways.
    T rest[kLength];
    for (int a = 0; a < 3; ++a) {
      lattice_places(g, a, cell[a], count, lattice[a], rest);
      for (int m = 0; m < count; ++m) offset[a][m] = (s[3 * m + a] + rest[m]) * scale[a];
    }
  } else {
    for (int m = 0; m < count; ++m) {
      offset[0][m] = s[3 * m] * scale[0];
      offset[1][m] = s[3 * m + 1] * scale[1];
      offset[2][m] = s[3 * m + 2] * scale[2];
    }
  }
  constexpr T far = T(kFarthest);
  for (int m = 0; m < count; ++m) {
    row.inside[m] = (std::abs(offset[0][m]) < far) & (std::abs(offset[1][m]) < far) &
                    (std::abs(offset[2][m]) < far);
  }
  for (int a = 0; a < 3; ++a) {
    const int32_t first = int32_t(g.halo[a] + g.step * cell[a]);
    const int32_t step = a == 2 ? int32_t(g.step) : 0;
    for (int m = 0; m < count; ++m) {
      const T along = row.inside[m] ? offset[a][m] : T(0);
      const T floor = std::floor(along);
      row.lower[a][m] = first + step * m + int32_t(floor);
      row.weight[a][m] = along - floor;
    }
    for (int m = 0; g.step == 0 && m < count; ++m) row.lower[a][m] += lattice[a][m];
  }
  for (int a = 0; a < 3; ++a) {
    if (g.halo[a] == 0) continue;
    const int32_t least = margin, most = int32_t(g.mesh[a]) - 2 - margin;
    for (int m = 0; m < count; ++m) {
      row.inside[m] &= (row.lower[a][m] >= least) & (row.lower[a][m] <= most);
    }
  }
  int32_t all = 1;
  for (int m = 0; m < count; ++m) all &= row.inside[m];
  row.all = all != 0;
}

// Shares of a value that a particle gives to its eight cells, z innermost.
template <typename T, int kLength>
FLOWPM_INLINE void shares(const Row<T, kLength>& row, const T* value, int count,
                          T (&share)[8][kLength]) {
  for (int m = 0; m < count; ++m) {
    const T wx = row.weight[0][m], wy = row.weight[1][m], wz = row.weight[2][m];
    const T x1 = value[m] * wx, x0 = value[m] - x1;
    const T x01 = x0 * wy, x00 = x0 - x01, x11 = x1 * wy, x10 = x1 - x11;
    share[1][m] = x00 * wz;
    share[3][m] = x01 * wz;
    share[5][m] = x10 * wz;
    share[7][m] = x11 * wz;
    share[0][m] = x00 - share[1][m];
    share[2][m] = x01 - share[3][m];
    share[4][m] = x10 - share[5][m];
    share[6][m] = x11 - share[7][m];
  }
}

}  // namespace flowpm
