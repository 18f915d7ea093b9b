// The particle kernels, free of TensorFlow. T is float or double; arrays are dense, C order.
#pragma once

#include <vector>

#include "calls.h"

namespace flowpm {

// Particles painted on maps of the sky, see `Shells` in base.py: what `Sky` and `Ball` share.
template <typename T>
struct Maps {
  int64_t batch, particles[3], fields, weights, nodes, shells, power;
  int64_t columns;  // of the amounts: the weights and, in curved space, f_K / chi
  double spacing[3], lengths[3], step, depth;
  std::vector<const T*> field;  // [fields] of [batch, x, y, z, 3]
  const double* borders;        // [shells + 1]
  const T* factors;
  const T* amounts;  // [batch, nodes, columns]
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

// Weights of points, painted on a mesh by B-splines that reach `order` cells along each axis.
struct Points {
  int64_t count, order, shape[3];
  const double* x;        // [count, 3] [cells]; what a point reaches is within the mesh
  const double* weights;  // or null: 1
  const double* before;   // [shape], to which they are added
  double* mesh;

  void run(const Parallel& parallel) const;
};

// Groups of points that chains of links join.
struct Friends {
  int64_t count;
  const double* x;      // [count, 3], finite
  const double* links;  // [3], links to a unit of length along each axis
  int32_t* group;       // [count], the first point of the group

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
