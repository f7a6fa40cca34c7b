// SPDX-License-Identifier: MIT
#pragma once

#include <nlohmann/json.hpp>

#include <utility>

#include "remat/memory/timeline.hpp"
#include "remat/training/memory_report.hpp"

namespace remat {

namespace detail {

using Json = nlohmann::ordered_json;

inline Json memory_json(const StepMemory& memory) {
  return {{"peak_bytes", memory.peak.count}, {"kept_bytes", memory.kept.count}};
}

inline Json timeline_json(const StepTimeline& timeline) {
  Json seconds = Json::array(), live = Json::array(), recomputes = Json::array();
  for (const MemorySample& sample : thinned(timeline.samples)) {
    seconds.push_back(sample.seconds);
    live.push_back(sample.live.count);
  }
  for (const RecomputeSpan& span : timeline.recomputes)
    recomputes.push_back({{"begin_seconds", span.begin_seconds},
                          {"end_seconds", span.end_seconds},
                          {"operations", span.operation_count}});
  return {{"backward_begin_seconds", timeline.backward_begin_seconds},
          {"end_seconds", timeline.end_seconds},
          {"seconds", std::move(seconds)},
          {"live_bytes", std::move(live)},
          {"recomputes", std::move(recomputes)}};
}

}  // namespace detail

/// Returns a report as JSON: every figure with its unit in its name, timelines thinned to about 800
/// points, and null for what was not measured.
///
/// ```cpp
/// std::ofstream("report.json") << remat::to_json(report).dump(2);
/// ```
inline nlohmann::ordered_json to_json(const MemoryReport& report) {
  using detail::Json;
  Json plain = detail::memory_json(report.plain);
  plain["timeline"] = detail::timeline_json(report.plain_timeline);
  Json checkpointed = detail::memory_json(report.checkpointed);
  checkpointed["timeline"] = detail::timeline_json(report.checkpointed_timeline);
  Json units = Json::array();
  for (const UnitMemory& unit : report.units)
    units.push_back({{"name", unit.name},
                     {"plain", detail::memory_json(unit.plain)},
                     {"checkpointed", detail::memory_json(unit.checkpointed)}});
  return {{"saving_bytes", report.saving().count},
          {"saved_part", report.saved_part()},
          {"regions", report.regions},
          {"recomputed_operations", report.recomputed_operations},
          {"time_ratio", report.time_ratio ? Json(*report.time_ratio) : Json()},
          {"plain", std::move(plain)},
          {"checkpointed", std::move(checkpointed)},
          {"units", std::move(units)}};
}

}  // namespace remat
