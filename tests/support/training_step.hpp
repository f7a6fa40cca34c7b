// SPDX-License-Identifier: MIT
#pragma once

#include "remat/backbones.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

/// One training step of a backbone, and everything it leaves that checkpointing must not change.
namespace training {

using Keys = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;
using Named = std::vector<std::pair<std::string, torch::Tensor>>;

/// Returns names and shapes of all parameters and buffers, sorted.
inline Keys state_keys(const torch::nn::Module& module) {
  Keys keys;
  for (const auto& item : module.named_parameters())
    keys.emplace_back(item.key(), item.value().sizes().vec());
  for (const auto& item : module.named_buffers())
    keys.emplace_back(item.key(), item.value().sizes().vec());
  std::sort(keys.begin(), keys.end());
  return keys;
}

struct Step {
  torch::Tensor result, input_gradient, random_state;
  Named gradients, buffers;
};

using Loss = std::function<torch::Tensor(const torch::Tensor& result)>;

/// Runs forward and backward in training mode.
inline Step step(remat::Backbone& model, const torch::Tensor& images, const Loss& loss) {
  model.train();
  model.zero_grad();
  const torch::Tensor x = images.clone().requires_grad_();
  Step step;
  step.result = model.forward(x);
  loss(step.result).backward();
  step.input_gradient = x.grad();
  for (const auto& item : model.named_parameters())
    step.gradients.emplace_back(item.key(), item.value().grad().clone());
  for (const auto& item : model.named_buffers())
    step.buffers.emplace_back(item.key(), item.value().clone());
  step.random_state =
      remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
  return step;
}

/// Returns the first name whose tensors differ in a bit, "" if none does.
inline std::string first_difference(const Step& left, const Step& right) {
  if (!torch::equal(left.result, right.result)) return "result";
  if (!torch::equal(left.input_gradient, right.input_gradient)) return "input gradient";
  if (!torch::equal(left.random_state, right.random_state)) return "random state";
  for (const auto& [mine, other] :
       {std::pair{&left.gradients, &right.gradients}, std::pair{&left.buffers, &right.buffers}}) {
    if (mine->size() != other->size()) return "number of tensors";
    for (std::size_t i = 0; i < mine->size(); ++i)
      if (!torch::equal((*mine)[i].second, (*other)[i].second)) return (*mine)[i].first;
  }
  return "";
}

}  // namespace training
