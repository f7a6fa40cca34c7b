// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Draws the weights of every convolution inside `module` from a normal distribution of variance
/// 2 / fan out, where the fan out is the kernel's area times the output channels, also of a grouped
/// convolution. Biases stay.
///
/// @par Source  He et al., Delving Deep into Rectifiers (2015), equation 14; torchvision's
/// convolutional networks
inline void init_convolutions_by_fan_out(torch::nn::Module& module) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* convolution = part->as<torch::nn::Conv2d>())
      torch::nn::init::kaiming_normal_(convolution->weight, /*a=*/0, torch::kFanOut, torch::kReLU);
}

/// Sets the biases of every convolution inside `module` to zero.
inline void zero_convolution_biases(torch::nn::Module& module) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* convolution = part->as<torch::nn::Conv2d>();
        convolution && convolution->bias.defined())
      torch::nn::init::zeros_(convolution->bias);
}

/// Draws the weights of every linear layer inside `module` from a normal distribution around 0 and
/// sets the biases to zero.
inline void init_linear_normal(torch::nn::Module& module, double standard_deviation) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* linear = part->as<torch::nn::Linear>()) {
      torch::nn::init::normal_(linear->weight, /*mean=*/0, standard_deviation);
      torch::nn::init::zeros_(linear->bias);
    }
}

}  // namespace remat::blocks
