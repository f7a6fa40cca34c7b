// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "remat/memory/timeline.hpp"
#include "remat/units.hpp"

namespace remat {

/// The tensors' bytes of one training step, or of one part of it, above the level before it.
struct StepMemory {
  Bytes peak;  ///< the most that were alive at once
  Bytes kept;  ///< of a step: alive just before backward, mostly what was saved for it; of a unit:
               ///< alive when its forward returned, less what it could let go
};

/// When a part of a forward was recomputed.
struct RecomputeSpan {
  double begin_seconds = 0, end_seconds = 0;
  std::int64_t operation_count = 0;
};

/// The course of one training step. Seconds are those of the thread that allocates, from the step's
/// beginning: an accelerator computes later than its memory is taken.
struct StepTimeline {
  std::vector<MemorySample> samples{};  ///< at the beginning, and at each allocation and release
  double backward_begin_seconds = 0;    ///< before: forward and loss
  double end_seconds = 0;
  std::vector<RecomputeSpan> recomputes{};
};

/// What one unit of a chain, or one checkpointed module, takes in forward.
struct UnitMemory {
  std::string name;                ///< as in `named_modules()`
  StepMemory plain, checkpointed;  ///< of several calls: kept in all, and the highest peak
};

/// What checkpointing does to the memory of one training step; see `compare_memory`.
struct MemoryReport {
  StepMemory plain, checkpointed;
  std::int64_t regions = 0;                ///< that the checkpointed step ran; 0: nothing was saved
  std::int64_t recomputed_operations = 0;  ///< that its backward ran a second time
  std::optional<double> time_ratio{};      ///< checkpointed over plain, median; empty: not timed
  StepTimeline plain_timeline{}, checkpointed_timeline{};
  std::vector<UnitMemory> units{};  ///< in the order of forward, those inside others left out

  /// Returns by how much the peak is lower with checkpointing; negative if it is higher.
  Bytes saving() const { return plain.peak - checkpointed.peak; }
  /// Returns the saving as a part of the plain peak, 0 to 1.
  double saved_part() const {
    return plain.peak.count == 0
               ? 0
               : static_cast<double>(saving().count) / static_cast<double>(plain.peak.count);
  }
};

namespace detail {

inline std::string fixed_number(double number, int decimals) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", decimals, number);
  return text;
}

/// Writes how much is saved and what that costs, on one line.
inline std::string saving_text(const MemoryReport& report) {
  std::string text = to_string(report.saving()) + " (" +
                     fixed_number(100 * report.saved_part(), 1) + " % of the peak)";
  if (report.regions == 0) return text + "; nothing in this step was checkpointed";
  text += "; " + std::to_string(report.recomputed_operations) + " operations recomputed";
  if (report.time_ratio) text += "; time x" + fixed_number(*report.time_ratio, 2);
  return text;
}

inline std::string unit_row(const std::string& name, std::size_t name_width,
                            const std::vector<std::string>& cells) {
  std::string row = name + std::string(name_width - std::min(name_width, name.size()), ' ');
  for (const std::string& cell : cells)
    row += std::string(14 - std::min<std::size_t>(14, cell.size()), ' ') + cell;
  return row;
}

/// Writes a line per unit, each after an end of line; nothing if there are none.
inline std::string unit_table(const std::vector<UnitMemory>& units) {
  if (units.empty()) return "";
  const std::string title = "forward, by unit";
  std::size_t width = title.size();
  for (const UnitMemory& unit : units) width = std::max(width, unit.name.size());
  std::string table = "\n\n" + unit_row(title, width, {"", "plain", "", "checkpointed"}) + "\n" +
                      unit_row("", width, {"kept", "peak", "kept", "peak"});
  for (const UnitMemory& unit : units)
    table +=
        "\n" + unit_row(unit.name, width,
                        {to_string(unit.plain.kept), to_string(unit.plain.peak),
                         to_string(unit.checkpointed.kept), to_string(unit.checkpointed.peak)});
  return table;
}

}  // namespace detail

/// Writes the report as lines for people, the last one without an end of line: three of the step,
/// and a table of the units if there are any.
inline std::string to_string(const MemoryReport& report) {
  const auto line = [](const StepMemory& memory) {
    return "peak " + to_string(memory.peak) + ", kept for backward " + to_string(memory.kept);
  };
  return "plain:        " + line(report.plain) + "\ncheckpointed: " + line(report.checkpointed) +
         "\nsaving:       " + detail::saving_text(report) + detail::unit_table(report.units);
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  return stream << to_string(report);
}

}  // namespace remat
