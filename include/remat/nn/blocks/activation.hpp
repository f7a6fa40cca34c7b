// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// A function of one tensor, element by element; null stands for none.
///
/// The type holds no state, so that a block can copy and clone it.
using Activation = torch::Tensor (*)(torch::Tensor);

/// The activations of the backbones. A name that ends in `_` writes into its argument, as
/// LibTorch's: which of the two a network uses decides how much memory it needs, and is
/// torchvision's choice.
namespace activations {

/// Computes max(x, 0).
inline torch::Tensor relu(torch::Tensor x) { return x.relu(); }
/// Computes max(x, 0), in place.
inline torch::Tensor relu_(torch::Tensor x) { return x.relu_(); }
/// Computes min(max(x, 0), 6), in place.
inline torch::Tensor relu6_(torch::Tensor x) { return at::relu6_(x); }
/// Computes x * sigmoid(x).
inline torch::Tensor silu(torch::Tensor x) { return at::silu(x); }
/// Computes x * sigmoid(x), in place.
inline torch::Tensor silu_(torch::Tensor x) { return at::silu_(x); }
/// Computes x times the normal distribution function of x.
inline torch::Tensor gelu(torch::Tensor x) { return at::gelu(x); }
/// Computes x * hardsigmoid(x), in place.
inline torch::Tensor hardswish_(torch::Tensor x) { return at::hardswish_(x); }
/// Computes 1 / (1 + exp(-x)).
inline torch::Tensor sigmoid(torch::Tensor x) { return x.sigmoid(); }
/// Computes min(max(x + 3, 0), 6) / 6.
inline torch::Tensor hardsigmoid(torch::Tensor x) { return at::hardsigmoid(x); }

}  // namespace activations

}  // namespace remat::blocks
