// SPDX-License-Identifier: MIT
#pragma once

// First, for Clang: see libtorch/tensor.hpp.
#include <ATen/core/ivalue.h>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace remat::detail {

/// Receives each allocation and release that LibTorch's allocators report on the thread it was set
/// on, and on the threads of backward passes that are started there.
class AllocationListener : public c10::MemoryReportingInfoBase {
 public:
  virtual void changed(std::int64_t bytes, c10::Device device) = 0;

  // The signature differs between versions; the one that matches overrides, and `override` would
  // refuse the other.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  virtual void reportMemoryUsage(void*, std::int64_t bytes, std::int64_t, std::int64_t,
                                 c10::Device device) {
    changed(bytes, device);
  }
  virtual void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                                 c10::Device device) {
    changed(bytes, device);
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif
  bool memoryProfilingEnabled() const override { return true; }
};

/// Sets a listener for the life of the guard. It takes the profiler's place: the inner one wins.
class AllocationListenerGuard {
 public:
  explicit AllocationListenerGuard(std::shared_ptr<AllocationListener> listener)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(listener)) {}

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace remat::detail
