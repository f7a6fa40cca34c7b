// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/conv_norm_act.hpp"
#include "remat/nn/blocks/partition_attention.hpp"
#include "remat/nn/blocks/squeeze_excitation.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"

namespace remat::blocks {

/// MaxViT's batch normalisations, as torchvision has them.
inline constexpr BatchNormConstants kMaxViTNorm{.eps = 1e-3, .momentum = 0.01};

/// What a `MaxViTLayer` is built from; meant for designated initialisers.
struct MaxViTLayerOptions {
  std::int64_t in = 0;      ///< channels of the layer's input
  std::int64_t out = 0;     ///< channels of its result
  std::int64_t stride = 1;  ///< 2 halves height and width, rounding up
  std::int64_t head_width = 32;
  std::int64_t partition_size = 7;
  double dropout = 0;
  double attention_dropout = 0;
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
};

/// A normalised inverted residual, around which the input is added, pooled and projected where the
/// layer changes shape.
///
/// Unlike EfficientNet's it normalises first, its last convolution has a bias and no normalisation,
/// and the squeeze is a quarter of the *result's* width.
///
/// @par Source  Tu et al., MaxViT (2022), section 3.3 and appendix A.1; torchvision's `MBConv` of
/// MaxViT
class MaxViTMBConvImpl : public torch::nn::Cloneable<MaxViTMBConvImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;
  static constexpr std::int64_t kSqueeze = 4;

  explicit MaxViTMBConvImpl(const MaxViTLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    proj = nullptr;
    if (options_.stride != 1 || options_.in != options_.out)
      proj = register_module("proj", shortcut());
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
    layers = register_module("layers", branch());
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor shortcut =
        proj.is_empty() ? x_nchw : proj->forward(x_nchw);  // (N, out, h / stride, w / stride)
    return shortcut + stochastic_depth->forward(layers->forward(x_nchw));
  }

  torch::nn::Sequential proj{nullptr};
  StochasticDepth stochastic_depth{nullptr};
  torch::nn::Sequential layers{nullptr};

 private:
  static torch::Tensor halved(const torch::Tensor& x_nchw) {
    return at::avg_pool2d(x_nchw, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
  }

  torch::nn::Sequential shortcut() const {
    torch::nn::Sequential sequence;
    if (options_.stride == 2) sequence->push_back(torch::nn::Functional(halved));
    sequence->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(options_.in, options_.out, 1)));
    return sequence;
  }

  torch::nn::Sequential branch() const {
    const std::int64_t wide = kExpansion * options_.out;
    torch::nn::Sequential sequence;
    sequence->push_back("pre_norm", batch_norm(options_.in, kMaxViTNorm));
    sequence->push_back("conv_a", ConvNormAct(padded_convolution(options_.in, wide, 1), kMaxViTNorm,
                                              activations::gelu));
    sequence->push_back(
        "conv_b",
        ConvNormAct(padded_convolution(wide, wide, 3).stride(options_.stride).groups(wide),
                    kMaxViTNorm, activations::gelu));
    sequence->push_back(
        "squeeze_excitation",
        SqueezeExcitation(wide, options_.out / kSqueeze, activations::silu, activations::sigmoid));
    sequence->push_back("conv_c",
                        torch::nn::Conv2d(torch::nn::Conv2dOptions(wide, options_.out, 1)));
    return sequence;
  }

  MaxViTLayerOptions options_;
};
TORCH_MODULE(MaxViTMBConv);

/// Mixes neighbours, then the places of each window, then places from all over the map; one unit of
/// a chain.
///
/// @par Source  Tu et al., MaxViT (2022), figure 2; torchvision's `MaxVitLayer`
class MaxViTLayerImpl : public torch::nn::Cloneable<MaxViTLayerImpl> {
 public:
  explicit MaxViTLayerImpl(const MaxViTLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    torch::nn::Sequential sequence;
    sequence->push_back("MBconv", MaxViTMBConv(options_));
    sequence->push_back("window_attention", attention(Partition::kWindow));
    sequence->push_back("grid_attention", attention(Partition::kGrid));
    layers = register_module("layers", sequence);
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    return layers->forward(x_nchw);  // (N, out, h / stride, w / stride)
  }

  /// Returns what this was built from.
  const MaxViTLayerOptions& options() const { return options_; }

  torch::nn::Sequential layers{nullptr};

 private:
  PartitionAttention attention(Partition partition) const {
    return PartitionAttention(
        PartitionAttentionOptions{.partition = partition,
                                  .channels = options_.out,
                                  .head_width = options_.head_width,
                                  .partition_size = options_.partition_size,
                                  .dropout = options_.dropout,
                                  .attention_dropout = options_.attention_dropout,
                                  .drop_rate = options_.drop_rate});
  }

  MaxViTLayerOptions options_;
};
TORCH_MODULE(MaxViTLayer);

}  // namespace remat::blocks
