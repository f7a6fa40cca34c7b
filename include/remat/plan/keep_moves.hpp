// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "remat/plan/step_points.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Small random changes of what becomes of values, for a search that goes from one way to run a
/// step to a neighbouring one. The numbers are drawn from a fixed seed.
///
/// @par Threads  one object per thread
class KeepMoves {
 public:
  /// What a change may turn.
  enum class Turn : std::uint8_t {
    kept,                ///< whether a value stays
    kept_and_transient,  ///< and whether it is transient
  };

  explicit KeepMoves(const StepTrace& trace) : overwritten_(trace.values.size()) {
    const std::vector<bool> can_keep = trace.keepable_values();
    for (std::size_t id = 0; id < can_keep.size(); ++id) {
      overwritten_[id] = trace.values[id].takes_over;
      if (can_keep[id]) candidates_.push_back(static_cast<std::int32_t>(id));
    }
  }

  /// Returns the values that may be kept.
  const std::vector<std::int32_t>& candidates() const { return candidates_; }

  /// Turns up to three values that lie close together.
  void move(StepPoint& point, Turn turn) {
    changed_.clear();
    if (turn == Turn::kept_and_transient) point.transient.resize(point.kept.size());
    const auto count = static_cast<std::int64_t>(candidates_.size());
    const std::int64_t first = uniform(count);
    change(point, turn, candidates_[static_cast<std::size_t>(first)]);
    for (std::int64_t more = uniform(3); more > 0; --more) {
      const std::int64_t other =
          uniform() < 0.75 ? first + uniform(2 * kReach + 1) - kReach : uniform(count);
      if (other < 0 || other >= count) continue;
      const std::int32_t id = candidates_[static_cast<std::size_t>(other)];
      if (std::ranges::find(changed_, id, &Change::id) == changed_.end()) change(point, turn, id);
    }
  }

  /// Takes back the last move.
  void undo(StepPoint& point) const {
    for (const Change& change : changed_)
      set(point, change.id, change.was_kept, change.was_transient);
  }

  /// Says what becomes of a value. What a transient one is written over is transient with it: if
  /// it stayed, that would take as much memory.
  void set(StepPoint& point, std::int32_t id, bool is_kept, bool is_transient) const {
    point.kept[at(id)] = is_kept;
    if (point.transient.empty()) return;
    for (; id != StepTrace::kNone; id = overwritten_[at(id)])
      point.transient[at(id)] = is_transient;
  }

  /// Returns a number from 0 up to, and without, 1.
  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }

 private:
  struct Change {
    std::int32_t id = 0;
    bool was_kept = false, was_transient = false;
  };

  static constexpr int kReach = 6;

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  void change(StepPoint& point, Turn turn, std::int32_t id) {
    const bool is_kept = point.kept[at(id)];
    const bool is_transient = !point.transient.empty() && point.transient[at(id)];
    changed_.push_back({id, is_kept, is_transient});
    if (turn == Turn::kept || uniform() < 0.5)
      set(point, id, !is_kept, false);
    else
      set(point, id, false, !is_transient);
  }

  /// A whole number below `count`.
  std::int64_t uniform(std::int64_t count) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(count));
  }

  std::vector<std::int32_t> candidates_;
  std::vector<std::int32_t> overwritten_;  // per value: what it is written over, in place
  std::vector<Change> changed_;            // by the last move
  std::mt19937 random_{1};
};

}  // namespace remat
