// SPDX-License-Identifier: MIT
#pragma once

#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include "tests/support/doctest.hpp"

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace tiny {

/// Linear, batch norm, dropout, ReLU: state and random numbers. Counts its calls.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(std::int64_t size) : width(size) { reset(); }
  void reset() override {
    fc = register_module("fc", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    ++call_count;
    return dropout->forward(norm->forward(fc->forward(x)).tanh()).relu();
  }

  std::int64_t width;
  std::int64_t call_count = 0;
  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
};
TORCH_MODULE(Block);

/// A forward that is const: legal for `Checkpointed<Module>`, not in LibTorch's containers.
struct ConstBlockImpl : torch::nn::Module {
  ConstBlockImpl() : weight(register_parameter("weight", torch::full({4}, 2.0))) {}
  torch::Tensor forward(const torch::Tensor& x) const { return (x * weight).tanh(); }
  torch::Tensor weight;
};
TORCH_MODULE(ConstBlock);

/// Takes a mask beside its input.
struct MaskedImpl : torch::nn::Cloneable<MaskedImpl> {
  explicit MaskedImpl(std::int64_t size) : width(size) { reset(); }
  void reset() override { fc = register_module("fc", torch::nn::Linear(width, width)); }
  torch::Tensor forward(torch::Tensor x, torch::Tensor mask) {
    masks.push_back(mask);
    return (fc->forward(x) * mask).tanh();
  }
  std::int64_t width;
  std::vector<torch::Tensor> masks;
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Masked);

/// Returns two tensors, and takes them.
struct SplitImpl : torch::nn::Cloneable<SplitImpl> {
  void reset() override {}
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) { return {x.sin(), x.exp()}; }
};
TORCH_MODULE(Split);
struct JoinImpl : torch::nn::Cloneable<JoinImpl> {
  void reset() override {}
  torch::Tensor forward(std::tuple<torch::Tensor, torch::Tensor> pair) {
    return std::get<0>(pair) * std::get<1>(pair);
  }
};
TORCH_MODULE(Join);

/// Throws as often as it is told to.
struct ThrowingBlockImpl : torch::nn::Cloneable<ThrowingBlockImpl> {
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) {
    if (throw_count > 0) {
      --throw_count;
      throw std::domain_error("thrown by the block");
    }
    return x.sigmoid();
  }
  int throw_count = 0;
};
TORCH_MODULE(ThrowingBlock);

/// What one training step leaves behind.
using Trace = std::map<std::string, torch::Tensor>;

inline torch::Tensor random_state() {
  auto generator = at::globalContext().defaultGenerator(torch::kCPU);
  return generator.get_state().clone();
}

/// Runs `forward` and backward on the module's parameters and notes everything that may differ.
template <class Forward>
Trace step(torch::nn::Module& module, torch::Tensor input, Forward forward,
           bool input_needs_grad = true) {
  torch::manual_seed(11);
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = torch::Tensor();
  auto x = input.detach().clone().set_requires_grad(input_needs_grad);
  Trace trace;
  const torch::Tensor y = forward(x);
  trace["output"] = y.detach().clone();
  trace["generator after forward"] = random_state();
  if (y.requires_grad()) (y * y).sum().backward();
  trace["generator after backward"] = random_state();
  if (x.grad().defined()) trace["grad of input"] = x.grad().clone();
  for (const auto& item : module.named_parameters())
    if (item.value().grad().defined()) trace["grad of " + item.key()] = item.value().grad().clone();
  for (const auto& item : module.named_buffers())
    trace["buffer " + item.key()] = item.value().clone();
  return trace;
}

template <class Holder>
Trace step(Holder& holder, const torch::Tensor& input) {
  return step(*holder, input, [&](torch::Tensor x) { return holder->forward(x); });
}

/// Empty where both are equal bit by bit, else the names of what differs.
inline std::string difference(const Trace& left, const Trace& right) {
  std::string names;
  for (const auto& [name, tensor] : left)
    if (right.count(name) == 0 || !torch::equal(tensor, right.at(name))) names += name + "; ";
  for (const auto& [name, tensor] : right)
    if (left.count(name) == 0) names += name + " is extra; ";
  return names;
}

/// Copies parameters and buffers from one module to another of the same keys.
inline void copy_weights(const torch::nn::Module& from, torch::nn::Module& to) {
  const torch::NoGradGuard no_grad;
  auto parameters = to.named_parameters();
  for (const auto& item : from.named_parameters()) parameters[item.key()].copy_(item.value());
  auto buffers = to.named_buffers();
  for (const auto& item : from.named_buffers()) buffers[item.key()].copy_(item.value());
}

inline std::vector<std::string> keys(const torch::nn::Module& module) {
  std::vector<std::string> names = module.named_parameters().keys();
  for (const auto& name : module.named_buffers().keys()) names.push_back(name);
  return names;
}

/// Regions that `call` opens.
template <class Call>
std::int64_t region_count(Call call) {
  const auto before = remat::statistics().regions;
  call();
  return remat::statistics().regions - before;
}

}  // namespace tiny
