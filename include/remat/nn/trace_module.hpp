// SPDX-License-Identifier: MIT
#pragma once

#include <utility>
#include <vector>

#include "remat/engine/trace_step.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/model_state.hpp"
#include "remat/plan/step_trace.hpp"

#include <ATen/ops/_unsafe_view.h>

namespace remat::detail {

/// Traces a module's step, `backward(forward(input), leaves)`, and leaves everything as it was.
///
/// The step runs twice, for kernels set themselves up in the first. Gradients go to the module's
/// parameters and a stand-in for `x` alone, which `leaves` lists: what else the step reads, a mask
/// with a graph for example, is its owner's.
///
/// @param forward   takes a tensor that shares the content of `x`
/// @param backward  runs a backward pass with `inputs` as they are given
template <class Forward, class Backward>
StepTrace trace_module(torch::nn::Module& module, const torch::Tensor& x, Forward&& forward,
                       Backward&& backward) {
  const torch::Tensor leaf = x.detach().requires_grad_(x.requires_grad());
  // A layer that writes to its input may do so only where that is no leaf.
  const torch::Tensor input = x.is_leaf() ? leaf : at::_unsafe_view(leaf, leaf.sizes());
  std::vector<torch::Tensor> leaves;
  if (leaf.requires_grad()) leaves.push_back(leaf);
  for (const torch::Tensor& parameter : module.parameters())
    if (parameter.requires_grad() && parameter.is_leaf()) leaves.push_back(parameter);

  ModelState state(module, leaf);
  const auto step = [&](const RegionOptions& options) {
    auto output = run_region(options, [&] { return forward(input); });
    backward(output, std::as_const(leaves));
  };
  RegionOptions first{.name = module.name(), .is_indivisible = true};
  first.before_write = [&](const torch::Tensor& tensor) { state.before_write(tensor); };
  step(first);
  state.rewind();
  state.zero_known_gradients();
  return trace_step(module.name(), step);
}

}  // namespace remat::detail
