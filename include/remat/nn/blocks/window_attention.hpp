// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>

#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/linear.hpp"
#include "remat/nn/blocks/relative_position.hpp"
#include "remat/nn/blocks/trunc_normal.hpp"

namespace remat::blocks {

/// Cuts a map into windows that do not overlap.
///
/// @param map_nhwc  (N, H, W, C), H and W multiples of the window's
/// @return          (N * windows, window.area(), C), windows of a row one after the other
inline torch::Tensor to_windows(const torch::Tensor& map_nhwc, WindowSize window) {
  const std::int64_t rows = map_nhwc.size(1) / window.height;
  const std::int64_t columns = map_nhwc.size(2) / window.width;
  const std::int64_t channels = map_nhwc.size(3);
  return map_nhwc.view({map_nhwc.size(0), rows, window.height, columns, window.width, channels})
      .permute({0, 1, 3, 2, 4, 5})
      .reshape({map_nhwc.size(0) * rows * columns, window.area(), channels});
}

/// Puts the windows of `to_windows` together again.
///
/// @param map  size of the map
inline torch::Tensor from_windows(const torch::Tensor& windows, WindowSize window, WindowSize map) {
  const std::int64_t rows = map.height / window.height;
  const std::int64_t columns = map.width / window.width;
  return windows.view({-1, rows, columns, window.height, window.width, windows.size(2)})
      .permute({0, 1, 3, 2, 4, 5})
      .reshape({-1, map.height, map.width, windows.size(2)});
}

/// Returns what keeps tokens apart that only a cyclic shift has brought into one window: -100
/// between them, 0 elsewhere.
///
/// @param shift  by how many places the map was moved up and to the left
/// @return       (windows, window.area(), window.area())
/// @par Source  Liu et al., Swin Transformer (2021), figure 4
inline torch::Tensor shift_mask(WindowSize map, WindowSize window, WindowSize shift,
                                const torch::TensorOptions& options) {
  constexpr double kApart = -100;  // of softmax's exponent: e^-100 is nothing beside e^0
  const auto came_around = [&](std::int64_t length, std::int64_t places) {
    return (at::arange(length, options.dtype(at::kLong)) >= length - places).to(at::kLong);
  };
  // The map falls into four parts, whose borders lie inside the last windows.
  const torch::Tensor parts = 2 * came_around(map.height, shift.height).unsqueeze(1) +
                              came_around(map.width, shift.width);  // (H, W)
  const torch::Tensor windows =
      to_windows(parts.view({1, map.height, map.width, 1}), window);  // (windows, area, 1)
  return (windows != windows.transpose(1, 2)).to(options.dtype()) * kApart;
}

/// What a `ShiftedWindowAttention` is built from; meant for designated initialisers.
struct WindowAttentionOptions {
  std::int64_t width = 0;       ///< channels of a token
  std::int64_t head_count = 1;  ///< they divide the width
  WindowSize window = {};
  WindowSize shift = {};         ///< by how much windows are moved against the map; 0: not
  double dropout = 0;            ///< rate behind the projection
  double attention_dropout = 0;  ///< rate on the attention's weights
};

/// Self-attention inside windows, with a learned bias for each distance between two tokens.
///
/// Maps that are no multiples of the window are padded at the bottom and on the right, before the
/// shift, and cut to size again. Where one window covers the padded map, nothing is shifted.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.2; torchvision's
/// `ShiftedWindowAttention`
class ShiftedWindowAttentionImpl : public torch::nn::Cloneable<ShiftedWindowAttentionImpl> {
 public:
  explicit ShiftedWindowAttentionImpl(const WindowAttentionOptions& options) : options_(options) {
    require(options.head_count > 0 && options.width % options.head_count == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::ShiftedWindowAttention")
          .what("the width is " + std::to_string(options.width) + " and there are " +
                std::to_string(options.head_count) +
                " heads, a width that the heads divide was expected");
    });
    reset();
  }

  void reset() override {
    relative_position_bias_table =
        register_parameter("relative_position_bias_table",
                           at::zeros({options_.window.distance_count(), options_.head_count}));
    relative_position_index = register_buffer(
        "relative_position_index", blocks::relative_position_index(options_.window).flatten());
    qkv = register_module("qkv", torch::nn::Linear(options_.width, 3 * options_.width));
    proj = register_module("proj", torch::nn::Linear(options_.width, options_.width));
    trunc_normal_(relative_position_bias_table, /*mean=*/0, /*standard_deviation=*/0.02);
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const WindowSize map = {map_nhwc.size(1), map_nhwc.size(2)};
    const WindowSize padded = {rounded_up(map.height, options_.window.height),
                               rounded_up(map.width, options_.window.width)};
    const WindowSize shift = {options_.window.height < padded.height ? options_.shift.height : 0,
                              options_.window.width < padded.width ? options_.shift.width : 0};
    const bool is_shifted = shift != WindowSize{};

    torch::Tensor x = map_nhwc;
    if (padded != map)
      x = at::constant_pad_nd(x,
                              {0, 0, 0, padded.width - map.width, 0, padded.height - map.height});
    if (is_shifted) x = at::roll(x, {-shift.height, -shift.width}, {1, 2});
    x = to_windows(x, options_.window);  // (N * windows, area, C)
    x = attend(
        x, is_shifted ? shift_mask(padded, options_.window, shift, x.options()) : torch::Tensor());
    x = from_windows(x, options_.window, padded);
    if (is_shifted) x = at::roll(x, {shift.height, shift.width}, {1, 2});
    return x.slice(1, 0, map.height).slice(2, 0, map.width).contiguous();  // (N, H, W, C)
  }

  /// Returns what this was built from.
  const WindowAttentionOptions& options() const { return options_; }

  torch::Tensor relative_position_bias_table, relative_position_index;
  torch::nn::Linear qkv{nullptr}, proj{nullptr};

 private:
  static std::int64_t rounded_up(std::int64_t length, std::int64_t window) {
    return (length + window - 1) / window * window;
  }

  /// @param mask  undefined, or (windows, area, area)
  torch::Tensor attend(const torch::Tensor& windows, const torch::Tensor& mask) {
    torch::Tensor x = mix(windows, mask);
    x = linear(proj, x);
    return at::dropout(x, options_.dropout, is_training());  // (N * windows, area, C)
  }

  torch::Tensor mix(const torch::Tensor& windows, const torch::Tensor& mask) {
    const std::int64_t batch = windows.size(0), area = windows.size(1);
    const std::int64_t heads = options_.head_count, depth = options_.width / heads;
    const auto parts = linear(qkv, windows)
                           .view({batch, area, 3, heads, depth})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);  // query, key, value, each (N * windows, heads, area, depth)
    const torch::Tensor query = parts[0] * std::pow(static_cast<double>(depth), -0.5);
    torch::Tensor weights = query.matmul(parts[1].transpose(-2, -1)) +
                            relative_position_bias(relative_position_bias_table,
                                                   relative_position_index, options_.window);
    if (mask.defined())
      weights = (weights.view({-1, mask.size(0), heads, area, area}) + mask.unsqueeze(1))
                    .view({batch, heads, area, area});
    weights = at::dropout(weights.softmax(-1), options_.attention_dropout, is_training());
    return weights.matmul(parts[2]).transpose(1, 2).reshape({batch, area, options_.width});
  }

  WindowAttentionOptions options_;
};
TORCH_MODULE(ShiftedWindowAttention);

}  // namespace remat::blocks
