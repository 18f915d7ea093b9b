// Read fields of any number of components at the particles, and its adjoint.
#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

template <typename T>
FLOWPM_INLINE void read_column(const Read<T>& call, const Tiling& tiling, const CellRange*,
                               int64_t column) {
  const Geometry& g = call.g;
  const int64_t width = call.components;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const T* mesh = call.fields + whole.batch * g.cell_count() * width;
    const CellRange touches = touched(g, 0, whole, call.s);
    for_windows(g, 0, whole, touches, call.s, [&](const Patch& patch, const CellRange& range) {
      const int64_t sz = width, sy = range.size(2) * sz, sx = range.size(1) * sy;
      T* window = scratch<T>(std::max<int64_t>(8, range.count()) * width);
      if (!range.empty()) copy_in(g, range, width, mesh, window);
      Row<T> row;
      T one[kRow], share[8][kRow];
      for (T& value : one) value = 1;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        locate_in(g, range, 0, i, j, k, count, at(g, call.s, 3, patch.batch, i, j, k), row);
        shares(row, one, count, share);
        T* out = at(g, call.values, width, patch.batch, i, j, k);
        for (int m = 0; m < count; ++m) {
          const T* a = window + row.index[m] * width;
          for (int64_t c = 0; c < width; ++c, ++a) {
            if (!row.inside[m]) {
              out[m * width + c] = std::numeric_limits<T>::quiet_NaN();
              continue;
            }
            out[m * width + c] = share[0][m] * a[0] + share[1][m] * a[sz] + share[2][m] * a[sy] +
                                 share[3][m] * a[sy + sz] + share[4][m] * a[sx] +
                                 share[5][m] * a[sx + sz] + share[6][m] * a[sx + sy] +
                                 share[7][m] * a[sx + sy + sz];
          }
        }
      });
    });
  }
}

template <typename T>
FLOWPM_INLINE void read_vjp_column(const ReadVjp<T>& call, const Tiling& tiling,
                                   const CellRange* ranges, int64_t column) {
  const Geometry& g = call.g;
  const int64_t width = call.components;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const int64_t first = whole.batch * g.cell_count() * width;
    for_windows(g, 0, whole, ranges[p], call.s, [&](const Patch& patch, const CellRange& range) {
      const int64_t sz = width, sy = range.size(2) * sz, sx = range.size(1) * sy;
      const int64_t values = range.count() * width;
      T* window = scratch<T>(2 * values);
      T* sums = window + values;
      if (!range.empty()) copy_in(g, range, width, call.fields + first, window);
      std::memset(sums, 0, values * sizeof(T));
      Row<T> row;
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        const T* s = at(g, call.s, 3, patch.batch, i, j, k);
        const T* dvalues = at(g, call.dvalues, width, patch.batch, i, j, k);
        T* ds = call.ds + (s - call.s);
        locate_in(g, range, 0, i, j, k, count, s, row);
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
            ds[3 * m + a] =
                row.inside[m] ? slope[a] * T(g.per_cell[a]) : std::numeric_limits<T>::quiet_NaN();
          }
        }
      });
      if (!range.empty()) add_out(g, range, width, call.dfields + first, sums);
    });
  }
}

FLOWPM_ENTRY(read_column, Read)
FLOWPM_ENTRY(read_vjp_column, ReadVjp)

}  // namespace

template <typename T>
void Read<T>::run(const Parallel& parallel) const {
  const Read& call = *this;
  if (call.components == 3) {
    Force<T>{call.g, true, call.fields, call.s, nullptr, nullptr, call.values}.run(parallel);
    return;
  }
  const Tiling tiling(call.g);
  parallel(tiling.columns(), [&](int64_t c) { read_column_clone(call, tiling, nullptr, c); });
}

template <typename T>
void ReadVjp<T>::run(const Parallel& parallel) const {
  const ReadVjp& call = *this;
  if (call.components == 3) {
    ForceVjp<T>{call.g,  true,    call.fields, call.s,       nullptr, call.dvalues,
                nullptr, nullptr, nullptr,     call.dfields, call.ds, nullptr}
        .run(parallel);
    return;
  }
  const Tiling tiling(call.g);
  clear(call.dfields, call.g.batch * call.g.cell_count() * call.components, parallel);
  scatter(call.g, tiling, survey(call.g, tiling, 0, call.s, parallel), 0, parallel,
          [&](int64_t column, const CellRange* touches) {
            read_vjp_column_clone(call, tiling, touches, column);
          });
}

template struct Read<float>;
template struct Read<double>;
template struct ReadVjp<float>;
template struct ReadVjp<double>;

}  // namespace flowpm
