// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/conv_norm_act.hpp"
#include "remat/nn/blocks/rounded_width.hpp"
#include "remat/nn/blocks/squeeze_excitation.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"

namespace remat::blocks {

/// How the wide part of an `MBConv` is made.
enum class MBConvKind {
  kDepthwise,  ///< a 1×1 convolution widens, a depthwise one mixes places, squeeze-and-excitation
  kFused,      ///< one full convolution does both: more arithmetic, quicker where maps are large
};

/// What an `MBConv` is built from; meant for designated initialisers.
struct MBConvOptions {
  MBConvKind kind = MBConvKind::kDepthwise;
  std::int64_t in = 0;         ///< channels of the block's input
  std::int64_t out = 0;        ///< channels of its result
  std::int64_t expansion = 1;  ///< how many times wider it is inside
  std::int64_t kernel = 3;
  std::int64_t stride = 1;
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
  BatchNormConstants norm = {};

  /// Returns the width inside.
  std::int64_t wide() const { return rounded_width(static_cast<double>(in * expansion)); }
  /// Returns whether the input can be added to the result.
  bool has_shortcut() const { return stride == 1 && in == out; }
};

/// An inverted residual: a branch that is wide inside and narrow at its ends, where the input is
/// added.
///
/// The squeeze is a quarter of the block's *input*, not of the wide part that it scales.
///
/// @par Source  Tan and Le, EfficientNet (2019), section 4, and EfficientNetV2 (2021), figure 2;
/// torchvision's `MBConv` and `FusedMBConv`
class MBConvImpl : public torch::nn::Cloneable<MBConvImpl> {
 public:
  explicit MBConvImpl(const MBConvOptions& options) : options_(options) { reset(); }

  void reset() override {
    block = register_module(
        "block", options_.kind == MBConvKind::kFused ? fused_branch() : depthwise_branch());
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = block->forward(x_nchw);  // (N, out, h / stride, w / stride)
    if (!options_.has_shortcut()) return y;
    y = stochastic_depth->forward(y);
    return y += x_nchw;
  }

  /// Returns what this was built from.
  const MBConvOptions& options() const { return options_; }

  torch::nn::Sequential block{nullptr};
  StochasticDepth stochastic_depth{nullptr};

 private:
  torch::nn::Sequential depthwise_branch() const {
    const std::int64_t wide = options_.wide();
    torch::nn::Sequential branch;
    if (wide != options_.in) branch->push_back(activated(padded_convolution(options_.in, wide, 1)));
    branch->push_back(activated(
        padded_convolution(wide, wide, options_.kernel).stride(options_.stride).groups(wide)));
    branch->push_back(SqueezeExcitation(wide, std::max<std::int64_t>(1, options_.in / 4),
                                        activations::silu_, activations::sigmoid));
    branch->push_back(projection());
    return branch;
  }

  torch::nn::Sequential fused_branch() const {
    const std::int64_t wide = options_.wide();
    torch::nn::Sequential branch(
        activated(padded_convolution(options_.in, wide, options_.kernel).stride(options_.stride)));
    // Where nothing is widened, the full convolution has the right width already.
    if (wide != options_.in) branch->push_back(projection());
    return branch;
  }

  ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    return ConvNormAct(convolution, options_.norm, activations::silu_);
  }
  ConvNormAct projection() const {
    return ConvNormAct(padded_convolution(options_.wide(), options_.out, 1), options_.norm);
  }

  MBConvOptions options_;
};
TORCH_MODULE(MBConv);

}  // namespace remat::blocks
