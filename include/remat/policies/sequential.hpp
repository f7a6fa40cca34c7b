// SPDX-License-Identifier: MIT
#pragma once

#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/plan/simulate.hpp"
#include "remat/policies/segments.hpp"

namespace remat {

/// The pattern of a chain of modules: each child is a unit, nested chains are opened.
///
/// Any unit may be dropped. The last segment stays plain when dropping it would not lower the
/// predicted peak: backward begins with it, so all that it saved would be recomputed at once.
struct Sequential {
  using DefaultRule = Segments<4>;

  Plan operator()(const Plan& plan, const Chain& chain) const {
    if (!chain.is_measured()) return plan;
    const Plan candidate = plan.with_last_plain();
    return predicted_peak(candidate, chain.unit_costs) <= predicted_peak(plan, chain.unit_costs)
               ? candidate
               : plan;
  }
};

}  // namespace remat
