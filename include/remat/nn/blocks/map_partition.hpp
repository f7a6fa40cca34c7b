// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Cuts a map into windows of neighbours.
///
/// @param x_nchw  height and width are multiples of `size`
/// @return  (N, h / size * w / size, size * size, C): windows row by row, and in each its places
/// row by row
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022), figure 3, block attention
inline torch::Tensor partition_windows(const torch::Tensor& x_nchw, std::int64_t size) {
  const std::int64_t rows = x_nchw.size(2) / size;
  const std::int64_t columns = x_nchw.size(3) / size;
  return x_nchw.reshape({x_nchw.size(0), x_nchw.size(1), rows, size, columns, size})
      .permute({0, 2, 4, 3, 5, 1})  // (N, rows, columns, size, size, C)
      .reshape({x_nchw.size(0), rows * columns, size * size, x_nchw.size(1)});
}

/// Puts the windows of `partition_windows` together again.
///
/// @return  (N, C, height, width)
inline torch::Tensor join_windows(const torch::Tensor& windows, std::int64_t size,
                                  std::int64_t height, std::int64_t width) {
  const std::int64_t batch = windows.size(0);
  const std::int64_t channels = windows.size(3);
  return windows.reshape({batch, height / size, width / size, size, size, channels})
      .permute({0, 5, 1, 3, 2, 4})  // (N, C, rows, size, columns, size)
      .reshape({batch, channels, height, width});
}

/// Shares a map out to groups that each see all of it: a group has `size * size` places in a grid
/// over the whole map, and the next group the places beside them.
///
/// @param x_nchw  height and width are multiples of `size`
/// @return  (N, h / size * w / size, size * size, C)
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022), figure 3, grid attention
inline torch::Tensor partition_grid(const torch::Tensor& x_nchw, std::int64_t size) {
  const std::int64_t down = x_nchw.size(2) / size;
  const std::int64_t right = x_nchw.size(3) / size;
  return x_nchw.reshape({x_nchw.size(0), x_nchw.size(1), size, down, size, right})
      .permute({0, 3, 5, 2, 4, 1})  // (N, down, right, size, size, C)
      .reshape({x_nchw.size(0), down * right, size * size, x_nchw.size(1)});
}

/// Puts the groups of `partition_grid` together again.
///
/// @return  (N, C, height, width)
inline torch::Tensor join_grid(const torch::Tensor& groups, std::int64_t size, std::int64_t height,
                               std::int64_t width) {
  const std::int64_t batch = groups.size(0);
  const std::int64_t channels = groups.size(3);
  return groups.reshape({batch, height / size, width / size, size, size, channels})
      .permute({0, 5, 3, 1, 4, 2})  // (N, C, size, down, size, right)
      .reshape({batch, channels, height, width});
}

}  // namespace remat::blocks
