// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <vector>

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Multiplies the last dimension of `x` by a matrix and adds a bias, as one operation, which a keep
/// policy then finds whole.
///
/// The forward of LibTorch's linear layer adds the bias in a pass of its own, in place, where the
/// input has more than two dimensions, and so does LibTorch 1.13 where it has more than three.
///
/// @param weight  (out, in)
/// @param bias    (out), or undefined
inline torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                            const torch::Tensor& bias) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return at::linear(x.reshape({-1, x.size(-1)}), weight, bias).view(shape);
}

/// Applies a linear layer so.
inline torch::Tensor linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return linear(x, layer->weight, layer->bias);
}

}  // namespace remat::blocks
