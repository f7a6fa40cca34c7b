// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "remat/plan/balance.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/plan/simulate.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// What stays under a schedule by segments.
struct NamedKeeps {
  std::string name;        ///< "4 segments"
  Plan plan;               ///< of the traced layers
  KeptValues kept;         ///< for `StepSimulation`
  bool is_common = false;  ///< among the few that people compare with
};

namespace detail {

/// The layers of a trace: which operations each has, and the value in which it ends.
class TracedLayers {
 public:
  explicit TracedLayers(const StepTrace& trace)
      : trace_(trace),
        saved_(trace.saved_counts()),
        layer_of_(trace.operations.size(), kOutside),
        is_overwritten_(trace.overwritten_values()) {
    std::int32_t first =
        trace.layers_begin == StepTrace::kNone ? 0 : producer(trace.layers_begin) + 1;
    for (const std::int32_t end : trace.layer_ends) {
      if (producer(end) < first) continue;  // it handed on what a layer before it had made
      for (; first <= producer(end); ++first) layer_of_[at(first)] = count();
      ends_.push_back(end);
    }
  }

  std::size_t count() const { return ends_.size(); }

  /// Returns what the layers cost, as a chain that runs by `plan` measures them.
  std::vector<UnitCost> costs(const Plan& plan) const {
    std::vector<std::size_t> segment_of;
    for (const Segment& segment : plan.segments())
      segment_of.insert(segment_of.end(), segment.unit_count(), segment.first);
    std::vector<UnitCost> costs(count());
    for (std::size_t layer = 0; layer < count(); ++layer) costs[layer].output = bytes(ends_[layer]);
    std::vector<bool> is_counted(trace_.values.size(), false);
    std::size_t running = kOutside;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      if (event.kind == StepTrace::Kind::ended) break;
      if (event.kind == StepTrace::Kind::ran) running = layer_of_[at(event.id)];
      if (event.kind != StepTrace::Kind::saved || is_counted[at(event.id)]) continue;
      const std::size_t from = layer_of(event.id), by = is_saved_by_next(i) ? running + 1 : running;
      // What a region gets from outside is no cost of its units.
      if (from == kOutside || by >= count() || segment_of[from] != segment_of[by]) continue;
      is_counted[at(event.id)] = true;
      const bool is_kept = trace_.values[at(event.id)].is_always_kept;
      (is_kept ? costs[by].kept : costs[by].saved) += bytes(event.id);
    }
    return costs;
  }

  /// Returns what stays if the layers run by the plan and everything around them is plain.
  KeptValues keeps(const Plan& plan) const {
    std::vector<bool> is_checkpointed;
    for (const Segment& segment : plan.segments())
      is_checkpointed.insert(is_checkpointed.end(), segment.unit_count(), segment.is_checkpointed);
    KeptValues kept(trace_.values.size(), false);
    for (std::size_t id = 0; id < kept.size(); ++id) {
      if (producer(static_cast<std::int32_t>(id)) == StepTrace::kNone) continue;
      const std::size_t layer = layer_of(static_cast<std::int32_t>(id));
      const bool is_plain = layer == kOutside || !is_checkpointed[layer];
      kept[id] = is_plain && saved_[id] > 0;
    }
    // What goes into a region, and what comes out of one.
    if (trace_.layers_begin != StepTrace::kNone) kept[at(trace_.layers_begin)] = true;
    for (const Segment& segment : plan.segments()) {
      if (!segment.is_checkpointed) continue;
      if (segment.first > 0) kept[at(ends_[segment.first - 1])] = true;
      kept[at(ends_[segment.last - 1])] = true;
    }
    for (std::size_t id = 0; id < kept.size(); ++id) kept[id] = kept[id] && !is_overwritten_[id];
    return kept;
  }

 private:
  static constexpr std::size_t kOutside = static_cast<std::size_t>(-2);

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  std::int32_t producer(std::int32_t id) const { return trace_.values[at(id)].producer; }
  Bytes bytes(std::int32_t id) const { return {trace_.values[at(id)].bytes}; }
  std::size_t layer_of(std::int32_t id) const {
    return producer(id) == StepTrace::kNone ? kOutside : layer_of_[at(producer(id))];
  }

  /// Autograd saves an operation's arguments before it runs and its results afterwards. So what is
  /// saved once between two operations, and read by the second, is the second's argument.
  bool is_saved_by_next(std::size_t index) const {
    const std::int32_t id = trace_.events[index].id;
    if (std::ranges::find(ends_, id) == ends_.end()) return false;
    for (++index; index < trace_.events.size(); ++index) {
      const StepTrace::Event& event = trace_.events[index];
      if (event.kind == StepTrace::Kind::saved && event.id == id) return false;
      if (event.kind == StepTrace::Kind::ended) return false;
      if (event.kind != StepTrace::Kind::ran) continue;
      const auto& reads = trace_.operations[at(event.id)].reads;
      return std::ranges::find(reads, id) != reads.end();
    }
    return false;
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;    // saved tensors per value when the region ended
  std::vector<std::size_t> layer_of_;  // per operation
  std::vector<bool> is_overwritten_;
  std::vector<std::int32_t> ends_;
};

/// The last segment plain where that does not raise the predicted peak, as `Sequential` has it.
inline Plan with_last_plain_if_free(const Plan& plan, const std::vector<UnitCost>& costs) {
  Plan candidate = plan.with_last_plain();
  return predicted_peak(candidate, costs) <= predicted_peak(plan, costs) ? candidate : plan;
}

}  // namespace detail

/// Returns what stays under the known schedules over a trace's layers: numbers of segments,
/// balanced by bytes and of equal numbers of layers, and one region per layer.
///
/// "n segments" is what a `Checkpointed<Sequential>` of n segments does from its second step on;
/// "n equal segments", the last of them plain, what Python's `checkpoint_sequential` does; the
/// square root of the number of layers has a name of its own. Each plan is there once. What ran
/// before the first layer and after the last one is plain.
///
/// @return  nothing if the trace knows no layers
inline std::vector<NamedKeeps> segment_keeps(const StepTrace& trace) {
  const detail::TracedLayers layers(trace);
  const std::size_t count = layers.count();
  std::vector<NamedKeeps> list;
  const auto add = [&](std::string name, const Plan& plan, bool is_common) {
    if (std::ranges::find(list, plan, &NamedKeeps::plan) == list.end())
      list.push_back({std::move(name), plan, layers.keeps(plan), is_common});
  };
  if (count == 0) return list;
  const Plan finest = Plan::from_count(count, count);
  add("one region per layer", finest, true);
  add("one region per layer, the last plain", finest.with_last_plain(), false);
  const auto root = static_cast<std::size_t>(std::lround(std::sqrt(static_cast<double>(count))));
  for (std::size_t segments = 2; segments < count; ++segments) {
    const bool is_power = (segments & (segments - 1)) == 0;
    if (segments > 8 && !is_power && segments % 12 != 0 && segments != root) continue;
    const Plan equal = Plan::from_count(count, segments);
    const std::vector<UnitCost> costs = layers.costs(equal);
    const Plan balanced = balanced_plan(Chain::of(costs), segments);
    const std::string number = std::to_string(segments);
    const bool is_root = segments == root;
    add(number + " segments" + (is_root ? ", sqrt(" + std::to_string(count) + ")" : ""),
        detail::with_last_plain_if_free(balanced, costs),
        is_root || segments == 2 || segments == 4 || segments == 8);
    add(number + " equal segments", equal.with_last_plain(), false);
  }
  return list;
}

}  // namespace remat
