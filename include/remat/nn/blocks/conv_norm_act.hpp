// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <utility>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"

namespace remat::blocks {

/// Returns the options of a convolution that keeps the size at stride 1, and that has no bias since
/// the normalisation behind it would take it away again.
///
/// Chain what differs: `padded_convolution(32, 64, 3).stride(2).groups(32)`.
///
/// @param kernel  odd
inline torch::nn::Conv2dOptions padded_convolution(std::int64_t in, std::int64_t out,
                                                   std::int64_t kernel) {
  return torch::nn::Conv2dOptions(in, out, kernel).padding((kernel - 1) / 2).bias(false);
}

/// The constants of a batch normalisation; LibTorch's and PyTorch's unless a family says otherwise.
struct BatchNormConstants {
  double eps = 1e-5;
  double momentum = 0.1;  ///< the weight of the *new* batch; some frameworks count it the other way
};

/// Makes a batch normalisation with these constants.
inline torch::nn::BatchNorm2d batch_norm(std::int64_t channels, BatchNormConstants constants) {
  return torch::nn::BatchNorm2d(
      torch::nn::BatchNorm2dOptions(channels).eps(constants.eps).momentum(constants.momentum));
}

/// A convolution, a batch normalisation and, if there is one, an activation. The children are `0`
/// and `1`; one unit of a chain.
///
/// @par Source  torchvision's `Conv2dNormActivation`
class ConvNormActImpl : public torch::nn::Cloneable<ConvNormActImpl> {
 public:
  explicit ConvNormActImpl(torch::nn::Conv2dOptions convolution, BatchNormConstants constants = {},
                           Activation activation = nullptr)
      : options_(std::move(convolution)), constants_(constants), activation_(activation) {
    reset();
  }

  void reset() override {
    conv = register_module("0", torch::nn::Conv2d(options_));
    norm = register_module("1", batch_norm(options_.out_channels(), constants_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = norm->forward(conv->forward(x_nchw));  // (N, out, h / stride, w / stride)
    return activation_ == nullptr ? y : activation_(std::move(y));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};

 private:
  torch::nn::Conv2dOptions options_;
  BatchNormConstants constants_;
  Activation activation_;
};
TORCH_MODULE(ConvNormAct);

}  // namespace remat::blocks
