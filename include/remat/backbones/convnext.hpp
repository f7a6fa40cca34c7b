// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "remat/backbones/family.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/convnext_block.hpp"
#include "remat/nn/blocks/layer_norm_2d.hpp"
#include "remat/nn/blocks/trunc_normal.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/each_unit.hpp"
#include "remat/policies/staged_hybrid.hpp"

namespace remat {

/// The numbers of one ConvNeXt.
struct ConvNeXtDesign {
  std::string_view name;
  std::array<std::int64_t, 4> widths;        ///< channels of each stage
  std::array<std::int64_t, 4> block_counts;  ///< blocks of each stage
  double stochastic_depth;                   ///< torchvision's rate for the last block
};

// The paper's section 3 and table 9.
inline constexpr std::array kConvNeXtDesigns{
    ConvNeXtDesign{"convnext_tiny", {96, 192, 384, 768}, {3, 3, 9, 3}, 0.1},
    ConvNeXtDesign{"convnext_small", {96, 192, 384, 768}, {3, 3, 27, 3}, 0.4},
    ConvNeXtDesign{"convnext_base", {128, 256, 512, 1024}, {3, 3, 27, 3}, 0.5},
    ConvNeXtDesign{"convnext_large", {192, 384, 768, 1536}, {3, 3, 27, 3}, 0.5},
};

namespace blocks {

/// Cuts images into patches of 4×4 and embeds each; in front of the first stage.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.2
class ConvNeXtStemImpl : public torch::nn::Cloneable<ConvNeXtStemImpl> {
 public:
  ConvNeXtStemImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    conv = register_module(
        "0", torch::nn::Conv2d(torch::nn::Conv2dOptions(in_channels_, width_, 4).stride(4)));
    norm = register_module("1", LayerNorm2d(width_));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return norm->forward(conv->forward(images_nchw));  // (N, width, H / 4, W / 4)
  }

  torch::nn::Conv2d conv{nullptr};
  LayerNorm2d norm{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(ConvNeXtStem);

/// Halves height and width and changes the number of channels; between two stages.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.6
class ConvNeXtDownsamplingImpl : public torch::nn::Cloneable<ConvNeXtDownsamplingImpl> {
 public:
  ConvNeXtDownsamplingImpl(std::int64_t in, std::int64_t out) : in_(in), out_(out) { reset(); }

  void reset() override {
    norm = register_module("0", LayerNorm2d(in_));
    conv =
        register_module("1", torch::nn::Conv2d(torch::nn::Conv2dOptions(in_, out_, 2).stride(2)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    return conv->forward(norm->forward(x_nchw));  // (N, out, h / 2, w / 2)
  }

  LayerNorm2d norm{nullptr};
  torch::nn::Conv2d conv{nullptr};

 private:
  std::int64_t in_, out_;
};
TORCH_MODULE(ConvNeXtDownsampling);

}  // namespace blocks

/// The module behind `ConvNeXt`.
///
/// The last normalisation, which torchvision has in `classifier`, belongs to the features: it is
/// there without a head, too.
class ConvNeXtImpl : public FamilyBackbone<ConvNeXtImpl, ConvNeXtDesign> {
 public:
  static constexpr std::string_view kFamily = "ConvNeXt";
  static constexpr std::span<const ConvNeXtDesign> designs() { return kConvNeXtDesigns; }

  ConvNeXtImpl(const ConvNeXtDesign& design, const BackboneOptions& options,
               CheckpointedChain chain)
      : FamilyBackbone(design, design.widths.back(), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    build_classifier();
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.2."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    const torch::Tensor pooled = at::adaptive_avg_pool2d(features_nchw, {1, 1});  // (N, C, 1, 1)
    return norm_->forward(pooled).flatten(1);                                     // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return linear_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    constexpr std::int64_t kLeast = 32;  // the stem divides by 4, each downsampling by 2
    require(height >= kLeast && width >= kLeast, [&] {
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + std::to_string(height) + "x" + std::to_string(width) +
                ", at least 32x32 was expected")
          .cause("Five halvings leave nothing of smaller ones")
          .cure("Resize the images");
    });
  }

 private:
  void build_features() {
    const auto& widths = design().widths;
    const double rate = options().stochastic_depth.value_or(design().stochastic_depth);
    std::int64_t block_count = 0, block_index = 0;
    for (const std::int64_t count : design().block_counts) block_count += count;
    append_feature(blocks::ConvNeXtStem(options().in_channels, widths[0]));
    for (std::size_t stage = 0; stage < widths.size(); ++stage) {
      if (stage > 0) append_feature(blocks::ConvNeXtDownsampling(widths[stage - 1], widths[stage]));
      torch::nn::Sequential row;
      for (std::int64_t i = 0; i < design().block_counts[stage]; ++i)
        row->push_back(
            blocks::ConvNeXtBlock(widths[stage], drop_rate(rate, block_index++, block_count)));
      append_feature(row);
    }
  }

  /// Grows along the network from 0 to the full rate of the last block.
  static double drop_rate(double last, std::int64_t block_index, std::int64_t block_count) {
    if (block_count == 1) return 0;
    return last * static_cast<double>(block_index) / static_cast<double>(block_count - 1);
  }

  void build_classifier() {
    const std::int64_t width = design().widths.back();
    norm_ = blocks::LayerNorm2d(width);
    const auto classifier = register_module("classifier", torch::nn::ModuleDict());
    classifier->update({{"0", norm_.ptr()}});
    if (options().num_classes == 0) return;
    linear_ = torch::nn::Linear(width, options().num_classes);
    classifier->update({{"2", linear_.ptr()}});
  }

  /// As torchvision: a narrow normal distribution without its tails; normalisations and the scales
  /// of the blocks as they are made.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* convolution = module->as<torch::nn::Conv2d>()) {
        blocks::trunc_normal_(convolution->weight, /*mean=*/0, /*std=*/0.02);
        torch::nn::init::zeros_(convolution->bias);
      } else if (auto* linear = module->as<torch::nn::Linear>()) {
        blocks::trunc_normal_(linear->weight, /*mean=*/0, /*std=*/0.02);
        torch::nn::init::zeros_(linear->bias);
      }
    }
  }

  /// Appends a layer, or a stage, to the features and to the chain.
  template <class Layer>
  void append_feature(const Layer& layer) {
    append("features_" + std::to_string(features_->size()), layer);
    features_->push_back(layer);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the layers; the chain runs them
  blocks::LayerNorm2d norm_{nullptr};
  torch::nn::Linear linear_{nullptr};
};

/// A convolutional network made after the image of a transformer; its units are the blocks, in four
/// stages. Stem and downsampling are plain under the default policy, which recomputes block by
/// block: a region for each stage would hold more at its peak and take no less time.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Liu et al., A ConvNet for the 2020s (2022); torchvision's `convnext_*`
template <class Policy = Checkpointed<StagedHybrid, EachUnit>>
class ConvNeXt : public BackboneHolder<ConvNeXtImpl, Policy> {
 public:
  using BackboneHolder<ConvNeXtImpl, Policy>::BackboneHolder;
};

using ConvNeXtTiny = NamedBackbone<ConvNeXt<>, "convnext_tiny">;
using ConvNeXtSmall = NamedBackbone<ConvNeXt<>, "convnext_small">;
using ConvNeXtBase = NamedBackbone<ConvNeXt<>, "convnext_base">;
using ConvNeXtLarge = NamedBackbone<ConvNeXt<>, "convnext_large">;

}  // namespace remat
