// SPDX-License-Identifier: MIT
#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

// The smallest program of a user; every way of consuming the library builds and runs it.
int main() {
  torch::manual_seed(0);
  auto image = torch::randn({4, 8}, torch::requires_grad());
  auto weight = torch::randn({8, 8}, torch::requires_grad());
  auto block = [&](torch::Tensor x) { return torch::relu(x.mm(weight)).mm(weight).sigmoid(); };

  auto plain = block(image);
  auto plain_gradients = torch::autograd::grad({plain.sum()}, {image, weight});
  auto checkpointed = remat::checkpoint(block, image);
  auto gradients = torch::autograd::grad({checkpointed.sum()}, {image, weight});

  const bool is_equal = torch::equal(plain, checkpointed) &&
                        torch::equal(plain_gradients[0], gradients[0]) &&
                        torch::equal(plain_gradients[1], gradients[1]);
  const auto status = remat::engine_status();
  std::cout << "remat " << REMAT_VERSION_MAJOR << '.' << REMAT_VERSION_MINOR << '.'
            << REMAT_VERSION_PATCH << ": engine " << (status.is_available ? "on" : "off")
            << ", gradients equal: " << (is_equal ? "yes" : "no") << '\n';
  return is_equal && status.is_available ? 0 : 1;
}
