// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cmath>
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
#include "remat/nn/blocks/mb_conv.hpp"
#include "remat/nn/blocks/rounded_width.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"

namespace remat {

/// One row of the papers' tables: `blocks` MBConvs, of which the first has the stride.
struct EfficientNetStage {
  blocks::MBConvKind kind;
  std::int64_t expansion;  ///< how many times wider a block is inside
  std::int64_t kernel;     ///< of the convolution that is not 1×1
  std::int64_t stride;
  std::int64_t width;   ///< channels of the result, before scaling
  std::int64_t blocks;  ///< before scaling
};

/// An EfficientNet, or an EfficientNetV2.
struct EfficientNetDesign {
  std::string_view name;
  std::span<const EfficientNetStage> stages;  ///< outlive the backbone, as the tables below do
  std::int64_t stem_width;                    ///< before scaling
  double width_factor;                        ///< channels are multiplied by it and rounded to 8s
  double depth_factor;                        ///< block counts are multiplied by it and rounded up
  std::int64_t last_width;  ///< channels of the last convolution; 0: 4 times those before it
  double dropout;           ///< torchvision's, in front of the classifier
  double norm_eps;          ///< torchvision's, of every batch normalisation
};

// EfficientNet's table 1, whose rows B0 scales by 1.
// kind, expansion, kernel, stride, width, blocks
inline constexpr std::array kEfficientNetStages{
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 1, 3, 1, 16, 1},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 24, 2},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 2, 40, 2},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 80, 3},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 1, 112, 3},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 2, 192, 4},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 320, 1},
};
// EfficientNetV2's table 4, and the larger two as its authors' code has them.
inline constexpr std::array kEfficientNetV2SStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 24, 2},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 48, 4},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 64, 4},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 128, 6},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 160, 9},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 256, 15},
};
inline constexpr std::array kEfficientNetV2MStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 24, 3},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 48, 5},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 80, 5},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 160, 7},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 176, 14},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 304, 18},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 512, 5},
};
inline constexpr std::array kEfficientNetV2LStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 32, 4},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 64, 7},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 96, 7},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 192, 10},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 224, 19},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 384, 25},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 640, 7},
};

// name, stages, stem, width and depth factor, last width, dropout, eps
inline constexpr std::array kEfficientNetDesigns{
    EfficientNetDesign{"efficientnet_b0", kEfficientNetStages, 32, 1.0, 1.0, 0, 0.2, 1e-5},
    EfficientNetDesign{"efficientnet_b1", kEfficientNetStages, 32, 1.0, 1.1, 0, 0.2, 1e-5},
    EfficientNetDesign{"efficientnet_b2", kEfficientNetStages, 32, 1.1, 1.2, 0, 0.3, 1e-5},
    EfficientNetDesign{"efficientnet_v2_s", kEfficientNetV2SStages, 24, 1.0, 1.0, 1280, 0.2, 1e-3},
    EfficientNetDesign{"efficientnet_v2_m", kEfficientNetV2MStages, 24, 1.0, 1.0, 1280, 0.3, 1e-3},
    EfficientNetDesign{"efficientnet_v2_l", kEfficientNetV2LStages, 32, 1.0, 1.0, 1280, 0.4, 1e-3},
};
inline constexpr double kEfficientNetStochasticDepth = 0.2;  // torchvision's, for all of them

namespace detail {

inline std::int64_t scaled_width(const EfficientNetDesign& design, std::int64_t width) {
  return blocks::rounded_width(static_cast<double>(width) * design.width_factor);
}
inline std::int64_t scaled_depth(const EfficientNetDesign& design, std::int64_t block_count) {
  return static_cast<std::int64_t>(
      std::ceil(static_cast<double>(block_count) * design.depth_factor));
}
inline std::int64_t last_width(const EfficientNetDesign& design) {
  return design.last_width != 0 ? design.last_width
                                : 4 * scaled_width(design, design.stages.back().width);
}

}  // namespace detail

/// The module behind `EfficientNet`.
class EfficientNetImpl : public FamilyBackbone<EfficientNetImpl, EfficientNetDesign> {
 public:
  static constexpr std::string_view kFamily = "EfficientNet";
  static constexpr std::span<const EfficientNetDesign> designs() { return kEfficientNetDesigns; }

  EfficientNetImpl(const EfficientNetDesign& design, const BackboneOptions& options,
                   CheckpointedChain chain)
      : FamilyBackbone(design, detail::last_width(design), options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
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
  std::string head() const override { return "classifier.1."; }

 private:
  void build_features() {
    const blocks::BatchNormConstants norm{.eps = design().norm_eps};
    std::int64_t in = detail::scaled_width(design(), design().stem_width);
    append_feature(activated(blocks::padded_convolution(options().in_channels, in, 3).stride(2)));
    std::int64_t block_count = 0, block_index = 0;
    for (const EfficientNetStage& stage : design().stages)
      block_count += detail::scaled_depth(design(), stage.blocks);
    for (const EfficientNetStage& row : design().stages) {
      const std::int64_t out = detail::scaled_width(design(), row.width);
      torch::nn::Sequential stage;
      for (std::int64_t i = 0; i < detail::scaled_depth(design(), row.blocks); ++i) {
        stage->push_back(
            blocks::MBConv(blocks::MBConvOptions{.kind = row.kind,
                                                 .in = in,
                                                 .out = out,
                                                 .expansion = row.expansion,
                                                 .kernel = row.kernel,
                                                 .stride = i == 0 ? row.stride : 1,
                                                 .drop_rate = drop_rate(block_index++, block_count),
                                                 .norm = norm}));
        in = out;
      }
      append_feature(stage);
    }
    append_feature(activated(blocks::padded_convolution(in, detail::last_width(design()), 1)));
  }

  /// Grows along the network from 0, and never reaches the full rate: torchvision divides by the
  /// count of blocks.
  double drop_rate(std::int64_t block_index, std::int64_t block_count) const {
    return options().stochastic_depth.value_or(kEfficientNetStochasticDepth) *
           static_cast<double>(block_index) / static_cast<double>(block_count);
  }

  /// Linear layers begin uniform within 1 / sqrt(classes), as torchvision's.
  void build_classifier() {
    const double dropout = options().dropout.value_or(design().dropout);
    const torch::nn::Linear linear(detail::last_width(design()), options().num_classes);
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Dropout(torch::nn::DropoutOptions(dropout).inplace(true)),
                              linear));
    const double bound = 1.0 / std::sqrt(static_cast<double>(options().num_classes));
    torch::nn::init::uniform_(linear->weight, -bound, bound);
    torch::nn::init::zeros_(linear->bias);
  }

  blocks::ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    return blocks::ConvNormAct(convolution, blocks::BatchNormConstants{.eps = design().norm_eps},
                               blocks::activations::silu_);
  }

  /// Appends a layer, or a stage, to the features and to the chain.
  template <class Layer>
  void append_feature(const Layer& layer) {
    append("features_" + std::to_string(features_->size()), layer);
    features_->push_back(layer);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of MBConvs whose depth and width were scaled together; its units are the stem, each
/// block and the last convolution. Five segments and not the usual four: EfficientNetV2-S, 42 units
/// deep, saves 75 % of its activations with them where four save 70 %.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Tan and Le, EfficientNet: Rethinking Model Scaling (2019), table 1, and
/// EfficientNetV2: Smaller Models and Faster Training (2021), table 4; torchvision's
/// `efficientnet_*`
template <class Policy = Checkpointed<Sequential, Segments<5>>>
class EfficientNet : public BackboneHolder<EfficientNetImpl, Policy> {
 public:
  using BackboneHolder<EfficientNetImpl, Policy>::BackboneHolder;
};

using EfficientNetB0 = NamedBackbone<EfficientNet<>, "efficientnet_b0">;
using EfficientNetB1 = NamedBackbone<EfficientNet<>, "efficientnet_b1">;
using EfficientNetB2 = NamedBackbone<EfficientNet<>, "efficientnet_b2">;
using EfficientNetV2S = NamedBackbone<EfficientNet<>, "efficientnet_v2_s">;
using EfficientNetV2M = NamedBackbone<EfficientNet<>, "efficientnet_v2_m">;
using EfficientNetV2L = NamedBackbone<EfficientNet<>, "efficientnet_v2_l">;

}  // namespace remat
