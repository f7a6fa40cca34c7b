// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "remat/errors.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/policies/each_stage.hpp"

namespace remat {

namespace detail {

/// Shares segments out to stages, one to each and every further one to the stage with the most
/// units per segment, the first of equals.
///
/// @return  for each stage its number of segments, never more than its units
inline std::vector<std::size_t> shared_out(const std::vector<std::size_t>& stage_sizes,
                                           std::size_t segment_count) {
  std::vector<std::size_t> shares(stage_sizes.size(), 1);
  for (std::size_t given = shares.size(); given < segment_count; ++given) {
    std::size_t neediest = stage_sizes.size();
    for (std::size_t stage = 0; stage < stage_sizes.size(); ++stage) {
      if (shares[stage] == stage_sizes[stage]) continue;
      // Compares units per segment, as products to stay with whole numbers.
      if (neediest == stage_sizes.size() ||
          stage_sizes[stage] * shares[neediest] > stage_sizes[neediest] * shares[stage])
        neediest = stage;
    }
    if (neediest == stage_sizes.size()) break;
    ++shares[neediest];
  }
  return shares;
}

}  // namespace detail

/// The pattern of a network in stages, between which single modules change the resolution.
///
/// The blocks of a stage, a nested `torch::nn::Sequential`, are checkpointed. Modules outside of
/// stages, such as the stem and the transitions, are plain: they are few and their results are the
/// borders anyway. A number of segments given at run time is shared out by depth: one for each
/// stage, the others where most blocks are.
struct StagedHybrid {
  using DefaultRule = EachStage;

  /// @throws ArgumentError  if the chain has modules and no stage
  Plan operator()(const Plan& plan, const Chain& chain) const {
    require(chain.unit_count == 0 || chain.lone_units.size() < chain.unit_count, [&] {
      return ErrorMessage("remat.plan.no_stage")
          .where("remat::StagedHybrid")
          .what("the chain has " + std::to_string(chain.unit_count) +
                " modules and no stage, and at least one stage was expected: there is nothing to "
                "checkpoint")
          .cure(
              "Put the blocks of a stage into a torch::nn::Sequential, or use the pattern "
              "remat::Sequential");
    });
    return plan.with_plain_units(chain.lone_units);
  }

  /// Shares `segment_count` segments out to the stages; each stage has at least one.
  Plan segments(const Chain& chain, std::size_t segment_count) const {
    std::vector<std::size_t> layers = chain.stage_sizes;  // lone modules are layers of one unit
    if (layers.empty()) layers.push_back(chain.unit_count);
    const auto is_lone = [&](std::size_t unit) {
      return std::ranges::find(chain.lone_units, unit) != chain.lone_units.end();
    };
    std::vector<std::size_t> stages;
    std::size_t first = 0;
    for (const std::size_t size : layers) {
      if (!is_lone(first)) stages.push_back(size);
      first += size;
    }
    const std::vector<std::size_t> shares = detail::shared_out(stages, segment_count);
    std::vector<std::size_t> sizes;
    first = 0;
    for (std::size_t layer = 0, stage = 0; layer < layers.size(); first += layers[layer++]) {
      const std::size_t share = is_lone(first) ? 1 : shares[stage++];
      for (const Segment& segment : Plan::from_count(layers[layer], share).segments())
        sizes.push_back(segment.unit_count());
    }
    return Plan::from_sizes(sizes);
  }
};

}  // namespace remat
