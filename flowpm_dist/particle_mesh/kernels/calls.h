// The arguments of the kernels between particles and mesh. T is float or double; arrays are dense, C
// order. `run` is the kernel on CPUs; those of GPUs have the same arguments.
#pragma once

#include "locate.h"

#ifdef __CUDACC_RTC__
namespace flowpm {
struct Parallel;
}
#else
#include "geometry.h"
#endif

// M(CALL) for each of them: with a mesh, with a field that can be the force or a potential, and
// without a mesh.
#define FLOWPM_MESH_CALLS(M) M(Paint) M(PaintVjp) M(Read) M(ReadVjp)
#define FLOWPM_FORCE_CALLS(M) M(Force) M(ForceVjp)
#define FLOWPM_PARTICLE_CALLS(M) M(Linear) M(DriftVjp)
#define FLOWPM_CALLS(M) FLOWPM_MESH_CALLS(M) FLOWPM_FORCE_CALLS(M) FLOWPM_PARTICLE_CALLS(M)

namespace flowpm {

template <typename T>
struct Paint {
  Geometry g;
  const T* s;
  const T* weights;  // or null: 1
  T* mesh;
  T* max_displacement;  // [3], the largest |s| along each axis [cells]

  void run(const Parallel& parallel) const;
};

template <typename T>
struct PaintVjp {
  Geometry g;
  const T* s;
  const T* weights;  // or null
  const T* dmesh;
  const T* add;  // or null: 0
  T* ds;
  T* dweights;  // null if weights is

  void run(const Parallel& parallel) const;
};

template <typename T>
struct Read {
  Geometry g;
  int64_t components;
  const T* fields;
  const T* s;
  T* values;

  void run(const Parallel& parallel) const;
};

template <typename T>
struct ReadVjp {
  Geometry g;
  int64_t components;
  const T* fields;
  const T* s;
  const T* dvalues;
  T* dfields;
  T* ds;

  void run(const Parallel& parallel) const;
};

// force, or factors[0] v + factors[1] force.
template <typename T>
struct Force {
  Geometry g;
  bool spectral;  // the field is the force [cells, 3]; else a potential [cells], for differences
  const T* field;
  const T* s;
  const T* v;        // or null
  const T* factors;  // null if v is
  T* out;

  void run(const Parallel& parallel) const;
};

template <typename T>
struct ForceVjp {
  Geometry g;
  bool spectral;
  const T* field;
  const T* s;
  const T* v_after;  // or null: no kick, just the force
  const T* dv;       // cotangent of v_after or of the force
  const T* add;      // null if v_after is
  const T* factors;  // null if v_after is
  T* v_before;       // null if v_after is
  T* dfield;
  T* ds;
  double* sums;  // null if v_after is

  void run(const Parallel& parallel) const;
};

// out = x + factor y, for `batch` rows of `count`.
template <typename T>
struct Linear {
  int64_t batch, count;
  const T* x;
  const T* y;
  const T* factor;
  T* out;

  void run(const Parallel& parallel) const;
};

// x_before = x_after - factor v, dv_before = dv + factor dx, sum = <dx, v>.
template <typename T>
struct DriftVjp {
  int64_t batch, count;
  const T* x_after;
  const T* v;
  const T* dx;
  const T* dv;
  const T* factor;
  T* x_before;
  T* dv_before;
  double* sum;

  void run(const Parallel& parallel) const;
};

}  // namespace flowpm
