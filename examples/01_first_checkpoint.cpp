// SPDX-License-Identifier: MIT
//
// One function, checkpointed: the same loss and gradients, less memory between forward and
// backward.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

namespace {

struct Outcome {
  torch::Tensor loss, gradient;
  remat::Bytes peak;
};

/// Three wide layers, whose results plain autograd would hold until backward.
torch::Tensor layers(const torch::Tensor& x, const torch::Tensor& weight) {
  torch::Tensor y = x;
  for (int i = 0; i < 3; ++i) y = torch::tanh(torch::matmul(y, weight));
  return y;
}

Outcome step(bool is_checkpointed) {
  torch::manual_seed(0);
  const auto x = torch::randn({4096, 128});
  auto weight = (torch::randn({128, 128}) / 12).requires_grad_();
  const remat::MemoryMeter meter;

  // The lambda reads `weight` from outside; its gradient comes out right all the same.
  const auto call = [&](const torch::Tensor& input) { return layers(input, weight); };
  const auto y = is_checkpointed ? remat::checkpoint(call, x) : call(x);
  const auto loss = y.pow(2).mean();
  loss.backward();

  return {loss.detach(), weight.grad(), meter.peak()};
}

}  // namespace

int main() {
  const Outcome plain = step(false);
  const Outcome checkpointed = step(true);

  const bool is_equal = torch::equal(plain.loss, checkpointed.loss) &&
                        torch::equal(plain.gradient, checkpointed.gradient);
  std::cout << "plain         peak " << plain.peak << '\n'
            << "checkpointed  peak " << checkpointed.peak << '\n'
            << "loss and gradient " << (is_equal ? "equal, bit for bit" : "DIFFER") << '\n';
  return is_equal && checkpointed.peak < plain.peak ? 0 : 1;
}
