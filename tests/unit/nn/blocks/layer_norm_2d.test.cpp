// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/layer_norm_2d.hpp"

#include <memory>
#include <string>
#include <vector>

namespace layer_norm_2d_test {
namespace {

using remat::blocks::LayerNorm2d;
using remat::blocks::LayerNorm2dImpl;

}  // namespace

TEST_CASE("a layer norm of maps is LibTorch's over the channels of each place") {
  torch::manual_seed(0);
  const torch::Tensor x = torch::randn({2, 5, 3, 4});
  LayerNorm2d layer(5);
  torch::nn::LayerNorm expected(torch::nn::LayerNormOptions({5}).eps(1e-6));
  {
    const torch::NoGradGuard no_grad;
    expected->weight.copy_(layer->weight.normal_());
    expected->bias.copy_(layer->bias.normal_());
  }

  const torch::Tensor y = layer->forward(x);

  CHECK(torch::equal(y, expected->forward(x.permute({0, 2, 3, 1})).permute({0, 3, 1, 2})));
}

TEST_CASE("a layer norm of maps starts as a pure normalisation with ConvNeXt's eps") {
  LayerNorm2d layer(4);

  CHECK(layer->eps() == 1e-6);
  CHECK(torch::equal(layer->weight, torch::ones({4})));
  CHECK(torch::equal(layer->bias, torch::zeros({4})));
  CHECK(layer->named_parameters().keys() == std::vector<std::string>{"weight", "bias"});
  // A constant place has no variance: it comes out as zero, and not as a division by zero.
  CHECK(torch::equal(layer->forward(torch::ones({1, 4, 2, 2})), torch::zeros({1, 4, 2, 2})));
}

TEST_CASE("a clone of a layer norm of maps has its eps and its own parameters") {
  const LayerNorm2d layer(4, /*eps=*/0.5);

  const auto copy = std::dynamic_pointer_cast<LayerNorm2dImpl>(layer->clone());

  REQUIRE(copy);
  CHECK(copy->eps() == 0.5);
  CHECK(copy->weight.data_ptr() != layer->weight.data_ptr());
}

}  // namespace layer_norm_2d_test
