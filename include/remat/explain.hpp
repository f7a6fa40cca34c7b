// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

#include "remat/checkpoint.hpp"
#include "remat/engine/graph_of.hpp"
#include "remat/engine/plan_follower.hpp"
#include "remat/plan/memory_plan.hpp"

namespace remat {

/// Runs `fn(inputs...)` once as a checkpointed region and returns its graph: what it keeps, drops
/// and would cost to recompute.
///
/// Printed, it is a table by kind of operation. The call has the effects of a forward pass
/// (buffers, random numbers); its results are let go. With grad mode off nothing is recorded and
/// the graph is empty.
///
/// @param keep    a keep policy, as for `checkpoint`
/// @param fn      any callable
/// @param inputs  handed to `fn`
template <class Keep, class Function, class... Inputs>
  requires std::predicate<const Keep&, const keep::Operation&, Bytes> &&
           std::invocable<Function, Inputs...>
Graph explain(Keep keep, Function&& fn, Inputs&&... inputs) {
  Graph graph;
  detail::RegionOptions options;
  if constexpr (!std::is_same_v<Keep, keep::nothing>) options.keep = std::move(keep);
  options.measures_time = true;
  options.at_end = [&graph](detail::Tape& tape) { graph = detail::graph_of(tape); };
  static_cast<void>(
      detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  return graph;
}

/// As above, with nothing kept.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
Graph explain(Function&& fn, Inputs&&... inputs) {
  return explain(keep::nothing{}, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// As above, keeping what a plan says; the graph, and so the table, says whether the region
/// followed the plan to its end, or where it left it.
///
/// A module that has a budget of its own follows the region around it here, as in any region: hand
/// over its `memory_plan()`.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
Graph explain(const MemoryPlan& plan, Function&& fn, Inputs&&... inputs) {
  Graph graph;
  detail::RegionOptions options;
  options.measures_time = true;
  const auto follower = detail::follow_plan(options, std::make_shared<const MemoryPlan>(plan));
  options.at_end = [&graph, compare = std::move(options.at_end)](detail::Tape& tape) {
    compare(tape);
    graph = detail::graph_of(tape);
  };
  static_cast<void>(
      detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  if (follower->has_ended()) graph.plan_outcome = follower->outcome();
  return graph;
}

}  // namespace remat
