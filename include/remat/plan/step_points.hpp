// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "remat/plan/step_simulation.hpp"
#include "remat/units.hpp"

namespace remat {

/// One way to run a step: what stays, and what that costs.
struct StepPoint {
  KeptValues kept;
  StepCost cost;
  TransientValues transient{};
};

/// The ways of which none is better than another in memory and in time, the least memory first.
///
/// A budget takes the fastest that fits. So a smaller budget never gets more memory than a larger
/// one.
class StepPoints {
 public:
  /// Adds a way unless one that is there needs neither more memory nor more time; takes out those
  /// that are now worse.
  void add(const StepPoint& point) {
    const auto [peak, seconds, count] = point.cost;
    const auto above = points_.upper_bound(peak.count);
    if (above != points_.begin() && std::prev(above)->second.cost.seconds <= seconds) return;
    auto worse = points_.lower_bound(peak.count);
    while (worse != points_.end() && worse->second.cost.seconds >= seconds)
      worse = points_.erase(worse);
    points_.emplace(peak.count, point);
  }

  bool is_empty() const { return points_.empty(); }
  /// Returns the way of the least memory; there must be one.
  const StepPoint& least() const { return points_.begin()->second; }
  /// Returns the fastest way, that of a plain step; there must be one.
  const StepPoint& most() const { return points_.rbegin()->second; }
  /// Returns the fastest way within the budget; null if there is none.
  const StepPoint* fastest_within(Bytes budget) const {
    const auto above = points_.upper_bound(budget.count);
    return above == points_.begin() ? nullptr : &std::prev(above)->second;
  }
  /// Returns the ways, the least memory first.
  std::vector<StepPoint> list() const {
    std::vector<StepPoint> points;
    for (const auto& [peak, point] : points_) points.push_back(point);
    return points;
  }

 private:
  std::map<std::int64_t, StepPoint> points_;  // by peak; seconds fall
};

}  // namespace remat
