// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Draws `weights` from a normal distribution that ends at -2 and 2.
///
/// The bounds are absolute, as torchvision uses them: at the usual deviation of 0.02 they are a
/// hundred deviations away and cut off nothing. What lies outside is drawn again, as newer PyTorch
/// does: the inverse error function, which it used before, gives minus infinity once in 2^24 draws
/// of single precision, and clamped to -2 that is a weight a hundred times too large.
///
/// @param mean  inside the bounds
/// @par Source  `torch.nn.init.trunc_normal_` of PyTorch 2.13, whose random numbers it draws;
/// LibTorch has none
inline void trunc_normal_(torch::Tensor weights, double mean, double standard_deviation) {
  constexpr double kBound = 2;
  const torch::NoGradGuard no_grad;
  weights.normal_(mean, standard_deviation);
  while (true) {
    const torch::Tensor is_outside = weights.abs() > kBound;
    if (!is_outside.any().item<bool>()) return;
    weights.copy_(
        at::where(is_outside, at::empty_like(weights).normal_(mean, standard_deviation), weights));
  }
}

}  // namespace remat::blocks
