// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "remat/errors.hpp"

namespace remat {

/// A run of units, `[first, last)`, that is recomputed as one, or kept.
struct Segment {
  std::size_t first = 0;
  std::size_t last = 0;
  bool is_checkpointed = true;

  /// Returns the number of units in it.
  std::size_t unit_count() const { return last - first; }
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// Says how the units of a chain are grouped into segments, and which of them are checkpointed.
///
/// A value: it prints, for example as `[0,1) checkpoint | [1,8) plain`, and compares. The segments
/// follow each other without a gap, from unit 0 on, and none is empty; a plan for no units has
/// none.
class Plan {
 public:
  Plan() = default;

  /// @throws ArgumentError  if a segment is empty or does not begin where the one before it ends
  explicit Plan(std::vector<Segment> segments) : segments_(std::move(segments)) {
    std::size_t expected = 0;
    for (std::size_t index = 0; index < segments_.size(); ++index) {
      const Segment& segment = segments_[index];
      require(segment.first == expected && segment.last > segment.first, [&] {
        return ErrorMessage("remat.plan.segments")
            .where("remat::Plan")
            .what("segment " + std::to_string(index) + " is " + range(segment) +
                  " where one that begins at unit " + std::to_string(expected) +
                  " and has at least one unit was expected")
            .cure("Give segments that follow each other without a gap, the first from unit 0");
      });
      expected = segment.last;
    }
  }

  /// Makes a plan of checkpointed segments with these numbers of units.
  static Plan from_sizes(std::span<const std::size_t> sizes) {
    std::vector<Segment> segments;
    std::size_t first = 0;
    for (const std::size_t size : sizes) {
      segments.push_back({first, first + size, true});
      first += size;
    }
    return Plan(std::move(segments));
  }
  /// As above, for a list that is written out.
  static Plan from_sizes(std::initializer_list<std::size_t> sizes) {
    return from_sizes(std::span(sizes.begin(), sizes.size()));
  }

  /// Makes a plan of `segment_count` checkpointed segments, as equal in number of units as can be.
  ///
  /// More segments than units means one segment per unit.
  static Plan from_count(std::size_t unit_count, std::size_t segment_count) {
    segment_count = std::min(segment_count, unit_count);
    std::vector<std::size_t> sizes;
    for (std::size_t index = 0; index < segment_count; ++index)
      sizes.push_back(unit_count / segment_count + (index < unit_count % segment_count ? 1 : 0));
    return from_sizes(sizes);
  }

  /// Makes a plan that checkpoints nothing: one plain segment.
  static Plan keep_all(std::size_t unit_count) {
    return unit_count == 0 ? Plan() : Plan({{0, unit_count, false}});
  }

  /// Returns the segments in the order of the units.
  const std::vector<Segment>& segments() const& { return segments_; }
  /// By value, so that a loop over the segments of a temporary plan is right.
  std::vector<Segment> segments() && { return std::move(segments_); }
  /// Returns the number of segments, plain ones included.
  std::size_t segment_count() const { return segments_.size(); }
  /// Returns the number of units in all segments.
  std::size_t unit_count() const { return segments_.empty() ? 0 : segments_.back().last; }
  /// Returns the number of segments that are recomputed.
  std::size_t checkpointed_count() const {
    return static_cast<std::size_t>(std::ranges::count_if(segments_, &Segment::is_checkpointed));
  }

  /// Returns this plan with the given units plain; a segment around such a unit is split there.
  Plan with_plain_units(std::span<const std::size_t> units) const {
    std::vector<Segment> segments;
    for (const Segment& segment : segments_) {
      std::size_t begin = segment.first;
      for (std::size_t unit = segment.first; unit < segment.last; ++unit) {
        if (!segment.is_checkpointed || std::ranges::find(units, unit) == units.end()) continue;
        if (unit > begin) segments.push_back({begin, unit, true});
        segments.push_back({unit, unit + 1, false});
        begin = unit + 1;
      }
      if (begin < segment.last) segments.push_back({begin, segment.last, segment.is_checkpointed});
    }
    return Plan(std::move(segments));
  }

  /// Returns this plan with its last segment plain.
  Plan with_last_plain() const {
    Plan plan = *this;
    if (!plan.segments_.empty()) plan.segments_.back().is_checkpointed = false;
    return plan;
  }

  friend bool operator==(const Plan&, const Plan&) = default;

  /// Writes the plan as `[0,1) checkpoint | [1,8) plain`.
  friend std::string to_string(const Plan& plan) {
    std::string text;
    for (const Segment& segment : plan.segments_)
      text += (text.empty() ? "" : " | ") + range(segment) +
              (segment.is_checkpointed ? " checkpoint" : " plain");
    return text.empty() ? "no units" : text;
  }
  friend std::ostream& operator<<(std::ostream& stream, const Plan& plan) {
    return stream << to_string(plan);
  }

 private:
  static std::string range(const Segment& segment) {
    return "[" + std::to_string(segment.first) + "," + std::to_string(segment.last) + ")";
  }

  std::vector<Segment> segments_;
};

}  // namespace remat
