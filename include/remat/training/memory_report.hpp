// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <ostream>
#include <string>

#include "remat/units.hpp"

namespace remat {

/// The tensors' bytes of one training step, above the level before it.
struct StepMemory {
  Bytes peak;  ///< the most that were alive at once in forward, loss and backward
  Bytes kept;  ///< alive just before backward: mostly what was saved for it
};

/// What checkpointing does to the memory of one training step; see `compare_memory`.
struct MemoryReport {
  StepMemory plain, checkpointed;
  std::int64_t regions = 0;                ///< that the checkpointed step ran; 0: nothing was saved
  std::int64_t recomputed_operations = 0;  ///< that its backward ran a second time
  std::optional<double> time_ratio{};      ///< checkpointed over plain, median; empty: not timed

  /// Returns by how much the peak is lower with checkpointing; negative if it is higher.
  Bytes saving() const { return plain.peak - checkpointed.peak; }
  /// Returns the saving as a part of the plain peak, 0 to 1.
  double saved_part() const {
    return plain.peak.count == 0
               ? 0
               : static_cast<double>(saving().count) / static_cast<double>(plain.peak.count);
  }
};

/// Writes the report as lines for people, the last one without an end of line.
inline std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  const auto fixed = [](double number, const char* format) {
    char text[40];
    std::snprintf(text, sizeof text, format, number);
    return std::string(text);
  };
  stream << "plain:        peak " << report.plain.peak << ", kept for backward "
         << report.plain.kept << "\ncheckpointed: peak " << report.checkpointed.peak
         << ", kept for backward " << report.checkpointed.kept
         << "\nsaving:       " << report.saving() << " ("
         << fixed(100 * report.saved_part(), "%.1f") << " % of the peak)";
  if (report.regions == 0) return stream << "; nothing in this step was checkpointed";
  stream << "; " << report.recomputed_operations << " operations recomputed";
  if (report.time_ratio) stream << "; time x" << fixed(*report.time_ratio, "%.2f");
  return stream;
}

}  // namespace remat
