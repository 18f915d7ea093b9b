// The adjoint of the force at the particles and of kicks by it.
#include "force_window.h"
#include "kernels.h"

namespace flowpm {
namespace {

// Adjoint of `difference`. `apart` has room for as many values as a window, and `line` for
// range.size(2) + 8.
template <typename T>
FLOWPM_INLINE void difference_adjoint(const Geometry& g, const CellRange& range, const T* window,
                                      T* apart, T* line, T* block) {
  const int64_t nx = range.size(0), ny = range.size(1), nz = range.size(2), count = range.count();
  const int64_t each = (count + 3) / 4 * 4;
  T *along_x = apart, *along_y = along_x + each, *along_z = along_y + each, *none = along_z + each;
  const T c[3] = {T(g.per_cell[0] / 12), T(g.per_cell[1] / 12), T(g.per_cell[2] / 12)};
  for (int64_t m = 0; m < count; m += 4) {
    const Vector<T> v = load_vectors(window + 4 * m);
    store(along_x + m, One<T>(c[0] * v.x));
    store(along_y + m, One<T>(c[1] * v.y));
    store(along_z + m, One<T>(c[2] * v.z));
  }
  for (int64_t z = 0; z < nz; ++z) none[z] = 0;
  for (int64_t z = 0; z < nz + 8; ++z) line[z] = 0;
  for (int64_t x = -2; x < nx + 2; ++x) {
    for (int64_t y = -2; y < ny + 2; ++y) {
      const bool in_x = x >= 0 && x < nx, in_y = y >= 0 && y < ny;
      T* out = block + ((x + 2) * (ny + 4) + y + 2) * (nz + 4);
      const auto row = [&](const T* along, bool used, int64_t i, int64_t j) {
        const bool there = used && i >= 0 && i < nx && j >= 0 && j < ny;
        return there ? along + (i * ny + j) * nz : none;
      };
      const T *x0 = row(along_x, in_y, x - 2, y), *x1 = row(along_x, in_y, x - 1, y);
      const T *x3 = row(along_x, in_y, x + 1, y), *x4 = row(along_x, in_y, x + 2, y);
      const T *y0 = row(along_y, in_x, x, y - 2), *y1 = row(along_y, in_x, x, y - 1);
      const T *y3 = row(along_y, in_x, x, y + 1), *y4 = row(along_y, in_x, x, y + 2);
      out[0] = out[1] = out[nz + 2] = out[nz + 3] = 0;
      for (int64_t z = 0; z < nz; ++z) {
        out[z + 2] = 8 * ((x3[z] - x1[z]) + (y3[z] - y1[z])) + ((x0[z] - x4[z]) + (y0[z] - y4[z]));
      }
      if (!in_x || !in_y) continue;
      const T* from = row(along_z, true, x, y);
      for (int64_t z = 0; z < nz; ++z) line[z + 4] = from[z];
      for (int64_t z = 2; z < nz + 6; ++z) {
        out[z - 2] += 8 * (line[z + 1] - line[z - 1]) + (line[z - 2] - line[z + 2]);
      }
    }
  }
}

// Adds the adjoint of `load_force` to the cotangent of the field.
template <typename T>
FLOWPM_INLINE void add_force(const Geometry& g, bool spectral, const CellRange& range,
                             const T* window, T* apart, T* line, T* block, T* dfield) {
  if (!spectral) {
    difference_adjoint(g, range, window, apart, line, block);
    add_out(g, range.grown(2), 1, dfield, block);
    return;
  }
  for (int64_t m = 0; m < range.count(); ++m) {
    for (int a = 0; a < 3; ++a) block[3 * m + a] = window[4 * m + a];
  }
  add_out(g, range, 3, dfield, block);
}

template <typename T>
struct ForceVjpColumns : ForceVjp<T> {
  double* partial = nullptr;  // [columns, 2]
};

// Gives dv in shares to the eight cells at `cell`.
template <typename T>
FLOWPM_INLINE void spread(T* cell, int64_t sx, int64_t sy, const One<T>& dv, T wx, T wy, T wz) {
  const One<T> x1 = dv * wx, x0 = dv - x1;
  const One<T> y1 = x0 * wy, y0 = x0 - y1, y3 = x1 * wy, y2 = x1 - y3;
  const One<T> shares[4] = {y0, y1, y2, y3};
  T* rows[4] = {cell, cell + sy, cell + sx, cell + sx + sy};
  for (int r = 0; r < 4; ++r) {
    const One<T> upper = shares[r] * wz, lower = shares[r] - upper;
    store(rows[r], load<One<T>>(rows[r]) + lower);
    store(rows[r] + 4, load<One<T>>(rows[r] + 4) + upper);
  }
}

// Sums over the first three lanes of three vectors whose fourth is 0.
template <typename T>
FLOWPM_INLINE One<T> sums_of(const One<T>& a, const One<T>& b, const One<T>& c) {
  const One<T> ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const One<T> ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const One<T> ab = ab0 + ab1;
  const One<T> cc = c + __builtin_shufflevector(c, c, 2, 3, 2, 3);
  const One<T> even = __builtin_shufflevector(ab, cc, 0, 1, 4, 4);
  const One<T> odd = __builtin_shufflevector(ab, cc, 2, 3, 5, 5);
  return even + odd;
}

template <typename T>
FLOWPM_INLINE void force_vjp_column(const ForceVjpColumns<T>& call, const Tiling& tiling,
                                    const CellRange* ranges, int64_t column) {
  const Geometry& g = call.g;
  const int margin = call.spectral ? 0 : 2;
  const One<T> scale = {T(g.per_cell[0]), T(g.per_cell[1]), T(g.per_cell[2]), 0};
  Dot<T> along_v, along_force;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const int64_t first = whole.batch * g.cell_count() * (call.spectral ? 3 : 1);
    const T before = call.factors ? call.factors[2 * whole.batch] : T(1);
    const T by = call.factors ? call.factors[2 * whole.batch + 1] : T(1);
    for_windows(
        g, margin, whole, ranges[p], call.s, [&](const Patch& patch, const CellRange& range) {
          const int64_t sy = 4 * range.size(2), sx = range.size(1) * sy, size = window_size(range);
          T* window = scratch<T>(2 * size + block_size(call.spectral, range) + range.size(2) + 8);
          T* sums = window + size;
          T* block = sums + size;
          if (range.empty()) {
            std::memset(window, 0, size * sizeof(T));
          } else {
            load_force(g, call.spectral, range, call.field + first, block, window);
          }
          std::memset(sums, 0, size * sizeof(T));
          Row<T> row;
          alignas(64) T value[3 * kRow + 4], slope[3 * kRow + 4], dv[3 * kRow + 4];
          for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
            const T* s = at(g, call.s, 3, patch.batch, i, j, k);
            const int64_t offset = s - call.s;
            prefetch_next(g, s, count);
            prefetch_next(g, call.dv + offset, count);
            if (call.v_after) {
              prefetch_next(g, call.add + offset, count);
              prefetch_next(g, call.v_after + offset, count);
            }
            locate_in(g, range, margin, i, j, k, count, s, row);
            for (int m = 0; m < 3 * count; ++m) dv[m] = call.dv[offset + m];
            dv[3 * count] = 0;
            for (int m = 0; m < count; ++m) {
              const T* cell = window + 4 * int64_t(row.index[m]);
              const T wx = row.weight[0][m], wy = row.weight[1][m], wz = row.weight[2][m];
              const Two<T> a = load<Two<T>>(cell), b = load<Two<T>>(cell + sy);
              const Two<T> c = load<Two<T>>(cell + sx), d = load<Two<T>>(cell + sx + sy);
              const Two<T> y0 = b - a, y1 = d - c, x0 = a + wy * y0, x1 = c + wy * y1;
              const Two<T> dx = x1 - x0, dy = y0 + wx * (y1 - y0), both = x0 + wx * dx;
              const One<T> dz = high<T>(both) - low<T>(both);
              store(value + 3 * m, low<T>(both) + wz * dz);
              One<T> cotangent = by * load<One<T>>(dv + 3 * m);
              cotangent[3] = 0;
              const One<T> px = (low<T>(dx) + wz * (high<T>(dx) - low<T>(dx))) * cotangent;
              const One<T> py = (low<T>(dy) + wz * (high<T>(dy) - low<T>(dy))) * cotangent;
              store(slope + 3 * m, sums_of<T>(px, py, dz * cotangent) * scale);
              if (row.inside[m]) {
                spread(sums + 4 * int64_t(row.index[m]), sx, sy, cotangent, wx, wy, wz);
              }
            }
            mark_outside(row, count, value);
            mark_outside(row, count, slope);
            T* ds = call.ds + offset;
            if (!call.v_after) {
              for (int m = 0; m < 3 * count; ++m) ds[m] = slope[m];
              return;
            }
            const T* add = call.add + offset;
            const T* v_after = call.v_after + offset;
            T* v_before = call.v_before + offset;
            for (int m = 0; m < 3 * count; ++m) ds[m] = add[m] + slope[m];
            for (int m = 0; m < 3 * count; ++m) v_before[m] = (v_after[m] - by * value[m]) / before;
            along_v.add(dv, v_before, 3 * count);
            along_force.add(dv, value, 3 * count);
          });
          if (range.empty()) return;
          add_force(g, call.spectral, range, sums, window,
                    block + block_size(call.spectral, range), block, call.dfield + first);
        });
  }
  call.partial[2 * column] = along_v.total();
  call.partial[2 * column + 1] = along_force.total();
}

FLOWPM_ENTRY(force_vjp_column, ForceVjpColumns)

}  // namespace

template <typename T>
void ForceVjp<T>::run(const Parallel& parallel) const {
  const ForceVjp& call = *this;
  const Geometry& g = call.g;
  const Tiling tiling(g);
  const int margin = call.spectral ? 0 : 2;
  clear(call.dfield, g.batch * g.cell_count() * (call.spectral ? 3 : 1), parallel);
  std::vector<double> partial(2 * tiling.columns());
  ForceVjpColumns<T> columns;
  static_cast<ForceVjp<T>&>(columns) = call;
  columns.partial = partial.data();
  scatter(g, tiling, survey(g, tiling, margin, call.s, parallel), margin, parallel,
          [&](int64_t column, const CellRange* touches) {
            force_vjp_column_clone(columns, tiling, touches, column);
          });
  if (!call.sums) return;
  const int64_t each = tiling.columns() / std::max<int64_t>(1, g.batch);
  for (int64_t b = 0; b < g.batch; ++b) {
    for (int which = 0; which < 2; ++which) {
      double& sum = call.sums[2 * b + which] = 0;
      for (int64_t c = b * each; c < (b + 1) * each; ++c) sum += partial[2 * c + which];
    }
  }
}

template struct ForceVjp<float>;
template struct ForceVjp<double>;

}  // namespace flowpm
