// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "remat/plan/balance.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// Makes `Count` segments: of equal unit counts until the units are measured, then of least
/// predicted peak.
///
/// @tparam Count  at least 1; more than there are units means one segment per unit
template <int Count>
struct Segments {
  static_assert(Count >= 1,
                "remat::Segments<N> needs N >= 1; to checkpoint nothing, use remat::KeepAll");

  Plan operator()(const Chain& chain) const {
    return balanced_plan(chain, static_cast<std::size_t>(Count));
  }
};

}  // namespace remat
