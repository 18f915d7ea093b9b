// Weights of points anywhere, painted on a mesh: B-splines of second, third and fourth order.
//
// Points are sorted into strips of planes along x, as wide as what a point reaches, so that every
// other strip can be painted at once, and within a strip into tiles along y that stay in cache.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

constexpr int64_t kStrip = 4;        // planes; at least the order less one
constexpr int64_t kTile = 32;        // rows
constexpr int64_t kBlock = 1 << 14;  // points or cells that one thread handles at a time

// The cells along an axis that a coordinate reaches: the first, and the weight of each.
template <int order>
struct Reach {
  int64_t first;
  double weight[order];

  FLOWPM_INLINE Reach(double x, int64_t cells) {
    const double below = std::floor(order == 3 ? x + 0.5 : x), d = x - below;
    const double last = double(cells - order), start = below - double(order > 2);
    first = int64_t(std::max(0.0, std::min(start, last)));
    if (order == 2) {
      weight[0] = 1 - d;
      weight[1] = d;
    } else if (order == 3) {
      weight[0] = 0.5 * (0.5 - d) * (0.5 - d);
      weight[1] = 0.75 - d * d;
      weight[2] = 0.5 * (0.5 + d) * (0.5 + d);
    } else {
      const double e = 1 - d;
      weight[0] = e * e * e / 6;
      weight[1] = (4 - 6 * d * d + 3 * d * d * d) / 6;
      weight[2] = (4 - 6 * e * e + 3 * e * e * e) / 6;
      weight[3] = d * d * d / 6;
    }
  }
};

int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The points in the order of their strips and tiles, and where the points of each strip begin.
struct Order {
  std::vector<int32_t> points;
  std::vector<int64_t> begin;
};

template <int order>
Order in_strips(const Points& call, const Parallel& parallel) {
  const int64_t strips = parts_of(call.shape[0], kStrip), tiles = parts_of(call.shape[1], kTile);
  const int64_t keys = strips * tiles, blocks = parts_of(call.count, kBlock);
  const auto key = [&](int64_t m) {
    const int64_t x = Reach<order>(call.x[3 * m], call.shape[0]).first;
    const int64_t y = Reach<order>(call.x[3 * m + 1], call.shape[1]).first;
    return (x / kStrip) * tiles + y / kTile;
  };
  std::vector<int64_t> place(blocks * keys, 0);
  parallel(blocks, [&](int64_t b) {
    const int64_t end = std::min(call.count, (b + 1) * kBlock);
    for (int64_t m = b * kBlock; m < end; ++m) ++place[b * keys + key(m)];
  });
  Order sorted{std::vector<int32_t>(call.count), std::vector<int64_t>(strips + 1, call.count)};
  int64_t next = 0;
  for (int64_t k = 0; k < keys; ++k) {
    if (k % tiles == 0) sorted.begin[k / tiles] = next;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t here = place[b * keys + k];
      place[b * keys + k] = next;
      next += here;
    }
  }
  parallel(blocks, [&](int64_t b) {
    const int64_t end = std::min(call.count, (b + 1) * kBlock);
    for (int64_t m = b * kBlock; m < end; ++m) {
      sorted.points[place[b * keys + key(m)]++] = int32_t(m);
    }
  });
  return sorted;
}

template <int order>
FLOWPM_INLINE void paint_strip(const Points& call, const int32_t* begin, const int32_t* end) {
  const int64_t plane = call.shape[1] * call.shape[2], row = call.shape[2];
  for (const int32_t* point = begin; point < end; ++point) {
    const double* at = call.x + 3 * int64_t(*point);
    const Reach<order> x(at[0], call.shape[0]), y(at[1], call.shape[1]), z(at[2], call.shape[2]);
    const double weight = call.weights == nullptr ? 1.0 : call.weights[*point];
    double* corner = call.mesh + x.first * plane + y.first * row + z.first;
    for (int i = 0; i < order; ++i) {
      for (int j = 0; j < order; ++j) {
        const double share = weight * x.weight[i] * y.weight[j];
        double* cells = corner + i * plane + j * row;
        for (int k = 0; k < order; ++k) cells[k] += share * z.weight[k];
      }
    }
  }
}

FLOWPM_CLONES void paint_strip_clone(const Points& call, const int32_t* begin,
                                     const int32_t* end) {
  if (call.order == 2) paint_strip<2>(call, begin, end);
  if (call.order == 3) paint_strip<3>(call, begin, end);
  if (call.order == 4) paint_strip<4>(call, begin, end);
}

}  // namespace

void Points::run(const Parallel& parallel) const {
  const int64_t cells = shape[0] * shape[1] * shape[2];
  if (mesh != before) {
    parallel(parts_of(cells, kBlock), [&](int64_t b) {
      std::copy(before + b * kBlock, before + std::min(cells, (b + 1) * kBlock), mesh + b * kBlock);
    });
  }
  if (count == 0) return;
  const Order sorted = order == 2   ? in_strips<2>(*this, parallel)
                       : order == 3 ? in_strips<3>(*this, parallel)
                                    : in_strips<4>(*this, parallel);
  const int64_t strips = int64_t(sorted.begin.size()) - 1;
  for (const int64_t odd : {0, 1}) {
    parallel((strips + 1 - odd) / 2, [&](int64_t pair) {
      const int64_t strip = 2 * pair + odd;
      const int32_t* points = sorted.points.data();
      paint_strip_clone(*this, points + sorted.begin[strip], points + sorted.begin[strip + 1]);
    });
  }
}

}  // namespace flowpm
