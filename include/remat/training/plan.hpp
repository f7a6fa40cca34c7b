// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/engine/plan_follower.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/trace_module.hpp"
#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

namespace detail {

/// What is no module and no holder of one.
template <class Type>
concept PlainFunction =
    std::is_invocable_v<Type&, const torch::Tensor&> &&
    !std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<Type>> &&
    !std::is_base_of_v<torch::detail::ModuleHolderIndicator, std::remove_cvref_t<Type>>;

/// Traces a training step with its real loss, and leaves everything as it was.
template <class Forward, class Loss>
StepTrace trace_loss_step(torch::nn::Module& module, const torch::Tensor& example,
                          const Forward& forward, Loss& loss) {
  require(module.is_training() && records_regions(), [&] {
    return ErrorMessage("remat.plan.mode")
        .where("remat::plan")
        .what(module.name() +
              " is in eval mode, or grad mode is off, or this is inside another plan")
        .cause("Nothing would be recorded")
        .cure("Call train() first, and plan outside of NoGradGuard and checkpointed regions");
  });
  const auto backward = [&](auto& output, const std::vector<torch::Tensor>& leaves) {
    const torch::Tensor value = loss(output);
    require(value.defined() && value.numel() == 1 && value.requires_grad(), [] {
      return ErrorMessage("remat.plan.loss")
          .where("remat::plan")
          .what("the loss is no scalar that requires grad")
          .cure("Return what a training step calls backward() on");
    });
    if (!leaves.empty()) value.backward({}, {}, /*create_graph=*/false, at::TensorList(leaves));
  };
  return trace_module(module, example, forward, backward);
}

template <class Module, class Loss>
StepTrace trace_training_step(Module& model, const torch::Tensor& example, Loss& loss) {
  const auto forward = [&](const torch::Tensor& x) { return model.forward(x); };
  return trace_loss_step(model, example, forward, loss);
}

}  // namespace detail

/// Makes the plan that needs the least time within a budget, from one traced training step.
///
/// The step is forward as one checkpointed region, loss and backward, run twice; afterwards the
/// model is as it was: gradients, buffers, modes, switches, random states. The plan is applied with
/// `remat::checkpoint(plan, fn, inputs...)` around the same forward, or given to a backbone's
/// `enable_gradient_checkpointing`.
///
/// @param model    in training mode; a module with forward(tensor)
/// @param example  an input of the size of a training batch
/// @param loss     makes a scalar of what forward returned
/// @throws BudgetError  if the budget is infeasible
/// @throws ArgumentError  if the model is in eval mode or the loss is no scalar that requires grad
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
MemoryPlan plan(Module& model, const torch::Tensor& example, Loss&& loss,
                const MemoryBudget& budget) {
  const StepTrace trace = detail::trace_training_step(model, example, loss);
  return plan_within(trace, KeepSearch(trace).run(), budget, /*reserve=*/{}, "remat::plan");
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
MemoryPlan plan(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& example,
                Loss&& loss, const MemoryBudget& budget) {
  return plan(*model.ptr(), example, std::forward<Loss>(loss), budget);
}

/// As for a module; takes a function of one tensor, whose plan `remat::checkpoint(plan, fn, x)`
/// applies. `remat::Budgeted` makes one by itself, in its first call.
///
/// What the function reads besides gets the same care as a module's parameters; modules that it
/// calls must be in training mode.
template <detail::PlainFunction Function, class Loss>
MemoryPlan plan(Function&& fn, const torch::Tensor& example, Loss&& loss,
                const MemoryBudget& budget) {
  torch::nn::Module named("the function");
  const StepTrace trace = detail::trace_loss_step(named, example, fn, loss);
  return plan_within(trace, KeepSearch(trace).run(), budget, /*reserve=*/{}, "remat::plan");
}

/// Calls `fn(inputs...)` as a checkpointed region that keeps what the plan says.
///
/// Regions inside are part of it. If other operations run than those of the plan, everything from
/// there on is dropped and recomputed: right, and slower.
///
/// @param outcome  gets whether the plan was followed to its end; may be null
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(const MemoryPlan& plan, PlanOutcome* outcome, Function&& fn,
                          Inputs&&... inputs) {
  detail::RegionOptions options;
  struct Report {
    std::shared_ptr<const detail::PlanFollower> from;
    PlanOutcome* to;
    ~Report() {
      if (to != nullptr) *to = from->outcome();
    }
  } const report{detail::follow_plan(options, std::make_shared<const MemoryPlan>(plan)), outcome};
  return detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// As above, without an outcome.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(const MemoryPlan& plan, Function&& fn, Inputs&&... inputs) {
  return checkpoint(plan, nullptr, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace remat
