// SPDX-License-Identifier: MIT
//
// Dropout and stochastic depth inside checkpointed layers: what is recomputed draws the numbers of
// forward again, and the generator goes on as if nothing had happened.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>
#include <utility>
#include <vector>

namespace {

/// A residual layer with dropout, left out as a whole for one row in five.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(std::int64_t width)
      : linear(register_module("linear", torch::nn::Linear(width, width))),
        dropout(register_module("dropout", torch::nn::Dropout(0.5))),
        depth(register_module("depth", remat::blocks::StochasticDepth(0.2))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return x + depth(dropout(torch::gelu(linear(x))));
  }

  torch::nn::Linear linear;
  torch::nn::Dropout dropout;
  remat::blocks::StochasticDepth depth;
};
TORCH_MODULE(Layer);

/// What a step leaves: every gradient, and the next number of the generator.
std::vector<torch::Tensor> step(torch::nn::Module& net, const torch::Tensor& loss) {
  net.zero_grad();
  loss.backward();
  std::vector<torch::Tensor> left;
  for (const torch::Tensor& parameter : net.parameters()) left.push_back(parameter.grad().clone());
  left.push_back(torch::rand({1}));
  return left;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  remat::Checkpointed<remat::Sequential, remat::EachUnit> net;
  for (int layer = 0; layer < 6; ++layer) net->push_back(Layer(64));
  const auto x = torch::randn({32, 64});

  torch::manual_seed(1);
  const auto checkpointed = step(*net, net->forward(x).pow(2).mean());
  net->disable_gradient_checkpointing();
  torch::manual_seed(1);
  const auto plain = step(*net, net->forward(x).pow(2).mean());

  bool is_equal = true;
  for (std::size_t index = 0; index < plain.size(); ++index)
    is_equal = is_equal && torch::equal(plain[index], checkpointed[index]);
  std::cout << plain.size() - 1 << " gradients and the next random number are "
            << (is_equal ? "the same bits" : "not the same") << " with checkpointing and without\n";
  return is_equal ? 0 : 1;
}
