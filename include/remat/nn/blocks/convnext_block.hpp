// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"

namespace remat::blocks {

/// A depthwise 7×7 convolution and a two-layer perceptron at each place, scaled channel by channel,
/// around which the input is added.
///
/// The perceptron works with the channels last, which is where linear layers have them.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), figure 4, and appendix A.1 for the
/// scale; torchvision's `CNBlock`
class ConvNeXtBlockImpl : public torch::nn::Cloneable<ConvNeXtBlockImpl> {
 public:
  static constexpr double kLayerNormEps = 1e-6;       // torchvision's; LibTorch's own is 1e-5
  static constexpr double kInitialLayerScale = 1e-6;  // a new block is nearly the identity

  /// @param drop_rate  with which probability stochastic depth drops a sample's branch
  ConvNeXtBlockImpl(std::int64_t channels, double drop_rate)
      : channels_(channels), drop_rate_(drop_rate) {
    reset();
  }

  void reset() override {
    const auto depthwise =
        torch::nn::Conv2dOptions(channels_, channels_, 7).padding(3).groups(channels_);
    block = register_module(
        "block",
        torch::nn::Sequential(
            torch::nn::Conv2d(depthwise), torch::nn::Functional(channels_last),
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels_}).eps(kLayerNormEps)),
            torch::nn::Linear(channels_, 4 * channels_), torch::nn::Functional(activations::gelu),
            torch::nn::Linear(4 * channels_, channels_), torch::nn::Functional(channels_first)));
    layer_scale =
        register_parameter("layer_scale", at::full({channels_, 1, 1}, kInitialLayerScale));
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(drop_rate_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = layer_scale * block->forward(x_nchw);  // (N, channels, h, w)
    y = stochastic_depth->forward(y);
    return y += x_nchw;
  }

  torch::nn::Sequential block{nullptr};
  torch::Tensor layer_scale;
  StochasticDepth stochastic_depth{nullptr};

 private:
  static torch::Tensor channels_last(const torch::Tensor& x_nchw) {
    return x_nchw.permute({0, 2, 3, 1});
  }
  static torch::Tensor channels_first(const torch::Tensor& x_nhwc) {
    return x_nhwc.permute({0, 3, 1, 2});
  }

  std::int64_t channels_;
  double drop_rate_;
};
TORCH_MODULE(ConvNeXtBlock);

}  // namespace remat::blocks
