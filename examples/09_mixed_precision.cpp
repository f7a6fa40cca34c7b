// SPDX-License-Identifier: MIT
//
// Mixed precision with checkpointing: forward and loss in a scope of autocast, a scaler where
// float16 needs it, backward outside. The recompute runs in the precision of forward.

#include "remat/amp.hpp"
#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

namespace {

torch::nn::Sequential network() {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(torch::nn::Linear(128, 128));
    layers->push_back(torch::nn::GELU());
  }
  return layers;
}

struct Outcome {
  torch::Tensor weight;
  double scale;
  remat::Bytes peak;
};

Outcome train(bool is_checkpointed) {
  torch::manual_seed(0);
  auto layers = network();
  torch::optim::SGD optimizer(layers->parameters(), torch::optim::SGDOptions(0.1));
  // bfloat16 has float32's range and would do without; float16 has kernels on GPUs.
  remat::amp::GradScaler scaler(torch::kCPU, {.init_scale = 1024, .growth_interval = 3});
  const auto x = torch::randn({2048, 128});
  const remat::MemoryMeter meter;

  for (int iteration = 0; iteration < 5; ++iteration) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      const remat::amp::Autocast autocast(torch::kCPU, {.dtype = torch::kBFloat16});
      const auto call = [&](const torch::Tensor& input) { return layers->forward(input); };
      const auto y = is_checkpointed ? remat::checkpoint(call, x) : call(x);
      loss = y.to(torch::kFloat).pow(2).mean();
    }
    scaler.scale(loss).backward();
    scaler.clip_grad_norm_(optimizer, 1.0);
    scaler.step(optimizer);
    scaler.update();
  }
  return {layers->parameters()[0].detach(), scaler.get_scale(), meter.peak()};
}

}  // namespace

int main() {
  const Outcome plain = train(false);
  const Outcome checkpointed = train(true);
  const bool is_equal =
      torch::equal(plain.weight, checkpointed.weight) && plain.scale == checkpointed.scale;
  std::cout << "plain         peak " << plain.peak << '\n'
            << "checkpointed  peak " << checkpointed.peak << '\n'
            << "weights " << (is_equal ? "equal, bit for bit" : "DIFFER") << ", scale "
            << checkpointed.scale << '\n';
  return is_equal && checkpointed.peak < plain.peak ? 0 : 1;
}
