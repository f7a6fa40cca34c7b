// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/nn/budgeted_run.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat {

/// A function whose calls are checkpointed so that their steps stay within a memory budget.
///
/// The first call with a shape of input, and with each kind of step (autocast, what requires grad),
/// makes a plan, for which the function runs twice more. As in a module with a budget, the loss
/// behind the function is taken to need two tensors of its result's size.
///
/// ```cpp
/// remat::Budgeted block(remat::MemoryBudget::fraction_of_plain(0.5),
///                       [&](const torch::Tensor& x) { return second(torch::gelu(first(x))); });
/// block(x).sum().backward();
/// ```
/// @tparam Function  takes a tensor, and more arguments if it likes; returns a tensor
/// @par Threads  any call from any thread, if the function allows it
template <class Function>
class Budgeted {
 public:
  /// @param name  stands in messages and reports
  Budgeted(const MemoryBudget& budget, Function function, const std::string& name = "budgeted")
      : function_(std::move(function)), named_(name) {
    run_.set(budget);
  }

  /// Calls the function as a region.
  ///
  /// @throws BudgetError  if no plan fits the budget
  template <class... More>
    requires std::is_invocable_r_v<torch::Tensor, Function&, const torch::Tensor&, More&...>
  torch::Tensor operator()(const torch::Tensor& x, More&&... more) {
    return run_.run_any(named_, x, [&](const torch::Tensor& input) -> torch::Tensor {
      return std::invoke(function_, input, more...);
    });
  }

  /// Returns the plan of the last call; null before the first.
  std::shared_ptr<const MemoryPlan> memory_plan() const { return run_.plan(); }
  /// Says how the last call kept to its plan.
  PlanOutcome plan_outcome() const { return run_.outcome(); }

 private:
  Function function_;
  torch::nn::Module named_;
  detail::BudgetedRun run_;
};

}  // namespace remat
