// Paint particles onto the mesh, and its adjoint.
#include <utility>

#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

template <typename T>
FLOWPM_INLINE void paint_column(const Paint<T>& call, const Tiling& tiling, const CellRange* ranges,
                                int64_t column) {
  const Geometry& g = call.g;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    T* mesh = call.mesh + whole.batch * g.cell_count();
    for_windows(g, 0, whole, ranges[p], call.s, [&](const Patch& patch, const CellRange& range) {
      if (range.empty()) return;
      const int64_t sy = range.size(2), sx = range.size(1) * sy;
      T* window = scratch<T>(range.count());
      std::memset(window, 0, range.count() * sizeof(T));
      Row<T> row;
      T value[kRow], share[8][kRow];
      for (T& one : value) one = 1;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        locate_in(g, range, 0, i, j, k, count, at(g, call.s, 3, patch.batch, i, j, k), row);
        if (call.weights) {
          const T* w = at(g, call.weights, 1, patch.batch, i, j, k);
          for (int m = 0; m < count; ++m) value[m] = w[m];
        }
        shares(row, value, count, share);
        for (int m = 0; m < count; ++m) {
          if (!row.inside[m]) continue;
          T* a = window + row.index[m];
          T* b = a + sx;
          a[0] += share[0][m];
          a[1] += share[1][m];
          a[sy] += share[2][m];
          a[sy + 1] += share[3][m];
          b[0] += share[4][m];
          b[1] += share[5][m];
          b[sy] += share[6][m];
          b[sy + 1] += share[7][m];
        }
      });
      add_out(g, range, 1, mesh, window);
    });
  }
}

template <typename T>
FLOWPM_INLINE void paint_vjp_column(const PaintVjp<T>& call, const Tiling& tiling, const CellRange*,
                                    int64_t column) {
  const Geometry& g = call.g;
  const T scale[3] = {T(g.per_cell[0]), T(g.per_cell[1]), T(g.per_cell[2])};
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const T* mesh = call.dmesh + whole.batch * g.cell_count();
    const CellRange touches = touched(g, 0, whole, call.s);
    for_windows(g, 0, whole, touches, call.s, [&](const Patch& patch, const CellRange& range) {
      const int64_t sy = range.size(2), sx = range.size(1) * sy;
      T* window = scratch<T>(std::max<int64_t>(8, range.count()));
      if (!range.empty()) copy_in(g, range, 1, mesh, window);
      Row<T> row;
      T cell[8][kRow], ds[3][kRow], value[kRow];
      alignas(64) T slope[3 * kRow + 4];
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        const T* s = at(g, call.s, 3, patch.batch, i, j, k);
        prefetch_next(g, s, count);
        if (call.add) prefetch_next(g, call.add + (s - call.s), count);
        locate_in(g, range, 0, i, j, k, count, s, row);
        const T* w = call.weights ? at(g, call.weights, 1, patch.batch, i, j, k) : nullptr;
        if (range.empty()) std::memset(cell, 0, sizeof(cell));
        for (int m = 0; m < count && !range.empty(); ++m) {
          const T* a = window + row.index[m];
          const T* b = a + sx;
          cell[0][m] = a[0];
          cell[1][m] = a[1];
          cell[2][m] = a[sy];
          cell[3][m] = a[sy + 1];
          cell[4][m] = b[0];
          cell[5][m] = b[1];
          cell[6][m] = b[sy];
          cell[7][m] = b[sy + 1];
        }
        for (int m = 0; m < count; ++m) {
          const T wx = row.weight[0][m], wy = row.weight[1][m], wz = row.weight[2][m];
          const T z0 = cell[1][m] - cell[0][m], z1 = cell[3][m] - cell[2][m];
          const T z2 = cell[5][m] - cell[4][m], z3 = cell[7][m] - cell[6][m];
          const T c0 = cell[0][m] + wz * z0, c1 = cell[2][m] + wz * z1;
          const T c2 = cell[4][m] + wz * z2, c3 = cell[6][m] + wz * z3;
          const T y0 = c1 - c0, y1 = c3 - c2, d0 = c0 + wy * y0, d1 = c2 + wy * y1;
          const T low = z0 + wy * (z1 - z0), high = z2 + wy * (z3 - z2);
          ds[0][m] = (d1 - d0) * scale[0];
          ds[1][m] = (y0 + wx * (y1 - y0)) * scale[1];
          ds[2][m] = (low + wx * (high - low)) * scale[2];
          value[m] = d0 + wx * (d1 - d0);
        }
        if (w) {
          for (int a = 0; a < 3; ++a) {
            for (int m = 0; m < count; ++m) ds[a][m] *= w[m];
          }
          T* out = at(g, call.dweights, 1, patch.batch, i, j, k);
          for (int m = 0; m < count; ++m) out[m] = row.inside[m] ? value[m] : T(0);
        }
        for (int m = 0; m < count && !row.all; ++m) {
          for (int a = 0; a < 3; ++a) ds[a][m] = row.inside[m] ? ds[a][m] : T(0);
        }
        for (int m = 0; m < count; m += 4) {
          store_vectors(slope + 3 * m, 3, load<One<T>>(ds[0] + m), load<One<T>>(ds[1] + m),
                        load<One<T>>(ds[2] + m));
        }
        T* out = at(g, call.ds, 3, patch.batch, i, j, k);
        if (call.add) {
          const T* add = call.add + (out - call.ds);
          for (int m = 0; m < 3 * count; ++m) out[m] = add[m] + slope[m];
        } else {
          for (int m = 0; m < 3 * count; ++m) out[m] = slope[m];
        }
      });
    });
  }
}

// The largest |s| of a column along each axis [cells], and what its patches touch.
template <typename T>
struct Extent {
  Geometry g;
  const T* s;
  T* largest;         // [columns, 3]
  CellRange* ranges;  // [columns, patches]
};

template <typename T>
FLOWPM_INLINE void extent_column(const Extent<T>& call, const Tiling& tiling, const CellRange*,
                                 int64_t column) {
  const Geometry& g = call.g;
  T largest[3 * kRow];
  for (T& value : largest) value = 0;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch patch = tiling.patch(column, p);
    for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
      const T* s = at(g, call.s, 3, patch.batch, i, j, k);
      for (int m = 0; m < 3 * count; ++m) {
        // NaN is less than or equal to nothing.
        const T size = std::abs(s[m]) <= std::numeric_limits<T>::max()
                           ? std::abs(s[m])
                           : std::numeric_limits<T>::infinity();
        largest[m] = std::max(largest[m], size);
      }
    });
    call.ranges[column * tiling.patches() + p] = touched(g, 0, patch, call.s);
  }
  for (int a = 0; a < 3; ++a) {
    T most = 0;
    for (int m = a; m < 3 * kRow; m += 3) most = std::max(most, largest[m]);
    call.largest[3 * column + a] = most * T(g.per_cell[a]);
  }
}

FLOWPM_ENTRY(paint_column, Paint)
FLOWPM_ENTRY(paint_vjp_column, PaintVjp)
FLOWPM_ENTRY(extent_column, Extent)

}  // namespace

template <typename T>
void Paint<T>::run(const Parallel& parallel) const {
  const Paint& call = *this;
  const Tiling tiling(call.g);
  clear(call.mesh, call.g.batch * call.g.cell_count(), parallel);
  std::vector<T> largest(3 * tiling.columns());
  std::vector<CellRange> ranges(tiling.columns() * tiling.patches());
  const Extent<T> extent{call.g, call.s, largest.data(), ranges.data()};
  parallel(tiling.columns(),
           [&](int64_t column) { extent_column_clone(extent, tiling, nullptr, column); });
  for (int a = 0; a < 3; ++a) {
    call.max_displacement[a] = 0;
    for (int64_t c = 0; c < tiling.columns(); ++c) {
      call.max_displacement[a] = std::max(call.max_displacement[a], largest[3 * c + a]);
    }
  }
  const T most =
      std::max({call.max_displacement[0], call.max_displacement[1], call.max_displacement[2]});
  if (!(most <= std::numeric_limits<T>::max())) {
    for (int a = 0; a < 3; ++a) call.max_displacement[a] = std::numeric_limits<T>::infinity();
  }
  scatter(call.g, tiling, std::move(ranges), 0, parallel,
          [&](int64_t column, const CellRange* touches) {
            paint_column_clone(call, tiling, touches, column);
          });
}

template <typename T>
void PaintVjp<T>::run(const Parallel& parallel) const {
  const PaintVjp& call = *this;
  const Tiling tiling(call.g);
  parallel(tiling.columns(), [&](int64_t c) { paint_vjp_column_clone(call, tiling, nullptr, c); });
}

template struct Paint<float>;
template struct Paint<double>;
template struct PaintVjp<float>;
template struct PaintVjp<double>;

}  // namespace flowpm
