// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/squeeze_excitation.hpp"

#include <string>
#include <vector>

namespace squeeze_excitation_test {
namespace {

namespace activations = remat::blocks::activations;
using remat::blocks::SqueezeExcitation;

}  // namespace

TEST_CASE("squeeze-excitation has two 1x1 convolutions with biases, fc1 and fc2") {
  const SqueezeExcitation layer(8, 2, activations::relu, activations::sigmoid);

  CHECK(layer->named_parameters().keys() ==
        std::vector<std::string>{"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"});
  CHECK(layer->fc1->weight.sizes() == torch::IntArrayRef{2, 8, 1, 1});
  CHECK(layer->fc2->weight.sizes() == torch::IntArrayRef{8, 2, 1, 1});
}

TEST_CASE("squeeze-excitation scales each channel by one number that all channels' means decide") {
  SqueezeExcitation layer(8, 2, activations::silu_, activations::hardsigmoid);
  const auto x = torch::randn({3, 8, 5, 4});

  const auto y = layer->forward(x);

  const auto mean = x.mean({2, 3}, /*keepdim=*/true);
  const auto scale =
      torch::hardsigmoid(layer->fc2->forward(torch::silu(layer->fc1->forward(mean))));
  CHECK(torch::equal(y, scale * x));
  CHECK((scale >= 0).all().item<bool>());
  CHECK((scale <= 1).all().item<bool>());
}

TEST_CASE("a clone of squeeze-excitation computes the same with weights of its own") {
  SqueezeExcitation layer(8, 2, activations::relu, activations::sigmoid);
  const auto copy = std::dynamic_pointer_cast<remat::blocks::SqueezeExcitationImpl>(layer->clone());
  REQUIRE(copy);
  const auto x = torch::randn({3, 8, 5, 4});

  CHECK(torch::equal(copy->forward(x), layer->forward(x)));
  CHECK_FALSE(copy->fc1->weight.is_same(layer->fc1->weight));
}

}  // namespace squeeze_excitation_test
