// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "remat/backbones/family.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/conv_norm_act.hpp"
#include "remat/nn/blocks/fan_out_init.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"

namespace remat {

/// One row of the paper's table 2: `blocks` inverted residuals, of which the first has the stride.
struct MobileNetV2Stage {
  std::int64_t expansion;  ///< the paper's t: how many times wider a block is inside
  std::int64_t width;      ///< c: channels of the result
  std::int64_t blocks;     ///< n
  std::int64_t stride;     ///< s
};

/// A MobileNetV2; there is one.
struct MobileNetV2Design {
  std::string_view name;
  std::int64_t stem_width;  ///< channels of the first convolution
  std::array<MobileNetV2Stage, 7> stages;
  std::int64_t head_width;  ///< channels of the last convolution
};

inline constexpr std::array kMobileNetV2Designs{MobileNetV2Design{
    "mobilenet_v2",
    /*stem_width=*/32,
    // t, c, n, s
    {{{1, 16, 1, 1},
      {6, 24, 2, 2},
      {6, 32, 3, 2},
      {6, 64, 4, 2},
      {6, 96, 3, 1},
      {6, 160, 3, 2},
      {6, 320, 1, 1}}},
    /*head_width=*/1280,
}};
inline constexpr double kMobileNetV2Dropout = 0.2;  // torchvision's, in front of the classifier
inline constexpr double kMobileNetV2LinearDeviation = 0.01;  // torchvision's, of initial weights

namespace blocks {

/// An inverted residual: widen by a 1×1 convolution, mix places by a depthwise one, narrow by a
/// linear 1×1 one; around it the input is added where shapes allow.
///
/// @par Source  Sandler et al., MobileNetV2 (2018), table 1 and figure 4; torchvision's
/// `InvertedResidual`
class MobileNetV2BlockImpl : public torch::nn::Cloneable<MobileNetV2BlockImpl> {
 public:
  MobileNetV2BlockImpl(std::int64_t in, std::int64_t out, std::int64_t expansion,
                       std::int64_t stride)
      : in_(in), out_(out), expansion_(expansion), stride_(stride) {
    reset();
  }

  void reset() override {
    const std::int64_t wide = in_ * expansion_;
    conv = register_module("conv", torch::nn::Sequential());
    if (wide != in_)
      conv->push_back(
          ConvNormAct(padded_convolution(in_, wide, 1), BatchNormConstants{}, activations::relu6_));
    conv->push_back(ConvNormAct(padded_convolution(wide, wide, 3).stride(stride_).groups(wide),
                                BatchNormConstants{}, activations::relu6_));
    conv->push_back(torch::nn::Conv2d(padded_convolution(wide, out_, 1)));
    conv->push_back(torch::nn::BatchNorm2d(out_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor y = conv->forward(x_nchw);  // (N, out, h / stride, w / stride)
    return stride_ == 1 && in_ == out_ ? x_nchw + y : y;
  }

  torch::nn::Sequential conv{nullptr};

 private:
  std::int64_t in_, out_, expansion_, stride_;
};
TORCH_MODULE(MobileNetV2Block);

}  // namespace blocks

/// The module behind `MobileNetV2`.
class MobileNetV2Impl : public FamilyBackbone<MobileNetV2Impl, MobileNetV2Design> {
 public:
  static constexpr std::string_view kFamily = "MobileNetV2";
  static constexpr std::span<const MobileNetV2Design> designs() { return kMobileNetV2Designs; }

  MobileNetV2Impl(const MobileNetV2Design& design, const BackboneOptions& options,
                  CheckpointedChain chain)
      : FamilyBackbone(design, design.head_width, options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    blocks::init_convolutions_by_fan_out(*features_);
    if (options.num_classes != 0) build_classifier();
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return classifier_->forward(std::move(pooled));
  }
  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.1."; }

 private:
  void build_features() {
    std::int64_t in = design().stem_width;
    append_feature(
        blocks::ConvNormAct(blocks::padded_convolution(options().in_channels, in, 3).stride(2),
                            blocks::BatchNormConstants{}, blocks::activations::relu6_));
    for (const MobileNetV2Stage& stage : design().stages)
      for (std::int64_t index = 0; index < stage.blocks; ++index) {
        append_feature(blocks::MobileNetV2Block(in, stage.width, stage.expansion,
                                                index == 0 ? stage.stride : 1));
        in = stage.width;
      }
    append_feature(blocks::ConvNormAct(blocks::padded_convolution(in, design().head_width, 1),
                                       blocks::BatchNormConstants{}, blocks::activations::relu6_));
  }

  void build_classifier() {
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Dropout(options().dropout.value_or(kMobileNetV2Dropout)),
                              torch::nn::Linear(design().head_width, options().num_classes)));
    blocks::init_linear_normal(*classifier_, kMobileNetV2LinearDeviation);
  }

  template <class Unit>
  void append_feature(const Unit& unit) {
    append("features_" + std::to_string(features_->size()), unit);
    features_->push_back(unit);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of inverted residuals for mobile processors; its units are the stem, each block and
/// the last convolution.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks (2018);
/// torchvision's `mobilenet_v2`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class MobileNetV2 : public BackboneHolder<MobileNetV2Impl, Policy> {
 public:
  using BackboneHolder<MobileNetV2Impl, Policy>::BackboneHolder;
  /// Builds the one network of the paper.
  ///
  /// @throws ArgumentError  for options that cannot be
  explicit MobileNetV2(const BackboneOptions& options = {})
      : BackboneHolder<MobileNetV2Impl, Policy>(kMobileNetV2Designs[0], options) {}
};

}  // namespace remat
