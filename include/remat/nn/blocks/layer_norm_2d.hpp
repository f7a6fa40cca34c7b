// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Normalises a map over its channels, at each place by itself.
///
/// `torch::nn::LayerNorm` normalises the last dimensions, and the channels of a map are none of
/// them. The result is laid out in memory with the channels last.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.5; torchvision's
/// `LayerNorm2d`
class LayerNorm2dImpl : public torch::nn::Cloneable<LayerNorm2dImpl> {
 public:
  /// @param eps  added to the variance; torchvision's for ConvNeXt
  explicit LayerNorm2dImpl(std::int64_t channels, double eps = 1e-6)
      : channels_(channels), eps_(eps) {
    reset();
  }

  void reset() override {
    weight = register_parameter("weight", at::ones({channels_}));
    bias = register_parameter("bias", at::zeros({channels_}));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor y_nhwc =
        at::layer_norm(x_nchw.permute({0, 2, 3, 1}), {channels_}, weight, bias, eps_);
    return y_nhwc.permute({0, 3, 1, 2});  // (N, channels, h, w)
  }

  /// Returns what is added to the variance.
  double eps() const { return eps_; }

  torch::Tensor weight, bias;

 private:
  std::int64_t channels_;
  double eps_;
};
TORCH_MODULE(LayerNorm2d);

}  // namespace remat::blocks
