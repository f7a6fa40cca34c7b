// SPDX-License-Identifier: MIT
#pragma once

#include <utility>

#include <nlohmann/json.hpp>

#include "remat/plan/frontier.hpp"

namespace remat {

/// Returns the frontier with all of its points as JSON; needs nlohmann-json.
///
/// ```cpp
/// std::ofstream("frontier.json") << remat::to_json(frontier).dump(2);
/// ```
inline nlohmann::ordered_json to_json(const Frontier& frontier) {
  constexpr auto kind_name = [](FrontierPoint::Kind kind) {
    return kind == FrontierPoint::Kind::plain      ? "plain"
           : kind == FrontierPoint::Kind::segments ? "segments"
                                                   : "budget";
  };
  nlohmann::ordered_json points = nlohmann::ordered_json::array();
  for (const FrontierPoint& point : frontier.points)
    points.push_back({{"kind", kind_name(point.kind)},
                      {"name", point.name},
                      {"is_common", point.is_common},
                      {"peak_bytes", point.peak.count},
                      {"fraction_of_plain", point.fraction_of_plain},
                      {"recomputed_seconds", point.recomputed_seconds},
                      {"recomputed_operations", point.recomputed_count},
                      {"share_of_forward", point.share_of_forward}});
  return {{"forward_seconds", frontier.forward_seconds}, {"points", std::move(points)}};
}

}  // namespace remat
