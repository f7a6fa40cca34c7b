// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/checkpoint.hpp"
#include "remat/libtorch/random.hpp"
#include "remat/nn/blocks/self_attention.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>

namespace self_attention_test {
namespace {

/// Sums of float64 in another order.
constexpr double kTolerance = 1e-12;

torch::Tensor random_state() {
  return remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
}

/// LibTorch's module with the weights of `attention`.
torch::nn::MultiheadAttention peer_of(const remat::blocks::SelfAttention& attention,
                                      std::int64_t width, std::int64_t head_count) {
  torch::nn::MultiheadAttention peer(
      torch::nn::MultiheadAttentionOptions(width, head_count).dropout(attention->dropout()));
  peer->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  auto parameters = peer->named_parameters();
  for (const auto& item : attention->named_parameters()) parameters[item.key()].copy_(item.value());
  return peer;
}

torch::Tensor run_peer(torch::nn::MultiheadAttention& peer, const torch::Tensor& tokens_nlc) {
  const auto x = tokens_nlc.transpose(0, 1);
  return std::get<0>(peer->forward(x, x, x)).transpose(0, 1);
}

void randomise(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.normal_(0, 0.3);
}

}  // namespace

TEST_CASE("self-attention has the keys, numbers and gradients of LibTorch's multi-head attention") {
  torch::manual_seed(0);
  remat::blocks::SelfAttention attention(12, 3, /*dropout=*/0);
  attention->to(torch::kFloat64);
  randomise(*attention);
  auto peer = peer_of(attention, 12, 3);
  CHECK(attention->named_parameters().keys() == peer->named_parameters().keys());
  const auto x = torch::randn({2, 5, 12}, torch::kFloat64).requires_grad_();
  const auto slope = torch::randn({2, 5, 12}, torch::kFloat64);

  const auto y = attention->forward(x);
  const auto expected = run_peer(peer, x);

  CHECK(torch::allclose(y, expected, 0, kTolerance));
  const auto gradient = torch::autograd::grad({(y * slope).sum()}, {x, attention->in_proj_weight});
  const auto wanted = torch::autograd::grad({(expected * slope).sum()}, {x, peer->in_proj_weight});
  for (std::size_t i = 0; i < 2; ++i) CHECK(torch::allclose(gradient[i], wanted[i], 0, kTolerance));
}

TEST_CASE(
    "in training, dropout zeroes attention weights as LibTorch's module does from that seed") {
  torch::manual_seed(0);
  remat::blocks::SelfAttention attention(8, 2, /*dropout=*/0.5);
  attention->to(torch::kFloat64);
  randomise(*attention);
  auto peer = peer_of(attention, 8, 2);
  const auto x = torch::randn({3, 6, 8}, torch::kFloat64);

  torch::manual_seed(1);
  const auto y = attention->forward(x);
  const auto state = random_state();
  torch::manual_seed(1);
  const auto expected = run_peer(peer, x);

  CHECK(torch::allclose(y, expected, 0, kTolerance));
  CHECK(torch::equal(state, random_state()));
  attention->eval();
  CHECK_FALSE(torch::allclose(attention->forward(x), expected, 0, kTolerance));
  CHECK(torch::equal(state, random_state()));  // nothing drawn in evaluation
}

TEST_CASE("a recompute of attention drops the weights that forward dropped") {
  torch::manual_seed(0);
  remat::blocks::SelfAttention attention(8, 2, /*dropout=*/0.5);
  const auto x = torch::randn({3, 6, 8});
  const auto gradient_of = [&](bool is_checkpointed) {
    torch::manual_seed(1);
    const auto forward = [&](const torch::Tensor& input) {
      return attention->forward(input).square();
    };
    const auto y = is_checkpointed ? remat::checkpoint(forward, x) : forward(x);
    return torch::autograd::grad({y.sum()}, {attention->in_proj_weight})[0];
  };

  CHECK(torch::equal(gradient_of(false), gradient_of(true)));
}

TEST_CASE("self-attention starts as nn.MultiheadAttention does") {
  torch::manual_seed(0);
  remat::blocks::SelfAttention attention(192, 3, 0);

  const double bound = std::sqrt(6.0 / (192 + 3 * 192));
  const double largest = attention->in_proj_weight.abs().max().item<double>();
  CHECK(largest <= bound);
  CHECK(largest > 0.99 * bound);
  CHECK(torch::equal(attention->in_proj_bias, torch::zeros({576})));
  CHECK(torch::equal(attention->out_proj->bias, torch::zeros({192})));
}

TEST_CASE("a width that the heads do not divide is refused with both numbers") {
  std::string message;
  try {
    remat::blocks::SelfAttention attention(10, 4, 0);
  } catch (const remat::ArgumentError& error) {
    message = error.what();
  }

  CHECK(message.find("[remat.attention.heads]") == 0);
  CHECK(message.find("10") != std::string::npos);
  CHECK(message.find("4 heads") != std::string::npos);
}

}  // namespace self_attention_test
