// SPDX-License-Identifier: MIT
//
// A chain of modules that is checkpointed in four segments, as a member of an ordinary module; and
// the switch.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    body = register_module("body", remat::Checkpointed<remat::Sequential, remat::Segments<4>>());
    for (int i = 0; i < 8; ++i) {
      body->push_back(
          torch::nn::Conv2d(torch::nn::Conv2dOptions(i == 0 ? 3 : 16, 16, 3).padding(1)));
      body->push_back(torch::nn::BatchNorm2d(16));
      body->push_back(torch::nn::ReLU());
    }
    head = register_module("head", torch::nn::Linear(16, 10));
  }
  torch::Tensor forward(const torch::Tensor& images) {
    return head->forward(body->forward(images).mean({2, 3}));
  }

  remat::Checkpointed<remat::Sequential, remat::Segments<4>> body{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Net);

/// Returns the peak of one training step.
remat::Bytes step(Net& net, const torch::Tensor& images) {
  const remat::MemoryMeter meter;
  net->forward(images).pow(2).mean().backward();
  return meter.peak();
}

}  // namespace

int main() {
  torch::manual_seed(0);
  Net net;
  const auto images = torch::randn({8, 3, 32, 32});

  step(net, images);  // the first step measures the units, the plan of the second uses that
  const remat::Bytes checkpointed = step(net, images);
  std::cout << "plan          " << net->body->plan() << '\n';
  remat::disable_gradient_checkpointing(*net);
  const remat::Bytes plain = step(net, images);

  std::cout << "checkpointed  peak " << checkpointed << '\n'
            << "switched off  peak " << plain << '\n';
  for (const auto& item : net->named_parameters())
    if (item.key().starts_with("body.0"))
      std::cout << item.key() << '\n';  // as in a torch::nn::Sequential
  return checkpointed < plain ? 0 : 1;
}
