// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// The time that backward spends on running operations again, without a simulation: a tenth of its
/// cost.
///
/// @par Threads  one object per thread; it refers to the trace
class RecomputeTime {
 public:
  explicit RecomputeTime(const StepTrace& trace)
      : trace_(trace), seen_(trace.operations.size(), 0) {
    const std::vector<std::int32_t> counts = trace.saved_counts();
    for (std::size_t id = 0; id < counts.size(); ++id)
      if (counts[id] > 0) saved_.push_back(static_cast<std::int32_t>(id));
  }

  /// Returns the seconds of the operations that run again if the given values stay.
  double operator()(const KeptValues& kept) {
    ++round_;
    double seconds = 0;
    todo_ = saved_;
    while (!todo_.empty()) {
      const auto id = static_cast<std::size_t>(todo_.back());
      todo_.pop_back();
      const StepTrace::Value& value = trace_.values[id];
      if (value.producer == StepTrace::kNone || value.is_always_kept || kept[id]) continue;
      const auto producer = static_cast<std::size_t>(value.producer);
      if (seen_[producer] == round_) continue;
      seen_[producer] = round_;
      const StepTrace::Operation& operation = trace_.operations[producer];
      seconds += operation.seconds;
      todo_.insert(todo_.end(), operation.reads.begin(), operation.reads.end());
    }
    return seconds;
  }

 private:
  const StepTrace& trace_;
  std::vector<std::int32_t> saved_, todo_;
  std::vector<std::int64_t> seen_;  // the last round that an operation was in
  std::int64_t round_ = 0;
};

}  // namespace remat
