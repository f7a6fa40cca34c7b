// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/plan/frontier.hpp"
#include "remat/training/plan.hpp"

namespace remat {

/// Says what a model's training step can be had for, from one traced step: without checkpointing,
/// by known schedules over its layers, and by the plans that memory budgets get.
///
/// All are simulated on the same trace, so that they compare; nothing is run but that step, twice.
/// Times are those of the operations that run again, measured in the traced step's forward.
/// Layers are those of the checkpointed chains inside the model, whether or not they are switched
/// on. Afterwards the model is as it was, as after `remat::plan`.
///
/// ```cpp
/// std::cout << remat::frontier(*net, images, loss) << '\n';
/// ```
/// @param model    in training mode; a module with forward(tensor)
/// @param example  an input of the size of a training batch
/// @param loss     makes a scalar of what forward returned
/// @throws ArgumentError  if the model is in eval mode or the loss is no scalar that requires grad
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
Frontier frontier(Module& model, const torch::Tensor& example, Loss&& loss) {
  return make_frontier(detail::trace_training_step(model, example, loss));
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
Frontier frontier(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& example,
                  Loss&& loss) {
  return frontier(*model.ptr(), example, std::forward<Loss>(loss));
}

}  // namespace remat
