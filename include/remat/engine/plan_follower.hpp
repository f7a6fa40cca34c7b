// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "remat/plan/memory_plan.hpp"
#include "remat/policies/keep.hpp"
#include "remat/units.hpp"

namespace remat {

/// How a forward pass kept to its plan.
struct PlanOutcome {
  bool is_followed = true;  ///< the same operations ran, none with a larger result
  std::string deviation;    ///< what was different first; empty: nothing
};

namespace detail {

/// A keep policy that does what a plan says, for one forward pass.
class PlanFollower {
 public:
  PlanFollower(std::shared_ptr<const MemoryPlan> plan, std::shared_ptr<PlanOutcome> outcome)
      : plan_(std::move(plan)), outcome_(std::move(outcome)) {}

  bool operator()(const keep::Operation& operation, Bytes bytes) const {
    if (!outcome_->is_followed) return false;
    if (operation.position >= plan_->operations.size())
      return leave(operation, "where the plan ends");
    const MemoryPlan::Operation& planned = plan_->operations[operation.position];
    if (planned.name != operation.name || operation.result >= planned.results.size())
      return leave(operation, "where " + planned.name + " was planned");
    const MemoryPlan::Result& result = planned.results[operation.result];
    if (bytes > result.bytes && result.bytes.count > 0)  // 0: memory that was there before
      return leave(operation, "with a result of " + to_string(bytes) + " where " +
                                  to_string(result.bytes) + " were planned");
    return result.is_kept;
  }

 private:
  /// From here on everything is dropped: right whatever runs, and within any budget that is met at
  /// all.
  bool leave(const keep::Operation& operation, const std::string& where) const {
    outcome_->is_followed = false;
    outcome_->deviation = "operation " + std::to_string(operation.position) + ", " +
                          std::string(operation.name) + ", ran " + where;
    return false;
  }

  std::shared_ptr<const MemoryPlan> plan_;
  std::shared_ptr<PlanOutcome> outcome_;
};

}  // namespace detail
}  // namespace remat
