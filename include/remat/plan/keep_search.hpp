// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "remat/plan/chain_search.hpp"
#include "remat/plan/cut_points.hpp"
#include "remat/plan/keep_moves.hpp"
#include "remat/plan/price_walk.hpp"
#include "remat/plan/recompute_time.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Searches for what to keep, and what to recompute more than once, so that a step needs the least
/// time at each level of memory.
///
/// The known schedules by segments come first, so that no plan is slower than one of these. Then a
/// ladder of levels leads down from plain: at each, `PriceWalk` and `ChainSearch` propose sets.
/// Last, annealing lowers the least memory that was found, first by what is kept alone and then
/// with transient values, and betters the levels for which the chain's program had no proposal. All
/// that is found goes into one list that depends on no budget. Every number is drawn from a fixed
/// seed: the same trace gives the same list. Up to nine values, everything is tried.
class KeepSearch {
 public:
  explicit KeepSearch(const StepTrace& trace)
      : trace_(trace), simulation_(trace), time_(trace), moves_(trace) {}

  /// Returns the list.
  StepPoints run() {
    if (moves_.candidates().size() <= kFewCandidates) {
      try_all();
      return std::move(points_);
    }
    const Bytes plain_peak = evaluate(trace_.kept_by_plain()).peak;
    plain_peak_ = static_cast<double>(plain_peak.count);
    for (const NamedKeeps& schedule : segment_keeps(trace_)) evaluate(schedule.kept);
    std::vector<Level> levels = choose_levels();
    descend(levels, plain_peak);
    lower({keep_cuts(), {}}, kLowerKept);  // the same, however long the operations took
    lower(points_.least(), kLowerKept);
    least_kept_ = points_.least().cost.peak;
    lower(nothing_kept(), kLowerTransient);
    for (const Level& level : levels) polish(level);
    return std::move(points_);
  }

 private:
  using Turn = KeepMoves::Turn;
  struct Level {
    std::int64_t bytes = 0;
    bool is_round = false;  // a budget that somebody is likely to ask for
    bool is_hard = true;    // the chain's program has no proposal
  };
  /// How to look for the least memory.
  struct Lowering {
    Turn turn;
    double swaps, most_events;  // fewer swaps in a step of more events
    double temperature;
    int squarings;  // peaks count with power 2^squarings
  };

  static constexpr std::size_t kFewCandidates = 9;  // 3^9 simulations: less than the search
  static constexpr double kStep = 0.95, kLowestLevel = 0.02;
  static constexpr std::array kRoundParts{0.9, 0.8,     0.75, 0.7,     2.0 / 3, 0.6,
                                          0.5, 0.45,    0.4,  1.0 / 3, 0.3,     1.0 / 4,
                                          0.2, 1.0 / 6, 0.15, 0.125,   0.1};
  static constexpr double kBelowRound = 0.9995;  // room for a small reserve
  static constexpr int kPriceSteps = 10, kMostFailures = 15;
  static constexpr double kFullEffort = 2000;  // events
  static constexpr Lowering kLowerKept{Turn::kept, 2000, kFullEffort, 0.02, 6};
  static constexpr Lowering kLowerTransient{Turn::kept_and_transient, 3000, 3 * kFullEffort, 0.005,
                                            5};
  static constexpr double kRoundSwaps = 200, kHardSwaps = 2000;
  static constexpr double kLowSwaps = 200;       // at levels below what kept values alone reach
  static constexpr double kTemperature = 0.006;  // of forward's time

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// What is kept where a chain is cut at all its cut points.
  KeptValues keep_cuts() const {
    KeptValues kept(trace_.values.size(), false);
    for (const CutPoint& point : cut_points(trace_)) kept[at(point.value)] = true;
    return kept;
  }

  StepPoint nothing_kept() const { return {KeptValues(trace_.values.size(), false), {}}; }

  StepCost evaluate(const KeptValues& kept) { return add({kept, simulation_.run(kept)}); }
  StepCost add(const StepPoint& point) {
    points_.add(point);
    return point.cost;
  }

  /// Tries everything that can become of the values.
  void try_all() {
    const std::vector<std::int32_t>& candidates = moves_.candidates();
    const std::size_t count = candidates.size();
    StepPoint point{
        KeptValues(trace_.values.size(), false), {}, TransientValues(trace_.values.size(), false)};
    for (const int fate_count : {2, 3}) {  // transient values only where they are better
      std::vector<int> fates(count, 0);
      std::size_t i = 0;
      do {
        for (std::size_t k = 0; k < count; ++k)
          moves_.set(point, candidates[k], fates[k] == 1, fates[k] == 2);
        point.cost = simulation_.run(point.kept, point.transient);
        add(point);
        for (i = 0; i < count && ++fates[i] == fate_count; ++i) fates[i] = 0;
      } while (i < count);
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
  void lower(StepPoint state, const Lowering& how) {
    double height = height_of(state, how.squarings);
    const int count = scaled(how.swaps, how.most_events);
    for (int i = 0; i < count; ++i) {
      const double temperature = how.temperature * (1 - static_cast<double>(i) / count);
      moves_.move(state, how.turn);
      const double now = height_of(state, how.squarings);
      if (now > height - temperature * std::log(moves_.uniform() + 1e-12))
        moves_.undo(state);
      else
        height = now;
    }
  }

  /// Simulates; the logarithm of a mean of the course with a high power, which is close to its
  /// peak's.
  double height_of(StepPoint& state, int squarings) {
    double sum = 0;
    state.cost = simulation_.run(state.kept, state.transient, &course_);
    points_.add(state);
    for (const Bytes& bytes : course_) {
      double power = static_cast<double>(bytes.count) / plain_peak_;
      for (int i = 0; i < squarings; ++i) power *= power;
      sum += power;
    }
    return std::log(sum);
  }

  // --- the least time ---

  /// Betters what was found for a level.
  void polish(const Level& level) {
    const StepPoint* found = points_.fastest_within({level.bytes});
    if (found == nullptr) return;
    StepPoint state = *found;
    fill(state, level.bytes);
    const bool is_low = level.bytes < least_kept_.count;
    const double swaps = is_low && !level.is_round ? kLowSwaps
                         : level.is_hard           ? kHardSwaps
                         : level.is_round          ? kRoundSwaps
                                                   : 0;
    anneal(state, level.bytes, scaled(swaps), is_low ? Turn::kept_and_transient : Turn::kept);
  }

  /// Keeps what saves time and fits, the most seconds per byte first.
  void fill(StepPoint& state, std::int64_t limit) {
    std::vector<std::pair<double, std::int32_t>> order;
    const double before = time_(state.kept);
    for (const std::int32_t id : moves_.candidates()) {
      if (state.kept[at(id)] || trace_.values[at(id)].bytes > limit) continue;
      state.kept[at(id)] = true;
      const double saved = before - time_(state.kept);
      state.kept[at(id)] = false;
      if (saved > 0)
        order.emplace_back(saved / static_cast<double>(trace_.values[at(id)].bytes), id);
    }
    std::ranges::sort(order, std::greater<>());
    int failures = 0;
    for (const auto& [gain, id] : order) {
      if (failures > kMostFailures) return;
      state.kept[at(id)] = true;
      if (accept(state, limit, state.cost.seconds)) continue;
      state.kept[at(id)] = false;
      ++failures;
    }
  }

  /// Takes the cost of what is kept now, if it fits and is as fast as `bound`.
  bool accept(StepPoint& state, std::int64_t limit, double bound) {
    if (time_(state.kept) > bound) return false;  // without what transient values cost
    const StepCost cost = simulation_.run(state.kept, state.transient);
    add({state.kept, cost, state.transient});
    if (cost.peak.count > limit || cost.seconds > bound) return false;
    state.cost = cost;
    return true;
  }

  /// Takes moves to what fits and is faster, or at first a little slower.
  void anneal(StepPoint& state, std::int64_t limit, int count, Turn turn) {
    const double start = kTemperature * trace_.seconds();
    for (int i = 0; i < count; ++i) {
      const double temperature = start * (1 - static_cast<double>(i) / count);
      moves_.move(state, turn);
      const double luck = temperature * std::log(moves_.uniform() + 1e-12);
      if (!accept(state, limit, state.cost.seconds - luck)) moves_.undo(state);
    }
  }

  /// Fewer swaps where each takes long, in a step of many events.
  int scaled(double swaps, double most_events = kFullEffort) const {
    return static_cast<int>(swaps *
                            std::min(1.0, most_events / static_cast<double>(trace_.events.size())));
  }

  const StepTrace& trace_;
  StepSimulation simulation_;
  RecomputeTime time_;
  KeepMoves moves_;
  StepPoints points_;
  double plain_peak_ = 0;
  Bytes least_kept_;  // of the ways without transient values
  std::vector<Bytes> course_;
};

}  // namespace remat
