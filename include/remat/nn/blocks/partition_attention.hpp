// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/map_partition.hpp"
#include "remat/nn/blocks/relative_position.hpp"
#include "remat/nn/blocks/stochastic_depth.hpp"
#include "remat/nn/blocks/trunc_normal.hpp"

namespace remat::blocks {

/// Attention inside groups of places, with a learned bias for each distance between two of them.
///
/// Products are scaled by the root of the whole width, not of a head's, as torchvision does.
///
/// @par Source  Tu et al., MaxViT (2022), equation 2; torchvision's
/// `RelativePositionalMultiHeadAttention`
class GroupAttentionImpl : public torch::nn::Cloneable<GroupAttentionImpl> {
 public:
  /// @param channels    a multiple of `head_width`
  /// @param group_size  a group is a square of that many places a side
  /// @throws ArgumentError  if heads of that width do not fill the channels
  GroupAttentionImpl(std::int64_t channels, std::int64_t head_width, std::int64_t group_size)
      : channels_(channels), head_width_(head_width), group_size_(group_size) {
    require(head_width > 0 && channels % head_width == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::GroupAttention")
          .what("there are " + std::to_string(channels) + " channels for heads of " +
                std::to_string(head_width) + ", a multiple of that was expected");
    });
    reset();
  }

  void reset() override {
    relative_position_bias_table =
        register_parameter("relative_position_bias_table",
                           at::zeros({window().distance_count(), channels_ / head_width_}));
    trunc_normal_(relative_position_bias_table, /*mean=*/0, /*standard_deviation=*/0.02);
    relative_position_index =
        register_buffer("relative_position_index", blocks::relative_position_index(window()));
    to_qkv = register_module("to_qkv", torch::nn::Linear(channels_, 3 * channels_));
    merge = register_module("merge", torch::nn::Linear(channels_, channels_));
  }

  /// @param x  (N, groups, group_size squared, channels)
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = to_qkv->forward(x).chunk(3, /*dim=*/-1);
    const torch::Tensor query = by_head(parts[0]);
    const torch::Tensor key = by_head(parts[1]) * std::pow(static_cast<double>(channels_), -0.5);
    torch::Tensor weights =
        at::einsum("nghid,nghjd->nghij", {query, key}) +
        relative_position_bias(relative_position_bias_table, relative_position_index, window());
    weights = weights.softmax(-1);  // (N, groups, heads, places, places)
    const torch::Tensor mixed = at::einsum("nghij,nghjd->nghid", {weights, by_head(parts[2])});
    return merge->forward(mixed.permute({0, 1, 3, 2, 4}).reshape(x.sizes()));
  }

  torch::Tensor relative_position_bias_table, relative_position_index;
  torch::nn::Linear to_qkv{nullptr}, merge{nullptr};

 private:
  WindowSize window() const { return {group_size_, group_size_}; }

  /// Returns (N, groups, heads, places, head_width).
  torch::Tensor by_head(const torch::Tensor& x) const {
    return x.reshape({x.size(0), x.size(1), x.size(2), channels_ / head_width_, head_width_})
        .permute({0, 1, 3, 2, 4});
  }

  std::int64_t channels_, head_width_, group_size_;
};
TORCH_MODULE(GroupAttention);

/// Which places of a map attend to each other.
enum class Partition {
  kWindow,  ///< neighbours
  kGrid,    ///< places spread over the whole map
};

/// What a `PartitionAttention` is built from; meant for designated initialisers.
struct PartitionAttentionOptions {
  Partition partition = Partition::kWindow;
  std::int64_t channels = 0;
  std::int64_t head_width = 32;     ///< channels of one attention head
  std::int64_t partition_size = 7;  ///< a group is a square of that many places a side
  double dropout = 0;               ///< rate behind the perceptron
  double attention_dropout = 0;     ///< rate behind the attention
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
};

/// Attention and a perceptron inside the groups of a map, each with the input added.
///
/// Any map is fine of which `partition_size` divides height and width.
///
/// @par Source  Tu et al., MaxViT (2022), section 3.2; torchvision's `PartitionAttentionLayer`
class PartitionAttentionImpl : public torch::nn::Cloneable<PartitionAttentionImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;  // how many times wider the perceptron is inside

  explicit PartitionAttentionImpl(const PartitionAttentionOptions& options) : options_(options) {
    reset();
  }

  void reset() override {
    const std::int64_t channels = options_.channels;
    attn_layer = register_module(
        "attn_layer", torch::nn::Sequential(
                          torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels})),
                          GroupAttention(channels, options_.head_width, options_.partition_size),
                          torch::nn::Dropout(options_.attention_dropout)));
    mlp_layer = register_module(
        "mlp_layer",
        torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels})),
                              torch::nn::Linear(channels, kExpansion * channels),
                              torch::nn::Functional(activations::gelu),
                              torch::nn::Linear(kExpansion * channels, channels),
                              torch::nn::Dropout(options_.dropout)));
    stochastic_dropout = register_module("stochastic_dropout", StochasticDepth(options_.drop_rate));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const bool is_grid = options_.partition == Partition::kGrid;
    const std::int64_t size = options_.partition_size;
    torch::Tensor x = is_grid ? partition_grid(x_nchw, size) : partition_windows(x_nchw, size);
    x = x + stochastic_dropout->forward(attn_layer->forward(x));
    x = x + stochastic_dropout->forward(mlp_layer->forward(x));  // (N, groups, places, channels)
    return is_grid ? join_grid(x, size, x_nchw.size(2), x_nchw.size(3))
                   : join_windows(x, size, x_nchw.size(2), x_nchw.size(3));
  }

  /// Returns what this was built from.
  const PartitionAttentionOptions& options() const { return options_; }

  torch::nn::Sequential attn_layer{nullptr}, mlp_layer{nullptr};
  StochasticDepth stochastic_dropout{nullptr};

 private:
  PartitionAttentionOptions options_;
};
TORCH_MODULE(PartitionAttention);

}  // namespace remat::blocks
