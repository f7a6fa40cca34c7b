// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/convnext_block.hpp"

#include <memory>
#include <string>
#include <vector>

namespace convnext_block_test {
namespace {

using remat::blocks::ConvNeXtBlock;
using remat::blocks::ConvNeXtBlockImpl;

}  // namespace

TEST_CASE("a ConvNeXt block has torchvision's keys in torchvision's order") {
  ConvNeXtBlock block(4, 0.0);

  CHECK(block->named_parameters().keys() ==
        std::vector<std::string>{"layer_scale", "block.0.weight", "block.0.bias", "block.2.weight",
                                 "block.2.bias", "block.3.weight", "block.3.bias", "block.5.weight",
                                 "block.5.bias"});
  CHECK(block->layer_scale.sizes() == torch::IntArrayRef{4, 1, 1});
  CHECK(block->block[0]->as<torch::nn::Conv2d>()->options.groups() == 4);
  CHECK(block->block[2]->as<torch::nn::LayerNorm>()->options.eps() == 1e-6);
}

TEST_CASE("a new ConvNeXt block is nearly the identity: its scale is 1e-6") {
  torch::manual_seed(0);
  ConvNeXtBlock block(4, 0.0);
  const torch::Tensor x = torch::randn({2, 4, 5, 6});

  CHECK(torch::equal(block->layer_scale, torch::full({4, 1, 1}, 1e-6)));
  const torch::Tensor difference = block->forward(x) - x;
  CHECK(difference.abs().max().item<double>() < 1e-4);
}

TEST_CASE("a ConvNeXt block adds its scaled branch, channel by channel") {
  torch::manual_seed(0);
  ConvNeXtBlock block(2, 0.0);
  const torch::Tensor x = torch::randn({1, 2, 3, 3});
  {
    const torch::NoGradGuard no_grad;
    block->layer_scale.copy_(torch::tensor({0.0F, 2.0F}).view({2, 1, 1}));
  }

  const torch::Tensor y = block->forward(x);

  const torch::Tensor branch = block->block->forward(x);
  CHECK(torch::equal(y.select(1, 0), x.select(1, 0)));
  CHECK(torch::equal(y.select(1, 1), branch.select(1, 1) * 2 + x.select(1, 1)));
}

TEST_CASE("stochastic depth drops the branch of a ConvNeXt block in training only") {
  torch::manual_seed(0);
  ConvNeXtBlock block(2, 1.0);
  const torch::Tensor x = torch::randn({3, 2, 4, 4});
  {
    const torch::NoGradGuard no_grad;
    block->layer_scale.fill_(1);
  }

  CHECK(torch::equal(block->forward(x), x));
  block->eval();
  CHECK_FALSE(torch::equal(block->forward(x), x));
}

TEST_CASE("a clone of a ConvNeXt block computes the same with its own parameters") {
  torch::manual_seed(0);
  ConvNeXtBlock block(3, 0.25);

  const auto copy = std::dynamic_pointer_cast<ConvNeXtBlockImpl>(block->clone());

  REQUIRE(copy);
  CHECK(copy->stochastic_depth->rate() == 0.25);
  CHECK(copy->layer_scale.data_ptr() != block->layer_scale.data_ptr());
  copy->eval();
  block->eval();
  const torch::Tensor x = torch::randn({1, 3, 8, 8});
  CHECK(torch::equal(copy->forward(x), block->forward(x)));
}

}  // namespace convnext_block_test
