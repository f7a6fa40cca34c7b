// SPDX-License-Identifier: MIT
#pragma once

#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/nn/blocks/squeeze_excitation.hpp"

#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// What tests of convolutional backbones read off a network.
namespace inspection {

/// Returns the modules of one type with their names.
template <class Impl>
std::vector<std::pair<std::string, std::shared_ptr<Impl>>> modules_of(
    const torch::nn::Module& network) {
  std::vector<std::pair<std::string, std::shared_ptr<Impl>>> found;
  for (const auto& item : network.named_modules("", /*include_self=*/false))
    if (auto module = std::dynamic_pointer_cast<Impl>(item.value()))
      found.emplace_back(item.key(), std::move(module));
  return found;
}

/// Returns the different {eps, momentum} of a network's batch normalisations.
inline std::set<std::pair<double, double>> norm_constants(const torch::nn::Module& network) {
  std::set<std::pair<double, double>> constants;
  for (const auto& [name, norm] : modules_of<torch::nn::BatchNorm2dImpl>(network))
    constants.emplace(norm->options.eps(), norm->options.momentum().value());
  return constants;
}

using Widths = std::vector<std::pair<std::int64_t, std::int64_t>>;

/// Returns {channels, squeezed channels} of every squeeze-and-excitation.
inline Widths squeezes(const torch::nn::Module& network) {
  Widths widths;
  for (const auto& [name, squeeze] : modules_of<remat::blocks::SqueezeExcitationImpl>(network))
    widths.emplace_back(squeeze->fc1->options.in_channels(), squeeze->fc1->options.out_channels());
  return widths;
}

/// Returns the names of the convolutions with stride 2.
inline std::vector<std::string> strided(const torch::nn::Module& network) {
  std::vector<std::string> names;
  for (const auto& [name, convolution] : modules_of<torch::nn::Conv2dImpl>(network))
    if (convolution->options.stride()->at(0) == 2) names.push_back(name);
  return names;
}

/// Whether a sample has this standard deviation, within six times what chance allows a normal one.
inline bool has_deviation(const torch::Tensor& sample, double expected) {
  const double found = sample.std().item<double>();
  return std::abs(found - expected) <
         6 * expected / std::sqrt(2.0 * static_cast<double>(sample.numel()));
}

/// Returns the name of the first convolution or normalisation that does not begin as torchvision's:
/// normal weights by the fan out, scale 1, shift 0, and no biases if `biases_are_zero`; "" if none.
inline std::string first_wrong_initial_value(const torch::nn::Module& network,
                                             bool biases_are_zero) {
  for (const auto& [name, convolution] : modules_of<torch::nn::Conv2dImpl>(network)) {
    const auto& weight = convolution->weight;
    const auto fan_out = static_cast<double>(weight.size(0) * weight.size(2) * weight.size(3));
    if (!has_deviation(weight, std::sqrt(2 / fan_out))) return name + ".weight";
    if (convolution->bias.defined() &&
        convolution->bias.eq(0).all().item<bool>() != biases_are_zero)
      return name + ".bias";
  }
  for (const auto& [name, norm] : modules_of<torch::nn::BatchNorm2dImpl>(network))
    if (!norm->weight.eq(1).all().item<bool>() || !norm->bias.eq(0).all().item<bool>()) return name;
  return "";
}

/// Trains for three steps of gradient descent from a fixed seed, and returns what the last one
/// left.
inline std::vector<torch::Tensor> after_three_steps(remat::Backbone& model,
                                                    const torch::Tensor& images) {
  torch::manual_seed(2);
  model.train();
  torch::Tensor loss;
  for (int round = 0; round < 3; ++round) {
    for (torch::Tensor& parameter : model.parameters()) parameter.mutable_grad() = torch::Tensor();
    loss = model.forward(images).square().sum();
    loss.backward();
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model.parameters())
      parameter.sub_(parameter.grad(), /*alpha=*/1e-3);
  }
  std::vector<torch::Tensor> left = model.parameters();
  for (const torch::Tensor& buffer : model.buffers()) left.push_back(buffer);
  left.push_back(loss);
  left.push_back(torch::rand({4}));  // tells where the generator stands
  return left;
}

inline bool equal(const std::vector<torch::Tensor>& left, const std::vector<torch::Tensor>& right) {
  if (left.size() != right.size()) return false;
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!torch::equal(left[i], right[i])) return false;
  return true;
}

/// Checks that three training steps with one segment per unit leave plain's bits.
inline void check_three_steps(std::string_view name, const remat::BackboneOptions& options,
                              const torch::Tensor& images) {
  using EachUnit = remat::Checkpointed<remat::Sequential, remat::EachUnit>;
  torch::manual_seed(0);
  const auto plain = remat::create_backbone<EachUnit>(name, options);
  torch::manual_seed(0);
  const auto checkpointed = remat::create_backbone<EachUnit>(name, options);
  checkpointed->enable_gradient_checkpointing();

  const auto expected = after_three_steps(*plain, images);
  const std::int64_t before = remat::statistics().recomputed_operations;
  CHECK(equal(expected, after_three_steps(*checkpointed, images)));
  CHECK(remat::statistics().recomputed_operations > before);
}

}  // namespace inspection
