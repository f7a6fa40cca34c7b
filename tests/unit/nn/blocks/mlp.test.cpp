// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/mlp.hpp"

#include <cmath>
#include <string>
#include <vector>

namespace mlp_test {

TEST_CASE("an MLP's linear layers are its children 0 and 3, started as torchvision's") {
  torch::manual_seed(0);
  remat::blocks::Mlp mlp(64, 256, 0.1);

  CHECK(mlp->named_parameters().keys() ==
        std::vector<std::string>{"0.weight", "0.bias", "3.weight", "3.bias"});
  const double bound = std::sqrt(6.0 / (64 + 256));
  for (const auto& linear : {mlp->widen, mlp->narrow}) {
    const double largest = linear->weight.abs().max().item<double>();
    CHECK(largest <= bound);
    CHECK(largest > 0.99 * bound);
    CHECK(linear->bias.abs().max().item<double>() < 1e-5);
    CHECK(linear->bias.abs().max().item<double>() > 1e-7);
  }
}

TEST_CASE("an MLP is linear, GELU, dropout, linear, dropout") {
  torch::manual_seed(0);
  remat::blocks::Mlp mlp(6, 24, 0.5);
  const auto x = torch::randn({2, 3, 6});

  torch::manual_seed(1);
  const auto y = mlp->forward(x);
  torch::manual_seed(1);
  const auto wide = torch::dropout(torch::gelu(mlp->widen->forward(x)), 0.5, true);
  const auto expected = torch::dropout(mlp->narrow->forward(wide), 0.5, true);

  CHECK(torch::equal(y, expected));
  mlp->eval();
  CHECK(torch::equal(mlp->forward(x), mlp->narrow->forward(torch::gelu(mlp->widen->forward(x)))));
}

}  // namespace mlp_test
