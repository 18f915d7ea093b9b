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

// A block of one of `batch` rows of `count` values, by the number of the block.
struct Block {
  static int64_t per_row(int64_t count) { return (count + kBlock - 1) / kBlock; }
  Block(int64_t rows_values, int64_t number)
      : row(number / per_row(rows_values)),
        from(row * rows_values + number % per_row(rows_values) * kBlock),
        count(std::min(kBlock, (row + 1) * rows_values - from)) {}

  int64_t row, from, count;
};

template <typename T>
FLOWPM_INLINE void linear_block(const Linear<T>& call, int64_t number) {
  const Block block(call.count, number);
  const T *x = call.x + block.from, *y = call.y + block.from, factor = call.factor[block.row];
  T* out = call.out + block.from;
  for (int64_t m = 0; m < block.count; ++m) out[m] = x[m] + factor * y[m];
}

template <typename T>
struct DriftBlocks : DriftVjp<T> {
  double* partial;  // of each block
};

template <typename T>
FLOWPM_INLINE void drift_block(const DriftBlocks<T>& call, int64_t number) {
  const Block block(call.count, number);
  const T *x_after = call.x_after + block.from, *v = call.v + block.from;
  const T *dx = call.dx + block.from, *dv = call.dv + block.from, factor = call.factor[block.row];
  T *x_before = call.x_before + block.from, *dv_before = call.dv_before + block.from;
  Dot<T> dot;
  constexpr int64_t piece = 512;
  for (int64_t from = 0; from < block.count; from += piece) {
    const int64_t to = std::min(block.count, from + piece);
    dot.add(dx + from, v + from, to - from);
    for (int64_t m = from; m < to; ++m) {
      const T cotangent = dv[m] + factor * dx[m];
      x_before[m] = x_after[m] - factor * v[m];
      dv_before[m] = cotangent;
    }
  }
  call.partial[number] = dot.total();
}

FLOWPM_PART(linear_block, Linear)
FLOWPM_PART(drift_block, DriftBlocks)
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
void Linear<T>::run(const Parallel& parallel) const {
  parallel(batch * Block::per_row(count), [&](int64_t m) { linear_block_clone(*this, m); });
}

template <typename T>
void DriftVjp<T>::run(const Parallel& parallel) const {
  const int64_t blocks = Block::per_row(count);
  std::vector<double> partial(batch * blocks);
  const DriftBlocks<T> call{*this, partial.data()};
  parallel(batch * blocks, [&](int64_t m) { drift_block_clone(call, m); });
  for (int64_t b = 0; b < batch; ++b) {
    sum[b] = 0;
    for (int64_t block = 0; block < blocks; ++block) sum[b] += partial[b * blocks + block];
  }
}

#define FLOWPM_INSTANTIATE(T)                                                              \
  template T* scratch<T>(int64_t);                                                         \
  template std::vector<CellRange> survey<T>(const Geometry&, const Tiling&, int, const T*, \
                                            const Parallel&);                              \
  template void clear<T>(T*, int64_t, const Parallel&);                                    \
  template struct Linear<T>;                                                               \
  template struct DriftVjp<T>;
FLOWPM_INSTANTIATE(float)
FLOWPM_INSTANTIATE(double)

}  // namespace flowpm
