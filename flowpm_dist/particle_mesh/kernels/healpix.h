// The rings of HEALPix pixels, and bilinear weights between them: see grid/healpix.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "window.h"

namespace flowpm {

// Rings are numbered from the north pole, which is 0, to the south pole, 4 nside.
struct Rings {
  int64_t nside;
  const double* theta;  // [4 nside + 1]

  int64_t last() const { return 4 * nside; }
  int64_t pixels() const { return 12 * nside * nside; }
  int64_t count(int64_t ring) const {
    return 4 * std::min(std::min(ring, last() - ring), nside);
  }
  int64_t start(int64_t ring) const {
    const int64_t north = std::min(ring, last() - ring);
    const int64_t from_pole = north < nside ? 2 * north * (north - 1)
                                            : 2 * nside * (nside - 1) + (north - nside) * 4 * nside;
    return ring > 2 * nside ? pixels() - from_pole - count(ring) : from_pole;
  }
  double shift(int64_t ring) const {
    const int64_t north = std::min(ring, last() - ring);
    return north < nside || (north - nside) % 2 == 0 ? 0.5 : 0.0;
  }
  // The ring above a direction, or the one that it lies on.
  FLOWPM_INLINE int64_t above(double z, double angle) const {
    const double size = std::abs(z);
    int64_t ring = int64_t(size <= 2.0 / 3 ? double(nside) * (2 - 1.5 * z)
                                           : double(nside) * std::sqrt(3 * (1 - size)));
    if (size > 2.0 / 3 && z < 0) ring = last() - ring - 1;
    ring = std::clamp<int64_t>(ring, 0, last() - 1);
    while (ring + 1 < last() && angle >= theta[ring + 1]) ++ring;
    while (ring > 0 && angle < theta[ring]) --ring;
    return ring;
  }
};

// The pixels between which a direction lies: two of the ring above it, two of the one below. A pole
// is a ring whose value is the mean of the four pixels next to it.
struct Corners {
  int64_t ring, pixel[4];
  bool north, south;
  double lower, along[2];           // shares of the second of two
  double per_theta, per_phi[2];     // [1/rad]
  double across;                    // distance from the axis

  FLOWPM_INLINE Corners(const Rings& rings, const double* x) {
    constexpr double kTurn = 6.283185307179586;
    across = std::sqrt(x[0] * x[0] + x[1] * x[1]);
    const double angle = std::atan2(across, x[2]);
    const double phi = std::atan2(x[1], x[0]);
    const double distance = std::sqrt(across * across + x[2] * x[2]);
    ring = rings.above(distance > 0 ? x[2] / distance : 1.0, angle);
    north = ring == 0;
    south = ring + 1 == rings.last();
    per_theta = 1 / (rings.theta[ring + 1] - rings.theta[ring]);
    lower = (angle - rings.theta[ring]) * per_theta;
    for (int i = 0; i < 2; ++i) {
      per_phi[i] = along[i] = 0;
      if (i == 0 ? north : south) continue;
      const int64_t count = rings.count(ring + i), start = rings.start(ring + i);
      per_phi[i] = double(count) / kTurn;
      const double place = phi * per_phi[i] - rings.shift(ring + i), first = std::floor(place);
      along[i] = place - first;
      const int64_t number = int64_t(first);
      pixel[2 * i] = start + wrapped(number, count);
      pixel[2 * i + 1] = start + wrapped(number + 1, count);
    }
    const int64_t cap = rings.pixels() - 4;
    for (int i = 0; i < 2; ++i) {
      if (north) pixel[i] = (pixel[2 + i] + 2) & 3;
      if (south) pixel[2 + i] = cap + ((pixel[i] + 2) & 3);
    }
  }

  FLOWPM_INLINE void weights(double* w) const {
    const double upper = north ? 0.0 : 1 - lower, under = south ? 0.0 : lower;
    const double pole = 0.25 * ((north ? 1 - lower : 0.0) + (south ? lower : 0.0));
    w[0] = upper * (1 - along[0]) + pole;
    w[1] = upper * along[0] + pole;
    w[2] = under * (1 - along[1]) + pole;
    w[3] = under * along[1] + pole;
  }

  struct Read {
    double value, by_theta, by_phi;
  };
  // The value of a map in this direction, and its slopes.
  template <typename T>
  FLOWPM_INLINE Read read(const T* map) const {
    const double m[4] = {double(map[pixel[0]]), double(map[pixel[1]]), double(map[pixel[2]]),
                         double(map[pixel[3]])};
    const double mean = 0.25 * (m[0] + m[1] + m[2] + m[3]);
    const double above = north ? mean : m[0] + along[0] * (m[1] - m[0]);
    const double below = south ? mean : m[2] + along[1] * (m[3] - m[2]);
    const double upper = north ? 0.0 : 1 - lower, under = south ? 0.0 : lower;
    return {above + lower * (below - above), (below - above) * per_theta,
            upper * per_phi[0] * (m[1] - m[0]) + under * per_phi[1] * (m[3] - m[2])};
  }

  // The cotangent of a place x from those of its angles and, over the distance, of the distance.
  FLOWPM_INLINE void carry_back(const double* x, double per_place, double to_theta, double to_phi,
                                double* to) const {
    const double square = across * across + x[2] * x[2];
    for (int a = 0; a < 3; ++a) to[a] = per_place * x[a];
    if (!(across > 0)) return;
    const double theta = to_theta / square, phi = to_phi / (across * across);
    to[0] += theta * x[0] * x[2] / across - phi * x[1];
    to[1] += theta * x[1] * x[2] / across + phi * x[0];
    to[2] -= theta * across;
  }

 private:
  static FLOWPM_INLINE int64_t wrapped(int64_t number, int64_t count) {
    return number < 0 ? number + count : number >= count ? number - count : number;
  }
};

}  // namespace flowpm
