// What the kernels share: entries for each processor, vectors of few values, sums of products, the
// survey before a scatter.
#pragma once

#include "window.h"

namespace flowpm {

// `NAME_clone`: `NAME` for float and double, in a version for each level of processor.
#define FLOWPM_ENTRY(NAME, CALL)                                                  \
  FLOWPM_CLONES void NAME##_clone(const CALL<float>& call, const Tiling& tiling,  \
                                  const CellRange* ranges, int64_t column) {      \
    NAME(call, tiling, ranges, column);                                           \
  }                                                                               \
  FLOWPM_CLONES void NAME##_clone(const CALL<double>& call, const Tiling& tiling, \
                                  const CellRange* ranges, int64_t column) {      \
    NAME(call, tiling, ranges, column);                                           \
  }

// The same for a part of the work, by its number.
#define FLOWPM_PART(NAME, CALL)                                                                 \
  FLOWPM_CLONES void NAME##_clone(const CALL<float>& call, int64_t part) { NAME(call, part); } \
  FLOWPM_CLONES void NAME##_clone(const CALL<double>& call, int64_t part) { NAME(call, part); }

// Four values, such as (x, y, z, nothing) of one cell, and eight, such as two cells along z.
template <typename T>
struct Vectors;
template <>
struct Vectors<float> {
  typedef float one __attribute__((vector_size(16)));
  typedef float two __attribute__((vector_size(32)));
};
template <>
struct Vectors<double> {
  typedef double one __attribute__((vector_size(32)));
  typedef double two __attribute__((vector_size(64)));
};
template <typename T>
using One = typename Vectors<T>::one;
template <typename T>
using Two = typename Vectors<T>::two;

template <typename V, typename T>
FLOWPM_INLINE V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <typename V, typename T>
FLOWPM_INLINE void store(T* to, const V& value) {
  std::memcpy(to, &value, sizeof(V));
}
template <typename T>
FLOWPM_INLINE One<T> low(const Two<T>& v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3);
}
template <typename T>
FLOWPM_INLINE One<T> high(const Two<T>& v) {
  return __builtin_shufflevector(v, v, 4, 5, 6, 7);
}


// Stores four vectors (x, y, z, 0), in their order and `stride` values apart, given by component.
template <typename T>
FLOWPM_INLINE void store_vectors(T* to, int64_t stride, const One<T>& x, const One<T>& y,
                                 const One<T>& z) {
  const One<T> zero = {0, 0, 0, 0};
  const One<T> xy0 = __builtin_shufflevector(x, y, 0, 4, 1, 5);
  const One<T> xy1 = __builtin_shufflevector(x, y, 2, 6, 3, 7);
  const One<T> z0 = __builtin_shufflevector(z, zero, 0, 4, 1, 5);
  const One<T> z1 = __builtin_shufflevector(z, zero, 2, 6, 3, 7);
  store(to, One<T>(__builtin_shufflevector(xy0, z0, 0, 1, 4, 5)));
  store(to + stride, One<T>(__builtin_shufflevector(xy0, z0, 2, 3, 6, 7)));
  store(to + 2 * stride, One<T>(__builtin_shufflevector(xy1, z1, 0, 1, 4, 5)));
  store(to + 3 * stride, One<T>(__builtin_shufflevector(xy1, z1, 2, 3, 6, 7)));
}

// The components of four vectors (x, y, z, anything) that follow each other.
template <typename T>
struct Vector {
  One<T> x, y, z;
};
template <typename T>
FLOWPM_INLINE Vector<T> load_vectors(const T* from) {
  const One<T> a = load<One<T>>(from), b = load<One<T>>(from + 4);
  const One<T> c = load<One<T>>(from + 8), d = load<One<T>>(from + 12);
  const One<T> ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const One<T> ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const One<T> cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const One<T> cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return {__builtin_shufflevector(ab0, cd0, 0, 1, 4, 5),
          __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7),
          __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5)};
}

// The sum of products, in an order that does not depend on the processor. Products of one call that
// are eight apart are summed as T, the rest in double.
template <typename T>
struct Dot {
  double lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};

  FLOWPM_INLINE void add(const T* a, const T* b, int64_t count) {
    T sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int64_t m = 0;
    for (; m + 8 <= count; m += 8) {
      for (int lane = 0; lane < 8; ++lane) sums[lane] += a[m + lane] * b[m + lane];
    }
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += double(sums[lane]);
    for (; m < count; ++m) lanes[m % 8] += double(a[m]) * double(b[m]);
  }
  double total() const {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
           ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }
};

// What the patches of each column touch: the ranges of `disjoint_groups`.
template <typename T>
std::vector<CellRange> survey(const Geometry& g, const Tiling& tiling, int margin, const T* s,
                              const Parallel& parallel);

// Sets `count` values to 0, in parallel.
template <typename T>
void clear(T* values, int64_t count, const Parallel& parallel);

// Calls work(column, ranges of its patches) for all columns, those that touch the same cells, with
// `margin` more on either side, in a fixed order.
template <typename Work>
void scatter(const Geometry& g, const Tiling& tiling, std::vector<CellRange> ranges, int margin,
             const Parallel& parallel, const Work& work) {
  std::vector<CellRange> grown = ranges;
  for (CellRange& range : grown) {
    if (!range.empty()) range = range.grown(margin);
  }
  for (const auto& group : disjoint_groups(g, tiling, grown)) {
    parallel(int64_t(group.size()),
             [&](int64_t m) { work(group[m], ranges.data() + group[m] * tiling.patches()); });
  }
}

}  // namespace flowpm
