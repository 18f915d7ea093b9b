// Parts of particles on maps, sorted by the bands of the maps that they touch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"
#include "window.h"

namespace flowpm {

constexpr int64_t kPieces = 32;       // of the particles, for any number of threads
constexpr int64_t kBands = 16;        // of rows or rings of the maps
constexpr int64_t kAtOnce = 1 << 19;  // particles whose places are held

// What one piece finds. A hit of two bands is held twice. One list for all bands: as the places of
// a piece are in few of them, a list each would grow to as much memory, each at its own time.
template <typename Hit>
class Hits {
 public:
  explicit Hits(int64_t bands) : first_(bands, -1), last_(bands, -1) {}

  void clear() {
    links_.clear();
    std::fill(first_.begin(), first_.end(), -1);
    std::fill(last_.begin(), last_.end(), -1);
  }
  FLOWPM_INLINE void add(int64_t band, const Hit& hit) {
    const int32_t number = int32_t(links_.size());
    links_.push_back({hit, -1});
    (last_[band] < 0 ? first_[band] : links_[last_[band]].next) = number;
    last_[band] = number;
  }
  // Calls use(hit) for those of a band, in the order in which they were added.
  template <typename Use>
  FLOWPM_INLINE void for_band(int64_t band, const Use& use) const {
    for (int32_t at = first_[band]; at >= 0; at = links_[at].next) use(links_[at].hit);
  }

 private:
  struct Link {
    Hit hit;
    int32_t next;
  };
  std::vector<Link> links_;
  std::vector<int32_t> first_, last_;
};

// The first of `count` rows that belongs to a piece.
inline int64_t piece_begin(int64_t count, int64_t piece) { return piece * count / kPieces; }

// Paints rows of `deep` particles, some at a time. find(begin, count) fills `hits`, which are those
// of each piece of these rows; deposit(band, hit) adds the hits of a band to the maps.
template <typename Hit, typename Find, typename Deposit>
void paint_rows(int64_t rows, int64_t deep, int64_t bands, std::vector<Hits<Hit>>& hits,
                const Parallel& parallel, const Find& find, const Deposit& deposit) {
  const int64_t step = std::max<int64_t>(1, kAtOnce / std::max<int64_t>(1, deep));
  for (int64_t begin = 0; begin < rows; begin += step) {
    for (Hits<Hit>& each : hits) each.clear();
    find(begin, std::min(step, rows - begin));
    parallel(bands, [&](int64_t band) {
      for (const Hits<Hit>& each : hits) {
        each.for_band(band, [&](const Hit& hit) { deposit(band, hit); });
      }
    });
  }
}

// Adds to `out` what each piece found: `sums` are [pieces, count].
inline void add_pieces(const std::vector<double>& sums, int64_t begin, int64_t count,
                       double* out) {
  const int64_t each = int64_t(sums.size()) / kPieces;
  std::fill(out, out + count, 0.0);
  for (int64_t piece = 0; piece < kPieces; ++piece) {
    const double* part = sums.data() + piece * each + begin;
    for (int64_t i = 0; i < count; ++i) out[i] += part[i];
  }
}

// What a particle at a distance adds to maps, from the amounts at the nodes around it.
template <typename T>
struct Amount {
  const T* lower;
  int64_t node, columns;
  double share, per, rise, fall;  // fall: minus the slope of `per`, over `per`

  FLOWPM_INLINE Amount(const Maps<T>& maps, int64_t b, double distance) : columns(maps.columns) {
    const double along = distance / maps.step, inverse = distance > 0 ? 1 / distance : 0.0;
    node = int64_t(std::min(along, double(maps.nodes - 2)));
    const bool inside = along - double(node) <= 1.0;
    share = inside ? along - double(node) : 1.0;
    lower = maps.amounts + (b * maps.nodes + node) * columns;
    per = maps.power == 0 ? 1.0 : maps.power == 1 ? inverse : inverse * inverse;
    rise = inside ? per / maps.step : 0.0;
    fall = double(maps.power) * inverse;
  }
  FLOWPM_INLINE double of(int64_t w) const {
    const double first = double(lower[w]);
    return (first + share * (double(lower[columns + w]) - first)) * per;
  }
  FLOWPM_INLINE double slope(int64_t w) const {
    return (double(lower[columns + w]) - double(lower[w])) * rise - of(w) * fall;
  }
};

// Calls use(shell, share, slope of the share) for the shells that hold a part of a particle, which
// is a cloud as deep as `depth` along the line of sight, cut to what lies between `near` and `far`.
template <typename T, typename Use>
FLOWPM_INLINE void for_shells(const Maps<T>& maps, double distance, double near, double far,
                              const Use& use) {
  const double low = distance - 0.5 * maps.depth, high = distance + 0.5 * maps.depth;
  const double per = 1 / maps.depth, begin = std::max(low, near), end = std::min(high, far);
  const double* borders = maps.borders;
  const int64_t found = std::upper_bound(borders, borders + maps.shells + 1, begin) - borders - 1;
  for (int64_t s = std::max<int64_t>(found, 0); s < maps.shells && borders[s] < end; ++s) {
    const double from = std::max(begin, borders[s]), to = std::min(end, borders[s + 1]);
    if (!(from < to)) continue;
    const bool begins = from > low, ends = to < high;
    use(s, begins || ends ? (to - from) * per : 1.0, (double(begins) - double(ends)) * per);
  }
}

// Whether a part of a particle's cloud may lie in a shell.
template <typename T>
FLOWPM_INLINE bool near_shells(const Maps<T>& maps, double distance) {
  return distance + 0.5 * maps.depth > maps.borders[0] &&
         distance - 0.5 * maps.depth < maps.borders[maps.shells];
}

// Whether a particle has a place: one displaced by more than `farthest` along an axis has none.
FLOWPM_INLINE bool has_place(const double* moved, double farthest) {
  return std::abs(moved[0]) <= farthest && std::abs(moved[1]) <= farthest &&
         std::abs(moved[2]) <= farthest;
}

// `farthest_move` of base.py.
FLOWPM_INLINE double farthest_move(const double* lengths) {
  return 10 * std::max(std::max(lengths[0], lengths[1]), lengths[2]);
}

constexpr double kInfinite = std::numeric_limits<double>::infinity();
constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

}  // namespace flowpm
