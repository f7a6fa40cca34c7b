// SPDX-License-Identifier: MIT
#pragma once

#include <string>

#include "remat/errors.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// Makes one segment per stage; a chain that names no stages is one.
struct EachStage {
  /// @throws ArgumentError  if the sizes of the stages do not add up to the number of units
  Plan operator()(const Chain& chain) const {
    if (chain.stage_sizes.empty()) return Plan::from_count(chain.unit_count, 1);
    Plan plan = Plan::from_sizes(chain.stage_sizes);
    require(plan.unit_count() == chain.unit_count, [&] {
      return ErrorMessage("remat.plan.stages")
          .where("remat::EachStage")
          .what("the stages have " + std::to_string(plan.unit_count()) +
                " units and the chain has " + std::to_string(chain.unit_count))
          .cure("Give stage sizes that add up to the number of units");
    });
    return plan;
  }
};

}  // namespace remat
