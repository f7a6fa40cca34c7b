// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"

namespace remat::blocks {

/// Zeroes whole samples of a batch, each with probability `rate`, and divides the others by the
/// probability to survive, so that the mean stays.
///
/// Without training, or with rate 0, it returns `x` itself and draws nothing.
///
/// @param x     (N, ...); meant for the residual branch of a block
/// @param rate  in [0, 1]
/// @par Source  Huang et al., Deep Networks with Stochastic Depth (2016); torchvision's
/// `stochastic_depth` in mode "row", whose random numbers it draws
inline torch::Tensor stochastic_depth(const torch::Tensor& x, double rate, bool is_training) {
  if (!is_training || rate == 0.0) return x;
  std::vector<std::int64_t> size(static_cast<std::size_t>(x.dim()), 1);
  size[0] = x.size(0);
  const double survival = 1.0 - rate;
  torch::Tensor noise = at::empty(size, at::device(x.device()).dtype(x.dtype()));
  noise.bernoulli_(survival);                // (N, 1, ...)
  if (survival > 0.0) noise.div_(survival);  // nobody survives rate 1, and 0 / 0 is no number
  return x * noise;
}

/// `stochastic_depth` as a module: without parameters, active while it trains.
///
/// @par Source  torchvision's `StochasticDepth` in mode "row"
class StochasticDepthImpl : public torch::nn::Cloneable<StochasticDepthImpl> {
 public:
  /// @throws ArgumentError  if `rate` is no probability
  explicit StochasticDepthImpl(double rate) : rate_(rate) {
    require(rate >= 0.0 && rate <= 1.0, [&] {
      return ErrorMessage("remat.stochastic_depth.rate")
          .where("remat::blocks::StochasticDepth")
          .what("the rate is " + std::to_string(rate) + ", a probability in [0, 1] was expected");
    });
  }

  void reset() override {}

  torch::Tensor forward(const torch::Tensor& x) {
    return stochastic_depth(x, rate_, is_training());
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "StochasticDepth(rate=" << rate_ << ")";
  }

  /// Returns the probability with which a sample is dropped.
  double rate() const { return rate_; }

 private:
  double rate_;
};
TORCH_MODULE(StochasticDepth);

}  // namespace remat::blocks
