// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/tape.hpp"
#include "remat/plan/graph.hpp"

#include <cstdint>
#include <mutex>
#include <vector>

namespace remat::detail {

/// Marks the operations behind the saved tensors that were dropped: backward runs those and no
/// others.
inline void mark_recomputed(Graph& graph) {
  std::vector<std::int32_t> todo;
  for (std::size_t i = 0; i < graph.values.size(); ++i)
    if (graph.values[i].is_saved && graph.values[i].fate == Graph::Fate::dropped)
      todo.push_back(static_cast<std::int32_t>(i));
  while (!todo.empty()) {
    const Graph::Value& value = graph.values[static_cast<std::size_t>(todo.back())];
    todo.pop_back();
    if (value.fate != Graph::Fate::dropped || value.producer == none) continue;
    Graph::Operation& operation = graph.operations[static_cast<std::size_t>(value.producer)];
    if (operation.is_recomputed) continue;
    operation.is_recomputed = true;
    todo.insert(todo.end(), operation.reads.begin(), operation.reads.end());
  }
}

/// What a tape knows now, as a value of its own. Asked when a region ends, before the backward pass
/// changes anything.
inline Graph graph_of(Tape& tape) {
  std::lock_guard<std::recursive_mutex> lock(tape.mutex);
  Graph graph;
  for (std::size_t i = 0; i < tape.regions.size(); ++i)
    graph.regions.push_back({tape.regions[i].name, tape.regions[i].parent});
  for (std::size_t i = 0; i < tape.values.size(); ++i) {
    const Value& value = tape.values[i];
    Graph::Value& copy = graph.values.emplace_back();
    copy.bytes = Bytes{value.nbytes};
    copy.producer = value.producer;
    copy.is_saved = value.is_saved;
    copy.is_result = value.is_result;
    copy.fate = value.producer == none ? Graph::Fate::external
                : value.held           ? Graph::Fate::kept
                : value.need > 0       ? Graph::Fate::dropped
                                       : Graph::Fate::unneeded;
  }
  for (std::size_t index = 0; index < tape.operations.size(); ++index) {
    const Operation& operation = tape.operations[index];
    Graph::Operation& copy = graph.operations.emplace_back();
    copy.name = operation.traits->name;
    copy.region = operation.region;
    copy.seconds = static_cast<double>(operation.seconds);
    copy.is_random = operation.random != nullptr;
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape.uses[operation.first_use + i];
      if (!use.needs_content) continue;
      copy.reads.push_back(use.value);
      graph.values[static_cast<std::size_t>(use.value)].last_read =
          static_cast<std::int32_t>(index);
    }
    for (std::size_t i = 0; i < operation.result_count; ++i)
      copy.makes.push_back(tape.results[operation.first_result + i].value);
  }
  mark_recomputed(graph);
  return graph;
}

}  // namespace remat::detail
