// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "remat/plan/step_trace.hpp"

namespace remat {

/// A value that alone connects the operations up to its own to those after it: the end of a layer.
struct CutPoint {
  std::size_t operation = 0;  ///< the last one before the cut
  std::int32_t value = StepTrace::kNone;
};

/// Returns all cut points whose value can be kept, in order of forward.
inline std::vector<CutPoint> cut_points(const StepTrace& trace) {
  const std::vector<bool> can_keep = trace.keepable_values();
  std::vector<std::size_t> last_read(trace.values.size(), 0);
  for (std::size_t i = 0; i < trace.operations.size(); ++i)
    for (const std::int32_t id : trace.operations[i].reads)
      last_read[static_cast<std::size_t>(id)] = i;
  std::vector<CutPoint> points;
  std::vector<std::int32_t> crossing;
  for (std::size_t i = 0; i < trace.operations.size(); ++i) {
    for (const std::int32_t id : trace.operations[i].makes) {
      const StepTrace::Value& made = trace.values[static_cast<std::size_t>(id)];
      if (!made.is_always_kept && made.bytes > 0) crossing.push_back(id);
    }
    std::erase_if(crossing,
                  [&](std::int32_t id) { return last_read[static_cast<std::size_t>(id)] <= i; });
    if (crossing.size() == 1 && can_keep[static_cast<std::size_t>(crossing.front())])
      points.push_back({i, crossing.front()});
  }
  return points;
}

/// Returns at most about `most` of the points, evenly spread, of neighbours the smallest.
inline std::vector<CutPoint> thin_out(const std::vector<CutPoint>& points, const StepTrace& trace,
                                      std::size_t most) {
  const std::size_t window = (trace.operations.size() + most - 1) / most;
  const auto bytes = [&](const CutPoint& point) {
    return trace.values[static_cast<std::size_t>(point.value)].bytes;
  };
  std::vector<CutPoint> chosen;
  for (std::size_t i = 0; i < points.size();) {
    std::size_t end = i, best = i;
    for (; end < points.size() && points[end].operation < points[i].operation + window; ++end)
      if (bytes(points[end]) <= bytes(points[best])) best = end;
    chosen.push_back(points[best]);
    i = end;
  }
  return chosen;
}

}  // namespace remat
