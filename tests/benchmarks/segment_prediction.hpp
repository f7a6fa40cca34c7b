// SPDX-License-Identifier: MIT
#pragma once

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace benchmarks {

/// Says from one traced step what a network's segments will need: the simulation that memory plans
/// are searched with, for the schedules beside them.
class SegmentPrediction {
 public:
  /// @param net  with checkpointing off
  SegmentPrediction(remat::Backbone& net, const torch::Tensor& images,
                    const torch::Tensor& labels) {
    const auto loss = [&](const torch::Tensor& output) {
      return torch::cross_entropy_loss(output, labels);
    };
    trace_ = remat::detail::trace_training_step(net, images, loss);
  }

  /// Returns what a step of `net` costs, which has the traced network's units and no keep policy;
  /// nothing if its units are not those of the trace.
  std::optional<remat::StepCost> of(const remat::ChainBackbone& net) const {
    const remat::detail::TracedLayers layers(trace_);
    const remat::Plan plan = recorded_part(net);
    if (plan.unit_count() != layers.count()) return std::nullopt;
    return remat::StepSimulation(trace_).run(layers.keeps(plan));
  }

  /// The time of forward in the trace.
  double seconds() const { return trace_.seconds(); }

 private:
  /// The plan without the units that are marked as plain, such as an embedding: no trace has those.
  static remat::Plan recorded_part(const remat::ChainBackbone& net) {
    const auto units = remat::detail::units_of(*net.chain());
    std::vector<remat::Segment> segments;
    std::size_t count = 0;
    for (const remat::Segment& segment : net.plan().segments()) {
      const std::size_t first = count;
      for (std::size_t unit = segment.first; unit < segment.last; ++unit)
        count += !units[unit].is_plain;
      if (count > first) segments.push_back({first, count, segment.is_checkpointed});
    }
    return remat::Plan(segments);
  }

  remat::StepTrace trace_;
};

}  // namespace benchmarks
