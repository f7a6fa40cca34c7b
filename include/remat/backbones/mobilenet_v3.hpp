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
#include "remat/nn/blocks/rounded_width.hpp"
#include "remat/nn/blocks/squeeze_excitation.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"

namespace remat {

/// The nonlinearities of a MobileNetV3, named as in the paper's tables: ReLU, hard swish.
enum class MobileNetV3Activation { RE, HS };

/// One row of the paper's tables 1 and 2: one block.
struct MobileNetV3Row {
  std::int64_t kernel;               ///< of the depthwise convolution
  std::int64_t expanded;             ///< the paper's "exp size": channels inside
  std::int64_t out;                  ///< #out: channels of the result
  bool has_squeeze;                  ///< SE
  MobileNetV3Activation activation;  ///< NL
  std::int64_t stride;               ///< s
};

/// A MobileNetV3.
struct MobileNetV3Design {
  std::string_view name;
  std::span<const MobileNetV3Row> rows;  ///< outlive the backbone, as the tables below do
  std::int64_t last_width;               ///< channels of the last convolution, and of the features
  std::int64_t head_width;               ///< in the middle of the classifier
};

// kernel, exp size, #out, SE, NL, s
inline constexpr std::array kMobileNetV3LargeRows{
    MobileNetV3Row{3, 16, 16, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{3, 64, 24, false, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 72, 24, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 72, 40, true, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{5, 120, 40, true, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 120, 40, true, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{3, 240, 80, false, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{3, 200, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 184, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 184, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 480, 112, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 672, 112, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 672, 160, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 960, 160, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 960, 160, true, MobileNetV3Activation::HS, 1},
};
inline constexpr std::array kMobileNetV3SmallRows{
    MobileNetV3Row{3, 16, 16, true, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 72, 24, false, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 88, 24, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 96, 40, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 240, 40, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 240, 40, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 120, 48, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 144, 48, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 288, 96, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 576, 96, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 576, 96, true, MobileNetV3Activation::HS, 1},
};
inline constexpr std::array kMobileNetV3Designs{
    MobileNetV3Design{"mobilenet_v3_small", kMobileNetV3SmallRows, 576, 1024},
    MobileNetV3Design{"mobilenet_v3_large", kMobileNetV3LargeRows, 960, 1280},
};
inline constexpr std::int64_t kMobileNetV3StemWidth = 16;
// torchvision's: normalisation, dropout in the classifier, initial weights of linear layers.
inline constexpr blocks::BatchNormConstants kMobileNetV3Norm{.eps = 1e-3, .momentum = 0.01};
inline constexpr double kMobileNetV3Dropout = 0.2;
inline constexpr double kMobileNetV3LinearDeviation = 0.01;

namespace blocks {

/// An inverted residual with, in some rows, squeeze-and-excitation before the last convolution.
///
/// The squeeze is a quarter of the block's width *inside*, rounded to a multiple of 8.
///
/// @par Source  Howard et al., Searching for MobileNetV3 (2019), figure 4; torchvision's
/// `InvertedResidual` of `mobilenetv3.py`
class MobileNetV3BlockImpl : public torch::nn::Cloneable<MobileNetV3BlockImpl> {
 public:
  MobileNetV3BlockImpl(std::int64_t in, const MobileNetV3Row& row) : in_(in), row_(row) { reset(); }

  void reset() override {
    const std::int64_t wide = row_.expanded;
    block = register_module("block", torch::nn::Sequential());
    if (wide != in_) block->push_back(activated(padded_convolution(in_, wide, 1)));
    block->push_back(
        activated(padded_convolution(wide, wide, row_.kernel).stride(row_.stride).groups(wide)));
    if (row_.has_squeeze)
      block->push_back(SqueezeExcitation(wide, rounded_width(static_cast<double>(wide / 4)),
                                         activations::relu, activations::hardsigmoid));
    block->push_back(ConvNormAct(padded_convolution(wide, row_.out, 1), kMobileNetV3Norm));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = block->forward(x_nchw);  // (N, out, h / stride, w / stride)
    if (row_.stride == 1 && in_ == row_.out) y += x_nchw;
    return y;
  }

  torch::nn::Sequential block{nullptr};

 private:
  ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    const bool is_relu = row_.activation == MobileNetV3Activation::RE;
    return ConvNormAct(convolution, kMobileNetV3Norm,
                       is_relu ? activations::relu_ : activations::hardswish_);
  }

  std::int64_t in_;
  MobileNetV3Row row_;
};
TORCH_MODULE(MobileNetV3Block);

}  // namespace blocks

/// The module behind `MobileNetV3`.
class MobileNetV3Impl : public FamilyBackbone<MobileNetV3Impl, MobileNetV3Design> {
 public:
  static constexpr std::string_view kFamily = "MobileNetV3";
  static constexpr std::span<const MobileNetV3Design> designs() { return kMobileNetV3Designs; }

  MobileNetV3Impl(const MobileNetV3Design& design, const BackboneOptions& options,
                  CheckpointedChain chain)
      : FamilyBackbone(design, design.last_width, options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    blocks::init_convolutions_by_fan_out(*features_);
    blocks::zero_convolution_biases(*features_);
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
  std::string head() const override { return "classifier.3."; }

 private:
  void build_features() {
    std::int64_t in = kMobileNetV3StemWidth;
    append_feature(activated(blocks::padded_convolution(options().in_channels, in, 3).stride(2)));
    for (const MobileNetV3Row& row : design().rows) {
      append_feature(blocks::MobileNetV3Block(in, row));
      in = row.out;
    }
    append_feature(activated(blocks::padded_convolution(in, design().last_width, 1)));
  }

  /// The features end before it: its first layer belongs to the classifier, as in torchvision.
  void build_classifier() {
    const double dropout = options().dropout.value_or(kMobileNetV3Dropout);
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Linear(design().last_width, design().head_width),
                              torch::nn::Functional(blocks::activations::hardswish_),
                              torch::nn::Dropout(torch::nn::DropoutOptions(dropout).inplace(true)),
                              torch::nn::Linear(design().head_width, options().num_classes)));
    blocks::init_linear_normal(*classifier_, kMobileNetV3LinearDeviation);
  }

  static blocks::ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) {
    return blocks::ConvNormAct(convolution, kMobileNetV3Norm, blocks::activations::hardswish_);
  }

  template <class Unit>
  void append_feature(const Unit& unit) {
    append("features_" + std::to_string(features_->size()), unit);
    features_->push_back(unit);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of inverted residuals that was found by search; its units are the stem, each block and
/// the last convolution.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Howard et al., Searching for MobileNetV3 (2019), tables 1 and 2; torchvision's
/// `mobilenet_v3_small` and `mobilenet_v3_large`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class MobileNetV3 : public BackboneHolder<MobileNetV3Impl, Policy> {
 public:
  using BackboneHolder<MobileNetV3Impl, Policy>::BackboneHolder;
};

using MobileNetV3Small = NamedBackbone<MobileNetV3<>, "mobilenet_v3_small">;
using MobileNetV3Large = NamedBackbone<MobileNetV3<>, "mobilenet_v3_large">;

}  // namespace remat
