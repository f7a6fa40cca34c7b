// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/version.hpp"

#include <ATen/core/ivalue.h>

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#if REMAT_LIBTORCH_AT_LEAST(2, 9)
#include <ATen/DeviceAccelerator.h>
#endif

namespace remat::detail {

struct DeviceMemory {
  std::int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
};

/// The caching allocator's figures of an accelerator, without its headers; nothing where LibTorch
/// (before 2.9, or built for the CPU) does not offer them.
inline std::optional<DeviceMemory> device_memory([[maybe_unused]] c10::Device device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && *accelerator == device.type()) {
    const auto stats =
        at::accelerator::getDeviceStats(device.has_index() ? device.index() : c10::DeviceIndex{0});
    return DeviceMemory{stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak,
                        stats.reserved_bytes[0].current, stats.reserved_bytes[0].peak};
  }
#endif
  return std::nullopt;
}

/// The process's accelerator, or the CPU where there is none or LibTorch does not say.
inline c10::Device device_with_memory() {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  if (const auto accelerator = at::getAccelerator(false)) return {*accelerator, 0};
#endif
  return c10::kCPU;
}

/// Sets the peaks to the current figures.
inline void reset_device_peak([[maybe_unused]] c10::Device device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && *accelerator == device.type())
    at::accelerator::resetPeakStats(device.has_index() ? device.index() : c10::DeviceIndex{0});
#endif
}

}  // namespace remat::detail
