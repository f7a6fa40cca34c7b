// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/engine/trace_step.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_plan.hpp"
#include "remat/nn/chain_units.hpp"
#include "remat/nn/unit_mark.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat::detail {

/// Replaces `value` by what the unit makes of it; `more` goes to every unit.
template <class... More>
void run_unit(const ChainUnit& unit, torch::nn::AnyValue& value, const More&... more) {
  const UnitMark mark(*unit.identity);
  if (const auto* tensor = value.try_get<torch::Tensor>()) begin_layer_while_tracing(*tensor);
  const auto call = [&] { value = unit.module->any_forward(std::move(value), more...); };
  if (unit.is_plain)
    call_plain(call);
  else
    call();
  if (auto* tensor = value.try_get<torch::Tensor>()) keep_while_tracing(*tensor);
}

inline Bytes bytes_of(torch::nn::AnyValue& value) {
  auto* tensor = value.try_get<torch::Tensor>();
  if (tensor == nullptr || !tensor->defined() || !has_plain_storage(*tensor)) return {};
  return {tensor->numel() * static_cast<std::int64_t>(tensor->dtype().itemsize())};
}

/// Runs the units segment by segment: checkpointed ones as regions, plain ones as they are.
///
/// @return  what the units cost, one per unit; empty if the plan did not ask for it, or the engine
/// is missing
template <class... More>
std::vector<UnitCost> run_segments(const ChainPlan& planned, const KeepPredicate& keep,
                                   torch::nn::AnyValue& value, const More&... more) {
  std::vector<UnitCost> costs(planned.is_to_measure ? planned.units.size() : 0);
  bool is_measured = planned.is_to_measure;
  for (std::size_t index = 0; index < planned.plan.segment_count(); ++index) {
    const Segment& segment = planned.plan.segments()[index];
    const auto run_units = [&]() -> torch::Tensor {
      for (std::size_t unit = segment.first; unit < segment.last; ++unit) {
        if (planned.is_to_measure && segment.is_checkpointed) begin_unit();
        run_unit(planned.units[unit], value, more...);
        if (planned.is_to_measure) costs[unit].output = bytes_of(value);
      }
      // Shown to the region as its result, which it keeps. Other types are carried in `value`
      // alone.
      auto* tensor = value.template try_get<torch::Tensor>();
      return tensor == nullptr ? torch::Tensor() : *tensor;
    };
    if (!segment.is_checkpointed) {
      run_units();
      continue;
    }
    std::vector<UnitCost> saved;
    RegionOptions options;
    options.keep = keep;
    options.name = planned.segment_names[index];
    if (planned.is_to_measure) options.unit_costs = &saved;
    run_region(options, run_units);
    is_measured = is_measured && saved.size() == segment.unit_count();
    for (std::size_t unit = 0; is_measured && unit < saved.size(); ++unit) {
      costs[segment.first + unit].saved = saved[unit].saved;
      costs[segment.first + unit].kept = saved[unit].kept;
    }
  }
  return is_measured ? std::move(costs) : std::vector<UnitCost>();
}

}  // namespace remat::detail
