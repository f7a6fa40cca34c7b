// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/device_memory.hpp"
#include "remat/units.hpp"

#include <iostream>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>

namespace remat {

/// An accelerator's memory: what tensors occupy, and what the caching allocator holds for them (at
/// least as much).
struct MemoryStats {
  Bytes allocated, allocated_peak, reserved, reserved_peak;
};

/// Returns the allocator's figures of a device, or nothing where LibTorch does not count them: on
/// the CPU (use `MemoryMeter`), and on accelerators before LibTorch 2.9. "Not available" is never
/// shown as zero.
inline std::optional<MemoryStats> memory_stats(c10::Device device) {
  const auto memory = detail::device_memory(device);
  if (!memory) return std::nullopt;
  return MemoryStats{
      {memory->allocated}, {memory->allocated_peak}, {memory->reserved}, {memory->reserved_peak}};
}

/// Sets a device's peaks to its current figures; does nothing where there are none.
inline void reset_peak_memory_stats(c10::Device device) { detail::reset_device_peak(device); }

/// Writes "allocated 1.2 GiB (peak 3.4 GiB), reserved 4.0 GiB (peak 4.0 GiB)".
inline std::ostream& operator<<(std::ostream& stream, const MemoryStats& stats) {
  return stream << "allocated " << stats.allocated << " (peak " << stats.allocated_peak
                << "), reserved " << stats.reserved << " (peak " << stats.reserved_peak << ')';
}

/// Returns one line for a log: the figures, or that there are none and what to use instead.
inline std::string describe_memory(c10::Device device) {
  std::ostringstream out;
  out << device << ": ";
  if (const auto stats = memory_stats(device))
    out << *stats;
  else
    out << "not available from this LibTorch; remat::MemoryMeter counts the tensors of a scope";
  return out.str();
}

/// Writes that line with its end.
///
/// @param device  by default the accelerator, or the CPU where there is none
inline void print_memory_stats(c10::Device device = detail::device_with_memory(),
                               std::ostream& stream = std::cout) {
  stream << describe_memory(device) << '\n';
}

}  // namespace remat
