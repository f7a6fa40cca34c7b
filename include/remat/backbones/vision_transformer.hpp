// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "remat/backbones/family.hpp"
#include "remat/backbones/position_embedding.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/encoder_layer.hpp"
#include "remat/nn/blocks/trunc_normal.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/transformer_layers.hpp"

namespace remat {

/// One row of the paper's table 1, with a patch size.
struct VisionTransformerDesign {
  std::string_view name;     ///< torchvision's
  std::int64_t patch_size;   ///< height and width of a patch in pixels
  std::int64_t layer_count;  ///< transformer layers
  std::int64_t head_count;   ///< heads of each attention
  std::int64_t width;        ///< channels of a token
  std::int64_t mlp_width;    ///< channels inside an MLP
};

inline constexpr std::array kVisionTransformerDesigns{
    VisionTransformerDesign{"vit_b_16", 16, 12, 12, 768, 3072},
    VisionTransformerDesign{"vit_b_32", 32, 12, 12, 768, 3072},
    VisionTransformerDesign{"vit_l_16", 16, 24, 16, 1024, 4096},
    VisionTransformerDesign{"vit_l_32", 32, 24, 16, 1024, 4096},
};
/// Height and width of the images that torchvision makes position embeddings for by default.
inline constexpr std::int64_t kVisionTransformerImageSize = 224;
/// The paper's code has this in place of LibTorch's 1e-5, and torchvision followed.
inline constexpr double kVisionTransformerNormEps = 1e-6;

namespace blocks {

/// Makes tokens of an image: one per patch and a learned one in front, each with a learned
/// embedding of its position.
///
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), equation 1; torchvision's
/// `VisionTransformer._process_input`
class VisionTransformerEmbeddingImpl : public torch::nn::Cloneable<VisionTransformerEmbeddingImpl> {
 public:
  /// @param grid  patches in a column and in a row
  VisionTransformerEmbeddingImpl(std::int64_t in_channels, std::int64_t width,
                                 std::int64_t patch_size, TokenGrid grid, double dropout_rate)
      : in_channels_(in_channels),
        width_(width),
        patch_size_(patch_size),
        grid_(grid),
        rate_(dropout_rate) {
    reset();
  }

  /// Makes the layers anew, initialised as torchvision does.
  void reset() override {
    class_token = register_parameter("class_token", at::zeros({1, 1, width_}));
    pos_embedding = register_parameter("pos_embedding", at::empty({1, 1 + grid_.area(), width_}));
    conv_proj = register_module(
        "conv_proj",
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(in_channels_, width_, patch_size_).stride(patch_size_)));
    dropout = register_module("dropout", torch::nn::Dropout(rate_));
    torch::nn::init::normal_(pos_embedding, /*mean=*/0, /*std=*/0.02);
    const auto fan_in = static_cast<double>(in_channels_ * patch_size_ * patch_size_);
    trunc_normal_(conv_proj->weight, /*mean=*/0, std::sqrt(1 / fan_in));
    torch::nn::init::zeros_(conv_proj->bias);
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    const torch::Tensor patches =
        conv_proj->forward(images_nchw).flatten(2).transpose(1, 2);  // (N, rows * columns, width)
    const torch::Tensor class_tokens =
        class_token.expand({images_nchw.size(0), -1, -1});  // (N, 1, width)
    return dropout->forward(at::cat({class_tokens, patches}, 1) + pos_embedding);
  }

  torch::Tensor class_token, pos_embedding;
  torch::nn::Conv2d conv_proj{nullptr};
  torch::nn::Dropout dropout{nullptr};

 private:
  std::int64_t in_channels_, width_, patch_size_;
  TokenGrid grid_;
  double rate_;
};
TORCH_MODULE(VisionTransformerEmbedding);

}  // namespace blocks

/// The module behind `VisionTransformer`.
class VisionTransformerImpl
    : public FamilyBackbone<VisionTransformerImpl, VisionTransformerDesign> {
 public:
  static constexpr std::string_view kFamily = "VisionTransformer";
  static constexpr std::span<const VisionTransformerDesign> designs() {
    return kVisionTransformerDesigns;
  }

  VisionTransformerImpl(const VisionTransformerDesign& design, const BackboneOptions& options,
                        CheckpointedChain chain)
      : FamilyBackbone(design, design.width, options, std::move(chain)) {
    refuse_option("stochastic_depth", options.stochastic_depth);
    check_option_image_size();
    blocks::VisionTransformerEmbedding embedding(
        options.in_channels, design.width, design.patch_size, grid(), options.dropout.value_or(0));
    register_parameter("class_token", embedding->class_token);
    register_module("conv_proj", embedding->conv_proj);
    append("embedding", plain(embedding));
    register_encoder(embedding);
    if (options.num_classes != 0) register_head();
    register_projection();
  }

  /// Returns the height and width of the images that this takes.
  std::int64_t image_size() const {
    return options().image_size == 0 ? kVisionTransformerImageSize : options().image_size;
  }
  /// Returns how many patches there are in a column and in a row.
  TokenGrid grid() const {
    return {image_size() / design().patch_size, image_size() / design().patch_size};
  }

  std::string first_convolution() const override { return "conv_proj.weight"; }
  std::string head() const override { return "heads.head."; }

  /// As `Backbone`; position embeddings for another square grid are resized, too.
  torch::Tensor fit_weight(const std::string& key, const torch::Tensor& stored,
                           at::IntArrayRef shape) const override {
    if (key != "encoder.pos_embedding") return Backbone::fit_weight(key, stored, shape);
    const bool is_embedding = stored.dim() == 3 && stored.size(0) == 1 && shape.size() == 3 &&
                              shape[0] == 1 && stored.size(1) > 1 && stored.size(2) == shape[2];
    if (!is_embedding || shape[1] != 1 + grid().area()) return {};
    const auto side = std::llround(std::sqrt(static_cast<double>(stored.size(1) - 1)));
    if (side * side != stored.size(1) - 1) return {};
    return resize_position_embedding(stored, {side, side}, grid());
  }

 protected:
  /// Takes the class token of (N, 1 + patches, width).
  torch::Tensor pool(torch::Tensor tokens_nlc) override { return tokens_nlc.select(1, 0); }
  torch::Tensor forward_head(torch::Tensor pooled) override { return head_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(height == image_size() && width == image_size(), [&] {
      const std::int64_t nearest = nearest_size(std::max(height, width));
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + size_text(height, width) + " pixels, " +
                size_text(image_size(), image_size()) + " was expected")
          .cause("Each patch has a learned embedding of its position")
          .cure("Resize the images, or build the network with .image_size = " +
                std::to_string(nearest) +
                " for images of that height and width; loading weights then resizes the position "
                "embeddings, as remat::resize_position_embedding does");
    });
  }

 private:
  static std::string size_text(std::int64_t height, std::int64_t width) {
    return std::to_string(height) + "x" + std::to_string(width);
  }

  std::int64_t nearest_size(std::int64_t size) const {
    const std::int64_t patch = design().patch_size;
    return std::max(patch, (size + patch / 2) / patch * patch);
  }

  void check_option_image_size() const {
    require(image_size() % design().patch_size == 0, [&] {
      const std::int64_t below = image_size() / design().patch_size * design().patch_size;
      const std::string above = std::to_string(below + design().patch_size);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("image_size is " + std::to_string(image_size()) +
                ", a multiple of the patch size " + std::to_string(design().patch_size) +
                " was expected")
          .cure("The nearest are " + (below == 0 ? "" : std::to_string(below) + " and ") + above);
    });
  }

  void register_encoder(const blocks::VisionTransformerEmbedding& embedding) {
    const auto encoder = register_module("encoder", std::make_shared<torch::nn::Module>("Encoder"));
    encoder->register_parameter("pos_embedding", embedding->pos_embedding);
    encoder->register_module("dropout", embedding->dropout);
    torch::nn::Sequential layers;
    for (std::int64_t index = 0; index < design().layer_count; ++index)
      layers->push_back("encoder_layer_" + std::to_string(index),
                        blocks::EncoderLayer(blocks::EncoderLayerOptions{
                            .width = design().width,
                            .head_count = design().head_count,
                            .hidden = design().mlp_width,
                            .dropout = options().dropout.value_or(0),
                            .attention_dropout = options().attention_dropout.value_or(0),
                            .norm_eps = kVisionTransformerNormEps,
                        }));
    encoder->register_module("layers", layers);
    append("layers", layers);
    const auto norm = encoder->register_module(
        "ln", torch::nn::LayerNorm(
                  torch::nn::LayerNormOptions({design().width}).eps(kVisionTransformerNormEps)));
    append("norm", plain(norm));
  }

  void register_head() {
    const auto heads = register_module("heads", std::make_shared<torch::nn::Module>("Heads"));
    head_ =
        heads->register_module("head", torch::nn::Linear(design().width, options().num_classes));
    torch::nn::init::zeros_(head_->weight);
    torch::nn::init::zeros_(head_->bias);
  }

  torch::nn::Linear head_{nullptr};
};

/// A vision transformer; its units are the transformer layers, and its features are all tokens,
/// normalised, of which the first stands for the image.
///
/// The embedding of the patches and the last normalisation are plain: they save little.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), table 1; torchvision's
/// `vit_*`
template <class Policy = Checkpointed<TransformerLayers>>
class VisionTransformer : public BackboneHolder<VisionTransformerImpl, Policy> {
 public:
  using BackboneHolder<VisionTransformerImpl, Policy>::BackboneHolder;
};

using ViTB16 = NamedBackbone<VisionTransformer<>, "vit_b_16">;
using ViTB32 = NamedBackbone<VisionTransformer<>, "vit_b_32">;
using ViTL16 = NamedBackbone<VisionTransformer<>, "vit_l_16">;
using ViTL32 = NamedBackbone<VisionTransformer<>, "vit_l_32">;

}  // namespace remat
