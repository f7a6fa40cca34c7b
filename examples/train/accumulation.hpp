// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <utility>

namespace train {

/// Adds up the gradients of several batches, one at a time, so that the sum is that of one big
/// batch: each counts by its share of the cases.
///
/// Equal up to rounding where no layer looks across cases, as batch norm does.
///
/// @param case_count  of all batches together
/// @param next_loss   returns the next batch's mean loss and its size
/// @param backward    runs backward for a weighted loss
/// @return  the mean loss over all cases
template <class NextLoss, class Backward>
double accumulate_gradients(std::int64_t batch_count, std::int64_t case_count, NextLoss next_loss,
                            Backward backward) {
  double mean = 0;
  for (std::int64_t i = 0; i < batch_count; ++i) {
    const std::pair<torch::Tensor, std::int64_t> part = next_loss();
    const torch::Tensor loss =
        part.first * (static_cast<double>(part.second) / static_cast<double>(case_count));
    backward(loss);
    mean += loss.template item<double>();
  }
  return mean;
}

}  // namespace train
