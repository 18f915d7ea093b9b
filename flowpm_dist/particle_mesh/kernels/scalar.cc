// Paint and read of any number of components.
#include <utility>

#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

// Shares of a value that a particle gives to its eight cells, z innermost.
template <typename T>
FLOWPM_INLINE void shares(const Row<T>& row, const T* value, int count, T (&share)[8][kRow]) {
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

template <typename T>
FLOWPM_INLINE void paint_column(const Paint<T>& call, const Tiling& tiling, const Box* boxes,
                                int64_t column) {
  const Geometry& g = call.g;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    T* mesh = call.mesh + whole.batch * g.cell_count();
    for_windows(g, 0, whole, boxes[p], call.s, [&](const Patch& patch, const Box& box) {
      if (box.empty()) return;
      const int64_t sy = box.size(2), sx = box.size(1) * sy;
      T* window = scratch<T>(box.count());
      std::memset(window, 0, box.count() * sizeof(T));
      Row<T> row;
      T value[kRow], share[8][kRow];
      for (T& one : value) one = 1;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        locate_in(g, box, 0, i, j, k, count, at(g, call.s, 3, patch.batch, i, j, k), row);
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
      add_out(g, box, 1, mesh, window);
    });
  }
}

template <typename T>
FLOWPM_INLINE void paint_vjp_column(const PaintVjp<T>& call, const Tiling& tiling, const Box*,
                                    int64_t column) {
  const Geometry& g = call.g;
  const T scale[3] = {T(g.per_cell[0]), T(g.per_cell[1]), T(g.per_cell[2])};
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const T* mesh = call.dmesh + whole.batch * g.cell_count();
    const Box touches = touched(g, 0, whole, call.s);
    for_windows(g, 0, whole, touches, call.s, [&](const Patch& patch, const Box& box) {
      const int64_t sy = box.size(2), sx = box.size(1) * sy;
      T* window = scratch<T>(std::max<int64_t>(8, box.count()));
      if (!box.empty()) copy_in(g, box, 1, mesh, window);
      Row<T> row;
      T cell[8][kRow], ds[3][kRow], value[kRow];
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        locate_in(g, box, 0, i, j, k, count, at(g, call.s, 3, patch.batch, i, j, k), row);
        const T* w = call.weights ? at(g, call.weights, 1, patch.batch, i, j, k) : nullptr;
        if (box.empty()) std::memset(cell, 0, sizeof(cell));
        for (int m = 0; m < count && !box.empty(); ++m) {
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
        T* out = at(g, call.ds, 3, patch.batch, i, j, k);
        const T* add = call.add ? call.add + (out - call.ds) : nullptr;
        for (int m = 0; m < count; ++m) {
          for (int a = 0; a < 3; ++a) {
            const T slope = row.inside[m] ? ds[a][m] : T(0);
            out[3 * m + a] = add ? add[3 * m + a] + slope : slope;
          }
        }
      });
    });
  }
}

template <typename T>
FLOWPM_INLINE void read_column(const Read<T>& call, const Tiling& tiling, const Box*,
                               int64_t column) {
  const Geometry& g = call.g;
  const int64_t width = call.components;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const T* mesh = call.fields + whole.batch * g.cell_count() * width;
    const Box touches = touched(g, 0, whole, call.s);
    for_windows(g, 0, whole, touches, call.s, [&](const Patch& patch, const Box& box) {
      const int64_t sz = width, sy = box.size(2) * sz, sx = box.size(1) * sy;
      T* window = scratch<T>(std::max<int64_t>(8, box.count()) * width);
      if (!box.empty()) copy_in(g, box, width, mesh, window);
      Row<T> row;
      T one[kRow], share[8][kRow];
      for (T& value : one) value = 1;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        locate_in(g, box, 0, i, j, k, count, at(g, call.s, 3, patch.batch, i, j, k), row);
        shares(row, one, count, share);
        T* out = at(g, call.values, width, patch.batch, i, j, k);
        for (int m = 0; m < count; ++m) {
          const T* a = window + row.index[m] * width;
          for (int64_t c = 0; c < width; ++c, ++a) {
            if (!row.inside[m]) {
              out[m * width + c] = std::numeric_limits<T>::quiet_NaN();
              continue;
            }
            out[m * width + c] =
                share[0][m] * a[0] + share[1][m] * a[sz] + share[2][m] * a[sy] +
                share[3][m] * a[sy + sz] + share[4][m] * a[sx] + share[5][m] * a[sx + sz] +
                share[6][m] * a[sx + sy] + share[7][m] * a[sx + sy + sz];
          }
        }
      });
    });
  }
}

template <typename T>
FLOWPM_INLINE void read_vjp_column(const ReadVjp<T>& call, const Tiling& tiling, const Box* boxes,
                                   int64_t column) {
  const Geometry& g = call.g;
  const int64_t width = call.components;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const int64_t first = whole.batch * g.cell_count() * width;
    for_windows(g, 0, whole, boxes[p], call.s, [&](const Patch& patch, const Box& box) {
      const int64_t sz = width, sy = box.size(2) * sz, sx = box.size(1) * sy;
      const int64_t values = box.count() * width;
      T* window = scratch<T>(2 * values);
      T* sums = window + values;
      if (!box.empty()) copy_in(g, box, width, call.fields + first, window);
      std::memset(sums, 0, values * sizeof(T));
      Row<T> row;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        const T* s = at(g, call.s, 3, patch.batch, i, j, k);
        const T* dvalues = at(g, call.dvalues, width, patch.batch, i, j, k);
        T* ds = call.ds + (s - call.s);
        locate_in(g, box, 0, i, j, k, count, s, row);
        for (int m = 0; m < count; ++m) {
          T slope[3] = {0, 0, 0};
          const T wx[2] = {1 - row.weight[0][m], row.weight[0][m]};
          const T wy[2] = {1 - row.weight[1][m], row.weight[1][m]};
          const T wz[2] = {1 - row.weight[2][m], row.weight[2][m]};
          for (int corner = 0; corner < 8 && row.inside[m]; ++corner) {
            const int x = corner >> 2, y = corner >> 1 & 1, z = corner & 1;
            const int64_t cell = row.index[m] * width + x * sx + y * sy + z * sz;
            T product = 0;
            for (int64_t c = 0; c < width; ++c) {
              const T value = dvalues[m * width + c];
              product += window[cell + c] * value;
              sums[cell + c] += wx[x] * wy[y] * wz[z] * value;
            }
            slope[0] += (x ? product : -product) * wy[y] * wz[z];
            slope[1] += (y ? product : -product) * wx[x] * wz[z];
            slope[2] += (z ? product : -product) * wx[x] * wy[y];
          }
          for (int a = 0; a < 3; ++a) {
            ds[3 * m + a] = row.inside[m] ? slope[a] * T(g.per_cell[a])
                                          : std::numeric_limits<T>::quiet_NaN();
          }
        }
      });
      if (!box.empty()) add_out(g, box, width, call.dfields + first, sums);
    });
  }
}

// The largest |s| of a column along each axis [cells], and what its patches touch.
template <typename T>
struct Reach {
  Geometry g;
  const T* s;
  T* largest;  // [columns, 3]
  Box* boxes;  // [columns, patches]
};

template <typename T>
FLOWPM_INLINE void reach_column(const Reach<T>& call, const Tiling& tiling, const Box*,
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
    call.boxes[column * tiling.patches() + p] = touched(g, 0, patch, call.s);
  }
  for (int a = 0; a < 3; ++a) {
    T most = 0;
    for (int m = a; m < 3 * kRow; m += 3) most = std::max(most, largest[m]);
    call.largest[3 * column + a] = most * T(g.per_cell[a]);
  }
}

FLOWPM_ENTRY(paint_column, Paint)
FLOWPM_ENTRY(paint_vjp_column, PaintVjp)
FLOWPM_ENTRY(read_column, Read)
FLOWPM_ENTRY(read_vjp_column, ReadVjp)
FLOWPM_ENTRY(reach_column, Reach)

}  // namespace

template <typename T>
void paint(const Paint<T>& call, const Parallel& parallel) {
  const Tiling tiling(call.g);
  clear(call.mesh, call.g.batch * call.g.cell_count(), parallel);
  std::vector<T> largest(3 * tiling.columns());
  std::vector<Box> boxes(tiling.columns() * tiling.patches());
  const Reach<T> reach{call.g, call.s, largest.data(), boxes.data()};
  parallel(tiling.columns(),
           [&](int64_t column) { reach_column_clone(reach, tiling, nullptr, column); });
  for (int a = 0; a < 3; ++a) {
    call.reach[a] = 0;
    for (int64_t c = 0; c < tiling.columns(); ++c) {
      call.reach[a] = std::max(call.reach[a], largest[3 * c + a]);
    }
  }
  const T most = std::max({call.reach[0], call.reach[1], call.reach[2]});
  if (!(most <= std::numeric_limits<T>::max())) {
    for (int a = 0; a < 3; ++a) call.reach[a] = std::numeric_limits<T>::infinity();
  }
  scatter(call.g, tiling, std::move(boxes), 0, parallel,
          [&](int64_t column, const Box* touches) {
            paint_column_clone(call, tiling, touches, column);
          });
}

template <typename T>
void paint_vjp(const PaintVjp<T>& call, const Parallel& parallel) {
  const Tiling tiling(call.g);
  parallel(tiling.columns(), [&](int64_t c) { paint_vjp_column_clone(call, tiling, nullptr, c); });
}

template <typename T>
void read(const Read<T>& call, const Parallel& parallel) {
  if (call.components == 3) {
    force(Force<T>{call.g, true, call.fields, call.s, nullptr, nullptr, call.values}, parallel);
    return;
  }
  const Tiling tiling(call.g);
  parallel(tiling.columns(), [&](int64_t c) { read_column_clone(call, tiling, nullptr, c); });
}

template <typename T>
void read_vjp(const ReadVjp<T>& call, const Parallel& parallel) {
  if (call.components == 3) {
    force_vjp(ForceVjp<T>{call.g, true, call.fields, call.s, nullptr, call.dvalues, nullptr,
                          nullptr, nullptr, call.dfields, call.ds, nullptr},
              parallel);
    return;
  }
  const Tiling tiling(call.g);
  clear(call.dfields, call.g.batch * call.g.cell_count() * call.components, parallel);
  scatter(call.g, tiling, survey(call.g, tiling, 0, call.s, parallel), 0, parallel,
          [&](int64_t column, const Box* touches) {
            read_vjp_column_clone(call, tiling, touches, column);
          });
}

#define FLOWPM_INSTANTIATE(T)                                       \
  template void paint<T>(const Paint<T>&, const Parallel&);         \
  template void paint_vjp<T>(const PaintVjp<T>&, const Parallel&);  \
  template void read<T>(const Read<T>&, const Parallel&);           \
  template void read_vjp<T>(const ReadVjp<T>&, const Parallel&);
FLOWPM_INSTANTIATE(float)
FLOWPM_INSTANTIATE(double)

}  // namespace flowpm
