// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/allocator.hpp"
#include "remat/libtorch/nn.hpp"

namespace remat::detail {

/// Shows whoever listens to allocations where a unit, or a checkpointed module, begins and ends.
///
/// Without a listener it is one look at a thread's own state.
class UnitMark {
 public:
  explicit UnitMark(const torch::nn::Module& module) : listener_(allocation_listener()) {
    if (listener_ != nullptr) listener_->unit_begins(&module);
  }
  ~UnitMark() {
    if (listener_ != nullptr) listener_->unit_ended();
  }
  UnitMark(const UnitMark&) = delete;
  UnitMark& operator=(const UnitMark&) = delete;

 private:
  AllocationListener* listener_;
};

}  // namespace remat::detail
