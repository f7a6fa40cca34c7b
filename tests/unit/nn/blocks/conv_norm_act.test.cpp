// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/conv_norm_act.hpp"

#include <string>
#include <vector>

namespace conv_norm_act_test {
namespace {

using remat::blocks::BatchNormConstants;
using remat::blocks::ConvNormAct;
using remat::blocks::padded_convolution;

}  // namespace

TEST_CASE("a padded convolution keeps the size at stride 1, halves it upward at stride 2") {
  for (const std::int64_t kernel : {1, 3, 5, 7}) {
    CAPTURE(kernel);
    torch::nn::Conv2d same(padded_convolution(2, 4, kernel));
    torch::nn::Conv2d half(padded_convolution(2, 4, kernel).stride(2));

    CHECK(same->forward(torch::rand({1, 2, 9, 7})).sizes() == torch::IntArrayRef{1, 4, 9, 7});
    CHECK(half->forward(torch::rand({1, 2, 9, 7})).sizes() == torch::IntArrayRef{1, 4, 5, 4});
    CHECK_FALSE(same->bias.defined());
  }
}

TEST_CASE("conv-norm-act calls its children 0 and 1, as torchvision's sequence of three") {
  const ConvNormAct layer(padded_convolution(3, 4, 3), BatchNormConstants{},
                          remat::blocks::activations::relu_);

  CHECK(layer->named_parameters().keys() ==
        std::vector<std::string>{"0.weight", "1.weight", "1.bias"});
  CHECK(layer->named_buffers().keys() ==
        std::vector<std::string>{"1.running_mean", "1.running_var", "1.num_batches_tracked"});
}

TEST_CASE("conv-norm-act computes convolution, normalisation and activation, in this order") {
  ConvNormAct with(padded_convolution(3, 4, 3), BatchNormConstants{},
                   remat::blocks::activations::hardswish_);
  ConvNormAct without(padded_convolution(3, 4, 3).bias(true));
  const auto x = torch::randn({2, 3, 5, 5});
  with->eval();
  without->eval();

  const auto normalised = with->norm->forward(with->conv->forward(x));
  CHECK(torch::equal(with->forward(x), torch::hardswish(normalised)));
  CHECK(torch::equal(without->forward(x), without->norm->forward(without->conv->forward(x))));
  CHECK(without->conv->bias.defined());
}

TEST_CASE("the constants of conv-norm-act reach its normalisation; LibTorch's are the default") {
  const ConvNormAct given(padded_convolution(3, 4, 3), BatchNormConstants{1e-3, 0.01});
  const ConvNormAct left(padded_convolution(3, 4, 3));

  CHECK(given->norm->options.eps() == 1e-3);
  CHECK(given->norm->options.momentum() == 0.01);
  CHECK(left->norm->options.eps() == 1e-5);
  CHECK(left->norm->options.momentum() == 0.1);
}

TEST_CASE("a clone of conv-norm-act has everything and shares nothing") {
  ConvNormAct layer(padded_convolution(4, 4, 3).groups(2), BatchNormConstants{1e-3, 0.01},
                    remat::blocks::activations::gelu);
  const auto copy = std::dynamic_pointer_cast<remat::blocks::ConvNormActImpl>(layer->clone());
  REQUIRE(copy);
  const auto x = torch::randn({2, 4, 5, 5});

  CHECK(torch::equal(copy->forward(x), layer->forward(x)));
  CHECK(copy->norm->options.momentum() == 0.01);
  CHECK_FALSE(copy->conv->weight.is_same(layer->conv->weight));
}

TEST_CASE("an activation whose name ends in an underscore writes into its argument") {
  namespace activations = remat::blocks::activations;
  for (const auto activation :
       {activations::relu_, activations::relu6_, activations::silu_, activations::hardswish_}) {
    const auto x = torch::randn({64});
    const auto before = x.clone();
    CHECK(activation(x).is_same(x));
    CHECK_FALSE(torch::equal(x, before));
  }
  for (const auto activation : {activations::relu, activations::silu, activations::gelu,
                                activations::sigmoid, activations::hardsigmoid}) {
    const auto x = torch::randn({64});
    const auto before = x.clone();
    CHECK_FALSE(activation(x).is_same(x));
    CHECK(torch::equal(x, before));
  }
}

}  // namespace conv_norm_act_test
