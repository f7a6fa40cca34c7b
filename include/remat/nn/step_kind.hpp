// SPDX-License-Identifier: MIT
#pragma once

#include <vector>

#include "remat/libtorch/autocast.hpp"
#include "remat/libtorch/nn.hpp"

namespace remat::detail {

/// What decides, besides the input's sizes, which operations a module's step runs and what autograd
/// saves of them.
struct StepKind {
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the input
  c10::Device device{c10::kCPU};
  AutocastState autocast;
  std::vector<bool> requires_grad;  // the input and the parameters
  std::vector<bool> is_training;    // the module and those below

  static StepKind of(const torch::nn::Module& module, const torch::Tensor& x) {
    StepKind kind;
    kind.dtype = x.scalar_type();
    kind.device = x.device();
    if (has_autocast(x.device().type())) kind.autocast = autocast_state(x.device().type());
    kind.requires_grad.push_back(x.requires_grad());
    kind.add(module);
    return kind;
  }

  friend bool operator==(const StepKind&, const StepKind&) = default;

 private:
  void add(const torch::nn::Module& module) {
    is_training.push_back(module.is_training());
    for (const torch::Tensor& parameter : module.parameters(/*recurse=*/false))
      requires_grad.push_back(parameter.requires_grad());
    for (const auto& child : module.children()) add(*child);
  }
};

}  // namespace remat::detail
