// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "remat/yaml.hpp"

namespace train {

/// The learning rate of each step: a rise from 0, then half a cosine down to the least.
///
/// A function of the step alone, so that a run that goes on has nothing to restore.
/// @par Source  Loshchilov and Hutter, SGDR (2017), without restarts
class Schedule {
 public:
  Schedule(const remat::TrainingConfig& training, std::int64_t steps_per_epoch)
      : highest_(training.lr),
        lowest_(training.min_lr),
        rise_(std::llround(training.warmup_epochs * static_cast<double>(steps_per_epoch))),
        steps_(training.epochs * steps_per_epoch) {}

  /// @param step  from 0
  double rate(std::int64_t step) const {
    if (step < rise_) return highest_ * static_cast<double>(step + 1) / static_cast<double>(rise_);
    const auto passed = static_cast<double>(step - rise_);
    const auto fall = static_cast<double>(std::max<std::int64_t>(1, steps_ - rise_));
    const double share = std::min(1.0, passed / fall);
    return lowest_ + (highest_ - lowest_) * (1 + std::cos(std::numbers::pi * share)) / 2;
  }

 private:
  double highest_, lowest_;
  std::int64_t rise_, steps_;
};

}  // namespace train
