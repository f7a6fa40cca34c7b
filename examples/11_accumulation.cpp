// SPDX-License-Identifier: MIT
//
// Accumulation: several small batches before each step train as one big batch, within rounding, as
// long as no layer mixes the samples of a batch. Checkpointing changes no bit of it.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <iostream>

namespace {

constexpr std::int64_t kBatch = 64;

/// Trains for three steps, each over `parts` batches; returns the first weight.
torch::Tensor train(std::int64_t parts, bool is_checkpointed) {
  torch::manual_seed(0);
  torch::nn::Sequential layers(torch::nn::Linear(32, 64), torch::nn::GELU(),
                               torch::nn::Linear(64, 64), torch::nn::Tanh(),
                               torch::nn::Linear(64, 10));
  torch::optim::SGD optimizer(layers->parameters(), torch::optim::SGDOptions(0.1));
  const auto images = torch::randn({kBatch, 32});
  const auto labels = torch::randint(10, {kBatch}, torch::kLong);
  const auto call = [&](const torch::Tensor& input) { return layers->forward(input); };

  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (std::int64_t part = 0; part < parts; ++part) {
      const auto x = images.chunk(parts)[static_cast<std::size_t>(part)];
      const auto y = is_checkpointed ? remat::checkpoint(call, x) : call(x);
      const auto target = labels.chunk(parts)[static_cast<std::size_t>(part)];
      // The mean over the big batch is the mean of the parts' means.
      (torch::cross_entropy_loss(y, target) / parts).backward();
    }
    optimizer.step();
  }
  return layers->parameters()[0].detach().clone();
}

}  // namespace

int main() {
  const auto big = train(1, false);
  const auto plain = train(4, false);
  const auto checkpointed = train(4, true);
  const bool is_equal = torch::equal(plain, checkpointed);
  const bool is_close = torch::allclose(big, checkpointed, 1e-5, 1e-6);
  std::cout << "4 batches accumulated, plain and checkpointed: "
            << (is_equal ? "equal, bit for bit" : "DIFFERENT") << '\n'
            << "one big batch: " << (is_close ? "the same within rounding" : "DIFFERENT") << '\n';
  return is_equal && is_close ? 0 : 1;
}
