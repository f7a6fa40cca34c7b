// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "remat/nn/budgeted_run.hpp"
#include "remat/nn/planned_forward.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat {

namespace detail {

/// A toggle whose module can be planned: its forward takes one tensor and returns one.
class BudgetedToggle : public CheckpointToggle {
 public:
  std::shared_ptr<const MemoryPlan> memory_plan() const override { return budgeted_.plan(); }
  PlanOutcome plan_outcome() const override { return budgeted_.outcome(); }

  std::function<void()> remember_checkpointing() override {
    return [put_switch_back = CheckpointToggle::remember_checkpointing(),
            put_budget_back = budgeted_.remember()] {
      put_switch_back();
      put_budget_back();
    };
  }

 protected:
  PlannedForwardSlot budgeted_;

 private:
  void enable_planned(std::shared_ptr<PlannedForward> planned, const char*) override {
    enable_gradient_checkpointing();
    budgeted_.set(std::move(planned));
  }
};

/// A `BudgetedRun` behind the interface.
class BudgetedForward final : public PlannedForward {
 public:
  explicit BudgetedForward(BudgetedRun::Target target) { run_.set(std::move(target)); }
  explicit BudgetedForward(const BudgetedRun& run) : run_(run) {}

  bool is_set() const override { return run_.is_set(); }
  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                    const Forward& forward) override {
    return run_.run(module, x, std::cref(forward));
  }
  std::shared_ptr<const MemoryPlan> plan() const override { return run_.plan(); }
  PlanOutcome outcome() const override { return run_.outcome(); }
  std::function<void()> remember() override { return run_.remember(); }
  std::shared_ptr<PlannedForward> copy() const override {
    return std::make_shared<BudgetedForward>(run_);
  }

 private:
  BudgetedRun run_;
};

}  // namespace detail

inline void CheckpointToggle::enable_gradient_checkpointing(const MemoryBudget& budget) {
  enable_planned(std::make_shared<detail::BudgetedForward>(budget), "a budget");
}

inline void CheckpointToggle::enable_gradient_checkpointing(const MemoryPlan& plan) {
  enable_planned(
      std::make_shared<detail::BudgetedForward>(std::make_shared<const MemoryPlan>(plan)),
      "a plan");
}

}  // namespace remat
