// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "remat/plan/minimum_cut.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// The operations of a trace from `first` up to, and without, `last`.
struct OperationRange {
  std::size_t first = 0, last = 0;
};

/// Decides between keeping and recomputing, exactly, where keeping has a price.
///
/// What backward needs must be kept or recomputed, and what a recomputed operation reads must be
/// so in turn. Which choice is the cheapest, prices and seconds together, is a minimum cut: between
/// a value and its operation runs a pipe at the price of the value, from the operation to the sink
/// one at its time, and to what it reads pipes that cannot be cut.
///
/// @par Source  the cut is that of the partitioner of PyTorch's AOTAutograd, which minimises bytes;
/// here bytes have prices, so that a search over prices obeys a budget
/// @par Threads  any; it refers to the trace
class CheapestKeeps {
 public:
  explicit CheapestKeeps(const StepTrace& trace)
      : trace_(trace), saved_(trace.saved_counts()), can_keep_(trace.keepable_values()) {
    unit_ = trace.seconds() > 0 ? 1e12 / trace.seconds() : 0;
  }

  /// Returns the values to keep among those that the operations make, in order.
  ///
  /// @param price  seconds, by the value's number; what was made before the range is there for free
  template <class Price>
  std::vector<std::int32_t> operator()(OperationRange range, const Price& price) const {
    const std::size_t operation_count = range.last - range.first;
    std::vector<std::int32_t> made;
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes)
        if (!value(id).is_always_kept) made.push_back(id);
    std::ranges::sort(made);
    // Nodes: the operations, then the values.
    const auto node_of = [&](std::int32_t id) -> std::size_t {
      const auto found = std::ranges::lower_bound(made, id);
      const bool is_made = found != made.end() && *found == id;
      return is_made ? operation_count + static_cast<std::size_t>(found - made.begin()) : kNoNode;
    };
    MinimumCut cut(operation_count + made.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::int32_t id = made[i];
      const std::size_t node = operation_count + i;
      if (saved_[at(id)] > 0) cut.add(cut.source(), node, MinimumCut::kUncuttable);
      cut.add(node, at(value(id).producer) - range.first,
              can_keep_[at(id)] ? cost_of(price(id)) + kKeepAtATie : MinimumCut::kUncuttable);
    }
    for (std::size_t i = 0; i < operation_count; ++i) {
      const StepTrace::Operation& operation = trace_.operations[range.first + i];
      cut.add(i, cut.sink(), cost_of(operation.seconds) + kRunAtATie);
      for (const std::int32_t id : operation.reads)
        if (const std::size_t node = node_of(id); node != kNoNode)
          cut.add(i, node, MinimumCut::kUncuttable);
    }
    cut.find();
    std::vector<std::int32_t> kept;
    for (std::size_t i = 0; i < made.size(); ++i)
      if (cut.is_on_source_side(operation_count + i) &&
          !cut.is_on_source_side(at(value(made[i]).producer) - range.first))
        kept.push_back(made[i]);
    return kept;
  }

 private:
  static constexpr auto kNoNode = static_cast<std::size_t>(-1);
  // A value is neither kept nor recomputed for nothing.
  static constexpr std::int64_t kKeepAtATie = 2, kRunAtATie = 1;

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  const StepTrace::Value& value(std::int32_t id) const { return trace_.values[at(id)]; }

  /// Whole numbers, so that the cut is exact: forward's time is 10^12.
  std::int64_t cost_of(double seconds) const {
    return std::llround(std::min(std::max(seconds, 0.0) * unit_, 1e17));
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;
  std::vector<bool> can_keep_;
  double unit_ = 0;
};

}  // namespace remat
