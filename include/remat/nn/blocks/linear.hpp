// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Applies a linear layer as one operation, which a keep policy then finds whole.
///
/// The layer's own forward adds the bias in a pass of its own, in place, where the input has more
/// than two dimensions; Python's, whose numbers are wanted, does not.
inline torch::Tensor linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace remat::blocks
