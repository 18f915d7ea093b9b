// The pieces that the work on a rank's particles is cut into.
#pragma once

#include <functional>
#include <vector>

#include "locate.h"

namespace flowpm {

// Calls a function with 0 .. count-1, in any order and at once; returns when all are done.
using Parallel = std::function<void(int64_t count, const std::function<void(int64_t)>&)>;

// A cuboid [begin, end) of one batch element's particle lattice.
struct Patch {
  int64_t batch;
  int64_t begin[3], end[3];

  int64_t size(int axis) const { return end[axis] - begin[axis]; }
  int64_t count() const { return size(0) * size(1) * size(2); }
};

// Cells [begin, end) of the mesh, before anything is wrapped around.
struct CellRange {
  int64_t begin[3], end[3];

  int64_t size(int axis) const { return end[axis] - begin[axis]; }
  bool empty() const { return size(0) <= 0; }
  int64_t count() const { return size(0) * size(1) * size(2); }
  CellRange grown(int64_t cells) const {
    CellRange range = *this;
    for (int a = 0; a < 3; ++a) {
      range.begin[a] -= cells;
      range.end[a] += cells;
    }
    return range;
  }
};

// The lattice cut into columns along z, the units of parallel work, and those into patches that
// are small enough for their part of the mesh to stay in cache. Depends on the geometry alone.
class Tiling {
 public:
  explicit Tiling(const Geometry& g);
  int64_t columns() const { return batch_ * across_[0] * across_[1]; }
  int64_t patches() const { return across_[2]; }  // of a column
  Patch patch(int64_t column, int64_t index) const;

 private:
  int64_t batch_;
  int64_t particles_[3], side_[3], across_[3];
};

// Columns in groups, one after the other; no two columns of a group touch the same mesh cell.
// `ranges` are what each patch of each column touches. Depends on the data alone, so every mesh
// cell sees its additions in the same order on any number of threads.
std::vector<std::vector<int64_t>> disjoint_groups(const Geometry& g, const Tiling& tiling,
                                                  const std::vector<CellRange>& ranges);

}  // namespace flowpm
