// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <limits>

#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Makes one row of a set of rows: their mean, weighted by what a small network thinks of each.
///
/// The weights do not depend on the order of the rows, nor on how many there are.
///
/// @par Source  Ilse, Tomczak and Welling, Attention-based Deep Multiple Instance Learning (2018),
/// equations 7 and 9, where `content` is V, `gate` is U and `score` is w
class GatedAttentionImpl : public torch::nn::Cloneable<GatedAttentionImpl> {
 public:
  /// @param width   of a row
  /// @param hidden  width in between; the paper's experiments have 128
  explicit GatedAttentionImpl(std::int64_t width, std::int64_t hidden = 128)
      : width_(width), hidden_(hidden) {
    reset();
  }

  void reset() override {
    content = register_module("content", torch::nn::Linear(width_, hidden_));
    gate = register_module("gate", torch::nn::Linear(width_, hidden_));
    // Without a bias, which the softmax would take away again.
    score = register_module("score",
                            torch::nn::Linear(torch::nn::LinearOptions(hidden_, 1).bias(false)));
  }

  /// Returns how much each row counts; the weights of a set sum up to 1.
  ///
  /// @param rows        (N, L, width)
  /// @param is_present  (N, L), boolean; rows that are not get weight 0; undefined: all are
  /// @return            (N, L)
  torch::Tensor weights(const torch::Tensor& rows, const torch::Tensor& is_present = {}) {
    const torch::Tensor hidden = content->forward(rows).tanh() * gate->forward(rows).sigmoid();
    torch::Tensor scores = score->forward(hidden).squeeze(-1);  // (N, L)
    if (is_present.defined())
      scores =
          scores.masked_fill(is_present.logical_not(), -std::numeric_limits<double>::infinity());
    return scores.softmax(/*dim=*/1);
  }

  /// Returns the weighted mean of each set, (N, width); arguments as for `weights`, absent rows
  /// finite.
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& is_present = {}) {
    return (weights(rows, is_present).unsqueeze(-1) * rows).sum(/*dim=*/1);
  }

  torch::nn::Linear content{nullptr}, gate{nullptr}, score{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  std::int64_t width_, hidden_;
};
TORCH_MODULE(GatedAttention);

}  // namespace remat::blocks
