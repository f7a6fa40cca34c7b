// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/libtorch/random.hpp"
#include "remat/nn/blocks/window_attention.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace window_attention_test {
namespace {

using remat::blocks::ShiftedWindowAttention;
using remat::blocks::WindowAttentionOptions;
using remat::blocks::WindowSize;

/// Sums of float64 in another order, and e^-100 in place of nothing.
constexpr double kTolerance = 1e-12;

ShiftedWindowAttention make(const WindowAttentionOptions& options) {
  ShiftedWindowAttention attention(options);
  attention->to(torch::kFloat64);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : attention->parameters()) parameter.normal_(0, 0.5);
  return attention;
}

/// The definition, token by token: one sees those of its window that no shift has brought there.
torch::Tensor by_definition(ShiftedWindowAttention& attention, const torch::Tensor& map,
                            WindowSize shift) {
  const WindowAttentionOptions& options = attention->options();
  const WindowSize window = options.window;
  const std::int64_t height = (map.size(1) + window.height - 1) / window.height * window.height;
  const std::int64_t width = (map.size(2) + window.width - 1) / window.width * window.width;
  auto padded = torch::zeros({height, width, options.width}, torch::kFloat64);
  padded.slice(0, 0, map.size(1)).slice(1, 0, map.size(2)).copy_(map[0]);
  const std::int64_t depth = options.width / options.head_count;
  const auto parts = attention->qkv->forward(padded.view({height * width, options.width}))
                         .view({height * width, 3, options.head_count, depth});
  const auto window_row = [&](std::int64_t y) {
    return (y + height - shift.height) % height / window.height;
  };
  const auto window_column = [&](std::int64_t x) {
    return (x + width - shift.width) % width / window.width;
  };

  auto result = torch::zeros({map.size(1), map.size(2), options.width}, torch::kFloat64);
  for (std::int64_t token = 0; token < height * width; ++token) {
    const std::int64_t y = token / width, x = token % width;
    if (y >= map.size(1) || x >= map.size(2)) continue;
    std::vector<std::int64_t> seen, bias_rows;
    for (std::int64_t other = 0; other < height * width; ++other) {
      const std::int64_t other_y = other / width, other_x = other % width;
      const bool is_in_window =
          window_row(y) == window_row(other_y) && window_column(x) == window_column(other_x);
      const bool is_neighbour = (y < shift.height) == (other_y < shift.height) &&
                                (x < shift.width) == (other_x < shift.width);
      if (!is_in_window || !is_neighbour) continue;
      seen.push_back(other);
      bias_rows.push_back((y - other_y + window.height - 1) * (2 * window.width - 1) + x - other_x +
                          window.width - 1);
    }
    const auto others = torch::tensor(seen);
    const auto biases =
        attention->relative_position_bias_table.index_select(0, torch::tensor(bias_rows));
    const auto query = parts[token][0];                              // (heads, depth)
    const auto keys = parts.select(1, 1).index_select(0, others);    // (seen, heads, depth)
    const auto values = parts.select(1, 2).index_select(0, others);  // (seen, heads, depth)
    const auto scores = (keys * query).sum(-1) / std::sqrt(static_cast<double>(depth)) + biases;
    const auto mixed = (scores.softmax(0).unsqueeze(-1) * values).sum(0);  // (heads, depth)
    result[y][x] = attention->proj->forward(mixed.flatten());
  }
  return result.unsqueeze(0);
}

}  // namespace

// microsoft/Swin-Transformer#249, huggingface/pytorch-image-models#1138: sizes that are no
// multiple.
TEST_CASE("window attention is what its definition says, shifted and not, at any size of map") {
  torch::manual_seed(0);
  const torch::NoGradGuard no_grad;
  for (const WindowSize map : {WindowSize{6, 8}, WindowSize{5, 9}, WindowSize{7, 7},
                               WindowSize{3, 4}, WindowSize{2, 9}, WindowSize{7, 3}})
    for (const WindowSize shift : {WindowSize{0, 0}, WindowSize{1, 2}}) {
      CAPTURE(map.height);
      CAPTURE(map.width);
      CAPTURE(shift.height);
      auto attention = make({.width = 6, .head_count = 2, .window = {3, 4}, .shift = shift});
      const auto x = torch::randn({1, map.height, map.width, 6}, torch::kFloat64);

      const auto y = attention->forward(x);

      // A window that covers the padded map leaves nothing to shift.
      const WindowSize effective = {map.height > 3 ? shift.height : 0,
                                    map.width > 4 ? shift.width : 0};
      CHECK(torch::allclose(y, by_definition(attention, x, effective), 0, kTolerance));
    }
}

TEST_CASE("a shift changes the result, and a window over the whole map turns it off") {
  torch::manual_seed(0);
  auto shifted = make({.width = 4, .head_count = 1, .window = {4, 4}, .shift = {2, 2}});
  auto unshifted = make({.width = 4, .head_count = 1, .window = {4, 4}});
  {
    const torch::NoGradGuard no_grad;
    auto parameters = unshifted->named_parameters();
    for (const auto& item : shifted->named_parameters()) parameters[item.key()].copy_(item.value());
  }
  const auto large = torch::randn({1, 8, 8, 4}, torch::kFloat64);
  const auto small = torch::randn({1, 3, 4, 4}, torch::kFloat64);

  CHECK_FALSE(torch::allclose(shifted->forward(large), unshifted->forward(large)));
  CHECK(torch::equal(shifted->forward(small), unshifted->forward(small)));
}

TEST_CASE("windows and maps are each other's inverse") {
  const auto map = torch::arange(2 * 4 * 6 * 3).view({2, 4, 6, 3});

  const auto windows = remat::blocks::to_windows(map, {2, 3});

  CHECK(windows.sizes() == torch::IntArrayRef({8, 6, 3}));
  CHECK(torch::equal(windows[1], map[0].slice(0, 0, 2).slice(1, 3, 6).reshape({6, 3})));
  CHECK(torch::equal(remat::blocks::from_windows(windows, {2, 3}, {4, 6}), map));
}

TEST_CASE("in training, window attention drops attention weights first and then results") {
  torch::manual_seed(0);
  auto attention = make(
      {.width = 4, .head_count = 2, .window = {2, 2}, .dropout = 0.25, .attention_dropout = 0.5});
  const auto x = torch::randn({2, 4, 4, 4}, torch::kFloat64);
  const auto state = [] {
    return remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
  };

  torch::manual_seed(1);
  const auto y = attention->forward(x);
  const auto drawn = state();
  torch::manual_seed(1);
  torch::dropout(torch::ones({8, 2, 4, 4}, torch::kFloat64), 0.5, true);
  const auto kept = torch::dropout(torch::ones({8, 4, 4}, torch::kFloat64), 0.25, true) > 0;

  CHECK(torch::equal(drawn, state()));
  CHECK(torch::equal(y != 0, remat::blocks::from_windows(kept, {2, 2}, {4, 4})));
  attention->eval();
  attention->forward(x);
  CHECK(torch::equal(drawn, state()));
}

TEST_CASE("window attention has torchvision's keys, and biases from a narrow normal distribution") {
  torch::manual_seed(0);
  const ShiftedWindowAttention attention(
      WindowAttentionOptions{.width = 96, .head_count = 24, .window = {7, 7}});

  CHECK(attention->named_parameters().keys() ==
        std::vector<std::string>{"relative_position_bias_table", "qkv.weight", "qkv.bias",
                                 "proj.weight", "proj.bias"});
  CHECK(attention->named_buffers().keys() == std::vector<std::string>{"relative_position_index"});
  CHECK(attention->relative_position_index.sizes() == torch::IntArrayRef({2401}));
  CHECK(attention->relative_position_bias_table.std().item<double>() ==
        doctest::Approx(0.02).epsilon(0.05));
}

TEST_CASE("a width that the heads of windows do not divide is refused with both numbers") {
  std::string message;
  try {
    ShiftedWindowAttention attention(
        WindowAttentionOptions{.width = 10, .head_count = 4, .window = {2, 2}});
  } catch (const remat::ArgumentError& error) {
    message = error.what();
  }

  CHECK(message.find("[remat.attention.heads]") == 0);
  CHECK(message.find("10") != std::string::npos);
  CHECK(message.find("4 heads") != std::string::npos);
}

}  // namespace window_attention_test
