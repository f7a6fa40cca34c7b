// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/mb_conv.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace mb_conv_test {
namespace {

using remat::blocks::MBConv;
using remat::blocks::MBConvKind;
using remat::blocks::MBConvOptions;

/// Names of the weights of convolutions and what they are: {"block.0.0", out, in / groups, kernel}.
std::vector<std::string> convolutions(const MBConv& block) {
  std::vector<std::string> lines;
  for (const auto& item : block->named_parameters())
    if (item.value().dim() == 4) lines.push_back(item.key() + " " + c10::str(item.value().sizes()));
  return lines;
}

}  // namespace

TEST_CASE("an MBConv widens, mixes, squeezes by a quarter of its input, and projects") {
  const MBConv block(MBConvOptions{.in = 16, .out = 24, .expansion = 6, .kernel = 5, .stride = 2});

  CHECK(convolutions(block) == std::vector<std::string>{"block.0.0.weight [96, 16, 1, 1]",
                                                        "block.1.0.weight [96, 1, 5, 5]",
                                                        "block.2.fc1.weight [4, 96, 1, 1]",
                                                        "block.2.fc2.weight [96, 4, 1, 1]",
                                                        "block.3.0.weight [24, 96, 1, 1]"});
  CHECK(MBConv(block)->forward(torch::rand({2, 16, 9, 7})).sizes() ==
        torch::IntArrayRef{2, 24, 5, 4});
}

TEST_CASE("an MBConv that widens nothing begins with its depthwise convolution") {
  const MBConv block(MBConvOptions{.in = 32, .out = 16});

  CHECK(convolutions(block) == std::vector<std::string>{"block.0.0.weight [32, 1, 3, 3]",
                                                        "block.1.fc1.weight [8, 32, 1, 1]",
                                                        "block.1.fc2.weight [32, 8, 1, 1]",
                                                        "block.2.0.weight [16, 32, 1, 1]"});
}

TEST_CASE("a fused MBConv widens by a full convolution and has no squeeze") {
  const MBConv wide(
      MBConvOptions{.kind = MBConvKind::kFused, .in = 24, .out = 48, .expansion = 4, .stride = 2});
  const MBConv same(MBConvOptions{.kind = MBConvKind::kFused, .in = 24, .out = 24});

  CHECK(convolutions(wide) == std::vector<std::string>{"block.0.0.weight [96, 24, 3, 3]",
                                                       "block.1.0.weight [48, 96, 1, 1]"});
  CHECK(convolutions(same) == std::vector<std::string>{"block.0.0.weight [24, 24, 3, 3]"});
  CHECK(MBConv(wide)->forward(torch::rand({2, 24, 9, 7})).sizes() ==
        torch::IntArrayRef{2, 48, 5, 4});
}

TEST_CASE("an MBConv adds its input where neither channels nor size change") {
  for (const auto kind : {MBConvKind::kDepthwise, MBConvKind::kFused}) {
    CHECK(MBConvOptions{.kind = kind, .in = 16, .out = 16}.has_shortcut());
    CHECK_FALSE(MBConvOptions{.kind = kind, .in = 16, .out = 24}.has_shortcut());
    CHECK_FALSE(MBConvOptions{.kind = kind, .in = 16, .out = 16, .stride = 2}.has_shortcut());

    // At rate 1 the branch is gone: with a shortcut the input remains, without one nothing is lost.
    MBConv with(MBConvOptions{.kind = kind, .in = 16, .out = 16, .drop_rate = 1});
    MBConv without(MBConvOptions{.kind = kind, .in = 16, .out = 24, .drop_rate = 1});
    const auto x = torch::randn({2, 16, 5, 5});
    CHECK(torch::equal(with->forward(x), x));
    CHECK(without->forward(x).abs().sum().item<double>() > 0);
  }
}

TEST_CASE("stochastic depth drops the branch of an MBConv in training only") {
  MBConv block(MBConvOptions{.in = 16, .out = 16, .expansion = 4, .drop_rate = 0.5});
  const auto x = torch::randn({64, 16, 3, 3});
  torch::manual_seed(0);

  const auto kept = (block->forward(x) != x).flatten(1).any(1);  // (64)
  block->eval();
  const auto evaluated = block->forward(x);

  CHECK(kept.any().item<bool>());
  CHECK_FALSE(kept.all().item<bool>());
  CHECK(torch::equal(evaluated, block->block->forward(x) + x));
}

TEST_CASE("every normalisation of an MBConv has the block's constants") {
  for (const auto kind : {MBConvKind::kDepthwise, MBConvKind::kFused}) {
    const MBConv block(MBConvOptions{
        .kind = kind, .in = 16, .out = 16, .expansion = 4, .norm = {.eps = 1e-3, .momentum = 0.2}});
    std::size_t count = 0;
    for (const auto& module : block->modules())
      if (const auto* norm = module->as<torch::nn::BatchNorm2d>()) {
        ++count;
        CHECK(norm->options.eps() == 1e-3);
        CHECK(norm->options.momentum() == 0.2);
      }
    CHECK(count == (kind == MBConvKind::kFused ? 2 : 3));
  }
}

}  // namespace mb_conv_test
