// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "remat/plan/keep_search.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"
#include "remat/units.hpp"

namespace remat {

/// One way to run a training step, and what it is predicted to cost.
struct FrontierPoint {
  /// What decides what stays.
  enum class Kind : std::uint8_t {
    plain,     ///< nothing: no checkpointing
    segments,  ///< a known schedule over layers, see `segment_keeps`
    budget,    ///< a search: what a memory budget of `peak` gets
  };

  Kind kind = Kind::plain;
  std::string name;                   ///< "4 segments"
  bool is_common = false;             ///< a schedule that people compare with
  Bytes peak;                         ///< the most bytes alive at once, above those before the step
  double fraction_of_plain = 1;       ///< of the plain step's peak
  double recomputed_seconds = 0;      ///< of operations that backward runs again
  std::int64_t recomputed_count = 0;  ///< how many those are
  double share_of_forward = 0;        ///< those seconds over those of all of forward's operations

  friend bool operator==(const FrontierPoint&, const FrontierPoint&) = default;
};

/// What a model's training step can be had for: memory against time.
struct Frontier {
  using Kind = FrontierPoint::Kind;

  /// Plain, then the schedules, then what budgets get, the most memory first.
  std::vector<FrontierPoint> points;
  double forward_seconds = 0;  ///< of all of forward's operations, once

  /// Returns the plain step; there must be points.
  const FrontierPoint& plain() const { return points.front(); }

  /// Returns the points of one kind, in their order.
  std::vector<FrontierPoint> of(Kind kind) const {
    std::vector<FrontierPoint> list;
    std::ranges::copy_if(points, std::back_inserter(list),
                         [&](const FrontierPoint& point) { return point.kind == kind; });
    return list;
  }

  /// Returns what a budget gets: plain, or the fastest that fits; null if nothing does.
  const FrontierPoint* fastest_within(Bytes budget) const {
    for (const FrontierPoint& point : points)
      if (point.kind != Kind::segments && point.peak <= budget) return &point;
    return nullptr;
  }

  friend bool operator==(const Frontier&, const Frontier&) = default;
};

namespace detail {

inline std::string percent(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * part);
  return text;
}

/// Names a budget that the peak just fits into: rounded upwards.
inline std::string budget_name(Bytes peak, Bytes plain) {
  const double part = static_cast<double>(peak.count) / static_cast<double>(plain.count);
  return "budget " + percent(std::ceil(1e3 * part) / 1e3);
}

}  // namespace detail

/// Makes the frontier of a traced step.
inline Frontier make_frontier(const StepTrace& trace) {
  Frontier frontier;
  frontier.forward_seconds = trace.seconds();
  StepSimulation simulation(trace);
  const auto add = [&](FrontierPoint::Kind kind, std::string name, const StepCost& cost) {
    const Bytes plain = frontier.points.empty() ? cost.peak : frontier.plain().peak;
    const auto part = [](double count, double of) { return of > 0 ? count / of : 0; };
    frontier.points.push_back(
        {kind, std::move(name), /*is_common=*/false, cost.peak,
         part(static_cast<double>(cost.peak.count), static_cast<double>(plain.count)), cost.seconds,
         cost.recomputed_count, part(cost.seconds, frontier.forward_seconds)});
  };
  KeptValues saved;
  for (const std::int32_t count : trace.saved_counts()) saved.push_back(count > 0);
  const StepCost plain = simulation.run(saved);
  add(FrontierPoint::Kind::plain, "plain", plain);
  for (const NamedKeeps& schedule : segment_keeps(trace)) {
    add(FrontierPoint::Kind::segments, schedule.name, simulation.run(schedule.kept));
    frontier.points.back().is_common = schedule.is_common;
  }
  const std::vector<StepPoint> found = KeepSearch(trace).run().list();
  for (std::size_t i = found.size(); i-- > 0;)
    if (found[i].cost.peak < plain.peak)
      add(FrontierPoint::Kind::budget, detail::budget_name(found[i].cost.peak, plain.peak),
          found[i].cost);
  return frontier;
}

namespace detail {

/// Picks about `count` points, the most and the least among them, at even distances in memory.
///
/// @param points  the most memory first
inline std::vector<FrontierPoint> thin_out(const std::vector<FrontierPoint>& points,
                                           std::size_t count) {
  if (points.size() <= count) return points;
  const auto most = static_cast<double>(points.front().peak.count);
  const auto least = static_cast<double>(points.back().peak.count);
  std::vector<FrontierPoint> picked;
  for (const FrontierPoint& point : points) {
    const double level =
        most - (most - least) * static_cast<double>(picked.size()) / static_cast<double>(count - 1);
    if (static_cast<double>(point.peak.count) <= level) picked.push_back(point);
  }
  if (picked.back() != points.back()) picked.push_back(points.back());
  return picked;
}

}  // namespace detail

/// Writes a table: the plain step, the schedules that people compare with, and some twenty of the
/// plans for budgets. A schedule's last column says what a plan of no more memory takes.
inline std::string to_string(const Frontier& frontier) {
  if (frontier.points.empty()) return "no points";
  std::string text;
  const auto line = [&](const std::string& name, const std::string& peak,
                        const std::string& fraction, const std::string& count,
                        const std::string& share, const std::string& plan) {
    char row[200];
    std::snprintf(row, sizeof row, "%-30s %11s %9s %11s %11s", name.c_str(), peak.c_str(),
                  fraction.c_str(), count.c_str(), share.c_str());
    text += (text.empty() ? "" : "\n") + std::string(row);
    if (!plan.empty()) std::snprintf(row, sizeof row, " %11s", plan.c_str()), text += row;
  };
  const auto write = [&](const FrontierPoint& point, const std::string& plan) {
    line(point.name, to_string(point.peak), detail::percent(point.fraction_of_plain),
         std::to_string(point.recomputed_count), detail::percent(point.share_of_forward), plan);
  };
  line("a training step", "peak", "of plain", "runs again", "extra time", "by a plan");
  write(frontier.plain(), "");
  for (const FrontierPoint& point : frontier.of(FrontierPoint::Kind::segments)) {
    if (!point.is_common) continue;
    const FrontierPoint* plan = frontier.fastest_within(point.peak);
    write(point, plan == nullptr ? "none" : detail::percent(plan->share_of_forward));
  }
  constexpr std::size_t kRows = 20;
  for (const auto& point : detail::thin_out(frontier.of(FrontierPoint::Kind::budget), kRows))
    write(point, "");
  char foot[100];
  std::snprintf(foot, sizeof foot, "\nextra time is part of that of forward's operations, %.1f ms",
                1e3 * frontier.forward_seconds);
  return text + foot;
}

inline std::ostream& operator<<(std::ostream& stream, const Frontier& frontier) {
  return stream << to_string(frontier);
}

}  // namespace remat
