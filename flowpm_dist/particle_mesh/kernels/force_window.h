// Windows on the force: what the force and its adjoint share.
#pragma once

#include "common.h"

namespace flowpm {

// Minus the 4-point difference of four cells that follow each other along z, in steps of `step`.
template <typename T>
FLOWPM_INLINE One<T> difference_along(const T* f, int64_t step, T scale) {
  const One<T> near = load<One<T>>(f - step) - load<One<T>>(f + step);
  return scale * (8 * near + (load<One<T>>(f + 2 * step) - load<One<T>>(f - 2 * step)));
}

// Minus the 4-point difference of a block, which has two more cells on either side than the range.
// Of each row it writes up to three cells too many, over which the next one is written.
template <typename T>
FLOWPM_INLINE void difference(const Geometry& g, const CellRange& range, const T* block,
                              T* window) {
  const int64_t nx = range.size(0), ny = range.size(1), nz = range.size(2);
  const int64_t sy = nz + 4, sx = (ny + 4) * sy;
  const T c[3] = {T(g.per_cell[0] / 12), T(g.per_cell[1] / 12), T(g.per_cell[2] / 12)};
  for (int64_t x = 0; x < nx; ++x) {
    for (int64_t y = 0; y < ny; ++y) {
      const T* f = block + (x + 2) * sx + (y + 2) * sy + 2;
      T* out = window + 4 * (x * ny + y) * nz;
      for (int64_t z = 0; z < nz; z += 4) {
        store_vectors<T>(out + 4 * z, 4, difference_along(f + z, sx, c[0]),
                         difference_along(f + z, sy, c[1]), difference_along(f + z, 1, c[2]));
      }
    }
  }
}

// The force on the cells of a range, four values each; `block` is scratch.
template <typename T>
FLOWPM_INLINE void load_force(const Geometry& g, bool spectral, const CellRange& range,
                              const T* field, T* block, T* window) {
  if (!spectral) {
    copy_in(g, range.grown(2), 1, field, block);
    difference(g, range, block, window);
    return;
  }
  copy_in(g, range, 3, field, block);
  for (int64_t m = 0; m < range.count(); ++m) {
    for (int a = 0; a < 3; ++a) window[4 * m + a] = block[3 * m + a];
    window[4 * m + 3] = 0;
  }
}

// Values of the scratch block that `load_force` and its adjoint need.
inline int64_t block_size(bool spectral, const CellRange& range) {
  const int64_t size = spectral ? 3 * range.count() : range.grown(2).count();
  return (size + 15) / 16 * 16;
}

// Values of a window on the force, with what `difference` may write after it.
inline int64_t window_size(const CellRange& range) {
  return (4 * std::max<int64_t>(8, range.count()) + 31) / 16 * 16;
}

// Sets the values of particles that take no part to NaN.
template <typename T>
FLOWPM_INLINE void mark_outside(const Row<T>& row, int count, T* values) {
  if (row.all) return;
  for (int m = 0; m < count; ++m) {
    if (row.inside[m]) continue;
    for (int a = 0; a < 3; ++a) values[3 * m + a] = std::numeric_limits<T>::quiet_NaN();
  }
}

}  // namespace flowpm
