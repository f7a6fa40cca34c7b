// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/plan/simulate.hpp"
#include "remat/units.hpp"

namespace remat {

namespace detail {

/// Finds borders so that the predicted peak of a fixed number of segments is least.
///
/// For a given limit on the peak, less kept before a unit is always better, so one number per
/// (segment count, unit) describes the best choice, and the least limit that can be met is found by
/// bisection over whole bytes. Exact, in O(segments * units * log units) per limit; no set of
/// alternatives is carried along.
class Balancer {
 public:
  Balancer(const std::vector<UnitCost>& costs, std::size_t segment_count)
      : costs_(costs),
        segment_count_(segment_count),
        saved_before_(costs.size() + 1, 0),
        held_before_(costs.size() + 1, 0) {
    for (std::size_t unit = 0; unit < costs.size(); ++unit) {
      saved_before_[unit + 1] = saved_before_[unit] + costs[unit].saved.count;
      held_before_[unit + 1] = held_before_[unit] + costs[unit].kept.count;
    }
    largest_.push_back({});
    for (const UnitCost& cost : costs) largest_[0].push_back(cost.output.count);
    for (std::size_t width = 1; 2 * width <= costs.size(); width *= 2) {
      const auto& half = largest_.back();
      std::vector<std::int64_t> level;
      for (std::size_t unit = 0; unit + width < half.size(); ++unit)
        level.push_back(std::max(half[unit], half[unit + width]));
      largest_.push_back(std::move(level));
    }
  }

  Plan plan() {
    std::int64_t met =
        predicted_peak(Plan::from_count(costs_.size(), segment_count_), costs_).count;
    std::int64_t missed = -1;
    // For chains of a thousand units and more the last per mille of the peak is not worth its time.
    const bool is_exact = costs_.size() * segment_count_ <= kExactUpTo;
    while (met - missed > (is_exact ? 1 : std::max<std::int64_t>(1, met / 1024))) {
      const std::int64_t limit = missed + (met - missed) / 2;
      (is_within(limit) ? met : missed) = limit;
    }
    is_within(met);
    return trace(met);
  }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  static constexpr std::size_t kExactUpTo = 100'000;

  std::int64_t largest_output(std::size_t first, std::size_t last) const {
    std::size_t level = 0;
    while (std::size_t{2} << level <= last - first) ++level;
    return std::max(largest_[level][first], largest_[level][last - (std::size_t{1} << level)]);
  }

  /// Bytes of a segment's own backward, and what a keep policy holds up to there.
  std::int64_t work(std::size_t first, std::size_t last) const {
    return held_before_[last] + saved_before_[last] - saved_before_[first] +
           kGradientsAlive * largest_output(first, last);
  }

  std::int64_t border(std::size_t first) const {
    return first == 0 ? 0 : costs_[first - 1].output.count;
  }

  /// Returns the end of the longest segment from `first` that stays within the limit, `first` if
  /// none does.
  std::size_t reach(std::size_t first, std::int64_t kept, std::int64_t limit) const {
    std::size_t low = first;
    std::size_t high = costs_.size();
    while (low < high) {
      const std::size_t middle = low + (high - low + 1) / 2;
      if (kept + work(first, middle) <= limit)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  /// Fills `kept_[k][last]`, the least bytes kept at borders when k segments within the limit end
  /// at `last`.
  bool is_within(std::int64_t limit) {
    const std::size_t unit_count = costs_.size();
    kept_.assign(segment_count_ + 1, std::vector<std::int64_t>(unit_count + 1, kNever));
    begin_.assign(segment_count_ + 1, std::vector<std::size_t>(unit_count + 1, 0));
    kept_[0][0] = 0;
    struct Start {
      std::int64_t kept;
      std::size_t first, reach;
      bool operator>(const Start& other) const { return kept > other.kept; }
    };
    for (std::size_t k = 1; k <= segment_count_; ++k) {
      std::priority_queue<Start, std::vector<Start>, std::greater<>> starts;
      for (std::size_t last = k; last <= unit_count; ++last) {
        const std::size_t first = last - 1;
        if (kept_[k - 1][first] != kNever) {
          const std::int64_t kept = kept_[k - 1][first] + border(first);
          starts.push({kept, first, reach(first, kept, limit)});
        }
        while (!starts.empty() && starts.top().reach < last) starts.pop();
        if (starts.empty()) continue;
        kept_[k][last] = starts.top().kept;
        begin_[k][last] = starts.top().first;
      }
    }
    return kept_[segment_count_][unit_count] != kNever;
  }

  /// Reads the borders back; the last segment, which a pattern may leave plain, is the one with
  /// most saved bytes.
  Plan trace(std::int64_t limit) const {
    const std::size_t unit_count = costs_.size();
    std::vector<std::size_t> borders = {unit_count};
    std::size_t first = segment_count_ - 1;
    while (kept_[segment_count_ - 1][first] == kNever ||
           kept_[segment_count_ - 1][first] + border(first) + work(first, unit_count) > limit)
      ++first;
    for (std::size_t k = segment_count_ - 1; k > 0; --k) {
      borders.push_back(first);
      first = begin_[k][first];
    }
    std::vector<std::size_t> sizes;
    std::size_t begin = 0;
    for (std::size_t index = borders.size(); index-- > 0; begin = borders[index])
      sizes.push_back(borders[index] - begin);
    return Plan::from_sizes(sizes);
  }

  const std::vector<UnitCost>& costs_;
  std::size_t segment_count_;
  std::vector<std::int64_t> saved_before_;  // units + 1
  std::vector<std::int64_t> held_before_;   // units + 1
  std::vector<std::vector<std::int64_t>>
      largest_;  // per power of two: the largest output from a unit on
  std::vector<std::vector<std::int64_t>> kept_;  // (segments + 1, units + 1)
  std::vector<std::vector<std::size_t>> begin_;  // (segments + 1, units + 1)
};

}  // namespace detail

/// Groups a chain into `segment_count` checkpointed segments.
///
/// With measured units the predicted peak is the least that so many segments can have, and among
/// plans with that peak the last segment, which need not be recomputed, holds the most bytes.
/// Without, the segments have equal numbers of units. More segments than units means one segment
/// per unit.
///
/// @throws ArgumentError  if `segment_count` is 0
inline Plan balanced_plan(const Chain& chain, std::size_t segment_count) {
  require(segment_count > 0, [] {
    return ErrorMessage("remat.segments.count")
        .where("remat::balanced_plan")
        .what("0 segments were asked for and at least 1 is needed");
  });
  if (!chain.is_measured() || segment_count == 1 || segment_count >= chain.unit_count)
    return Plan::from_count(chain.unit_count, segment_count);
  return detail::Balancer(chain.unit_costs, segment_count).plan();
}

}  // namespace remat
