// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/mlp.hpp"
#include "remat/nn/blocks/self_attention.hpp"

namespace remat::blocks {

/// What an `EncoderLayer` is built from; meant for designated initialisers.
struct EncoderLayerOptions {
  std::int64_t width = 0;        ///< channels of a token
  std::int64_t head_count = 1;   ///< heads of the attention
  std::int64_t hidden = 0;       ///< channels inside the MLP
  double dropout = 0;            ///< rate behind the attention, and twice in the MLP
  double attention_dropout = 0;  ///< rate on the attention's weights
  double norm_eps = 1e-6;        ///< of both layer normalisations
};

/// A transformer layer that normalises in front of its two branches, attention and MLP.
///
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), equations 2 and 3;
/// torchvision's `EncoderBlock`
class EncoderLayerImpl : public torch::nn::Cloneable<EncoderLayerImpl> {
 public:
  explicit EncoderLayerImpl(const EncoderLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    const auto norm = [&] {
      return torch::nn::LayerNorm(
          torch::nn::LayerNormOptions({options_.width}).eps(options_.norm_eps));
    };
    ln_1 = register_module("ln_1", norm());
    self_attention = register_module(
        "self_attention",
        SelfAttention(options_.width, options_.head_count, options_.attention_dropout));
    dropout = register_module("dropout", torch::nn::Dropout(options_.dropout));
    ln_2 = register_module("ln_2", norm());
    mlp = register_module("mlp", Mlp(options_.width, options_.hidden, options_.dropout));
  }

  torch::Tensor forward(const torch::Tensor& tokens_nlc) {
    const torch::Tensor x =
        dropout->forward(self_attention->forward(ln_1->forward(tokens_nlc))) + tokens_nlc;
    return x + mlp->forward(ln_2->forward(x));  // (N, L, C), as all in between
  }

  /// Returns what this was built from.
  const EncoderLayerOptions& options() const { return options_; }

  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  SelfAttention self_attention{nullptr};
  torch::nn::Dropout dropout{nullptr};
  Mlp mlp{nullptr};

 private:
  EncoderLayerOptions options_;
};
TORCH_MODULE(EncoderLayer);

}  // namespace remat::blocks
