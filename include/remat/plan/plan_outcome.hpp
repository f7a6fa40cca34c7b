// SPDX-License-Identifier: MIT
#pragma once

#include <ostream>
#include <string>

namespace remat {

/// How a forward pass kept to its plan.
struct PlanOutcome {
  bool is_followed = true;  ///< the same operations ran, all of them, none with a larger result
  std::string deviation;    ///< what was different first; empty: nothing

  friend bool operator==(const PlanOutcome&, const PlanOutcome&) = default;
};

/// Writes "the plan was followed", or where it was left.
inline std::string to_string(const PlanOutcome& outcome) {
  return outcome.is_followed ? "the plan was followed" : "the plan was left: " + outcome.deviation;
}

inline std::ostream& operator<<(std::ostream& stream, const PlanOutcome& outcome) {
  return stream << to_string(outcome);
}

}  // namespace remat
