// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <utility>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/linear.hpp"

namespace remat::blocks {

/// Two linear layers with a GELU between, on the last dimension; dropout behind each.
///
/// Children are `0` and `3`, the linear layers, and `2` and `4`, the dropouts; `1` would be the
/// activation.
///
/// @par Source  Vaswani et al., Attention Is All You Need (2017), section 3.3, with the GELU of
/// BERT; torchvision's `MLP`
class MlpImpl : public torch::nn::Cloneable<MlpImpl> {
 public:
  /// @param width    channels of the input and of the result
  /// @param hidden   channels in between
  /// @param dropout  rate
  MlpImpl(std::int64_t width, std::int64_t hidden, double dropout)
      : width_(width), hidden_(hidden), rate_(dropout) {
    reset();
  }

  /// Makes the layers anew, initialised as torchvision's transformers do: Glorot's uniform
  /// distribution for weights, almost zero for biases.
  void reset() override {
    widen = register_module("0", torch::nn::Linear(width_, hidden_));
    inner_dropout = register_module("2", torch::nn::Dropout(rate_));
    narrow = register_module("3", torch::nn::Linear(hidden_, width_));
    outer_dropout = register_module("4", torch::nn::Dropout(rate_));
    for (const auto& linear : {widen, narrow}) {
      torch::nn::init::xavier_uniform_(linear->weight);
      torch::nn::init::normal_(linear->bias, /*mean=*/0, /*std=*/1e-6);
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor wide = inner_dropout->forward(at::gelu(linear(widen, x)));  // (..., hidden)
    return outer_dropout->forward(linear(narrow, wide));                            // (..., width)
  }

  torch::nn::Linear widen{nullptr}, narrow{nullptr};
  torch::nn::Dropout inner_dropout{nullptr}, outer_dropout{nullptr};

 private:
  std::int64_t width_, hidden_;
  double rate_;
};
TORCH_MODULE(Mlp);

}  // namespace remat::blocks
