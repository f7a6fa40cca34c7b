// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/allocator.hpp"
#include "remat/memory/timeline.hpp"
#include "remat/units.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace remat {

/// Measures the bytes of tensors that are allocated while it lives, exact and the same in every
/// run.
///
/// It counts what LibTorch's allocators report on the thread that made it and on the threads of
/// backward passes started there, above the level at its construction; what is freed that was
/// allocated before counts as negative only on accelerators. It does not see memory that operators
/// take from elsewhere (oneDNN's scratch), nor the process's size, which allocators keep high.
///
/// @par Threads  made and destroyed on one thread, in the order of a stack; read from anywhere
class MemoryMeter {
 public:
  using Sample = MemorySample;

  MemoryMeter() : count_(std::make_shared<Count>()), guard_(count_) {}
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Returns the live bytes.
  Bytes current() const { return {count_->live}; }
  /// Returns the most bytes that were alive at once since construction or `reset_peak()`.
  Bytes peak() const { return {count_->peak}; }
  /// Sets the peak to the live bytes.
  void reset_peak() { count_->peak = count_->live.load(); }
  /// Takes the present level as zero for what follows.
  void reset() { count_->live = 0, count_->peak = 0; }

  /// Switches on a sample at every allocation and release.
  void record_timeline(bool enabled) { count_->has_timeline = enabled; }
  /// Returns the samples so far.
  std::vector<Sample> timeline() const {
    std::lock_guard<std::mutex> lock(count_->mutex);
    return count_->timeline;
  }

 private:
  struct Count final : detail::AllocationListener {
    std::atomic<std::int64_t> live{0}, peak{0};
    std::atomic<bool> has_timeline{false};
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    std::mutex mutex;
    std::vector<Sample> timeline;

    void changed(const void*, std::int64_t bytes, c10::Device) override {
      const std::int64_t now = live += bytes;
      std::int64_t before = peak;
      while (now > before && !peak.compare_exchange_weak(before, now)) {
      }
      if (!has_timeline) return;
      std::lock_guard<std::mutex> lock(mutex);
      timeline.push_back(
          {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), {now}});
    }
  };

  std::shared_ptr<Count> count_;
  detail::AllocationListenerGuard guard_;
};

}  // namespace remat
