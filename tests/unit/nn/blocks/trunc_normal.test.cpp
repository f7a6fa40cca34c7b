// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/trunc_normal.hpp"

namespace trunc_normal_test {

TEST_CASE("the truncated normal distribution ends at -2 and 2 and keeps its shape in between") {
  torch::manual_seed(0);
  auto weights = torch::empty({200, 500});

  remat::blocks::trunc_normal_(weights, /*mean=*/0, /*standard_deviation=*/1);

  CHECK(weights.abs().max().item<double>() <= 2.0);
  CHECK(weights.abs().max().item<double>() > 1.999);
  // The deviation of a standard normal distribution that is cut at two deviations.
  CHECK(weights.std().item<double>() == doctest::Approx(0.8796).epsilon(0.01));
  CHECK(weights.mean().item<double>() == doctest::Approx(0).epsilon(0.01));
}

TEST_CASE("where the bounds are far away the truncated normal distribution is the normal one") {
  torch::manual_seed(0);
  const auto normal = torch::empty({100, 100}).normal_(0.5, 0.02);
  torch::manual_seed(0);
  auto weights = torch::empty({100, 100});

  remat::blocks::trunc_normal_(weights, 0.5, 0.02);

  CHECK(torch::equal(weights, normal));
}

TEST_CASE("a truncated normal distribution is drawn into a parameter, without history") {
  auto weights = torch::ones({8, 8}, torch::requires_grad());

  remat::blocks::trunc_normal_(weights, 0, 1);

  CHECK(weights.is_leaf());
  CHECK_FALSE(torch::equal(weights, torch::ones({8, 8})));
}

}  // namespace trunc_normal_test
