// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <memory>

#include "remat/nn/budgeted_run.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat::detail {

/// A toggle whose module can be planned: its forward takes one tensor and returns one.
class BudgetedToggle : public CheckpointToggle {
 public:
  using CheckpointToggle::enable_gradient_checkpointing;
  void enable_gradient_checkpointing(const MemoryBudget& budget) override {
    enable_gradient_checkpointing();
    budgeted_.set(budget);
  }
  void enable_gradient_checkpointing(const MemoryPlan& plan) override {
    enable_gradient_checkpointing();
    budgeted_.set(std::make_shared<const MemoryPlan>(plan));
  }
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
  BudgetedRun budgeted_;
};

}  // namespace remat::detail
