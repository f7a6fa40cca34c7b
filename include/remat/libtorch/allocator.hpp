// SPDX-License-Identifier: MIT
#pragma once

// First, for Clang: see libtorch/tensor.hpp.
#include <ATen/core/ivalue.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "remat/config.hpp"

namespace remat::detail {

/// Receives each allocation and release that LibTorch's allocators report on the thread it was set
/// on, and on the threads of backward passes that are started there; and when a recompute, or the
/// forward of a unit, begins and ends there.
class REMAT_VISIBLE AllocationListener : public c10::MemoryReportingInfoBase {
 public:
  /// @param block  the memory; it may be null where an allocator does not say
  /// @param bytes  negative for a release
  virtual void changed(const void* block, std::int64_t bytes, c10::Device device) = 0;

  virtual void recompute_begins() {}
  /// @param operation_count  how many ran again; 0 if one of them failed
  virtual void recompute_ended(std::int64_t /*operation_count*/) {}

  /// Says that a unit of a chain, or a checkpointed module, is called; they nest.
  ///
  /// @param module  the `torch::nn::Module`, to be told from others
  virtual void unit_begins(const void* /*module*/) {}
  virtual void unit_ended() {}

  // The signature differs between versions; the one that matches overrides, and `override` would
  // refuse the other.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  virtual void reportMemoryUsage(void* block, std::int64_t bytes, std::int64_t, std::int64_t,
                                 c10::Device device) {
    changed(block, bytes, device);
  }
  virtual void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t, std::size_t,
                                 c10::Device device) {
    changed(block, bytes, device);
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif
  bool memoryProfilingEnabled() const override { return true; }
};

/// The listener that is set on this thread; null if there is none, or a profiler took its place.
inline AllocationListener* allocation_listener() {
  return dynamic_cast<AllocationListener*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
}

/// Sets a listener for the life of the guard. It takes the profiler's place: the inner one wins.
class AllocationListenerGuard {
 public:
  explicit AllocationListenerGuard(std::shared_ptr<AllocationListener> listener)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(listener)) {}

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace remat::detail
