// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "remat/plan/cheapest_keeps.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Finds what to keep by letting memory cost something where it is short.
///
/// Every event of the step has a price per byte. A set that is the cheapest at these prices is
/// simulated; where it needs more than the limit the prices rise, where it needs less they fall.
/// Good where most values stay: what a recompute needs besides has no price.
///
/// @par Source  Lagrangian relaxation with subgradient steps, textbook
/// @par Threads  one object per thread; it refers to the trace and the simulation
class PriceWalk {
 public:
  PriceWalk(const StepTrace& trace, StepSimulation& simulation, Bytes plain_peak)
      : trace_(trace),
        simulation_(simulation),
        cheapest_(trace),
        plain_peak_(static_cast<double>(plain_peak.count)),
        prices_(trace.events.size(), 0) {
    find_spans();
  }

  /// Returns the next set that is tried on the way to `limit` bytes, and its cost.
  StepPoint step(std::int64_t limit) {
    std::vector<double> sums(prices_.size() + 1, 0);
    for (std::size_t i = 0; i < prices_.size(); ++i) sums[i + 1] = sums[i] + prices_[i];
    const double unit = trace_.seconds() / plain_peak_;
    const auto price = [&](std::int32_t id) {
      const auto [first, last] = spans_[at(id)];
      const double sum = last > first ? sums[last] - sums[first] : 0;
      return sum * unit * static_cast<double>(trace_.values[at(id)].bytes);
    };
    KeptValues kept(trace_.values.size(), false);
    for (const std::int32_t id : cheapest_({0, trace_.operations.size()}, price))
      kept[at(id)] = true;
    const StepCost cost = simulation_.run(kept, &course_);
    const double step = kStep / static_cast<double>(prices_.size());
    for (std::size_t i = 0; i < prices_.size(); ++i) {
      const double excess = static_cast<double>(course_[i].count - limit) / plain_peak_;
      prices_[i] = std::max(0.0, prices_[i] + step * excess);
    }
    return {std::move(kept), cost};
  }

 private:
  static constexpr double kStep = 12;  // forward's times, over all events

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// Finds for each value the events through which it lives only because it is kept.
  void find_spans() {
    const std::size_t count = trace_.values.size();
    std::vector<std::size_t> asked(count, 0), until(count, 0);
    spans_.assign(count, {0, 0});
    bool is_backward = false;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      is_backward = is_backward || event.kind == StepTrace::Kind::ended;
      if (event.kind == StepTrace::Kind::let_go) spans_[at(event.id)].first = i;
      if (is_backward && event.kind == StepTrace::Kind::asked && asked[at(event.id)] == 0)
        asked[at(event.id)] = i;
      if (is_backward && event.kind == StepTrace::Kind::released) until[at(event.id)] = i;
    }
    // Whoever reads a value to recompute another one does so when that one is asked for.
    for (std::size_t i = trace_.operations.size(); i-- > 0;)
      for (const std::int32_t made : trace_.operations[i].makes)
        for (const std::int32_t read : trace_.operations[i].reads)
          until[at(read)] =
              std::max(until[at(read)], asked[at(made)] > 0 ? asked[at(made)] : until[at(made)]);
    for (std::size_t id = 0; id < count; ++id) spans_[id].second = until[id];
  }

  const StepTrace& trace_;
  StepSimulation& simulation_;
  CheapestKeeps cheapest_;
  double plain_peak_;
  std::vector<double> prices_;  // of a byte at each event, in forward's times for plain's peak
  std::vector<Bytes> course_;
  std::vector<std::pair<std::size_t, std::size_t>> spans_;
};

}  // namespace remat
