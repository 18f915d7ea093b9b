// Friends of friends: groups of points that chains of links shorter than a length join.
//
// Points are sorted into cells half as wide as a link, so the points of a cell are friends, and
// groups are sets of cells. Two cells join if they have a pair of friends. Eight cells are a cube,
// and all friends of its points are in it and the 26 cubes about it. In the order of cubes, those of
// a neighbouring column are a range that moves forward.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "common.h"
#include "kernels.h"

namespace flowpm {
namespace {

constexpr double kSide = 0.5 + 1e-7;  // of a cell [links]: a link spans less than two
constexpr uint64_t kCells = 8;        // of a cube
constexpr int64_t kBlock = 1 << 14;   // points or cells that one thread handles at a time
constexpr int64_t kBuckets = 1 << 10;

struct Keyed {
  uint64_t key;
  int32_t point;
  bool operator<(const Keyed& other) const {
    return key != other.key ? key < other.key : point < other.point;
  }
};

int64_t blocks_of(int64_t count) { return (count + kBlock - 1) / kBlock; }

// Calls work(from, to) for blocks of `count` numbers.
template <typename Work>
void in_blocks(int64_t count, const Parallel& parallel, const Work& work) {
  parallel(blocks_of(count), [&](int64_t b) {
    work(b * kBlock, std::min(count, (b + 1) * kBlock), b);
  });
}

// The cells about the points, and the cubes that they form.
struct Cells {
  double low[3], per_length[3];
  uint64_t cubes[3];  // one more than there are: the neighbours of an edge are not in the next row

  uint64_t key(const double* x) const {
    uint64_t cell[3];
    for (int a = 0; a < 3; ++a) cell[a] = uint64_t((x[a] - low[a]) * per_length[a]);
    const uint64_t cube = ((cell[0] / 2) * cubes[1] + cell[1] / 2) * cubes[2] + cell[2] / 2;
    return cube * kCells + (cell[0] % 2) * 4 + (cell[1] % 2) * 2 + cell[2] % 2;
  }
  uint64_t end() const { return cubes[0] * cubes[1] * cubes[2] * kCells; }
};

Cells cells_of(const Friends& call, const Parallel& parallel) {
  const double infinite = std::numeric_limits<double>::infinity();
  const int64_t blocks = blocks_of(call.count);
  std::vector<double> low(3 * blocks, infinite), high(3 * blocks, -infinite);
  in_blocks(call.count, parallel, [&](int64_t from, int64_t to, int64_t b) {
    for (int64_t m = from; m < to; ++m) {
      for (int a = 0; a < 3; ++a) {
        low[3 * b + a] = std::min(low[3 * b + a], call.x[3 * m + a]);
        high[3 * b + a] = std::max(high[3 * b + a], call.x[3 * m + a]);
      }
    }
  });
  Cells cells;
  for (int a = 0; a < 3; ++a) {
    double highest = -infinite;
    cells.low[a] = infinite;
    for (int64_t b = 0; b < blocks; ++b) {
      cells.low[a] = std::min(cells.low[a], low[3 * b + a]);
      highest = std::max(highest, high[3 * b + a]);
    }
    cells.per_length[a] = call.links[a] / kSide;
    cells.cubes[a] = uint64_t((highest - cells.low[a]) * cells.per_length[a]) / 2 + 2;
  }
  return cells;
}

// The points in the order of their cells.
std::vector<Keyed> sorted(const Friends& call, const Cells& cells, const Parallel& parallel) {
  const int64_t n = call.count, blocks = blocks_of(n);
  const uint64_t width = cells.end() / kBuckets + 1;  // of a bucket [keys]
  std::vector<Keyed> points(n);
  std::vector<int64_t> place(blocks * kBuckets, 0), begin(kBuckets + 1, 0);
  in_blocks(n, parallel, [&](int64_t from, int64_t to, int64_t b) {
    for (int64_t m = from; m < to; ++m) ++place[b * kBuckets + cells.key(call.x + 3 * m) / width];
  });
  int64_t next = 0;
  for (int64_t k = 0; k < kBuckets; ++k) {
    begin[k] = next;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t here = place[b * kBuckets + k];
      place[b * kBuckets + k] = next;
      next += here;
    }
  }
  begin[kBuckets] = next;
  in_blocks(n, parallel, [&](int64_t from, int64_t to, int64_t b) {
    for (int64_t m = from; m < to; ++m) {
      const uint64_t key = cells.key(call.x + 3 * m);
      points[place[b * kBuckets + key / width]++] = {key, int32_t(m)};
    }
  });
  parallel(kBuckets, [&](int64_t k) {
    std::sort(points.begin() + begin[k], points.begin() + begin[k + 1]);
  });
  return points;
}

// Sets of cells, which threads join at once. A set is named after its first cell.
class Sets {
 public:
  explicit Sets(int64_t count) : parent_(new std::atomic<int32_t>[count]) {
    for (int64_t c = 0; c < count; ++c) parent_[c].store(int32_t(c), std::memory_order_relaxed);
  }

  int32_t find(int32_t c) {
    for (;;) {
      int32_t up = parent_[c].load(std::memory_order_relaxed);
      if (up == c) return c;
      const int32_t above = parent_[up].load(std::memory_order_relaxed);
      if (above == up) return up;
      parent_[c].compare_exchange_weak(up, above, std::memory_order_relaxed);
      c = above;
    }
  }

  void join(int32_t a, int32_t b) {
    for (;;) {
      a = find(a);
      b = find(b);
      if (a == b) return;
      if (a > b) std::swap(a, b);
      int32_t expected = b;
      if (parent_[b].compare_exchange_strong(expected, a, std::memory_order_relaxed)) return;
    }
  }

 private:
  std::unique_ptr<std::atomic<int32_t>[]> parent_;
};

// The cells that have points, in order: keys, and where their points begin.
struct Occupied {
  std::vector<uint64_t> key;
  std::vector<int32_t> begin;  // one more than there are cells

  int64_t count() const { return int64_t(key.size()); }
};

Occupied occupied(const std::vector<Keyed>& points) {
  Occupied cells;
  int64_t count = 0;
  for (size_t m = 0; m < points.size(); ++m) count += m == 0 || points[m].key != points[m - 1].key;
  cells.key.reserve(count);
  cells.begin.reserve(count + 1);
  for (size_t m = 0; m < points.size(); ++m) {
    if (m > 0 && points[m].key == points[m - 1].key) continue;
    cells.key.push_back(points[m].key);
    cells.begin.push_back(int32_t(m));
  }
  cells.begin.push_back(int32_t(points.size()));
  return cells;
}

// Whether two cells have a pair of friends.
bool linked(const Friends& call, const double* x, const int32_t* begin, int64_t c, int64_t d) {
  for (int32_t i = begin[c]; i < begin[c + 1]; ++i) {
    for (int32_t j = begin[d]; j < begin[d + 1]; ++j) {
      double square = 0;
      for (int a = 0; a < 3; ++a) {
        const double apart = (x[3 * int64_t(i) + a] - x[3 * int64_t(j) + a]) * call.links[a];
        square += apart * apart;
      }
      if (square <= 1) return true;
    }
  }
  return false;
}

// Joins the cells [from, to) with the later ones in three cubes of a column: the one `column` cubes
// after their own, the one before it, and the one after it.
void join_column(const Friends& call, const double* x, const Occupied& cells, uint64_t column,
                 int64_t from, int64_t to, Sets& sets) {
  const auto& key = cells.key;
  int64_t next = from;
  for (int64_t c = from; c < to; ++c) {
    const uint64_t cube = key[c] / kCells + column;
    const uint64_t begin = column == 0 ? key[c] + 1 : (cube - 1) * kCells;
    const uint64_t end = (cube + 2) * kCells;
    if (c == from) next = std::lower_bound(key.begin() + from, key.end(), begin) - key.begin();
    while (next < cells.count() && key[next] < begin) ++next;
    for (int64_t d = next; d < cells.count() && key[d] < end; ++d) {
      if (sets.find(int32_t(c)) != sets.find(int32_t(d)) &&
          linked(call, x, cells.begin.data(), c, d)) {
        sets.join(int32_t(c), int32_t(d));
      }
    }
  }
}

}  // namespace

void Friends::run(const Parallel& parallel) const {
  if (count == 0) return;
  const Cells cells = cells_of(*this, parallel);
  const std::vector<Keyed> points = sorted(*this, cells, parallel);
  std::vector<double> places(3 * count);
  in_blocks(count, parallel, [&](int64_t from, int64_t to, int64_t) {
    for (int64_t m = from; m < to; ++m) {
      std::copy_n(x + 3 * int64_t(points[m].point), 3, places.data() + 3 * m);
    }
  });
  const Occupied filled = occupied(points);
  Sets sets(filled.count());
  in_blocks(filled.count(), parallel, [&](int64_t from, int64_t to, int64_t) {
    const uint64_t row = cells.cubes[2], plane = cells.cubes[1] * row;
    for (const uint64_t column : {uint64_t{0}, row, plane - row, plane, plane + row}) {
      join_column(*this, places.data(), filled, column, from, to, sets);
    }
  });
  in_blocks(filled.count(), parallel, [&](int64_t from, int64_t to, int64_t) {
    for (int64_t c = from; c < to; ++c) {
      const int32_t set = sets.find(int32_t(c));
      for (int32_t m = filled.begin[c]; m < filled.begin[c + 1]; ++m) {
        group[points[m].point] = filled.begin[set];
      }
    }
  });
  // Named after its first point, as all who have the same points agree.
  std::vector<int32_t> first(count, std::numeric_limits<int32_t>::max());
  for (int64_t m = 0; m < count; ++m) first[group[m]] = std::min(first[group[m]], int32_t(m));
  in_blocks(count, parallel, [&](int64_t from, int64_t to, int64_t) {
    for (int64_t m = from; m < to; ++m) group[m] = first[group[m]];
  });
}

}  // namespace flowpm
