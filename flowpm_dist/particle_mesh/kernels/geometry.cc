#include "geometry.h"

#include <algorithm>

namespace flowpm {
namespace {

int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool overlap(const Geometry& g, const CellRange& a, const CellRange& b) {
  if (a.empty() || b.empty()) return false;
  for (int axis = 0; axis < 2; ++axis) {
    int64_t apart = b.begin[axis] - a.begin[axis];
    if (g.halo[axis] == 0) {
      const int64_t period = g.mesh[axis];
      apart = (apart % period + period) % period;
      if (apart >= a.size(axis) && period - apart >= b.size(axis)) return false;
    } else if (apart >= a.size(axis) || -apart >= b.size(axis)) {
      return false;
    }
  }
  return true;
}

}  // namespace

Tiling::Tiling(const Geometry& g) : batch_(g.batch) {
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t n = g.particles[axis];
    const int64_t cells = axis == 2 ? 32 : g.own[axis] < 64 ? 8 : 16;
    particles_[axis] = n;
    side_[axis] = std::max(int64_t(1), int64_t(cells / g.mesh_factor()));
    across_[axis] = ceiling(n, side_[axis]);
  }
}

Patch Tiling::patch(int64_t column, int64_t index) const {
  const int64_t at[3] = {column / across_[1] % across_[0], column % across_[1], index};
  Patch patch;
  patch.batch = column / (across_[0] * across_[1]);
  for (int axis = 0; axis < 3; ++axis) {
    patch.begin[axis] = at[axis] * side_[axis];
    patch.end[axis] = std::min(particles_[axis], patch.begin[axis] + side_[axis]);
  }
  return patch;
}

std::vector<std::vector<int64_t>> disjoint_groups(const Geometry& g, const Tiling& tiling,
                                                  const std::vector<CellRange>& ranges) {
  const int64_t columns = tiling.columns(), patches = tiling.patches();
  std::vector<CellRange> whole(columns);
  for (int64_t c = 0; c < columns; ++c) {
    CellRange& sum = whole[c] = CellRange{{0, 0, 0}, {0, 0, 0}};
    for (int64_t p = 0; p < patches; ++p) {
      const CellRange& range = ranges[c * patches + p];
      if (range.empty()) continue;
      const bool first = sum.empty();
      for (int axis = 0; axis < 3; ++axis) {
        sum.begin[axis] = first ? range.begin[axis] : std::min(sum.begin[axis], range.begin[axis]);
        sum.end[axis] = first ? range.end[axis] : std::max(sum.end[axis], range.end[axis]);
      }
    }
  }
  std::vector<std::vector<int64_t>> groups;
  const int64_t each = columns / std::max<int64_t>(1, g.batch);
  for (int64_t c = 0; c < columns; ++c) {
    size_t group = 0;
    for (; group < groups.size(); ++group) {
      const auto& others = groups[group];
      const bool clash = std::any_of(others.begin(), others.end(), [&](int64_t other) {
        return other / each == c / each && overlap(g, whole[other], whole[c]);
      });
      if (!clash) break;
    }
    if (group == groups.size()) groups.emplace_back();
    groups[group].push_back(c);
  }
  return groups;
}

}  // namespace flowpm
