// What one thread of a GPU does: the work for one particle, or for one value of a row.
//
// Threads add to the mesh and to totals with `add_to`, which is atomic on GPUs. Without a GPU the
// same functions run one after the other: tests/gpu_threads.cc.
//
// Each kernel is compiled for cells numbered by 32 bits and by 64: `Index`, see `is_wide`. Those of
// forces are compiled for a field that is a potential and for one that is the force: `spectral`.
#pragma once

#include "calls.h"

namespace flowpm {

template <typename T>
FLOWPM_INLINE void add_to(T* sum, T value) {
#ifdef __CUDA_ARCH__
  atomicAdd(sum, value);
#else
  *sum += value;
#endif
}

// Replaces a value that is not negative by a larger one.
template <typename T>
FLOWPM_INLINE void raise(T* largest, T value) {
#ifdef __CUDA_ARCH__
  // Numbers that are not negative are in the order of their bits.
  if constexpr (sizeof(T) == 4) {
    atomicMax(reinterpret_cast<int*>(largest), __float_as_int(value));
  } else {
    atomicMax(reinterpret_cast<long long*>(largest), __double_as_longlong(value));
  }
#else
  if (value > *largest) *largest = value;
#endif
}

// a / b, for numbers that are not negative; 64 bits take GPUs several times as long as 32.
FLOWPM_INLINE int32_t quotient(int32_t a, int32_t b) { return int32_t(uint32_t(a) / uint32_t(b)); }
FLOWPM_INLINE int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 ? a / b : int64_t(uint32_t(a) / uint32_t(b));
}

// Locates particle p of a batch element, whose displacement is s[0..2], with `lower` wrapped around;
// returns whether it takes part.
template <typename Index, typename T>
FLOWPM_INLINE bool place(const Geometry& g, int margin, int64_t p, const T* s, Row<T, 1>& row) {
  const Index ny = Index(g.particles[1]), nz = Index(g.particles[2]);
  const Index line = quotient(Index(p), nz), plane = quotient(line, ny);
  const Index j = line - plane * ny, k = Index(p) - line * nz;
  locate(g, margin, plane, j, k, 1, s, row);
  for (int a = 0; a < 3; ++a) row.lower[a][0] = wrapped(g, a, row.lower[a][0]);
  return row.inside[0];
}

// The cells of the mesh after and before one along an axis.
FLOWPM_INLINE int32_t next(const Geometry& g, int axis, int32_t cell) {
  return cell + 1 == int32_t(g.mesh[axis]) ? 0 : cell + 1;
}
FLOWPM_INLINE int32_t previous(const Geometry& g, int axis, int32_t cell) {
  return (cell == 0 ? int32_t(g.mesh[axis]) : cell) - 1;
}

// The numbers of the eight cells about a particle; z innermost, as in `shares`.
template <typename Index, typename T>
FLOWPM_INLINE void corners(const Geometry& g, const Row<T, 1>& row, Index (&cell)[8]) {
  Index along[3][2];
  for (int a = 0; a < 3; ++a) {
    along[a][0] = row.lower[a][0];
    along[a][1] = next(g, a, row.lower[a][0]);
  }
  for (int c = 0; c < 8; ++c) {
    cell[c] = (along[0][c >> 2] * Index(g.mesh[1]) + along[1][c >> 1 & 1]) * Index(g.mesh[2]) +
              along[2][c & 1];
  }
}

// The value of a field that is f on the eight cells, and its slopes [per cell].
template <typename T>
FLOWPM_INLINE T interpolate(const T (&f)[8], const Row<T, 1>& row, T (&slope)[3]) {
  const T wx = row.weight[0][0], wy = row.weight[1][0], wz = row.weight[2][0];
  const T z0 = f[1] - f[0], z1 = f[3] - f[2], z2 = f[5] - f[4], z3 = f[7] - f[6];
  const T c0 = f[0] + wz * z0, c1 = f[2] + wz * z1, c2 = f[4] + wz * z2, c3 = f[6] + wz * z3;
  const T y0 = c1 - c0, y1 = c3 - c2, d0 = c0 + wy * y0, d1 = c2 + wy * y1;
  const T low = z0 + wy * (z1 - z0), high = z2 + wy * (z3 - z2);
  slope[0] = d1 - d0;
  slope[1] = y0 + wx * (y1 - y0);
  slope[2] = low + wx * (high - low);
  return d0 + wx * (d1 - d0);
}

// The cells of the 4-point difference along an axis at the eight cells about a particle.
template <int axis, typename Index>
struct Stencil {
  static constexpr int kFirst = axis == 0 ? 1 : 0, kSecond = axis == 2 ? 1 : 2;
  Index along[6], first[2], second[2];

  template <typename T>
  FLOWPM_INLINE Stencil(const Geometry& g, const Row<T, 1>& row) {
    const Index stride[3] = {Index(g.mesh[1]) * Index(g.mesh[2]), Index(g.mesh[2]), 1};
    int32_t cell[6];
    cell[2] = row.lower[axis][0];
    for (int m = 2; m > 0; --m) cell[m - 1] = previous(g, axis, cell[m]);
    for (int m = 2; m < 5; ++m) cell[m + 1] = next(g, axis, cell[m]);
    for (int m = 0; m < 6; ++m) along[m] = cell[m] * stride[axis];
    first[0] = row.lower[kFirst][0] * stride[kFirst];
    first[1] = next(g, kFirst, row.lower[kFirst][0]) * stride[kFirst];
    second[0] = row.lower[kSecond][0] * stride[kSecond];
    second[1] = next(g, kSecond, row.lower[kSecond][0]) * stride[kSecond];
  }
  // The number among the eight cells.
  FLOWPM_INLINE static constexpr int corner(int upper, int u, int v) {
    return upper << (2 - axis) | u << (2 - kFirst) | v << (2 - kSecond);
  }
};

// A component of the force on the eight cells. `cell` are their numbers.
template <int axis, bool spectral, typename Index, typename T>
FLOWPM_INLINE void forces(const Geometry& g, const T* field, const Index (&cell)[8],
                          const Row<T, 1>& row, T (&f)[8]) {
  if constexpr (spectral) {
    for (int c = 0; c < 8; ++c) f[c] = field[3 * int64_t(cell[c]) + axis];
    return;
  }
  const Stencil<axis, Index> at(g, row);
  const T by = T(g.per_cell[axis] / 12);
  for (int u = 0; u < 2; ++u) {
    for (int v = 0; v < 2; ++v) {
      T line[6];
      for (int m = 0; m < 6; ++m) line[m] = field[at.along[m] + at.first[u] + at.second[v]];
      f[at.corner(0, u, v)] = by * (8 * (line[1] - line[3]) + (line[4] - line[0]));
      f[at.corner(1, u, v)] = by * (8 * (line[2] - line[4]) + (line[5] - line[1]));
    }
  }
}

// The adjoint of `forces`: adds to the cotangent of the field what `share` on the eight cells gives.
// What falls on these eight is added to `inner`.
template <int axis, bool spectral, typename Index, typename T>
FLOWPM_INLINE void add_forces(const Geometry& g, T* dfield, const Index (&cell)[8],
                              const Row<T, 1>& row, const T (&share)[8][1], T (&inner)[8]) {
  if constexpr (spectral) {
    for (int c = 0; c < 8; ++c) add_to(dfield + 3 * int64_t(cell[c]) + axis, share[c][0]);
    return;
  }
  const Stencil<axis, Index> at(g, row);
  const T by = T(g.per_cell[axis] / 12);
  for (int u = 0; u < 2; ++u) {
    for (int v = 0; v < 2; ++v) {
      const int low = at.corner(0, u, v), high = at.corner(1, u, v);
      const T lower = by * share[low][0], upper = by * share[high][0];
      T* line = dfield + at.first[u] + at.second[v];
      add_to(line + at.along[0], -lower);
      add_to(line + at.along[1], 8 * lower - upper);
      inner[low] += 8 * upper;
      inner[high] -= 8 * lower;
      add_to(line + at.along[4], lower - 8 * upper);
      add_to(line + at.along[5], upper);
    }
  }
}

// `one<Index, spectral>(call, b, p, totals)` does the work of a kernel for particle p of batch
// element b. `totals` are of this thread; `deliver` brings them, once added up or the largest found,
// to the outputs.

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const Paint<T>& call, int64_t b, int64_t p, double (&totals)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p;
  const T* s = call.s + 3 * q;
  for (int a = 0; a < 3; ++a) {
    // NaN is less than or equal to nothing.
    const T size = std::abs(s[a]) <= std::numeric_limits<T>::max()
                       ? std::abs(s[a])
                       : std::numeric_limits<T>::infinity();
    if (size > totals[a]) totals[a] = size;
  }
  Row<T, 1> row;
  if (!place<Index>(g, 0, p, s, row)) return;
  Index cell[8];
  corners(g, row, cell);
  const T value[1] = {call.weights ? call.weights[q] : T(1)};
  T share[8][1];
  shares(row, value, 1, share);
  T* mesh = call.mesh + b * g.cell_count();
  for (int c = 0; c < 8; ++c) add_to(mesh + cell[c], share[c][0]);
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const PaintVjp<T>& call, int64_t b, int64_t p, double (&)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p;
  Row<T, 1> row;
  T slope[3] = {0, 0, 0}, value = 0;
  if (place<Index>(g, 0, p, call.s + 3 * q, row)) {
    Index cell[8];
    corners(g, row, cell);
    const T* mesh = call.dmesh + b * g.cell_count();
    T f[8];
    for (int c = 0; c < 8; ++c) f[c] = mesh[cell[c]];
    value = interpolate(f, row, slope);
    const T weight = call.weights ? call.weights[q] : T(1);
    for (int a = 0; a < 3; ++a) slope[a] *= T(g.per_cell[a]) * weight;
  }
  for (int a = 0; a < 3; ++a) {
    call.ds[3 * q + a] = call.add ? call.add[3 * q + a] + slope[a] : slope[a];
  }
  if (call.weights) call.dweights[q] = value;
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const Read<T>& call, int64_t b, int64_t p, double (&)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p, width = call.components;
  Row<T, 1> row;
  const bool inside = place<Index>(g, 0, p, call.s + 3 * q, row);
  Index cell[8];
  corners(g, row, cell);
  const T value[1] = {T(1)};
  T share[8][1];
  shares(row, value, 1, share);
  const T* fields = call.fields + b * g.cell_count() * width;
  for (int64_t component = 0; component < width; ++component) {
    T sum = std::numeric_limits<T>::quiet_NaN();
    if (inside) {
      sum = 0;
      for (int c = 0; c < 8; ++c) sum += share[c][0] * fields[int64_t(cell[c]) * width + component];
    }
    call.values[q * width + component] = sum;
  }
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const ReadVjp<T>& call, int64_t b, int64_t p, double (&)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p, width = call.components;
  T* ds = call.ds + 3 * q;
  Row<T, 1> row;
  if (!place<Index>(g, 0, p, call.s + 3 * q, row)) {
    for (int a = 0; a < 3; ++a) ds[a] = std::numeric_limits<T>::quiet_NaN();
    return;
  }
  Index cell[8];
  corners(g, row, cell);
  const int64_t first = b * g.cell_count() * width;
  T slope[3] = {0, 0, 0};
  for (int64_t component = 0; component < width; ++component) {
    const T value[1] = {call.dvalues[q * width + component]};
    T f[8], share[8][1], slopes[3];
    shares(row, value, 1, share);
    for (int c = 0; c < 8; ++c) {
      const int64_t at = first + int64_t(cell[c]) * width + component;
      f[c] = call.fields[at];
      add_to(call.dfields + at, share[c][0]);
    }
    interpolate(f, row, slopes);
    for (int a = 0; a < 3; ++a) slope[a] += value[0] * slopes[a];
  }
  for (int a = 0; a < 3; ++a) ds[a] = slope[a] * T(g.per_cell[a]);
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const Force<T>& call, int64_t b, int64_t p, double (&)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p;
  T value[3], slope[3];
  Row<T, 1> row;
  if (place<Index>(g, spectral ? 0 : 2, p, call.s + 3 * q, row)) {
    const T* field = call.field + b * g.cell_count() * (spectral ? 3 : 1);
    Index cell[8];
    corners(g, row, cell);
    T f[8];
    forces<0, spectral>(g, field, cell, row, f);
    value[0] = interpolate(f, row, slope);
    forces<1, spectral>(g, field, cell, row, f);
    value[1] = interpolate(f, row, slope);
    forces<2, spectral>(g, field, cell, row, f);
    value[2] = interpolate(f, row, slope);
  } else {
    for (int a = 0; a < 3; ++a) value[a] = std::numeric_limits<T>::quiet_NaN();
  }
  for (int a = 0; a < 3; ++a) {
    const T force = value[a];
    call.out[3 * q + a] =
        call.v ? call.factors[2 * b] * call.v[3 * q + a] + call.factors[2 * b + 1] * force : force;
  }
}

// One component in `one` of ForceVjp: its value at the particle, and the cotangents from it.
template <int axis, bool spectral, typename Index, typename T>
FLOWPM_INLINE T force_vjp_along(const Geometry& g, const T* field, T* dfield,
                                const Index (&cell)[8], const Row<T, 1>& row, T cotangent,
                                T (&slope)[3], T (&inner)[8]) {
  T f[8], share[8][1], slopes[3];
  forces<axis, spectral>(g, field, cell, row, f);
  const T value = interpolate(f, row, slopes);
  for (int a = 0; a < 3; ++a) slope[a] += cotangent * slopes[a];
  shares(row, &cotangent, 1, share);
  add_forces<axis, spectral>(g, dfield, cell, row, share, inner);
  return value;
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const ForceVjp<T>& call, int64_t b, int64_t p, double (&totals)[3]) {
  const Geometry& g = call.g;
  const int64_t q = b * g.particle_count() + p;
  const T before = call.factors ? call.factors[2 * b] : T(1);
  const T by = call.factors ? call.factors[2 * b + 1] : T(1);
  T dv[3], value[3], slope[3] = {0, 0, 0};
  for (int a = 0; a < 3; ++a) dv[a] = call.dv[3 * q + a];
  Row<T, 1> row;
  if (place<Index>(g, spectral ? 0 : 2, p, call.s + 3 * q, row)) {
    const int64_t first = b * g.cell_count() * (spectral ? 3 : 1);
    const T* field = call.field + first;
    T* dfield = call.dfield + first;
    Index cell[8];
    corners(g, row, cell);
    T inner[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    value[0] = force_vjp_along<0, spectral>(g, field, dfield, cell, row, by * dv[0], slope, inner);
    value[1] = force_vjp_along<1, spectral>(g, field, dfield, cell, row, by * dv[1], slope, inner);
    value[2] = force_vjp_along<2, spectral>(g, field, dfield, cell, row, by * dv[2], slope, inner);
    if constexpr (!spectral) {
      for (int c = 0; c < 8; ++c) add_to(dfield + cell[c], inner[c]);
    }
    for (int a = 0; a < 3; ++a) slope[a] *= T(g.per_cell[a]);
  } else {
    for (int a = 0; a < 3; ++a) value[a] = slope[a] = std::numeric_limits<T>::quiet_NaN();
  }
  for (int a = 0; a < 3; ++a) {
    const int64_t at = 3 * q + a;
    if (!call.v_after) {
      call.ds[at] = slope[a];
      continue;
    }
    const T v_before = (call.v_after[at] - by * value[a]) / before;
    call.ds[at] = call.add[at] + slope[a];
    call.v_before[at] = v_before;
    totals[0] += double(dv[a]) * double(v_before);
    totals[1] += double(dv[a]) * double(value[a]);
  }
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const Linear<T>& call, int64_t b, int64_t p, double (&)[3]) {
  const int64_t q = b * call.count + p;
  call.out[q] = call.x[q] + call.factor[b] * call.y[q];
}

template <typename Index, bool spectral, typename T>
FLOWPM_INLINE void one(const DriftVjp<T>& call, int64_t b, int64_t p, double (&totals)[3]) {
  const int64_t q = b * call.count + p;
  const T v = call.v[q], dx = call.dx[q], factor = call.factor[b];
  totals[0] += double(dx) * double(v);
  const T cotangent = call.dv[q] + factor * dx;
  call.x_before[q] = call.x_after[q] - factor * v;
  call.dv_before[q] = cotangent;
}

// How many numbers of `totals` a kernel uses, and whether they are sums or the largest values.
template <typename Call>
struct Totals {
  static constexpr int kCount = 0;
  static constexpr bool kLargest = false;
};
template <typename T>
struct Totals<Paint<T>> {
  static constexpr int kCount = 3;
  static constexpr bool kLargest = true;
};
template <typename T>
struct Totals<ForceVjp<T>> {
  static constexpr int kCount = 2;
  static constexpr bool kLargest = false;
};
template <typename T>
struct Totals<DriftVjp<T>> {
  static constexpr int kCount = 1;
  static constexpr bool kLargest = false;
};

template <typename Call>
FLOWPM_INLINE void deliver(const Call&, int64_t, const double (&)[3]) {}
template <typename T>
FLOWPM_INLINE void deliver(const Paint<T>& call, int64_t, const double (&totals)[3]) {
  for (int a = 0; a < 3; ++a) raise(call.max_displacement + a, T(totals[a]));
}
template <typename T>
FLOWPM_INLINE void deliver(const ForceVjp<T>& call, int64_t b, const double (&totals)[3]) {
  for (int which = 0; which < 2 && call.sums; ++which) add_to(call.sums + 2 * b + which, totals[which]);
}
template <typename T>
FLOWPM_INLINE void deliver(const DriftVjp<T>& call, int64_t b, const double (&totals)[3]) {
  add_to(call.sum + b, totals[0]);
}

// The rows of a kernel's work, and the length of each: the batch, and its particles or values.
template <typename Call>
FLOWPM_INLINE auto rows(const Call& call) -> decltype(call.g.batch) {
  return call.g.batch;
}
template <typename Call>
FLOWPM_INLINE auto rows(const Call& call) -> decltype(call.batch) {
  return call.batch;
}
template <typename Call>
FLOWPM_INLINE auto length(const Call& call) -> decltype(call.g.batch) {
  return call.g.particle_count();
}
template <typename Call>
FLOWPM_INLINE auto length(const Call& call) -> decltype(call.count) {
  return call.count;
}

// Whether cells need numbers of 64 bits, which take more registers. A block has at least as many cells
// as particles.
template <typename Call>
FLOWPM_INLINE auto is_wide(const Call& call) -> decltype(call.g.batch != 0) {
  return call.g.cell_count() > std::numeric_limits<int32_t>::max();
}
template <typename Call>
FLOWPM_INLINE auto is_wide(const Call& call) -> decltype(call.batch != 0) {
  return false;
}

// Whether the field of a call is the force.
template <typename Call>
FLOWPM_INLINE bool is_spectral(const Call&) {
  return false;
}
template <typename T>
FLOWPM_INLINE bool is_spectral(const Force<T>& call) {
  return call.spectral;
}
template <typename T>
FLOWPM_INLINE bool is_spectral(const ForceVjp<T>& call) {
  return call.spectral;
}

// clear(memory, bytes) for what must be 0 before the first thread.
template <typename Call, typename Clear>
void for_sums(const Call&, const Clear&) {}
template <typename T, typename Clear>
void for_sums(const Paint<T>& call, const Clear& clear) {
  clear(call.mesh, call.g.batch * call.g.cell_count() * sizeof(T));
  clear(call.max_displacement, 3 * sizeof(T));
}
template <typename T, typename Clear>
void for_sums(const ReadVjp<T>& call, const Clear& clear) {
  clear(call.dfields, call.g.batch * call.g.cell_count() * call.components * sizeof(T));
}
template <typename T, typename Clear>
void for_sums(const ForceVjp<T>& call, const Clear& clear) {
  clear(call.dfield, call.g.batch * call.g.cell_count() * (call.spectral ? 3 : 1) * sizeof(T));
  if (call.sums) clear(call.sums, call.g.batch * 2 * sizeof(double));
}
template <typename T, typename Clear>
void for_sums(const DriftVjp<T>& call, const Clear& clear) {
  clear(call.sum, call.batch * sizeof(double));
}

// What one thread does after the last one: lengths become cells.
template <typename Call>
FLOWPM_INLINE void finish(const Call&) {}
template <typename T>
FLOWPM_INLINE void finish(const Paint<T>& call) {
  bool finite = true;
  for (int a = 0; a < 3; ++a) {
    call.max_displacement[a] *= T(call.g.per_cell[a]);
    finite = finite && call.max_displacement[a] <= std::numeric_limits<T>::max();
  }
  for (int a = 0; a < 3 && !finite; ++a) {
    call.max_displacement[a] = std::numeric_limits<T>::infinity();
  }
}

}  // namespace flowpm
