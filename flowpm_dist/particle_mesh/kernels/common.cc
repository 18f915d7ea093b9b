#include "common.h"

#include <cstdlib>
#include <memory>
#include <new>

#include "kernels.h"

namespace flowpm {
namespace {

constexpr int64_t kBlock = 1 << 15;  // values that one thread handles at a time

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

void* scratch_bytes(size_t bytes) {
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t capacity = 0;
  if (bytes > capacity) {
    memory.reset();
    capacity = 0;
    const size_t rounded = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(4096, rounded));
    if (!memory) throw std::bad_alloc();
    capacity = rounded;
  }
  return memory.get();
}

template <typename T>
struct Survey {
  Geometry g;
  int margin;
  const T* s;
  CellRange* ranges;
};

template <typename T>
FLOWPM_INLINE void survey_column(const Survey<T>& call, const Tiling& tiling, const CellRange*,
                                 int64_t column) {
  for (int64_t p = 0; p < tiling.patches(); ++p) {
    call.ranges[column * tiling.patches() + p] =
        touched(call.g, call.margin, tiling.patch(column, p), call.s);
  }
}

template <typename T>
FLOWPM_INLINE void linear_block(int64_t count, const T* x, const T* y, T factor, T* out) {
  for (int64_t m = 0; m < count; ++m) out[m] = x[m] + factor * y[m];
}

template <typename T>
FLOWPM_INLINE double drift_block(int64_t count, const T* x_after, const T* v, const T* dx,
                                 const T* dv, T factor, T* x_before, T* dv_out) {
  Dot<T> dot;
  constexpr int64_t piece = 512;
  for (int64_t from = 0; from < count; from += piece) {
    const int64_t to = std::min(count, from + piece);
    dot.add(dx + from, v + from, to - from);
    for (int64_t m = from; m < to; ++m) {
      const T dv_before = dv[m] + factor * dx[m];
      x_before[m] = x_after[m] - factor * v[m];
      dv_out[m] = dv_before;
    }
  }
  return dot.total();
}

FLOWPM_CLONES void linear_clone(int64_t count, const float* x, const float* y, float factor,
                                float* out) {
  linear_block(count, x, y, factor, out);
}
FLOWPM_CLONES void linear_clone(int64_t count, const double* x, const double* y, double factor,
                                double* out) {
  linear_block(count, x, y, factor, out);
}
FLOWPM_CLONES double drift_clone(int64_t count, const float* x_after, const float* v,
                                 const float* dx, const float* dv, float factor, float* x_before,
                                 float* dv_out) {
  return drift_block(count, x_after, v, dx, dv, factor, x_before, dv_out);
}
FLOWPM_CLONES double drift_clone(int64_t count, const double* x_after, const double* v,
                                 const double* dx, const double* dv, double factor,
                                 double* x_before, double* dv_out) {
  return drift_block(count, x_after, v, dx, dv, factor, x_before, dv_out);
}

FLOWPM_ENTRY(survey_column, Survey)

}  // namespace

template <typename T>
T* scratch(int64_t count) {
  return static_cast<T*>(scratch_bytes(size_t(count) * sizeof(T)));
}

template <typename T>
std::vector<CellRange> survey(const Geometry& g, const Tiling& tiling, int margin, const T* s,
                              const Parallel& parallel) {
  std::vector<CellRange> ranges(tiling.columns() * tiling.patches());
  const Survey<T> call{g, margin, s, ranges.data()};
  parallel(tiling.columns(), [&](int64_t c) { survey_column_clone(call, tiling, nullptr, c); });
  return ranges;
}

template <typename T>
void clear(T* values, int64_t count, const Parallel& parallel) {
  parallel((count + kBlock - 1) / kBlock, [&](int64_t block) {
    const int64_t from = block * kBlock;
    std::memset(values + from, 0, std::min(kBlock, count - from) * sizeof(T));
  });
}

template <typename T>
void linear(int64_t batch, int64_t count, const T* x, const T* y, const T* factor, T* out,
            const Parallel& parallel) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  parallel(batch * blocks, [&](int64_t block) {
    const int64_t b = block / blocks, within = block % blocks * kBlock, from = b * count + within;
    linear_clone(std::min(kBlock, count - within), x + from, y + from, factor[b], out + from);
  });
}

template <typename T>
void drift_vjp(int64_t batch, int64_t count, const T* x_after, const T* v, const T* dx, const T* dv,
               const T* factor, T* x_before, T* dv_out, double* sum, const Parallel& parallel) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> partial(batch * blocks);
  parallel(batch * blocks, [&](int64_t block) {
    const int64_t b = block / blocks, within = block % blocks * kBlock, from = b * count + within;
    partial[block] = drift_clone(std::min(kBlock, count - within), x_after + from, v + from,
                                 dx + from, dv + from, factor[b], x_before + from, dv_out + from);
  });
  for (int64_t b = 0; b < batch; ++b) {
    sum[b] = 0;
    for (int64_t block = 0; block < blocks; ++block) sum[b] += partial[b * blocks + block];
  }
}

#define FLOWPM_INSTANTIATE(T)                                                                    \
  template T* scratch<T>(int64_t);                                                               \
  template std::vector<CellRange> survey<T>(const Geometry&, const Tiling&, int, const T*,       \
                                            const Parallel&);                                    \
  template void clear<T>(T*, int64_t, const Parallel&);                                          \
  template void linear<T>(int64_t, int64_t, const T*, const T*, const T*, T*, const Parallel&);  \
  template void drift_vjp<T>(int64_t, int64_t, const T*, const T*, const T*, const T*, const T*, \
                             T*, T*, double*, const Parallel&);
FLOWPM_INSTANTIATE(float)
FLOWPM_INSTANTIATE(double)

}  // namespace flowpm
