// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "remat/plan/plan_outcome.hpp"
#include "remat/units.hpp"

namespace remat {

/// A region's step as plain numbers: which operations ran, what they read and made, and what became
/// of it.
///
/// Knows no LibTorch, so that planning on it is arithmetic.
struct Graph {
  /// No producer, or no position.
  static constexpr std::int32_t kNone = -1;

  /// What becomes of a value between forward and backward.
  enum class Fate : std::uint8_t {
    external,  ///< existed before: inputs, parameters, buffers, what was made unrecorded
    kept,      ///< made here and kept: by a policy, because it is tiny, or as a result
    dropped,   ///< made here, let go, and recomputed if backward needs it
    unneeded,  ///< made here, and backward does not need it
  };

  /// The content of one storage at one time.
  struct Value {
    Bytes bytes;
    Fate fate = Fate::dropped;
    std::int32_t producer = kNone;  ///< the operation that made it
    std::int32_t last_read =
        kNone;  ///< the last operation that reads it: with `producer`, its lifetime in forward
    bool is_saved = false;   ///< autograd saved it for backward
    bool is_result = false;  ///< a region returned it
  };

  /// One operation, in the order of forward.
  struct Operation {
    std::string name;  ///< "aten::convolution"
    std::int32_t region = kNone;
    double seconds = 0;               ///< 0 if it was not measured
    std::vector<std::int32_t> reads;  ///< values
    std::vector<std::int32_t> makes;  ///< values
    bool is_random = false;
    bool is_recomputed = false;  ///< backward has to run it again
  };

  /// A region: its name, and the one around it.
  struct Region {
    std::string name;
    std::int32_t parent = kNone;
  };

  std::vector<Value> values;
  std::vector<Operation> operations;
  std::vector<Region> regions;
  std::optional<PlanOutcome> plan_outcome{};  ///< how the region kept to its plan, if it had one

  /// Returns the bytes of all values of that fate; for `dropped` only what autograd saved, which
  /// plain would hold.
  Bytes bytes(Fate fate) const {
    Bytes sum;
    for (const Value& value : values)
      if (value.fate == fate && (fate != Fate::dropped || value.is_saved)) sum += value.bytes;
    return sum;
  }

  /// Returns how many operations backward runs again if it asks for everything.
  std::size_t recomputed_count() const {
    return static_cast<std::size_t>(std::ranges::count_if(operations, &Operation::is_recomputed));
  }

  /// Returns the measured time of those.
  double recomputed_seconds() const {
    double sum = 0;
    for (const Operation& operation : operations)
      sum += operation.is_recomputed ? operation.seconds : 0;
    return sum;
  }

  /// Returns the measured time of all operations.
  double seconds() const {
    double sum = 0;
    for (const Operation& operation : operations) sum += operation.seconds;
    return sum;
  }
};

/// Writes a table: for each kind of operation how often it ran, what was kept and dropped of it,
/// and what running it again costs; for a region that had a plan, whether that was followed.
inline std::string to_string(const Graph& graph) {
  struct Row {
    std::size_t count = 0, recomputed = 0;
    Bytes kept, dropped;
    double seconds = 0;
  };
  std::map<std::string, Row> rows;
  for (const Graph::Operation& operation : graph.operations) {
    Row& row = rows[operation.name];
    ++row.count;
    if (operation.is_recomputed) ++row.recomputed, row.seconds += operation.seconds;
    for (const std::int32_t id : operation.makes) {
      const Graph::Value& value = graph.values[static_cast<std::size_t>(id)];
      if (value.fate == Graph::Fate::kept) row.kept += value.bytes;
      if (value.fate == Graph::Fate::dropped && value.is_saved) row.dropped += value.bytes;
    }
  }

  const auto line = [](const std::string& name, const Row& row) {
    char text[160];
    std::snprintf(text, sizeof text, "%-36s %8zu %12s %12s %10zu %10.2f ms\n",
                  name.substr(0, 36).c_str(), row.count, to_string(row.kept).c_str(),
                  to_string(row.dropped).c_str(), row.recomputed, row.seconds * 1e3);
    return std::string(text);
  };
  char head[160];
  std::snprintf(head, sizeof head, "%-36s %8s %12s %12s %10s %13s\n", "operation", "runs", "kept",
                "dropped", "recomputed", "at a cost of");
  std::string table = head;
  Row total;
  for (const auto& [name, row] : rows) {
    table += line(name, row);
    total.count += row.count, total.recomputed += row.recomputed, total.seconds += row.seconds;
    total.kept += row.kept, total.dropped += row.dropped;
  }
  table += line("all", total);
  char foot[160];
  std::snprintf(foot, sizeof foot,
                "from outside: %s; recomputing takes %.0f %% of the forward's %.2f ms\n",
                to_string(graph.bytes(Graph::Fate::external)).c_str(),
                graph.seconds() > 0 ? 100 * graph.recomputed_seconds() / graph.seconds() : 0.0,
                graph.seconds() * 1e3);
  table += foot;
  return graph.plan_outcome ? table + to_string(*graph.plan_outcome) + "\n" : table;
}

inline std::ostream& operator<<(std::ostream& stream, const Graph& graph) {
  return stream << to_string(graph);
}

}  // namespace remat
