// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <functional>
#include <memory>
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

/// Traces a training step of a module with its real loss, and leaves the module as it was.
template <class Module, class Loss>
StepTrace trace_training_step(Module& model, const torch::Tensor& example, Loss& loss) {
  require(model.is_training() && records_regions(), [&] {
    return ErrorMessage("remat.plan.mode")
        .where("remat::plan")
        .what(model.name() +
              " is in eval mode, or grad mode is off, or this is inside another plan")
        .cause("Nothing would be recorded")
        .cure("Call train() first, and plan outside of NoGradGuard and checkpointed regions");
  });
  const auto forward = [&](const torch::Tensor& x) { return model.forward(x); };
  const auto backward = [&](auto& output, const std::vector<torch::Tensor>& leaves) {
    const torch::Tensor value = loss(output);
    require(value.defined() && value.numel() == 1 && value.requires_grad(), [] {
      return ErrorMessage("remat.plan.loss")
          .where("remat::plan")
          .what("the loss is no scalar that requires grad")
          .cure("Return what a training step calls backward() on");
    });
    value.backward({}, {}, /*create_graph=*/false, at::TensorList(leaves));
  };
  return trace_module(model, example, forward, backward);
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
/// @throws ArgumentError  if the budget is infeasible, with the least feasible one; if the model is
/// in eval mode or the loss is no scalar that requires grad
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
