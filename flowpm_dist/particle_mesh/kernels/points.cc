// Weights of points anywhere, painted on a mesh: B-splines of second, third and fourth order.
//
// Points are sorted into strips of planes along x, as wide as what a point reaches, so that every
// other strip can be painted at once, and within a strip into tiles along y that stay in cache.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

constexpr int64_t kStrip = 4;        // planes; at least the order less one
constexpr int64_t kTile = 32;        // rows
constexpr int64_t kBlock = 1 << 14;  // points or cells that one thread handles at a time

// The first cell that a coordinate reaches along an axis; a coordinate is at least 0.
template <int order>
FLOWPM_INLINE int64_t first_of(double x, int64_t cells) {
  const int64_t below = int64_t(order == 3 ? x + 0.5 : x);
  return std::max(int64_t{0}, std::min(below - int64_t(order > 2), cells - order));
}

// The weights of the cells that it reaches.
template <int order>
FLOWPM_INLINE void weights_of(double x, double* weight) {
  const double d = x - double(int64_t(order == 3 ? x + 0.5 : x)), e = 1 - d;
  if (order == 2) {
    weight[0] = e;
    weight[1] = d;
  } else if (order == 3) {
    weight[0] = 0.5 * (0.5 - d) * (0.5 - d);
    weight[1] = 0.75 - d * d;
    weight[2] = 0.5 * (0.5 + d) * (0.5 + d);
  } else {
    weight[0] = e * e * e / 6;
    weight[1] = (4 - 6 * d * d + 3 * d * d * d) / 6;
    weight[2] = (4 - 6 * e * e + 3 * e * e * e) / 6;
    weight[3] = d * d * d / 6;
  }
}

int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct Point {
  double x[3], weight;
};

// The points in the order of their strips and tiles, and where the points of each strip begin.
struct Order {
  std::unique_ptr<Point[]> points;
  std::vector<int64_t> begin;
};

template <int order>
FLOWPM_INLINE void keys_of(const Points& call, int64_t begin, int64_t end, int64_t tiles,
                           int32_t* key) {
  for (int64_t m = begin; m < end; ++m) {
    const int64_t x = first_of<order>(call.x[3 * m], call.shape[0]);
    const int64_t y = first_of<order>(call.x[3 * m + 1], call.shape[1]);
    key[m - begin] = int32_t((x / kStrip) * tiles + y / kTile);
  }
}

Order in_strips(const Points& call, const Parallel& parallel) {
  const int64_t strips = parts_of(call.shape[0], kStrip), tiles = parts_of(call.shape[1], kTile);
  const int64_t keys = strips * tiles, blocks = parts_of(call.count, kBlock);
  std::vector<int64_t> place(blocks * keys, 0);
  // Calls work(m, key) for the points of a block.
  const auto each = [&](int64_t b, const auto& work) {
    int32_t key[kBlock];
    const int64_t begin = b * kBlock, end = std::min(call.count, begin + kBlock);
    if (call.order == 2) keys_of<2>(call, begin, end, tiles, key);
    if (call.order == 3) keys_of<3>(call, begin, end, tiles, key);
    if (call.order == 4) keys_of<4>(call, begin, end, tiles, key);
    for (int64_t m = begin; m < end; ++m) work(m, key[m - begin]);
  };
  parallel(blocks, [&](int64_t b) {
    each(b, [&](int64_t, int32_t key) { ++place[b * keys + key]; });
  });
  Order sorted{std::unique_ptr<Point[]>(new Point[call.count]), std::vector<int64_t>(strips + 1)};
  int64_t next = 0;
  for (int64_t k = 0; k < keys; ++k) {
    if (k % tiles == 0) sorted.begin[k / tiles] = next;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t here = place[b * keys + k];
      place[b * keys + k] = next;
      next += here;
    }
  }
  sorted.begin[strips] = next;
  parallel(blocks, [&](int64_t b) {
    each(b, [&](int64_t m, int32_t key) {
      const double* x = call.x + 3 * m;
      sorted.points[place[b * keys + key]++] = {
          {x[0], x[1], x[2]}, call.weights == nullptr ? 1.0 : call.weights[m]};
    });
  });
  return sorted;
}

template <int order>
FLOWPM_INLINE void paint_strip(const Points& call, const Point* begin, const Point* end) {
  const int64_t row = call.shape[2], plane = call.shape[1] * row;
  for (const Point* point = begin; point < end; ++point) {
    double weight[3][order];
    int64_t first[3];
    for (int a = 0; a < 3; ++a) {
      first[a] = first_of<order>(point->x[a], call.shape[a]);
      weights_of<order>(point->x[a], weight[a]);
    }
    double* corner = call.mesh + first[0] * plane + first[1] * row + first[2];
    for (int i = 0; i < order; ++i) {
      for (int j = 0; j < order; ++j) {
        const double share = point->weight * weight[0][i] * weight[1][j];
        double* cells = corner + i * plane + j * row;
        for (int k = 0; k < order; ++k) cells[k] += share * weight[2][k];
      }
    }
  }
}

FLOWPM_CLONES void paint_strip_clone(const Points& call, const Point* begin, const Point* end) {
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
  const Order sorted = in_strips(*this, parallel);
  const int64_t strips = int64_t(sorted.begin.size()) - 1;
  for (const int64_t odd : {0, 1}) {
    parallel((strips + 1 - odd) / 2, [&](int64_t pair) {
      const int64_t strip = 2 * pair + odd;
      const Point* points = sorted.points.get();
      paint_strip_clone(*this, points + sorted.begin[strip], points + sorted.begin[strip + 1]);
    });
  }
}

}  // namespace flowpm
