// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "remat/plan/chain_search.hpp"
#include "remat/plan/cut_points.hpp"
#include "remat/plan/price_walk.hpp"
#include "remat/plan/recompute_time.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Searches for the sets of kept values that need the least time at each level of memory.
///
/// The known schedules by segments come first, so that no plan is slower than one of these. Then a
/// ladder of levels leads down from plain: at each, `PriceWalk` and `ChainSearch` propose sets.
/// Last, annealing lowers the least memory that was found, and betters the levels for which the
/// chain's program had no proposal. All that is found goes into one list that depends on no budget.
/// Every number is drawn from a fixed seed: the same trace gives the same list. Up to twelve
/// values, all sets are tried.
class KeepSearch {
 public:
  explicit KeepSearch(const StepTrace& trace) : trace_(trace), simulation_(trace), time_(trace) {
    const std::vector<bool> can_keep = trace.keepable_values();
    for (std::size_t id = 0; id < can_keep.size(); ++id)
      if (can_keep[id]) candidates_.push_back(static_cast<std::int32_t>(id));
  }

  /// Returns the list.
  StepPoints run() {
    if (candidates_.size() <= kFewCandidates) {
      try_all();
      return std::move(points_);
    }
    const Bytes plain_peak = evaluate(trace_.kept_by_plain()).peak;
    plain_peak_ = static_cast<double>(plain_peak.count);
    for (const NamedKeeps& schedule : segment_keeps(trace_)) evaluate(schedule.kept);
    std::vector<Level> levels = choose_levels();
    descend(levels, plain_peak);
    lower(keep_cuts());  // the same, however long the operations took
    lower(points_.least().kept);
    for (const Level& level : levels) polish(level);
    return std::move(points_);
  }

 private:
  struct Level {
    std::int64_t bytes = 0;
    bool is_round = false;  // a budget that somebody is likely to ask for
    bool is_hard = true;    // the chain's program has no proposal
  };

  static constexpr std::size_t kFewCandidates = 12;  // 4096 sets take less time than the search
  static constexpr double kStep = 0.95, kLowestLevel = 0.02;
  static constexpr std::array kRoundParts{0.9, 0.8,     0.75, 0.7,     2.0 / 3, 0.6,
                                          0.5, 0.45,    0.4,  1.0 / 3, 0.3,     1.0 / 4,
                                          0.2, 1.0 / 6, 0.15, 0.125,   0.1};
  static constexpr double kBelowRound = 0.9995;  // room for a small reserve
  static constexpr int kPriceSteps = 10, kMostFailures = 15, kReach = 6;
  static constexpr double kSwaps = 200, kHardSwaps = 2000, kLowerSwaps = 2000;
  static constexpr double kFullEffort = 2000;    // events
  static constexpr double kTemperature = 0.006;  // of forward's time
  static constexpr double kLowerTemperature = 0.02, kPower = 60;

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// What is kept where a chain is cut at all its cut points.
  KeptValues keep_cuts() const {
    KeptValues kept(trace_.values.size(), false);
    for (const CutPoint& point : cut_points(trace_)) kept[at(point.value)] = true;
    return kept;
  }

  StepCost evaluate(const KeptValues& kept) { return add({kept, simulation_.run(kept)}); }
  StepCost add(const StepPoint& point) {
    points_.add(point.kept, point.cost);
    return point.cost;
  }

  static void flip(KeptValues& kept, std::int32_t id) { kept[at(id)] = !kept[at(id)]; }

  void try_all() {
    KeptValues kept(trace_.values.size(), false);
    for (std::uint32_t set = 0; set < std::uint32_t{1} << candidates_.size(); ++set) {
      for (std::size_t i = 0; i < candidates_.size(); ++i)
        kept[at(candidates_[i])] = (set >> i & 1U) != 0;
      evaluate(kept);
    }
  }

  /// A ladder, and the round parts of plain, which are asked for most.
  std::vector<Level> choose_levels() const {
    std::vector<Level> levels;
    for (double part = 1; part > kLowestLevel; part *= kStep)
      levels.push_back({static_cast<std::int64_t>(part * plain_peak_)});
    for (const double part : kRoundParts)
      levels.push_back({static_cast<std::int64_t>(part * kBelowRound * plain_peak_), true});
    std::ranges::sort(levels, std::greater<>(), &Level::bytes);
    return levels;
  }

  /// Takes the proposals for each level, down to the first for which there is none.
  void descend(std::vector<Level>& levels, Bytes plain_peak) {
    PriceWalk walk(trace_, simulation_, plain_peak);
    const ChainSearch chain(trace_, simulation_);
    bool is_met = true;
    for (Level& level : levels) {
      if (!std::exchange(is_met, false)) return;
      for (int i = 0; i < kPriceSteps; ++i)
        is_met = add(walk.step(level.bytes)).peak.count <= level.bytes || is_met;
      const KeptValues kept = chain.run(level.bytes);
      if (kept.empty()) continue;
      level.is_hard = false;
      is_met = true;
      evaluate(kept);
    }
  }

  // --- the least memory ---

  /// Lowers the course of memory wherever it is high, not only where it is highest.
  void lower(KeptValues kept) {
    double height = height_of(kept);
    const int count = scaled(kLowerSwaps);
    for (int i = 0; i < count; ++i) {
      const double temperature = kLowerTemperature * (1 - static_cast<double>(i) / count);
      const std::vector<std::int32_t> flipped = draw_neighbours();
      for (const std::int32_t id : flipped) flip(kept, id);
      const double now = height_of(kept);
      if (now > height - temperature * std::log(uniform() + 1e-12)) {
        for (const std::int32_t id : flipped) flip(kept, id);
        continue;
      }
      height = now;
    }
  }

  /// Simulates; the logarithm of a mean of the course with a high power, which is close to its
  /// peak's.
  double height_of(const KeptValues& kept) {
    double sum = 0;
    points_.add(kept, simulation_.run(kept, &course_));
    for (const Bytes& bytes : course_)
      sum += std::pow(static_cast<double>(bytes.count) / plain_peak_, kPower);
    return std::log(sum);
  }

  // --- the least time ---

  /// Betters what was found for a level.
  void polish(const Level& level) {
    const StepPoint* found = points_.fastest_within({level.bytes});
    if (found == nullptr) return;
    StepPoint state = *found;
    fill(state, level.bytes);
    anneal(state, level);
  }

  /// Keeps what saves time and fits, the most seconds per byte first.
  void fill(StepPoint& state, std::int64_t limit) {
    std::vector<std::pair<double, std::int32_t>> order;
    for (const std::int32_t id : candidates_) {
      if (state.kept[at(id)] || trace_.values[at(id)].bytes > limit) continue;
      flip(state.kept, id);
      const double saved = state.cost.seconds - time_(state.kept);
      flip(state.kept, id);
      if (saved > 0)
        order.emplace_back(saved / static_cast<double>(trace_.values[at(id)].bytes), id);
    }
    std::ranges::sort(order, std::greater<>());
    int failures = 0;
    for (const auto& [gain, id] : order) {
      if (failures > kMostFailures) return;
      flip(state.kept, id);
      if (time_(state.kept) < state.cost.seconds && accept(state, limit)) continue;
      flip(state.kept, id);
      ++failures;
    }
  }

  /// Takes the cost of what is kept now, if it fits.
  bool accept(StepPoint& state, std::int64_t limit) {
    const StepCost cost = evaluate(state.kept);
    if (cost.peak.count > limit) return false;
    state.cost = cost;
    return true;
  }

  /// Flips up to three values that lie close together, and takes what fits and is faster, or at
  /// first a little slower.
  void anneal(StepPoint& state, const Level& level) {
    const double start = kTemperature * trace_.seconds();
    const int count = scaled(level.is_hard ? kHardSwaps : level.is_round ? kSwaps : 0);
    for (int i = 0; i < count; ++i) {
      const double temperature = start * (1 - static_cast<double>(i) / count);
      const std::vector<std::int32_t> flipped = draw_neighbours();
      for (const std::int32_t id : flipped) flip(state.kept, id);
      const double bound = state.cost.seconds - temperature * std::log(uniform() + 1e-12);
      if (time_(state.kept) <= bound && accept(state, level.bytes)) continue;
      for (const std::int32_t id : flipped) flip(state.kept, id);
    }
  }

  /// Fewer swaps where each takes long.
  int scaled(double swaps) const {
    return static_cast<int>(swaps *
                            std::min(1.0, kFullEffort / static_cast<double>(trace_.events.size())));
  }

  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }
  /// A whole number below `count`.
  std::int64_t uniform(std::int64_t count) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(count));
  }

  std::vector<std::int32_t> draw_neighbours() {
    const auto count = static_cast<std::int64_t>(candidates_.size());
    const std::int64_t first = uniform(count);
    std::vector<std::int32_t> drawn{candidates_[static_cast<std::size_t>(first)]};
    for (std::int64_t more = uniform(3); more > 0; --more) {
      const std::int64_t other =
          uniform() < 0.75 ? first + uniform(2 * kReach + 1) - kReach : uniform(count);
      if (other < 0 || other >= count) continue;
      const std::int32_t id = candidates_[static_cast<std::size_t>(other)];
      if (std::ranges::find(drawn, id) == drawn.end()) drawn.push_back(id);
    }
    return drawn;
  }

  const StepTrace& trace_;
  StepSimulation simulation_;
  RecomputeTime time_;
  std::vector<std::int32_t> candidates_;
  StepPoints points_;
  double plain_peak_ = 0;
  std::vector<Bytes> course_;
  std::mt19937 random_{1};
};

}  // namespace remat
