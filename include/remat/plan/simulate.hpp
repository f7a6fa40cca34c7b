// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/units.hpp"

namespace remat {

namespace detail {

inline void require_cost_per_unit(const Plan& plan, std::span<const UnitCost> costs,
                                  std::string_view where) {
  require(plan.unit_count() == costs.size(), [&] {
    return ErrorMessage("remat.plan.costs")
        .where(where)
        .what("the plan has " + std::to_string(plan.unit_count()) +
              " units and there are costs of " + std::to_string(costs.size()))
        .cure("Give one cost per unit");
  });
}

/// Gradients pass a segment in pairs: that of a result while that of an input is made.
inline constexpr std::int64_t kGradientsAlive = 2;

}  // namespace detail

/// Returns the bytes that backward holds at its fullest moment, on paper.
///
/// While a segment is in backward these are alive: the tensors at the segments' borders up to it,
/// what plain segments before it saved, what it saved itself (recomputed, or kept if it is plain),
/// and gradients, counted as twice the largest result in it. Not counted: the chain's input and
/// result, parameters, and what a kernel takes for its own work.
///
/// @throws ArgumentError  if there is not one cost per unit
inline Bytes predicted_peak(const Plan& plan, std::span<const UnitCost> costs) {
  detail::require_cost_per_unit(plan, costs, "remat::predicted_peak");
  Bytes alive;
  Bytes held;  // by a keep policy, in the units so far: later ones have let go of theirs
  Bytes peak;
  bool is_border_kept = false;  // between two plain segments nothing is kept beyond what they saved
  for (const Segment& segment : plan.segments()) {
    if (segment.first > 0 && (is_border_kept || segment.is_checkpointed))
      alive += costs[segment.first - 1].output;
    Bytes saved;
    Bytes largest_output;
    for (const UnitCost& cost : costs.subspan(segment.first, segment.unit_count())) {
      saved += cost.saved;
      held += cost.kept;
      largest_output = std::max(largest_output, cost.output);
    }
    peak = std::max(peak, alive + held + saved + detail::kGradientsAlive * largest_output);
    if (!segment.is_checkpointed) alive += saved;
    is_border_kept = segment.is_checkpointed;
  }
  return peak;
}

/// Returns the bytes that backward computes again, a measure of a plan's extra time.
///
/// @throws ArgumentError  if there is not one cost per unit
inline Bytes recomputed_bytes(const Plan& plan, std::span<const UnitCost> costs) {
  detail::require_cost_per_unit(plan, costs, "remat::recomputed_bytes");
  Bytes recomputed;
  for (const Segment& segment : plan.segments()) {
    if (!segment.is_checkpointed) continue;
    for (const UnitCost& cost : costs.subspan(segment.first, segment.unit_count()))
      recomputed += cost.saved;
  }
  return recomputed;
}

}  // namespace remat
