// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"

namespace remat::blocks {

/// Scales each channel by a number in [0, 1] that it computes from the means of all channels.
///
/// @par Source  Hu et al., Squeeze-and-Excitation Networks (2017), figure 1 and equation 3, whose
/// delta is `inner` and whose sigma is `gate`; torchvision's `SqueezeExcitation`
class SqueezeExcitationImpl : public torch::nn::Cloneable<SqueezeExcitationImpl> {
 public:
  /// @param squeezed  the width in between; what it is a fraction of differs between families
  /// @param inner     behind `fc1`
  /// @param gate      behind `fc2`; sigmoid or a cheaper stand-in
  SqueezeExcitationImpl(std::int64_t channels, std::int64_t squeezed, Activation inner,
                        Activation gate)
      : channels_(channels), squeezed_(squeezed), inner_(inner), gate_(gate) {
    reset();
  }

  void reset() override {
    fc1 = register_module("fc1", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels_, squeezed_,
                                                                            /*kernel_size=*/1)));
    fc2 = register_module("fc2", torch::nn::Conv2d(torch::nn::Conv2dOptions(squeezed_, channels_,
                                                                            /*kernel_size=*/1)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor scale = at::adaptive_avg_pool2d(x_nchw, {1, 1});  // (N, channels, 1, 1)
    scale = inner_(fc1->forward(scale));                            // (N, squeezed, 1, 1)
    scale = gate_(fc2->forward(scale));                             // (N, channels, 1, 1)
    return scale * x_nchw;                                          // (N, channels, h, w)
  }

  torch::nn::Conv2d fc1{nullptr}, fc2{nullptr};

 private:
  std::int64_t channels_, squeezed_;
  Activation inner_, gate_;
};
TORCH_MODULE(SqueezeExcitation);

}  // namespace remat::blocks
