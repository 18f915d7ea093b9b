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
};

template <typename T>
struct Read {
  Geometry g;
  int64_t components;
  const T* fields;
  const T* s;
  T* values;
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
};

// How the field gives the force: the 4-point difference of a potential [cells], or the force itself
// [cells, 3].
enum class ForceGradient { finite_difference, spectral };

// force, or factors[0] v + factors[1] force.
template <typename T>
struct Force {
  Geometry g;
  ForceGradient force_gradient;
  const T* field;
  const T* s;
  const T* v;        // or null
  const T* factors;  // null if v is
  T* out;

  bool spectral() const { return force_gradient == ForceGradient::spectral; }
};

template <typename T>
struct ForceVjp {
  Geometry g;
  ForceGradient force_gradient;
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

  bool spectral() const { return force_gradient == ForceGradient::spectral; }
};

// Layers of particles that are seen on a map of the sky, see `Slabs` in base.py.
template <typename T>
struct Sky {
  int64_t batch, particles[3], slabs, layers, fields, weights, maps, pixels;
  const int32_t* places;     // [slabs, 6]: axes of x, y and distance; begin, count; first layer
  const double* directions;  // [slabs, 5]: origin and sign of x, of y; sign of the distance
  const double* distances;   // [layers]
  const int32_t* first_map;  // [layers]
  double spacing[3], lengths[3], pixel;
  const T* const* field;    // [fields] of [batch, x, y, z, 3]
  const T* factors;         // [batch, layers, fields]
  const T* amounts;         // [batch, layers, weights, 2]
  T* out;                   // [batch, maps, pixels, pixels]
};

template <typename T>
struct SkyVjp {
  Sky<T> sky;               // whose `out` is not used
  const T* dout;            // [batch, maps, pixels, pixels]
  T* const* dfield;         // [fields] of [batch, x, y, z, 3]
  double* dfactors;         // [batch, layers, fields]
  double* damounts;         // [batch, layers, weights, 2]
};

// Copies of particles about an observer, see `Ball` in base.py.
template <typename T>
struct Ball {
  static constexpr int64_t kTerms = 4;  // of the polynomials that factors are
  int64_t batch, particles[3], first[3], copies, segments, nodes, fields, weights, maps, nside;
  bool per_distance;
  const int32_t* copy;       // [copies, 3]
  const double* edges;       // [segments + 1]
  const int32_t* first_map;  // [segments]
  double spacing[3], lengths[3], observer[3], step;
  const double* rings;    // [4 nside + 1]: colatitudes, those of the poles included
  const T* const* field;  // [fields] of [batch, x, y, z, 3]
  const T* factors;       // [batch, segments, fields, kTerms]
  const T* amounts;       // [batch, nodes, weights]
  T* out;                 // [batch, maps, pixels]

  int64_t pixels() const { return 12 * nside * nside; }
};

template <typename T>
struct BallVjp {
  Ball<T> ball;      // whose `out` is not used
  const T* dout;     // [batch, maps, pixels]
  T* const* dfield;  // [fields] of [batch, x, y, z, 3]
  double* dfactors;  // [batch, segments, fields, kTerms]
  double* damounts;  // [batch, nodes, weights]
};

template <typename T>
void paint_ball(const Ball<T>& call, const Parallel& parallel);
template <typename T>
void paint_ball_vjp(const BallVjp<T>& call, const Parallel& parallel);

template <typename T>
void paint_sky(const Sky<T>& call, const Parallel& parallel);
template <typename T>
void paint_sky_vjp(const SkyVjp<T>& call, const Parallel& parallel);

template <typename T>
void paint(const Paint<T>& call, const Parallel& parallel);
template <typename T>
void paint_vjp(const PaintVjp<T>& call, const Parallel& parallel);
template <typename T>
void read(const Read<T>& call, const Parallel& parallel);
template <typename T>
void read_vjp(const ReadVjp<T>& call, const Parallel& parallel);
template <typename T>
void force(const Force<T>& call, const Parallel& parallel);
template <typename T>
void force_vjp(const ForceVjp<T>& call, const Parallel& parallel);

// out = x + factor y, for `batch` rows of `count`.
template <typename T>
void linear(int64_t batch, int64_t count, const T* x, const T* y, const T* factor, T* out,
            const Parallel& parallel);
// x_before = x_after - factor v, dv_out = dv + factor dx, sum = <dx, v>.
template <typename T>
void drift_vjp(int64_t batch, int64_t count, const T* x_after, const T* v, const T* dx, const T* dv,
               const T* factor, T* x_before, T* dv_out, double* sum, const Parallel& parallel);

}  // namespace flowpm
