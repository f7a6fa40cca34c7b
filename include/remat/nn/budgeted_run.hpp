// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/engine/plan_follower.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/step_kind.hpp"
#include "remat/nn/trace_module.hpp"
#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat::detail {

/// Traces a step of `forward` and a stand-in for the loss, a gradient of ones.
template <class Forward>
StepTrace trace_forward(torch::nn::Module& module, const torch::Tensor& x, Forward& forward) {
  const auto backward = [](const torch::Tensor& output, const std::vector<torch::Tensor>& leaves) {
    if (!leaves.empty())
      output.backward(torch::ones_like(output), {}, /*create_graph=*/false, at::TensorList(leaves));
  };
  return trace_module(module, x, forward, backward);
}

/// Runs a module's forward as one region that follows a plan: one that was given, or one made for
/// a budget from a trace of the module's own step, anew for each shape of input and each kind of
/// step (`StepKind`).
///
/// @par Threads  any call from any thread; a plan, once handed out, stays as it is
class BudgetedRun {
 public:
  using Target = std::variant<std::monostate, MemoryBudget, std::shared_ptr<const MemoryPlan>>;

  BudgetedRun() = default;
  BudgetedRun(const BudgetedRun& other) { *this = other; }
  BudgetedRun& operator=(const BudgetedRun& other) {
    if (this == &other) return *this;
    const std::scoped_lock lock(mutex_, other.mutex_);
    target_ = other.target_;
    planned_ = other.planned_;
    last_ = other.last_;
    return *this;
  }

  /// Sets a budget or a plan; nothing: the module goes by segments again.
  void set(Target target) {
    const std::lock_guard lock(mutex_);
    target_ = std::move(target);
    planned_.clear();
    last_ = nullptr;
  }

  bool is_set() const {
    const std::lock_guard lock(mutex_);
    return target_.index() != 0;
  }

  /// Returns the plan of the last forward; null before the first.
  std::shared_ptr<const MemoryPlan> plan() const {
    const std::lock_guard lock(mutex_);
    if (const auto* given = std::get_if<std::shared_ptr<const MemoryPlan>>(&target_)) return *given;
    return last_ == nullptr ? nullptr : last_->plan();
  }

  /// Says how the last forward kept to its plan.
  PlanOutcome outcome() const {
    const std::lock_guard lock(mutex_);
    return last_ == nullptr ? PlanOutcome() : last_->outcome();
  }

  std::function<void()> remember() {
    const std::lock_guard lock(mutex_);
    return [this, target = target_, planned = planned_, last = last_] {
      const std::lock_guard lock_again(mutex_);
      target_ = target;
      planned_ = planned;
      last_ = last;
    };
  }

  /// Calls `forward(x)`, and twice more with a stand-in for `x` where there is no plan yet.
  ///
  /// Inside another region there is nothing to plan: that one decides what stays. Nor is there
  /// where nothing requires grad.
  template <class Forward>
  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x, Forward forward) {
    if (!x.requires_grad() && !has_trainable_parameter(module)) return forward(x);
    return run_any(module, x, forward);
  }

  /// As `run`, where the module does not tell whether anything requires grad.
  template <class Forward>
  torch::Tensor run_any(torch::nn::Module& module, const torch::Tensor& x, Forward forward) {
    if (!records_regions() || thread_state().tape) return forward(x);
    RegionOptions options;
    options.name = module.name();
    const Pass pass{*this, follow_plan(options, plan_for(module, x, forward))};
    return run_region(options, [&] { return forward(x); });
  }

 private:
  struct Planned {
    StepKind kind;
    std::vector<std::int64_t> sizes;  // of the input
    std::shared_ptr<const MemoryPlan> plan;
  };
  static constexpr std::size_t kMostPlans = 8;

  /// A forward pass, noted when it is over, whether well or by an exception.
  struct Pass {
    BudgetedRun& owner;
    std::shared_ptr<const PlanFollower> follower;
    ~Pass() {
      const std::lock_guard lock(owner.mutex_);
      // Another thread may have made or used another plan since.
      if (follower->has_deviated()) owner.forget(follower->plan());
      owner.last_ = std::move(follower);
    }
  };

  /// The loss is not traced: it saves, and makes in backward, tensors of the size of what it gets,
  /// besides the gradient that stands in for it.
  static constexpr std::int64_t kLossTensors = 2;

  template <class Forward>
  std::shared_ptr<const MemoryPlan> plan_for(torch::nn::Module& module, const torch::Tensor& x,
                                             Forward& forward) {
    const std::lock_guard lock(mutex_);
    if (const auto* given = std::get_if<std::shared_ptr<const MemoryPlan>>(&target_)) return *given;
    const std::vector<std::int64_t> sizes = x.sizes().vec();
    StepKind kind = StepKind::of(module, x);
    const auto known = std::ranges::find_if(planned_, [&](const Planned& planned) {
      return is_covered(sizes, planned.sizes) && planned.kind == kind;
    });
    if (known != planned_.end()) {
      std::rotate(known, known + 1, planned_.end());
      return planned_.back().plan;
    }
    const StepTrace trace = trace_forward(module, x, forward);
    auto plan = std::make_shared<const MemoryPlan>(
        plan_within(trace, KeepSearch(trace).run(), std::get<MemoryBudget>(target_),
                    trace.result_bytes() * kLossTensors, module.name()));
    if (planned_.size() == kMostPlans) planned_.erase(planned_.begin());
    planned_.push_back({std::move(kind), sizes, plan});
    return plan;
  }

  /// The same shape, or fewer samples of it: the last batch of an epoch.
  static bool is_covered(const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& planned) {
    return sizes.size() == planned.size() && !sizes.empty() && sizes.front() <= planned.front() &&
           std::equal(sizes.begin() + 1, sizes.end(), planned.begin() + 1);
  }

  /// The operations differ from those of the trace, so that the next forward makes a new plan.
  void forget(const std::shared_ptr<const MemoryPlan>& plan) {
    std::erase_if(planned_, [&](const Planned& planned) { return planned.plan == plan; });
  }

  // Guards what follows; recursive because a trace remembers and puts back the module's switches.
  mutable std::recursive_mutex mutex_;
  Target target_;
  std::vector<Planned> planned_;              // the one that was used last is the last
  std::shared_ptr<const PlanFollower> last_;  // of the last forward; null: there was none
};

}  // namespace remat::detail
