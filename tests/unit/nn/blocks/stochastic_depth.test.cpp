// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/checkpoint.hpp"
#include "remat/libtorch/random.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"

#include <limits>
#include <string>

namespace stochastic_depth_test {
namespace {

torch::Tensor random_state() {
  return remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
}

}  // namespace

TEST_CASE("stochastic depth at one half zeroes or doubles whole samples, about half of each") {
  torch::manual_seed(0);
  const auto ones = torch::ones({1000, 2, 2, 2});

  const auto y = remat::blocks::stochastic_depth(ones, 0.5, /*is_training=*/true);

  const auto rows = y.flatten(1);                     // (1000, 8)
  const auto first = rows.select(1, 0).unsqueeze(1);  // (1000, 1)
  CHECK((rows == first).all().item<bool>());
  CHECK(((first == 0) | (first == 2)).all().item<bool>());
  const auto survivors = (first == 2).sum().item<std::int64_t>();
  CHECK(survivors > 400);
  CHECK(survivors < 600);
}

TEST_CASE("stochastic depth draws one number for each sample, with the rate to survive") {
  const auto x = torch::rand({16, 3, 2, 2}, torch::kFloat64);
  torch::manual_seed(1);
  const auto kept = torch::empty({16, 1, 1, 1}, torch::kFloat64).bernoulli_(0.8);
  const auto state = random_state();

  torch::manual_seed(1);
  const auto y = remat::blocks::stochastic_depth(x, 1.0 - 0.8, /*is_training=*/true);

  CHECK(torch::equal(y, x * kept.div(1.0 - (1.0 - 0.8))));
  CHECK(torch::equal(random_state(), state));
}

TEST_CASE("stochastic depth in evaluation, or at rate 0, returns its argument and draws nothing") {
  const auto x = torch::rand({4, 3});
  const auto before = random_state();

  const auto evaluated = remat::blocks::stochastic_depth(x, 0.5, /*is_training=*/false);
  const auto at_rate_zero = remat::blocks::stochastic_depth(x, 0.0, /*is_training=*/true);

  CHECK(evaluated.is_same(x));
  CHECK(at_rate_zero.is_same(x));
  CHECK(torch::equal(random_state(), before));
}

TEST_CASE("stochastic depth at rate 1 gives zeros and no NaN") {
  const auto y = remat::blocks::stochastic_depth(torch::ones({4, 3}), 1.0, /*is_training=*/true);

  CHECK(torch::equal(y, torch::zeros({4, 3})));
}

TEST_CASE("stochastic depth keeps the type of half precision") {
  const auto x = torch::ones({4, 3}, torch::kBFloat16);

  CHECK(remat::blocks::stochastic_depth(x, 0.5, true).dtype() == torch::kBFloat16);
}

TEST_CASE("the module of stochastic depth follows train and eval, and its clone has its rate") {
  remat::blocks::StochasticDepth layer(0.25);
  const auto x = torch::ones({64, 2});

  CHECK_FALSE(layer->forward(x).is_same(x));
  layer->eval();
  CHECK(layer->forward(x).is_same(x));
  const auto copy = std::dynamic_pointer_cast<remat::blocks::StochasticDepthImpl>(layer->clone());
  REQUIRE(copy);
  CHECK(copy->rate() == 0.25);
  CHECK_FALSE(copy->is_training());
}

TEST_CASE("a rate of stochastic depth that is no probability is refused by name and value") {
  for (const double rate : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    CAPTURE(rate);
    std::string message;
    try {
      remat::blocks::StochasticDepth layer(rate);
    } catch (const remat::ArgumentError& error) {
      message = error.what();
    }
    CHECK(message.find("[remat.stochastic_depth.rate]") == 0);
    CHECK(message.find(std::to_string(rate)) != std::string::npos);
  }
}

TEST_CASE("a recompute drops the samples that forward dropped") {
  const auto weight = torch::rand({3, 3}, torch::requires_grad());
  const auto x = torch::rand({32, 3});
  remat::blocks::StochasticDepth layer(0.5);
  const auto branch = [&](const torch::Tensor& input) {
    return layer->forward(input.matmul(weight).sigmoid()).square();
  };
  torch::manual_seed(2);
  const auto plain = torch::autograd::grad({branch(x).sum()}, {weight})[0];

  torch::manual_seed(2);
  const auto y = remat::checkpoint(branch, x);
  const auto after_forward = random_state();
  const auto checkpointed = torch::autograd::grad({y.sum()}, {weight})[0];

  CHECK(torch::equal(plain, checkpointed));
  CHECK(torch::equal(random_state(), after_forward));
}

}  // namespace stochastic_depth_test
