// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "remat/libtorch/allocator.hpp"
#include "remat/units.hpp"

namespace benchmarks {

/// Counts what a step allocates, as `remat::MemoryMeter` does, and times its recomputes, which the
/// engine tells a listener of allocations.
class StepMeter {
 public:
  StepMeter() : count_(std::make_shared<Count>()), guard_(count_) {}

  remat::Bytes peak() const { return count_->peak; }
  /// The time that backward has spent on running operations of forward again.
  double recompute_seconds() const { return count_->recompute_time.count(); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Count final : remat::detail::AllocationListener {
    std::mutex mutex;
    remat::Bytes live, peak;
    std::chrono::duration<double> recompute_time{0};
    Clock::time_point recompute_start;

    void changed(const void*, std::int64_t bytes, c10::Device) override {
      const std::lock_guard lock(mutex);
      live.count += bytes;
      peak = std::max(peak, live);
    }
    // On one device there is one thread of backward, so that recomputes follow each other.
    void recompute_begins() override { recompute_start = Clock::now(); }
    void recompute_ended(std::int64_t) override {
      recompute_time += Clock::now() - recompute_start;
    }
  };

  std::shared_ptr<Count> count_;
  remat::detail::AllocationListenerGuard guard_;
};

}  // namespace benchmarks
