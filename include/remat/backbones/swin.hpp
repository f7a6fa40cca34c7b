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
#include "remat/nn/blocks/patch_merging.hpp"
#include "remat/nn/blocks/swin_block.hpp"
#include "remat/nn/blocks/trunc_normal.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/transformer_layers.hpp"

namespace remat {

/// One variant of the paper's section 3.3.
struct SwinDesign {
  std::string_view name;                    ///< torchvision's
  std::int64_t width;                       ///< channels of the first stage; each next has twice
  std::array<std::int64_t, 4> block_count;  ///< blocks in each of the four stages
  std::array<std::int64_t, 4> head_count;   ///< heads of each stage's attention
  double stochastic_depth;                  ///< rate of the last block, as torchvision trained it
};

inline constexpr std::array kSwinDesigns{
    SwinDesign{"swin_t", 96, {2, 2, 6, 2}, {3, 6, 12, 24}, 0.2},
    SwinDesign{"swin_s", 96, {2, 2, 18, 2}, {3, 6, 12, 24}, 0.3},
    SwinDesign{"swin_b", 128, {2, 2, 18, 2}, {4, 8, 16, 32}, 0.5},
};
inline constexpr std::int64_t kSwinPatchSize = 4;
inline constexpr std::int64_t kSwinWindow = 7;
inline constexpr std::int64_t kSwinMlpRatio = 4;
inline constexpr double kSwinNormEps = 1e-5;

namespace blocks {

/// Makes a map of tokens of an image: a strided convolution and a layer normalisation. The children
/// are `0` and `2`.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.1
class SwinEmbeddingImpl : public torch::nn::Cloneable<SwinEmbeddingImpl> {
 public:
  SwinEmbeddingImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    conv = register_module(
        "0",
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(in_channels_, width_, kSwinPatchSize).stride(kSwinPatchSize)));
    norm = register_module(
        "2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width_}).eps(kSwinNormEps)));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return norm->forward(
        conv->forward(images_nchw).permute({0, 2, 3, 1}));  // (N, H / 4, W / 4, width)
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::LayerNorm norm{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(SwinEmbedding);

}  // namespace blocks

/// The module behind `SwinTransformer`.
class SwinTransformerImpl : public FamilyBackbone<SwinTransformerImpl, SwinDesign> {
 public:
  static constexpr std::string_view kFamily = "SwinTransformer";
  static constexpr std::span<const SwinDesign> designs() { return kSwinDesigns; }

  SwinTransformerImpl(const SwinDesign& design, const BackboneOptions& options,
                      CheckpointedChain chain)
      : FamilyBackbone(design, stage_width(design, 3), options, std::move(chain)) {
    register_features();
    const auto norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({raw_width()}).eps(kSwinNormEps)));
    append("norm", plain(norm));
    if (options.num_classes != 0)
      head_ = register_module("head", torch::nn::Linear(raw_width(), options.num_classes));
    register_projection();
    initialise();
  }

  /// Computes the last map of tokens, normalised, as (N, C, H / 32, W / 32), rounded up.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return FamilyBackbone::forward_features(images_nchw).permute({0, 3, 1, 2});
  }

  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "head."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return head_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(height >= kSwinPatchSize && width >= kSwinPatchSize, [&] {
      const std::string least = std::to_string(kSwinPatchSize);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + std::to_string(height) + "x" + std::to_string(width) +
                " pixels, at least " + least + "x" + least + " was expected")
          .cause("A token is made of that many pixels")
          .cure("Any larger size will do, whatever it is a multiple of");
    });
  }

 private:
  static std::int64_t stage_width(const SwinDesign& design, std::size_t stage) {
    return design.width << stage;
  }
  std::int64_t raw_width() const { return stage_width(design(), 3); }

  void register_features() {
    const auto features = register_module("features", torch::nn::ModuleList());
    blocks::SwinEmbedding embedding(options().in_channels, design().width);
    features->push_back(embedding);
    // A unit like a layer: left plain, its normalisation would hold a map as large as a layer's.
    append("embedding", embedding);
    std::int64_t first = 0;
    for (std::size_t stage = 0; stage < design().block_count.size(); ++stage) {
      const std::string number = std::to_string(stage + 1);
      if (stage > 0) {
        const blocks::PatchMerging merging(stage_width(design(), stage - 1), kSwinNormEps);
        features->push_back(merging);
        append("merging" + number, plain(merging));
      }
      const torch::nn::Sequential layers = make_stage(stage, first);
      features->push_back(layers);
      append("stage" + number, layers);
      first += design().block_count[stage];
    }
  }

  /// @param first  how many blocks come before the stage
  torch::nn::Sequential make_stage(std::size_t stage, std::int64_t first) const {
    const std::int64_t width = stage_width(design(), stage);
    std::int64_t block_count = 0;
    for (const std::int64_t count : design().block_count) block_count += count;
    const double last_rate = options().stochastic_depth.value_or(design().stochastic_depth);
    torch::nn::Sequential layers;
    for (std::int64_t index = 0; index < design().block_count[stage]; ++index) {
      const std::int64_t shift = index % 2 == 0 ? 0 : kSwinWindow / 2;
      layers->push_back(blocks::SwinBlock(blocks::SwinBlockOptions{
          .attention = {.width = width,
                        .head_count = design().head_count[stage],
                        .window = {kSwinWindow, kSwinWindow},
                        .shift = {shift, shift},
                        .dropout = options().dropout.value_or(0),
                        .attention_dropout = options().attention_dropout.value_or(0)},
          .hidden = kSwinMlpRatio * width,
          .drop_rate =
              last_rate * static_cast<double>(first + index) / static_cast<double>(block_count - 1),
          .norm_eps = kSwinNormEps,
      }));
    }
    return layers;
  }

  /// As torchvision: linear layers from a truncated normal distribution and without bias; the
  /// convolution as LibTorch makes it.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      auto* linear = module->as<torch::nn::Linear>();
      if (linear == nullptr) continue;
      blocks::trunc_normal_(linear->weight, /*mean=*/0, /*standard_deviation=*/0.02);
      if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
    }
  }

  torch::nn::Linear head_{nullptr};
};

/// A transformer whose attention looks at windows, which every other layer shifts; its units are
/// the embedding and the blocks.
///
/// The merging between stages and the last normalisation are plain. Images of any size will do.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Liu et al., Swin Transformer: Hierarchical Vision Transformer using Shifted Windows
/// (2021), section 3.3; torchvision's `swin_*`
template <class Policy = Checkpointed<TransformerLayers>>
class SwinTransformer : public BackboneHolder<SwinTransformerImpl, Policy> {
 public:
  using BackboneHolder<SwinTransformerImpl, Policy>::BackboneHolder;
};

using SwinT = NamedBackbone<SwinTransformer<>, "swin_t">;
using SwinS = NamedBackbone<SwinTransformer<>, "swin_s">;
using SwinB = NamedBackbone<SwinTransformer<>, "swin_b">;

}  // namespace remat
