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
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/conv_norm_act.hpp"
#include "remat/nn/blocks/maxvit_layer.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/transformer_layers.hpp"

namespace remat {

/// The numbers of one MaxViT.
struct MaxViTDesign {
  std::string_view name;
  std::int64_t stem_width;                   ///< channels in front of the first block
  std::array<std::int64_t, 4> widths;        ///< channels of each block
  std::array<std::int64_t, 4> layer_counts;  ///< layers of each block, the first of which halves
  std::int64_t head_width;                   ///< channels of one attention head
  std::int64_t partition_size;               ///< places a side of a window, and of a grid
  double stochastic_depth;                   ///< torchvision's rate for the last layer
};

// The paper's table 1, column MaxViT-T.
inline constexpr std::array kMaxViTDesigns{
    MaxViTDesign{"maxvit_t", 64, {64, 128, 256, 512}, {2, 2, 5, 2}, 32, 7, 0.2},
};

namespace blocks {

/// Two convolutions in front of the first block; the first halves height and width.
///
/// @par Source  Tu et al., MaxViT (2022), table 1; torchvision's `maxvit_t`
class MaxViTStemImpl : public torch::nn::Cloneable<MaxViTStemImpl> {
 public:
  MaxViTStemImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    first = register_module("0", ConvNormAct(padded_convolution(in_channels_, width_, 3).stride(2),
                                             kMaxViTNorm, activations::gelu));
    second = register_module(
        "1",
        torch::nn::Sequential(torch::nn::Conv2d(padded_convolution(width_, width_, 3).bias(true))));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return second->forward(first->forward(images_nchw));  // (N, width, H / 2, W / 2)
  }

  ConvNormAct first{nullptr};
  torch::nn::Sequential second{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(MaxViTStem);

}  // namespace blocks

/// The module behind `MaxViT`.
///
/// Weights do not depend on the size of the images: any height and width is fine whose maps the
/// partition divides. `BackboneOptions::image_size` is only checked, when the network is built.
class MaxViTImpl : public FamilyBackbone<MaxViTImpl, MaxViTDesign> {
 public:
  static constexpr std::string_view kFamily = "MaxViT";
  static constexpr std::span<const MaxViTDesign> designs() { return kMaxViTDesigns; }

  MaxViTImpl(const MaxViTDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, design.widths.back(), options, std::move(chain)) {
    if (options.image_size != 0) check_image_size(options.image_size, options.image_size);
    const blocks::MaxViTStem stem(options.in_channels, design.stem_width);
    register_module("stem", stem);
    append("stem", stem);
    build_blocks();
    if (options.num_classes != 0) build_classifier();
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "stem.0.0.weight"; }
  std::string head() const override { return "classifier.5."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return last_linear_->forward(linear_->forward(norm_->forward(pooled)).tanh());
  }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(is_valid_length(height) && is_valid_length(width), [&] {
      const std::string window = size_text(design().partition_size, design().partition_size);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + size_text(height, width) + ", and windows of " + window +
                " must tile the map of every block: these are " + maps_text(height, width))
          .cure("The nearest heights that do are " + nearest_lengths(height) +
                ", the nearest widths " + nearest_lengths(width) +
                "; another partition_size in the design goes with other sizes");
    });
  }

 private:
  void build_blocks() {
    const auto list = register_module("blocks", torch::nn::ModuleList());
    const double rate = options().stochastic_depth.value_or(design().stochastic_depth);
    std::int64_t layer_count = 0, layer_index = 0;
    for (const std::int64_t count : design().layer_counts) layer_count += count;
    std::int64_t in = design().stem_width;
    for (std::size_t block = 0; block < design().widths.size(); ++block) {
      torch::nn::Sequential layers;
      for (std::int64_t i = 0; i < design().layer_counts[block]; ++i) {
        layers->push_back(blocks::MaxViTLayer(
            blocks::MaxViTLayerOptions{.in = in,
                                       .out = design().widths[block],
                                       .stride = i == 0 ? 2 : 1,
                                       .head_width = design().head_width,
                                       .partition_size = design().partition_size,
                                       .dropout = options().dropout.value_or(0),
                                       .attention_dropout = options().attention_dropout.value_or(0),
                                       .drop_rate = drop_rate(rate, layer_index++, layer_count)}));
        in = design().widths[block];
      }
      torch::nn::ModuleDict holder;  // gives the layers the names of torchvision's block
      holder->update({{"layers", layers.ptr()}});
      list->push_back(holder);
      append("blocks_" + std::to_string(block), layers);
    }
  }

  /// Grows along the network from 0 to the full rate of the last layer.
  static double drop_rate(double last, std::int64_t layer_index, std::int64_t layer_count) {
    if (layer_count == 1) return 0;
    return last * static_cast<double>(layer_index) / static_cast<double>(layer_count - 1);
  }

  void build_classifier() {
    const std::int64_t width = design().widths.back();
    norm_ = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
    linear_ = torch::nn::Linear(width, width);
    last_linear_ =
        torch::nn::Linear(torch::nn::LinearOptions(width, options().num_classes).bias(false));
    register_module("classifier", torch::nn::ModuleDict())
        ->update({{"2", norm_.ptr()}, {"3", linear_.ptr()}, {"5", last_linear_.ptr()}});
  }

  /// As torchvision: a narrow normal distribution; normalisations as they are made.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* convolution = module->as<torch::nn::Conv2d>())
        initialise(convolution->weight, convolution->bias);
      else if (auto* linear = module->as<torch::nn::Linear>())
        initialise(linear->weight, linear->bias);
    }
  }
  static void initialise(const torch::Tensor& weight, const torch::Tensor& bias) {
    torch::nn::init::normal_(weight, /*mean=*/0, /*std=*/0.02);
    if (bias.defined()) torch::nn::init::zeros_(bias);
  }

  /// Returns the lengths of the maps of the blocks: the stem and each block halve, rounding up.
  static std::array<std::int64_t, 4> map_lengths(std::int64_t length) {
    std::array<std::int64_t, 4> lengths{};
    length = (length + 1) / 2;
    for (std::int64_t& map : lengths) map = length = (length + 1) / 2;
    return lengths;
  }

  bool is_valid_length(std::int64_t length) const {
    if (length < 1) return false;
    for (const std::int64_t map : map_lengths(length))
      if (map % design().partition_size != 0) return false;
    return true;
  }

  static std::string size_text(std::int64_t height, std::int64_t width) {
    return std::to_string(height) + "x" + std::to_string(width);
  }

  static std::string maps_text(std::int64_t height, std::int64_t width) {
    const auto heights = map_lengths(height);
    const auto widths = map_lengths(width);
    std::string text;
    for (std::size_t block = 0; block < heights.size(); ++block)
      text += (text.empty() ? "" : ", ") + size_text(heights[block], widths[block]);
    return text;
  }

  /// Names the multiples of the partition below and above, as they come out of five halvings.
  std::string nearest_lengths(std::int64_t length) const {
    if (is_valid_length(length)) return std::to_string(length);
    const std::int64_t step = 32 * design().partition_size;
    const std::int64_t below = length / step * step;
    const std::string above = std::to_string(below + step);
    return below == 0 ? above : std::to_string(below) + " and " + above;
  }

  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear linear_{nullptr}, last_linear_{nullptr};
};

/// A network of inverted residuals and attention in windows and in grids; its units are the stem
/// and each layer.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022); torchvision's `maxvit_t`
template <class Policy = Checkpointed<TransformerLayers>>
class MaxViT : public BackboneHolder<MaxViTImpl, Policy> {
 public:
  using BackboneHolder<MaxViTImpl, Policy>::BackboneHolder;
};

using MaxViTT = NamedBackbone<MaxViT<>, "maxvit_t">;

}  // namespace remat
