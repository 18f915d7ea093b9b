// The particle kernels, free of TensorFlow. T is float or double; arrays are dense, C order.
#pragma once

#include "geometry.h"

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

// Particles painted on maps of the sky, see `Shells` in base.py: what `Sky` and `Ball` share.
template <typename T>
struct Maps {
  int64_t batch, particles[3], fields, weights, nodes, shells, power;
  double spacing[3], lengths[3], step, depth;
  std::vector<const T*> field;  // [fields] of [batch, x, y, z, 3]
  const double* borders;        // [shells + 1]
  const T* factors;
  const T* amounts;  // [batch, nodes, weights]
  T* out;            // [batch, shells, weights, ...]

  int64_t maps() const { return shells * weights; }
};

// Layers of particles that are seen on a map of the sky, see `Slabs` in base.py.
// factors [batch, layers, fields], maps of pixels x pixels.
template <typename T>
struct Sky : Maps<T> {
  int64_t slabs, layers, pixels;
  double pixel;
  const int32_t* places;     // [slabs, 6]: axes of x, y and distance; begin, count; first layer
  const double* directions;  // [slabs, 7]: origin and sign of x, of y; sign and ends of distances
  const double* distances;   // [layers]

  void run(const Parallel& parallel) const;
};

// Copies of particles about an observer, see `Ball` in base.py.
// factors [batch, segments, fields, kTerms], maps of `pixels()`.
template <typename T>
struct Ball : Maps<T> {
  static constexpr int64_t kTerms = 4;  // of the polynomials that factors are
  int64_t first[3], copies, segments, nside;
  double observer[3], near, far;
  const int32_t* copy;  // [copies, 3]
  const double* edges;  // [segments + 1]
  const double* rings;  // [4 nside + 1]: colatitudes, those of the poles included

  int64_t pixels() const { return 12 * nside * nside; }
  void run(const Parallel& parallel) const;
};

// The adjoint of painting maps.
template <typename T, template <typename> class Painted>
struct MapsVjp {
  Painted<T> painted;      // whose `out` is not used
  const T* dout;           // [batch, shells, weights, ...]
  std::vector<T*> dfield;  // [fields] of [batch, x, y, z, 3]
  double* dfactors;        // of the shape of factors
  double* damounts;        // of the shape of amounts
};

template <typename T>
struct SkyVjp : MapsVjp<T, Sky> {
  void run(const Parallel& parallel) const;
};

template <typename T>
struct BallVjp : MapsVjp<T, Ball> {
  void run(const Parallel& parallel) const;
};

}  // namespace flowpm
