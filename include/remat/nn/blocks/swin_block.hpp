// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/mlp.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"
#include "remat/nn/blocks/window_attention.hpp"

namespace remat::blocks {

/// What a `SwinBlock` is built from; meant for designated initialisers.
struct SwinBlockOptions {
  WindowAttentionOptions attention = {};
  std::int64_t hidden = 0;  ///< channels inside the MLP
  double drop_rate = 0;     ///< with which probability stochastic depth drops a sample's branch
  double norm_eps = 1e-5;   ///< of both layer normalisations
};

/// A transformer layer on a map of tokens: attention in windows, and an MLP.
///
/// @par Source  Liu et al., Swin Transformer (2021), figure 3b and equation 3; torchvision's
/// `SwinTransformerBlock`
class SwinBlockImpl : public torch::nn::Cloneable<SwinBlockImpl> {
 public:
  explicit SwinBlockImpl(const SwinBlockOptions& options) : options_(options) { reset(); }

  void reset() override {
    const std::int64_t width = options_.attention.width;
    const auto norm = [&] {
      return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(options_.norm_eps));
    };
    norm1 = register_module("norm1", norm());
    attn = register_module("attn", ShiftedWindowAttention(options_.attention));
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
    norm2 = register_module("norm2", norm());
    mlp = register_module("mlp", Mlp(width, options_.hidden, options_.attention.dropout));
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const torch::Tensor x =
        map_nhwc + stochastic_depth->forward(attn->forward(norm1->forward(map_nhwc)));
    return x + stochastic_depth->forward(mlp->forward(norm2->forward(x)));  // (N, H, W, C)
  }

  /// Returns what this was built from.
  const SwinBlockOptions& options() const { return options_; }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  ShiftedWindowAttention attn{nullptr};
  StochasticDepth stochastic_depth{nullptr};
  Mlp mlp{nullptr};

 private:
  SwinBlockOptions options_;
};
TORCH_MODULE(SwinBlock);

}  // namespace remat::blocks
