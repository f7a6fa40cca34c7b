// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/remat.hpp"
#include "remat/yaml.hpp"

namespace train {

/// LibTorch's AdamW: weights decay, biases and the scales of norms do not.
inline torch::optim::AdamW make_optimizer(torch::nn::Module& module,
                                          const remat::TrainingConfig& training) {
  std::vector<torch::Tensor> weights, others;
  for (const torch::Tensor& parameter : module.parameters())
    (parameter.dim() > 1 ? weights : others).push_back(parameter);
  const auto options = [&](double weight_decay) {
    return std::make_unique<torch::optim::AdamWOptions>(
        torch::optim::AdamWOptions(training.lr).weight_decay(weight_decay));
  };
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(weights, options(training.weight_decay));
  groups.emplace_back(others, options(0));
  return torch::optim::AdamW(groups, torch::optim::AdamWOptions(training.lr));
}

inline void set_learning_rate(torch::optim::AdamW& optimizer, double rate) {
  for (auto& group : optimizer.param_groups())
    static_cast<torch::optim::AdamWOptions&>(group.options()).lr(rate);
}

/// What AdamW remembers of each parameter, under the parameter's name.
class OptimizerState {
 public:
  OptimizerState(torch::optim::AdamW& optimizer, torch::nn::Module& module)
      : optimizer_(optimizer), module_(module) {}

  /// Adds the tensors to a state dict.
  void save(remat::StateDict& into) const {
    for (const auto& parameter : module_.named_parameters()) {
      const auto found = optimizer_.state().find(key_of(parameter.value()));
      if (found == optimizer_.state().end()) continue;  // no gradient so far
      const auto& state = static_cast<const torch::optim::AdamWParamState&>(*found->second);
      into.add(name(parameter.key(), "step"), torch::tensor(state.step()));
      into.add(name(parameter.key(), "exp_avg"), state.exp_avg());
      into.add(name(parameter.key(), "exp_avg_sq"), state.exp_avg_sq());
    }
  }

  /// Takes the tensors out of a state dict.
  void load(const remat::StateDict& from) {
    for (const auto& parameter : module_.named_parameters()) {
      const torch::Tensor* step = from.find(name(parameter.key(), "step"));
      if (step == nullptr) continue;
      const auto moment = [&](const char* which) {
        return from.at(name(parameter.key(), which)).to(parameter.value().device()).clone();
      };
      auto state = std::make_unique<torch::optim::AdamWParamState>();
      state->step(step->item<std::int64_t>());
      state->exp_avg(moment("exp_avg"));
      state->exp_avg_sq(moment("exp_avg_sq"));
      optimizer_.state()[key_of(parameter.value())] = std::move(state);
    }
  }

 private:
  using Key = std::remove_cvref_t<decltype(std::declval<torch::optim::AdamW&>().state())>::key_type;

  static std::string name(const std::string& parameter, const char* which) {
    return "optimizer." + parameter + "." + which;
  }

  /// The address of the tensor, which LibTorch 1.13 has as a text.
  static Key key_of(const torch::Tensor& parameter) {
    return as_key<Key>(parameter.unsafeGetTensorImpl());
  }
  template <class Wanted>
  static Wanted as_key(c10::TensorImpl* address) {
    if constexpr (std::is_same_v<Wanted, std::string>) {
      std::ostringstream text;
      text << address;
      return text.str();
    } else {
      return address;
    }
  }

  torch::optim::AdamW& optimizer_;
  torch::nn::Module& module_;
};

}  // namespace train
