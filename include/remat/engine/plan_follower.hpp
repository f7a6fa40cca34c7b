// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/region.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"
#include "remat/policies/keep.hpp"
#include "remat/units.hpp"

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace remat::detail {

/// A plan in one forward pass: says as a keep policy what stays, and compares what ran.
///
/// The policy is not asked about every operation, since tiny results stay anyway; so the end
/// compares all of them once more, and finds those that did not run.
class PlanFollower {
 public:
  explicit PlanFollower(std::shared_ptr<const MemoryPlan> plan) : plan_(std::move(plan)) {}

  const std::shared_ptr<const MemoryPlan>& plan() const { return plan_; }
  bool has_ended() const { return has_ended_; }
  /// Whether the pass came to its end, and was another than planned.
  bool has_deviated() const { return has_ended_ && !outcome_.is_followed; }

  /// Returns how the pass kept to the plan. Where nothing was recorded there was nothing to keep
  /// to.
  PlanOutcome outcome() const {
    if (has_begun_ && !has_ended_ && outcome_.is_followed)
      return {false, "forward ended with an exception"};
    return outcome_;
  }

  bool is_kept(const keep::Operation& operation, Bytes bytes) {
    has_begun_ = true;
    if (!outcome_.is_followed) return false;
    if (operation.position >= plan_->operations.size())
      return leave(operation.position, operation.name, "where the plan ends");
    const MemoryPlan::Operation& planned = plan_->operations[operation.position];
    if (planned.name != operation.name)
      return leave(operation.position, operation.name, "where " + planned.name + " was planned");
    if (operation.result >= planned.results.size())
      return leave(operation.position, operation.name,
                   "with more results than the " + std::to_string(planned.results.size()) +
                       " that were planned");
    const MemoryPlan::Result& result = planned.results[operation.result];
    if (bytes > result.bytes && result.bytes.count > 0)  // 0: memory that was there before
      return leave(operation.position, operation.name,
                   "with a result of " + to_string(bytes) + " where " + to_string(result.bytes) +
                       " were planned");
    return result.is_kept;
  }

  /// Compares the innermost region of the tape, which is about to end.
  void end(Tape& tape) {
    const std::lock_guard<std::recursive_mutex> lock(tape.mutex);
    has_begun_ = has_ended_ = true;
    if (!outcome_.is_followed) return;
    const Region& region = tape.regions[static_cast<std::size_t>(tape.region)];
    const std::size_t first = region.first_operation;
    const std::size_t ran = tape.operations.size() - first, planned = plan_->operations.size();
    for (std::size_t i = 0; i < ran && i < planned; ++i)
      if (const std::string_view name = tape.operations[first + i].traits->name;
          name != plan_->operations[i].name) {
        leave(i, name, "where " + plan_->operations[i].name + " was planned");
        return;
      }
    const std::size_t saved = tape.saved_count - region.first_saved;
    if (ran != planned)
      outcome_ = {false, "the plan has " + std::to_string(planned) + " operations, " +
                             std::to_string(ran) + " ran"};
    else if (saved > static_cast<std::size_t>(plan_->saved_count))
      outcome_ = {false, "autograd saved " + std::to_string(saved) + " tensors where " +
                             std::to_string(plan_->saved_count) +
                             " were planned: more parameters or inputs require grad"};
    else
      mark_transient(tape, first);
  }

 private:
  /// Only backward reads it, so that the end is early enough.
  void mark_transient(Tape& tape, std::size_t first) const {
    for (std::size_t i = 0; i < plan_->operations.size(); ++i) {
      const auto& planned = plan_->operations[i].results;
      const Operation& ran = tape.operations[first + i];
      for (std::size_t k = 0; k < ran.result_count && k < planned.size(); ++k) {
        const ValueId id = tape.results[ran.first_result + k].value;
        tape.values[static_cast<std::size_t>(id)].is_transient = planned[k].is_transient;
      }
    }
  }

  /// From here on everything is dropped: right whatever runs, though what is recomputed at once may
  /// need more than the budget.
  bool leave(std::size_t position, std::string_view name, const std::string& where) {
    outcome_ = {false, "operation " + std::to_string(position) + ", " + std::string(name) +
                           ", ran " + where};
    return false;
  }

  std::shared_ptr<const MemoryPlan> plan_;
  PlanOutcome outcome_;
  bool has_begun_ = false;
  bool has_ended_ = false;
};

/// Makes the region that is opened with these options follow a plan.
///
/// @return  what knows, when the region has ended, how it kept to it
inline std::shared_ptr<const PlanFollower> follow_plan(RegionOptions& options,
                                                       std::shared_ptr<const MemoryPlan> plan) {
  auto follower = std::make_shared<PlanFollower>(std::move(plan));
  options.is_indivisible = true;
  options.keep = [follower](const keep::Operation& operation, Bytes bytes) {
    return follower->is_kept(operation, bytes);
  };
  options.at_end = [follower](Tape& tape) { follower->end(tape); };
  return follower;
}

}  // namespace remat::detail
