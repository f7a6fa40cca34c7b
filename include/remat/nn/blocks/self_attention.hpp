// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>

#include "remat/errors.hpp"
#include "remat/libtorch/attention.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/linear.hpp"

namespace remat::blocks {

/// Self-attention of all tokens to all, in several heads, by LibTorch's fused kernel.
///
/// Keys are those of `nn.MultiheadAttention`. LibTorch's own module computes the weights to return
/// their mean as well, and so can use no fused kernel.
///
/// @par Source  Vaswani et al., Attention Is All You Need (2017), section 3.2; PyTorch's
/// `nn.MultiheadAttention` with `batch_first` and without `need_weights`
class SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl> {
 public:
  /// @param dropout  rate at which attention weights are zeroed in training
  /// @throws ArgumentError  if `width` cannot be shared out to `head_count` heads
  SelfAttentionImpl(std::int64_t width, std::int64_t head_count, double dropout)
      : width_(width), head_count_(head_count), dropout_(dropout) {
    require(head_count > 0 && width % head_count == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::SelfAttention")
          .what("the width is " + std::to_string(width) + " and there are " +
                std::to_string(head_count) + " heads, a width that the heads divide was expected");
    });
    reset();
  }

  void reset() override {
    in_proj_weight = register_parameter("in_proj_weight", at::empty({3 * width_, width_}));
    in_proj_bias = register_parameter("in_proj_bias", at::zeros({3 * width_}));
    out_proj = register_module("out_proj", torch::nn::Linear(width_, width_));
    torch::nn::init::xavier_uniform_(in_proj_weight);
    torch::nn::init::zeros_(out_proj->bias);
  }

  torch::Tensor forward(const torch::Tensor& tokens_nlc) {
    // Tokens come first in memory, as behind nn.MultiheadAttention: dropout draws its numbers in
    // that order, and from one seed it is to draw torchvision's.
    return linear(out_proj, mix(tokens_nlc))
        .view({tokens_nlc.size(1), tokens_nlc.size(0), width_})
        .transpose(0, 1);  // (N, L, C)
  }

  /// Returns the rate at which attention weights are zeroed in training.
  double dropout() const { return dropout_; }

  torch::Tensor in_proj_weight, in_proj_bias;
  torch::nn::Linear out_proj{nullptr};

 private:
  torch::Tensor mix(const torch::Tensor& tokens_nlc) const {
    const std::int64_t batch = tokens_nlc.size(0);
    const std::int64_t length = tokens_nlc.size(1);
    const auto parts = linear(tokens_nlc, in_proj_weight, in_proj_bias)
                           .view({batch, length, 3, head_count_, width_ / head_count_})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);  // query, key, value, each (N, heads, L, d)
    return remat::detail::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                       is_training() ? dropout_ : 0.0)
        .permute({2, 0, 1, 3})
        .reshape({length * batch, width_});  // (L * N, C)
  }

  std::int64_t width_, head_count_;
  double dropout_;
};
TORCH_MODULE(SelfAttention);

}  // namespace remat::blocks
