// SPDX-License-Identifier: MIT
//
// A network in stages: blocks inside a stage are checkpointed, what lies between stages is not, and
// segments asked for at run time go where most blocks are.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

namespace {

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1));
}

/// A convolution around which the input is added.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t width)
      : norm(register_module("norm", torch::nn::BatchNorm2d(width))),
        conv(register_module("conv", convolution(width, width, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + conv->forward(torch::relu(norm->forward(x)));
  }

  torch::nn::BatchNorm2d norm;
  torch::nn::Conv2d conv;
};
TORCH_MODULE(Block);

/// A nested Sequential is a stage.
torch::nn::Sequential stage(std::int64_t width, int block_count) {
  torch::nn::Sequential blocks;
  for (int block = 0; block < block_count; ++block) blocks->push_back(Block(width));
  return blocks;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  remat::Checkpointed<remat::StagedHybrid> net({{"stem", convolution(3, 16, 2)},
                                                {"stage1", stage(16, 2)},
                                                {"down1", convolution(16, 32, 2)},
                                                {"stage2", stage(32, 6)}});
  const auto images = torch::randn({8, 3, 64, 64});
  const auto peak = [&] {
    const remat::MemoryMeter meter;
    net->forward(images).pow(2).mean().backward();
    return meter.peak();
  };

  peak();  // the first step measures the units
  const remat::Bytes by_stage = peak();
  std::cout << "one per stage  peak " << by_stage << ", " << net->plan() << '\n';
  net->enable_gradient_checkpointing(4);
  const remat::Bytes shared_out = peak();
  std::cout << "4 segments     peak " << shared_out << ", " << net->plan() << '\n';
  net->disable_gradient_checkpointing();
  const remat::Bytes plain = peak();
  std::cout << "plain          peak " << plain << '\n';
  return by_stage < plain && shared_out < by_stage ? 0 : 1;
}
