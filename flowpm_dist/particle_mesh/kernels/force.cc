// The force at the particles, from a potential or a vector field, and kicks by it.
#include "force_window.h"
#include "kernels.h"

namespace flowpm {
namespace {

template <typename T>
FLOWPM_INLINE void force_column(const Force<T>& call, const Tiling& tiling, const CellRange*,
                                int64_t column) {
  const Geometry& g = call.g;
  const int margin = call.spectral ? 0 : 2;
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    const Patch whole = tiling.patch(column, p);
    const T* field = call.field + whole.batch * g.cell_count() * (call.spectral ? 3 : 1);
    const CellRange touches = touched(g, margin, whole, call.s);
    for_windows(g, margin, whole, touches, call.s, [&](const Patch& patch, const CellRange& range) {
      const int64_t sy = 4 * range.size(2), sx = range.size(1) * sy;
      T* window = scratch<T>(window_size(range) + block_size(call.spectral, range));
      if (range.empty()) {
        std::memset(window, 0, window_size(range) * sizeof(T));
      } else {
        load_force(g, call.spectral, range, field, window + window_size(range), window);
      }
      Row<T> row;
      alignas(64) T value[3 * kRow + 4];
      for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
        const T* s = at(g, call.s, 3, patch.batch, i, j, k);
        prefetch_next(g, s, count);
        if (call.v) prefetch_next(g, call.v + (s - call.s), count);
        locate_in(g, range, margin, i, j, k, count, s, row);
        for (int m = 0; m < count; ++m) {
          const T* cell = window + 4 * int64_t(row.index[m]);
          const T wx = row.weight[0][m], wy = row.weight[1][m], wz = row.weight[2][m];
          const Two<T> a = load<Two<T>>(cell), b = load<Two<T>>(cell + sy);
          const Two<T> c = load<Two<T>>(cell + sx), d = load<Two<T>>(cell + sx + sy);
          const Two<T> x0 = a + wy * (b - a), x1 = c + wy * (d - c), both = x0 + wx * (x1 - x0);
          store(value + 3 * m, low<T>(both) + wz * (high<T>(both) - low<T>(both)));
        }
        mark_outside(row, count, value);
        T* out = call.out + (s - call.s);
        if (call.v) {
          const T before = call.factors[2 * patch.batch], by = call.factors[2 * patch.batch + 1];
          const T* v = call.v + (s - call.s);
          for (int m = 0; m < 3 * count; ++m) out[m] = before * v[m] + by * value[m];
        } else {
          for (int m = 0; m < 3 * count; ++m) out[m] = value[m];
        }
      });
    });
  }
}

FLOWPM_ENTRY(force_column, Force)

}  // namespace

template <typename T>
void Force<T>::run(const Parallel& parallel) const {
  const Force& call = *this;
  const Tiling tiling(call.g);
  parallel(tiling.columns(), [&](int64_t c) { force_column_clone(call, tiling, nullptr, c); });
}

template struct Force<float>;
template struct Force<double>;

}  // namespace flowpm
