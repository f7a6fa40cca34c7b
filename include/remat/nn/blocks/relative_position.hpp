// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Height and width of a window of tokens, or of a map of them.
struct WindowSize {
  std::int64_t height = 0;
  std::int64_t width = 0;

  /// Returns how many tokens there are.
  std::int64_t area() const { return height * width; }
  /// Returns how many distances there are between two tokens, which is how many rows a table of
  /// biases has.
  std::int64_t distance_count() const { return (2 * height - 1) * (2 * width - 1); }

  friend bool operator==(const WindowSize&, const WindowSize&) = default;
};

/// Returns for each pair of tokens of a window the row of their distance in a table of biases.
///
/// @return  (area, area), 64-bit integers; Swin registers it flattened, MaxViT as it is
/// @par Source  torchvision's `define_relative_position_index` and
/// `_get_relative_position_index`
inline torch::Tensor relative_position_index(WindowSize window) {
  const auto distances = [&](std::int64_t first, std::int64_t second, std::int64_t length) {
    const torch::Tensor place = at::arange(length, at::device(at::kCPU).dtype(at::kLong));
    const torch::Tensor along =
        place.view({first, second}).expand({window.height, window.width}).reshape({-1});  // (area)
    return along.unsqueeze(1) - along.unsqueeze(0) + (length - 1);  // (area, area), from 0 on
  };
  const torch::Tensor down = distances(window.height, 1, window.height);
  const torch::Tensor right = distances(1, window.width, window.width);
  return down * (2 * window.width - 1) + right;
}

/// Returns what is to be added to the products of queries and keys inside a window.
///
/// @param table  (window.distance_count(), heads), learned
/// @param index  as `relative_position_index` gives it, of any shape; made again if it is of
/// another type, because LibTorch's `Module::to(dtype)` converts buffers of integers too, and half
/// precision cannot count far
/// @return  (1, heads, area, area), contiguous
/// @par Source  Liu et al., Swin Transformer (2021), equation 4; torchvision's
/// `get_relative_position_bias` and `get_relative_positional_bias`
inline torch::Tensor relative_position_bias(const torch::Tensor& table, const torch::Tensor& index,
                                            WindowSize window) {
  const torch::Tensor rows = index.scalar_type() == at::kLong
                                 ? index.reshape({-1})
                                 : relative_position_index(window).reshape({-1}).to(table.device());
  return table.index({rows})
      .view({window.area(), window.area(), -1})
      .permute({2, 0, 1})
      .contiguous()
      .unsqueeze(0);
}

}  // namespace remat::blocks
