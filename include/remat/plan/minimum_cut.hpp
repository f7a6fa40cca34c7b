// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace remat {

/// A network of pipes between a source and a sink, and the cheapest set of pipes that separates
/// them.
///
/// @par Source  Dinic 1970: blocking flows over levels of breadth-first search
class MinimumCut {
 public:
  /// The cost of a pipe that is never cut.
  static constexpr std::int64_t kUncuttable = std::numeric_limits<std::int64_t>::max() / 4;

  /// Nodes have the numbers 0 to `node_count` - 1, besides the source and the sink.
  explicit MinimumCut(std::size_t node_count)
      : outgoing_(node_count + 2), source_(node_count), sink_(node_count + 1) {}

  /// Returns the node that all flow comes from.
  std::size_t source() const { return source_; }
  /// Returns the node that all flow goes to.
  std::size_t sink() const { return sink_; }

  /// Adds a pipe that costs `cost` to cut; at `kUncuttable` it never is.
  void add(std::size_t from, std::size_t to, std::int64_t cost) {
    outgoing_[from].push_back(pipes_.size());
    pipes_.push_back({to, cost});
    outgoing_[to].push_back(pipes_.size());
    pipes_.push_back({from, 0});
  }

  /// Finds the cut; afterwards `is_on_source_side` answers.
  void find() {
    while (measure_levels()) {
      next_.assign(outgoing_.size(), 0);
      while (push(source_, kUncuttable) > 0) {
      }
    }
  }

  /// Returns whether the cut leaves the node with the source.
  bool is_on_source_side(std::size_t node) const { return level_[node] >= 0; }

 private:
  struct Pipe {
    std::size_t to = 0;
    std::int64_t room = 0;
  };

  bool measure_levels() {
    level_.assign(outgoing_.size(), -1);
    level_[source_] = 0;
    queue_.assign(1, source_);
    for (std::size_t i = 0; i < queue_.size(); ++i)
      for (const std::size_t index : outgoing_[queue_[i]]) {
        const Pipe& pipe = pipes_[index];
        if (pipe.room == 0 || level_[pipe.to] >= 0) continue;
        level_[pipe.to] = level_[queue_[i]] + 1;
        queue_.push_back(pipe.to);
      }
    return level_[sink_] >= 0;
  }

  /// Pushes flow along one path of rising levels; returns how much.
  std::int64_t push(std::size_t node, std::int64_t most) {
    if (node == sink_) return most;
    for (std::size_t& i = next_[node]; i < outgoing_[node].size(); ++i) {
      const std::size_t index = outgoing_[node][i];
      const Pipe pipe = pipes_[index];
      if (pipe.room == 0 || level_[pipe.to] != level_[node] + 1) continue;
      const std::int64_t pushed = push(pipe.to, std::min(most, pipe.room));
      if (pushed == 0) continue;
      pipes_[index].room -= pushed;
      pipes_[index ^ 1].room += pushed;  // pipes are added in pairs
      return pushed;
    }
    return 0;
  }

  std::vector<Pipe> pipes_;
  std::vector<std::vector<std::size_t>> outgoing_;
  std::size_t source_, sink_;
  std::vector<int> level_;
  std::vector<std::size_t> queue_, next_;
};

}  // namespace remat
