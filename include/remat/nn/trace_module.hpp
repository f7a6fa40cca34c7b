// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/tensors_in.hpp"
#include "remat/engine/trace_step.hpp"
#include "remat/libtorch/graph_leaves.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/model_state.hpp"
#include "remat/plan/step_trace.hpp"

#include <ATen/ops/_unsafe_view.h>

namespace remat::detail {

/// Traces a module's step, `backward(forward(input), leaves)`, and leaves everything as it was.
///
/// The step runs twice, for kernels set themselves up in the first. Gradients go to the module's
/// parameters, a stand-in for `x`, and leaves that the forward reads besides; `leaves` lists them.
/// A graph from before that the step reads, a mask's for example, is its owner's.
///
/// @param forward   takes a tensor that shares the content of `x`
/// @param backward  runs a backward pass with `leaves` as its `inputs`, if there are any
template <class Forward, class Backward>
StepTrace trace_module(torch::nn::Module& module, const torch::Tensor& x, Forward&& forward,
                       Backward&& backward) {
  const torch::Tensor leaf = x.detach().requires_grad_(x.requires_grad());
  ModelState state(module, leaf);
  const auto step = [&](const RegionOptions& options) {
    GraphLeaves found;
    // A layer may write to its input only where that is no leaf.
    const torch::Tensor input = x.is_leaf() ? leaf : at::_unsafe_view(leaf, leaf.sizes());
    auto output = run_region(options, [&] { return forward(input); });
    for_each_tensor_in(output, [&](const torch::Tensor& result) { found.find_behind(result); });
    for (const torch::Tensor& tensor : found.leaves()) state.add_leaf(tensor);
    backward(output, found.leaves());
  };
  RegionOptions first{.name = module.name(), .is_indivisible = true};
  first.before_write = [&](const torch::Tensor& tensor) { state.before_write(tensor); };
  step(first);
  state.rewind();
  state.zero_known_gradients();
  return trace_step(module.name(), step);
}

}  // namespace remat::detail
