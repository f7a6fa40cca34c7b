// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <queue>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "remat/plan/recompute_time.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Searches for the sets of kept values that need the least time at each level of memory.
///
/// Two walks over a ladder of levels meet. Downwards from plain: drop what lowers the excess over
/// the level most per second (lazily, since a gain seldom grows when others are dropped), then put
/// back what fits after all. Upwards from the least memory: keep what saves the most seconds per
/// byte. On low levels a short annealing follows, which swaps neighbours. All that is found goes
/// into one list that depends on no budget. Every number is drawn from a fixed seed: the same trace
/// gives the same list.
///
/// @par Source  the greedy choice follows the heuristic of Dynamic Tensor Rematerialization
/// (Kirisame et al. 2021, ICLR) in weighing bytes against seconds; the annealing is textbook
class KeepSearch {
 public:
  explicit KeepSearch(const StepTrace& trace) : trace_(trace), simulation_(trace), time_(trace) {
    find_candidates();
  }

  /// Returns the list.
  StepPoints run() {
    if (candidates_.size() <= kFewCandidates) {
      try_all();
      return std::move(points_);
    }
    State plain{keep_saved(), {}};
    plain.cost = evaluate(plain.kept);
    plain_peak_ = static_cast<double>(plain.cost.peak.count);
    const bool is_large = candidates_.size() > kManyCandidates;
    std::vector<std::int64_t> levels;
    for (double level = plain_peak_; level > kLowestLevel * plain_peak_;
         level *= is_large ? kCoarseStep : kFineStep)
      levels.push_back(static_cast<std::int64_t>(level));
    go_down(std::move(plain), levels, is_large);
    std::ranges::reverse(levels);
    go_up(levels);
    return std::move(points_);
  }

 private:
  struct State {
    KeptValues kept;
    StepCost cost;
  };

  static constexpr double kUnknown = std::numeric_limits<double>::infinity();
  static constexpr std::size_t kFewCandidates = 12;  // 4096 sets take less time than the search
  static constexpr std::size_t kManyCandidates = 300;
  static constexpr double kFineStep = 0.95, kCoarseStep = 0.85, kLowestLevel = 0.02;
  static constexpr double kHardLevel = 0.46;  // of plain: below, the greedy choice errs visibly
  static constexpr int kSwaps = 1500, kMostFailures = 60, kMostPasses = 4, kReach = 6;
  static constexpr double kTemperature = 0.006;  // of forward's time

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  void find_candidates() {
    std::vector<bool> is_overwritten(trace_.values.size(), false);
    for (const StepTrace::Value& value : trace_.values)
      if (value.takes_over != StepTrace::kNone) is_overwritten[at(value.takes_over)] = true;
    for (std::size_t id = 0; id < trace_.values.size(); ++id) {
      const StepTrace::Value& value = trace_.values[id];
      if (value.producer != StepTrace::kNone && value.bytes > 0 && !value.is_always_kept &&
          !is_overwritten[id])
        candidates_.push_back(static_cast<std::int32_t>(id));
    }
  }

  /// What plain keeps. A value that autograd did not save would only add to that.
  KeptValues keep_saved() const {
    const std::vector<std::int32_t> counts = trace_.saved_counts();
    KeptValues kept(trace_.values.size(), false);
    for (const std::int32_t id : candidates_) kept[at(id)] = counts[at(id)] > 0;
    return kept;
  }

  StepCost evaluate(const KeptValues& kept, std::int64_t limit = 0) {
    const StepCost cost = simulation_.run(kept, {limit});
    points_.add(kept, cost);
    return cost;
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

  // --- downwards ---

  void go_down(State state, const std::vector<std::int64_t>& levels, bool is_large) {
    for (const std::int64_t level : levels) {
      const bool fits = shrink(state, level);
      const std::int64_t limit = std::max(level, state.cost.peak.count);
      fill(state, limit);
      if (!is_large) anneal(state, limit);
      if (!fits) return;
    }
  }

  /// Drops values until the level is met; false if no single one helps any more.
  bool shrink(State& state, std::int64_t level) {
    state.cost = evaluate(state.kept, level);
    int round = 0;
    std::priority_queue<std::tuple<double, std::int32_t, int>> queue;  // gain, value, round
    for (const std::int32_t id : candidates_)
      if (state.kept[at(id)]) queue.emplace(kUnknown, id, -1);
    while (state.cost.peak.count > level && !queue.empty()) {
      const auto [gain, id, known_in] = queue.top();
      queue.pop();
      flip(state.kept, id);
      const StepCost cost = evaluate(state.kept, level);
      if (known_in == round) {
        if (gain <= 0) return flip(state.kept, id), false;
        state.cost = cost;
        ++round;
        continue;
      }
      flip(state.kept, id);
      const double seconds = std::max(cost.seconds - state.cost.seconds, 1e-9);
      queue.emplace(std::max(state.cost.excess - cost.excess, 0.0) / seconds, id, round);
    }
    return state.cost.peak.count <= level;
  }

  /// Keeps what saves time and fits, the most seconds per byte first.
  void fill(State& state, std::int64_t limit) {
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
  bool accept(State& state, std::int64_t limit) {
    const StepCost cost = evaluate(state.kept);
    if (cost.peak.count > limit) return false;
    state.cost = cost;
    return true;
  }

  // --- annealing ---

  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }
  /// A whole number below `count`.
  std::int64_t uniform(std::int64_t count) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(count));
  }

  /// Flips up to three values that lie close together, and takes what fits and is faster, or at
  /// first a little slower.
  void anneal(State& state, std::int64_t limit) {
    const bool is_hard = static_cast<double>(limit) < kHardLevel * plain_peak_;
    const int count = is_hard ? kSwaps : kSwaps / 10;
    const double start = kTemperature * trace_.seconds();
    State best = state;
    for (int i = 0; i < count && !candidates_.empty(); ++i) {
      const double temperature = start * (1 - static_cast<double>(i) / count);
      const std::vector<std::int32_t> flipped = draw_neighbours();
      for (const std::int32_t id : flipped) flip(state.kept, id);
      const double bound = state.cost.seconds - temperature * std::log(uniform() + 1e-12);
      if (time_(state.kept) <= bound && accept(state, limit)) {
        if (state.cost.seconds < best.cost.seconds) best = state;
      } else {
        for (const std::int32_t id : flipped) flip(state.kept, id);
      }
    }
    state = std::move(best);
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

  // --- upwards ---

  void go_up(const std::vector<std::int64_t>& levels) {
    State state{keep_cuts(), {}};
    evaluate(state.kept);
    flatten(state.kept);
    state.cost = evaluate(state.kept);
    for (const std::int64_t level : levels)
      if (state.cost.peak.count <= level) fill(state, level);
  }

  /// Keeps what alone connects the operations before it to those after it: the ends of layers.
  KeptValues keep_cuts() const {
    std::vector<std::int32_t> last_read(trace_.values.size(), StepTrace::kNone);
    for (std::size_t i = 0; i < trace_.operations.size(); ++i)
      for (const std::int32_t id : trace_.operations[i].reads)
        last_read[at(id)] = static_cast<std::int32_t>(i);
    KeptValues kept(trace_.values.size(), false);
    std::vector<std::int32_t> crossing;
    for (std::size_t i = 0; i < trace_.operations.size(); ++i) {
      for (const std::int32_t id : trace_.operations[i].makes)
        if (!trace_.values[at(id)].is_always_kept) crossing.push_back(id);
      std::erase_if(crossing, [&](std::int32_t id) {
        return last_read[at(id)] <= static_cast<std::int32_t>(i);
      });
      if (crossing.size() == 1) kept[at(crossing.front())] = true;
    }
    return kept;
  }

  /// Lowers the course of memory wherever it is high, not only where it is highest.
  void flatten(KeptValues& kept) {
    double height = height_of(kept);
    bool is_better = true;
    for (int pass = 0; is_better && pass < kMostPasses; ++pass) {
      is_better = false;
      for (const std::int32_t id : candidates_) {
        flip(kept, id);
        const double now = height_of(kept);
        if (now < height * (1 - 1e-4))
          height = now, is_better = true;
        else
          flip(kept, id);
      }
    }
  }

  /// A mean of the course with a high power, close to its peak.
  double height_of(const KeptValues& kept) {
    double sum = 0;
    for (const Bytes& bytes : simulation_.timeline(kept))
      sum += std::pow(static_cast<double>(bytes.count) / plain_peak_, 16);
    return sum;
  }

  const StepTrace& trace_;
  StepSimulation simulation_;
  RecomputeTime time_;
  std::vector<std::int32_t> candidates_;
  StepPoints points_;
  double plain_peak_ = 0;
  std::mt19937 random_{1};
};

}  // namespace remat
