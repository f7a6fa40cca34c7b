// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <ranges>
#include <thread>
#include <utility>
#include <vector>

#include "remat/config.hpp"
#include "remat/libtorch/allocator.hpp"
#include "remat/training/memory_report.hpp"

namespace remat::detail {

/// What one training step did to memory.
struct StepRecord {
  struct Unit {
    const void* module;
    StepMemory memory;
  };

  StepMemory memory;
  StepTimeline timeline;
  std::vector<Unit> units;  // in the order of their first calls
};

/// Records one training step: its live bytes over time, its recomputes, and what its units take.
///
/// Set as the allocation listener on the thread that runs the step, where `MemoryMeter` would be:
/// both count the same.
class REMAT_VISIBLE StepRecorder final : public AllocationListener {
 public:
  StepRecorder() { record_.timeline.samples.push_back({0, {0}}); }

  /// Marks the moment between the loss and its backward pass.
  void backward_begins() {
    const std::lock_guard lock(mutex_);
    is_in_forward_ = false;
    record_.memory.kept = live_;
    record_.timeline.backward_begin_seconds = now();
  }

  /// Returns the record; called when the step is over.
  StepRecord finish() {
    const std::lock_guard lock(mutex_);
    record_.timeline.end_seconds = now();
    return std::move(record_);
  }

  void changed(const void*, std::int64_t bytes, c10::Device) override {
    const std::lock_guard lock(mutex_);
    live_.count += bytes;
    record_.memory.peak = std::max(record_.memory.peak, live_);
    unit_peak_ = std::max(unit_peak_, live_);
    record_.timeline.samples.push_back({now(), live_});
  }

  void recompute_begins() override {
    const std::lock_guard lock(mutex_);
    open_.emplace_back(std::this_thread::get_id(), record_.timeline.recomputes.size());
    const double begin = now();
    record_.timeline.recomputes.push_back({begin, begin, 0});
  }
  void recompute_ended(std::int64_t operation_count) override {
    const std::lock_guard lock(mutex_);
    // Each device has a thread of backward: several may recompute at once.
    const auto open =
        std::ranges::find(open_, std::this_thread::get_id(), &decltype(open_)::value_type::first);
    if (open == open_.end()) return;
    RecomputeSpan& span = record_.timeline.recomputes[open->second];
    span.end_seconds = now();
    span.operation_count = operation_count;
    open_.erase(open);
  }

  void unit_begins(const void* module) override {
    const std::lock_guard lock(mutex_);
    if (!is_in_forward_ || std::this_thread::get_id() != thread_) return;
    if (unit_depth_++ > 0) return;
    unit_ = module;
    unit_start_ = unit_peak_ = live_;
  }
  void unit_ended() override {
    const std::lock_guard lock(mutex_);
    if (unit_depth_ == 0 || std::this_thread::get_id() != thread_) return;
    if (--unit_depth_ > 0) return;
    auto known = std::ranges::find(record_.units, unit_, &StepRecord::Unit::module);
    if (known == record_.units.end()) known = record_.units.insert(known, {unit_, {}});
    known->memory.kept += live_ - unit_start_;
    known->memory.peak = std::max(known->memory.peak, unit_peak_ - unit_start_);
  }

 private:
  double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::thread::id thread_ = std::this_thread::get_id();
  std::mutex mutex_;  // guards what follows
  StepRecord record_;
  Bytes live_;
  std::vector<std::pair<std::thread::id, std::size_t>> open_;  // recomputes, by thread
  bool is_in_forward_ = true;
  int unit_depth_ = 0;
  const void* unit_ = nullptr;  // the outermost one
  Bytes unit_start_, unit_peak_;
};

}  // namespace remat::detail
