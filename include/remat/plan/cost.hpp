// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <ostream>
#include <utility>
#include <vector>

#include "remat/units.hpp"

namespace remat {

/// What one unit of a chain costs in memory.
struct UnitCost {
  Bytes saved;   ///< tensors that backward needs and a checkpointed segment drops
  Bytes output;  ///< the unit's result, which stays if a segment ends there
  Bytes kept{};  ///< tensors that backward needs and a keep policy holds in any case

  friend bool operator==(const UnitCost&, const UnitCost&) = default;
  friend std::ostream& operator<<(std::ostream& stream, const UnitCost& cost) {
    return stream << "saved " << cost.saved << ", output " << cost.output << ", kept " << cost.kept;
  }
};

/// What a rule is told about a chain.
struct Chain {
  std::size_t unit_count = 0;
  std::vector<UnitCost>
      unit_costs;  ///< one per unit; empty before the first forward has measured them
  std::vector<std::size_t>
      stage_sizes;  ///< units per stage, their sum is `unit_count`; empty: one stage
  std::vector<std::size_t>
      lone_units{};  ///< units that are layers by themselves, and not blocks of a nested chain

  /// Returns a chain of which only the number of units is known.
  static Chain of(std::size_t unit_count) { return {unit_count, {}, {}}; }
  /// Returns a chain with measured units.
  static Chain of(std::vector<UnitCost> unit_costs) {
    const std::size_t unit_count = unit_costs.size();
    return {unit_count, std::move(unit_costs), {}};
  }

  /// Returns whether each unit has its cost.
  bool is_measured() const { return unit_count != 0 && unit_costs.size() == unit_count; }
};

}  // namespace remat
