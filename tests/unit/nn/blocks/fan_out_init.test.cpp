// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/fan_out_init.hpp"

#include <cmath>

namespace fan_out_init_test {
namespace {

/// Whether a sample of normal numbers has this deviation, within five times what chance allows.
bool has_deviation(const torch::Tensor& sample, double expected) {
  const double found = sample.std().item<double>();
  const double chance = expected / std::sqrt(2.0 * static_cast<double>(sample.numel()));
  return std::abs(found - expected) < 5 * chance;
}

}  // namespace

TEST_CASE("convolutions begin normal with variance 2 over the fan out, also grouped ones") {
  torch::manual_seed(0);
  const torch::nn::Conv2d full(torch::nn::Conv2dOptions(32, 48, 3));
  const torch::nn::Conv2d depthwise(torch::nn::Conv2dOptions(512, 512, 5).groups(512).bias(false));
  torch::nn::Sequential net(full, depthwise);
  const auto bias = full->bias.clone();

  remat::blocks::init_convolutions_by_fan_out(*net);

  CHECK(has_deviation(full->weight, std::sqrt(2.0 / (48 * 9))));
  CHECK(has_deviation(depthwise->weight, std::sqrt(2.0 / (512 * 25))));
  CHECK(torch::equal(full->bias, bias));
}

TEST_CASE("biases of convolutions can be zeroed, and those of others stay") {
  torch::nn::Sequential net(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 1)),
                            torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 1).bias(false)),
                            torch::nn::Linear(8, 4));
  const auto linear_bias = net[2]->as<torch::nn::Linear>()->bias.clone();

  remat::blocks::zero_convolution_biases(*net);

  CHECK(torch::equal(net[0]->as<torch::nn::Conv2d>()->bias, torch::zeros({8})));
  CHECK(torch::equal(net[2]->as<torch::nn::Linear>()->bias, linear_bias));
}

TEST_CASE("linear layers begin normal with the deviation given, and with no bias") {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(128, 128));

  remat::blocks::init_linear_normal(*net, 0.01);

  CHECK(has_deviation(net[0]->as<torch::nn::Linear>()->weight, 0.01));
  CHECK(torch::equal(net[0]->as<torch::nn::Linear>()->bias, torch::zeros({128})));
}

}  // namespace fan_out_init_test
