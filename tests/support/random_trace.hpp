// SPDX-License-Identifier: MIT
#pragma once

#include "remat/plan/step_trace.hpp"

#include <cstdint>
#include <random>
#include <vector>

namespace random_traces {

using remat::StepTrace;

/// A chain of operations, some of which read an earlier value too; autograd saves the results of
/// most, and each backward operation asks for one and makes a gradient.
inline StepTrace random_trace(std::uint32_t seed, int operation_count) {
  std::mt19937 random(seed);
  const auto draw = [&](std::uint32_t count) {
    return static_cast<std::int32_t>(random() % count);
  };
  StepTrace trace;
  trace.values.push_back({.bytes = 0});  // the input, from outside
  std::vector<std::int32_t> saved;
  const auto event = [&](StepTrace::Kind kind, std::int32_t id, std::int64_t other = 0) {
    trace.events.push_back({kind, id, other, other});
  };
  for (std::int32_t i = 0; i < operation_count; ++i) {
    StepTrace::Operation operation{"op", {i}, {i + 1}, 0, 1.0 + draw(9)};
    if (i > 1 && draw(3) == 0) operation.reads.push_back(draw(static_cast<std::uint32_t>(i)));
    const std::int64_t bytes = 100 * (1 + draw(9));
    operation.peak = bytes + 10;
    trace.values.push_back({.bytes = bytes, .producer = i});
    trace.operations.push_back(operation);
    event(StepTrace::Kind::ran, i);
    if (i > 0) event(StepTrace::Kind::let_go, i);  // the user's code goes on with the result
    if (draw(4) != 0) {
      saved.push_back(i + 1);
      event(StepTrace::Kind::saved, i + 1);
    }
  }
  event(StepTrace::Kind::let_go, operation_count);
  event(StepTrace::Kind::ended, StepTrace::kNone);
  for (std::size_t i = saved.size(); i-- > 0;) {
    event(StepTrace::Kind::asked, saved[i], 50);
    event(StepTrace::Kind::released, saved[i], 120);
  }
  event(StepTrace::Kind::done, StepTrace::kNone);
  return trace;
}

}  // namespace random_traces
