// Parts of the mesh copied to where nothing wraps around, and particles located in them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "geometry.h"

// One build that serves old and new processors, where the loader can choose between versions.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FLOWPM_CLONES \
  __attribute__((flatten, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FLOWPM_CLONES
#endif

namespace flowpm {

// As `locate`, and each particle's lower cell in a window on `range`; 0 for those that are nowhere.
template <typename T>
FLOWPM_INLINE void locate_in(const Geometry& g, const CellRange& range, int margin, int64_t i,
                             int64_t j, int64_t k, int count, const T* s, Row<T>& row) {
  locate(g, margin, i, j, k, count, s, row);
  const int32_t ny = int32_t(range.size(1)), nz = int32_t(range.size(2));
  const int32_t x = int32_t(range.begin[0]), y = int32_t(range.begin[1]),
                z = int32_t(range.begin[2]);
  for (int m = 0; m < count; ++m) {
    const int32_t index =
        ((row.lower[0][m] - x) * ny + row.lower[1][m] - y) * nz + row.lower[2][m] - z;
    row.index[m] = row.inside[m] ? index : 0;
  }
}

template <typename T>
FLOWPM_INLINE T* at(const Geometry& g, T* particles, int64_t width, int64_t b, int64_t i, int64_t j,
                    int64_t k) {
  const int64_t* n = g.particles;
  return particles + width * (((b * n[0] + i) * n[1] + j) * n[2] + k);
}

// Asks for the vectors of the row after the one of `count` particles that begins at `row`: rows are
// too short for the processor to foresee them.
template <typename T>
FLOWPM_INLINE void prefetch_next(const Geometry& g, const T* row, int count) {
  constexpr int64_t line = 64 / sizeof(T);
  const T* next = row + 3 * g.particles[2];
  for (int64_t m = 0; m < 3 * count; m += line) __builtin_prefetch(next + m);
}

// f(i, j, k, count) for the rows of a patch, in the lattice's order.
template <typename F>
FLOWPM_INLINE void for_rows(const Patch& patch, const F& f) {
  for (int64_t i = patch.begin[0]; i < patch.end[0]; ++i) {
    for (int64_t j = patch.begin[1]; j < patch.end[1]; ++j) {
      for (int64_t k = patch.begin[2]; k < patch.end[2]; k += kRow) {
        f(i, j, k, int(std::min<int64_t>(kRow, patch.end[2] - k)));
      }
    }
  }
}

// The cells that a patch's particles touch; empty if none is inside.
template <typename T>
FLOWPM_INLINE CellRange touched(const Geometry& g, int margin, const Patch& patch, const T* s) {
  constexpr int32_t none = std::numeric_limits<int32_t>::max();
  int32_t least[3] = {none, none, none}, most[3] = {-none, -none, -none};
  Row<T> row;
  for_rows(patch, [&](int64_t i, int64_t j, int64_t k, int count) {
    const T* places = at(g, s, 3, patch.batch, i, j, k);
    prefetch_next(g, places, count);
    locate(g, margin, i, j, k, count, places, row);
    for (int a = 0; a < 3; ++a) {
      int32_t low = least[a], high = most[a];
      for (int m = 0; m < count; ++m) {
        low = std::min(low, row.inside[m] ? row.lower[a][m] : none);
        high = std::max(high, row.inside[m] ? row.lower[a][m] : -none);
      }
      least[a] = low;
      most[a] = high;
    }
  });
  if (least[0] == none) return CellRange{{0, 0, 0}, {0, 0, 0}};
  return CellRange{{least[0], least[1], least[2]}, {most[0] + 2, most[1] + 2, most[2] + 2}};
}

// f(patch, range) for a patch, cut up until its particles lie close enough together for a window on
// all they touch to be worth its while. What is outside has the empty range.
template <typename T, typename F>
FLOWPM_INLINE void for_windows(const Geometry& g, int margin, const Patch& whole,
                               const CellRange& range, const T* s, const F& f) {
  struct Part {
    Patch patch;
    CellRange range;
  };
  Part stack[64];
  int depth = 0;
  stack[depth++] = {whole, range};
  const double factor = g.mesh_factor();
  const int64_t dense = int64_t(8 * factor * factor * factor);
  while (depth > 0) {
    const Part part = stack[--depth];
    if (part.range.empty() || part.patch.count() == 1 ||
        part.range.count() <= dense * part.patch.count()) {
      f(part.patch, part.range);
      continue;
    }
    int axis = 0;
    for (int a = 1; a < 3; ++a) {
      if (part.patch.size(a) > part.patch.size(axis)) axis = a;
    }
    Patch first = part.patch, second = part.patch;
    first.end[axis] = second.begin[axis] = part.patch.begin[axis] + part.patch.size(axis) / 2;
    stack[depth++] = {second, touched(g, margin, second, s)};
    stack[depth++] = {first, touched(g, margin, first, s)};
  }
}

// f(row of the mesh, row of the window, values) for the contiguous pieces of a window on `range`.
template <typename T, typename U, typename F>
FLOWPM_INLINE void for_pieces(const Geometry& g, const CellRange& range, int64_t components,
                              T* mesh, U* window, const F& f) {
  for (int64_t x = range.begin[0]; x < range.end[0]; ++x) {
    T* plane = mesh + wrapped(g, 0, x) * g.mesh[1] * g.mesh[2] * components;
    for (int64_t y = range.begin[1]; y < range.end[1]; ++y) {
      T* line = plane + wrapped(g, 1, y) * g.mesh[2] * components;
      for (int64_t z = range.begin[2]; z < range.end[2];) {
        const int64_t from = wrapped(g, 2, z);
        const int64_t cells = std::min(g.mesh[2] - from, range.end[2] - z);
        f(line + from * components, window, cells * components);
        window += cells * components;
        z += cells;
      }
    }
  }
}

template <typename T>
FLOWPM_INLINE void copy_in(const Geometry& g, const CellRange& range, int64_t components,
                           const T* mesh, T* window) {
  for_pieces(g, range, components, mesh, window, [](const T* from, T* to, int64_t n) {
    for (int64_t m = 0; m < n; ++m) to[m] = from[m];
  });
}

template <typename T>
FLOWPM_INLINE void add_out(const Geometry& g, const CellRange& range, int64_t components, T* mesh,
                           const T* window) {
  for_pieces(g, range, components, mesh, window, [](T* to, const T* from, int64_t n) {
    for (int64_t m = 0; m < n; ++m) to[m] += from[m];
  });
}

// This thread's scratch memory, `count` values aligned to a cache line; valid until the next call.
template <typename T>
T* scratch(int64_t count);

}  // namespace flowpm
