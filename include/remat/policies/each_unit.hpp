// SPDX-License-Identifier: MIT
#pragma once

#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// Makes one segment per unit: the least memory inside a segment, a border tensor for each.
struct EachUnit {
  Plan operator()(const Chain& chain) const {
    return Plan::from_count(chain.unit_count, chain.unit_count);
  }
};

}  // namespace remat
