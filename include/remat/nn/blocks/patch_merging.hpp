// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/linear.hpp"

namespace remat::blocks {

/// Makes one token of every 2×2 tokens: half the height and width, twice the channels.
///
/// A map of odd height or width is padded with zeros at the bottom or on the right.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.1; torchvision's `PatchMerging`
class PatchMergingImpl : public torch::nn::Cloneable<PatchMergingImpl> {
 public:
  PatchMergingImpl(std::int64_t width, double norm_eps) : width_(width), norm_eps_(norm_eps) {
    reset();
  }

  void reset() override {
    reduction = register_module(
        "reduction",
        torch::nn::Linear(torch::nn::LinearOptions(4 * width_, 2 * width_).bias(false)));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4 * width_}).eps(norm_eps_)));
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const std::int64_t odd_rows = map_nhwc.size(1) % 2, odd_columns = map_nhwc.size(2) % 2;
    const torch::Tensor even =
        odd_rows + odd_columns == 0
            ? map_nhwc
            : at::constant_pad_nd(map_nhwc, {0, 0, 0, odd_columns, 0, odd_rows});
    const auto corner = [&](std::int64_t row, std::int64_t column) {
      return even.slice(1, row, even.size(1), 2).slice(2, column, even.size(2), 2);
    };
    // Column by column, as the published weights expect it.
    const torch::Tensor merged = at::cat({corner(0, 0), corner(1, 0), corner(0, 1), corner(1, 1)},
                                         -1);         // (N, H / 2, W / 2, 4 C)
    return linear(reduction, norm->forward(merged));  // (N, H / 2, W / 2, 2 C)
  }

  torch::nn::Linear reduction{nullptr};
  torch::nn::LayerNorm norm{nullptr};

 private:
  std::int64_t width_;
  double norm_eps_;
};
TORCH_MODULE(PatchMerging);

}  // namespace remat::blocks
