// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace benchmarks {

/// What one block of a chain costs. Bytes are counted above the block's input, which is there.
struct BlockCost {
  double seconds = 0;              // of forward; backward runs once in any schedule
  std::int64_t output = 0;         // also the bytes of the output's gradient
  std::int64_t saved = 0;          // what a forward leaves for backward, with the output
  std::int64_t dropped_peak = 0;   // of a forward that leaves its output alone
  std::int64_t forward_peak = 0;   // of a forward that saves
  std::int64_t backward_peak = 0;  // with what was saved and the output's gradient
};

/// A step of a schedule: a block that saves what its backward needs, or a run of blocks `[first,
/// last)` that are forgotten and, when backward comes to them, run again by a schedule of their
/// own.
struct RotorStep {
  std::size_t first = 0, last = 0;
  std::vector<RotorStep> inside{};  // empty: the block saves
};
using RotorSchedule = std::vector<RotorStep>;

/// The schedule of least time for a chain within a limit of memory.
///
/// For the blocks s to t with m bytes above the input of s, either s saves and the rest has what s
/// leaves of m, or the blocks before some e are forgotten: then the rest has m without the input of
/// e, and afterwards the forgotten ones have all of m for another run. Memory is counted in slots,
/// rounded against the schedule.
///
/// @par Source  the recurrence of Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, Optimal
/// checkpointing for heterogeneous chains (2019), theorem 1
class Rotor {
 public:
  Rotor(const std::vector<BlockCost>& costs, std::int64_t limit)
      : costs_(costs),
        slot_bytes_(static_cast<double>(std::max<std::int64_t>(limit, 1)) / kSlots),
        cells_(costs.size() * costs.size() * (kSlots + 1)) {
    for (std::size_t length = 1; length <= costs.size(); ++length)
      for (std::size_t first = 0; first + length <= costs.size(); ++first)
        fill(first, first + length - 1);
  }

  /// Returns nothing if no schedule fits.
  std::optional<RotorSchedule> schedule() const {
    if (cell(0, costs_.size() - 1, kSlots).seconds == kNever) return std::nullopt;
    return read(0, costs_.size() - 1, kSlots);
  }

 private:
  struct Cell {
    double seconds = kNever;
    std::size_t resume = 0;  // the block after the forgotten ones; the first itself: it saves
  };

  static constexpr std::size_t kSlots = 500;
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::size_t index(std::size_t first, std::size_t last, std::size_t slots) const {
    return (first * costs_.size() + last) * (kSlots + 1) + slots;
  }
  const Cell& cell(std::size_t first, std::size_t last, std::size_t slots) const {
    return cells_[index(first, last, slots)];
  }
  std::size_t slots_of(std::int64_t bytes) const {
    return static_cast<std::size_t>(std::ceil(static_cast<double>(bytes) / slot_bytes_));
  }

  void fill(std::size_t first, std::size_t last) {
    const BlockCost& begin = costs_[first];
    const std::int64_t gradient = costs_[last].output;
    const std::size_t saved = slots_of(begin.saved);
    const std::int64_t need = std::max(gradient + begin.forward_peak, begin.backward_peak);
    for (std::size_t m = std::max(slots_of(need), saved); m <= kSlots; ++m)
      offer(first, last, m, first,
            begin.seconds + (first == last ? 0 : cell(first + 1, last, m - saved).seconds));

    std::int64_t dropped = 0;
    double seconds = 0;
    for (std::size_t resume = first + 1; resume <= last; ++resume) {
      const BlockCost& before = costs_[resume - 1];
      const std::int64_t input = resume - 1 > first ? costs_[resume - 2].output : 0;
      dropped = std::max(dropped, input + before.dropped_peak);
      seconds += before.seconds;
      const std::size_t border = slots_of(before.output);
      for (std::size_t m = std::max(slots_of(gradient + dropped), border); m <= kSlots; ++m)
        offer(
            first, last, m, resume,
            seconds + cell(resume, last, m - border).seconds + cell(first, resume - 1, m).seconds);
    }
  }

  void offer(std::size_t first, std::size_t last, std::size_t m, std::size_t resume,
             double seconds) {
    Cell& best = cells_[index(first, last, m)];
    if (seconds < best.seconds) best = {seconds, resume};
  }

  RotorSchedule read(std::size_t first, std::size_t last, std::size_t m) const {
    RotorSchedule steps;
    while (first <= last) {
      const std::size_t resume = cell(first, last, m).resume;
      const bool saves = resume == first;
      if (saves)
        steps.push_back({first, first + 1});
      else
        steps.push_back({first, resume, read(first, resume - 1, m)});
      first = steps.back().last;
      m -= slots_of(saves ? costs_[first - 1].saved : costs_[first - 1].output);
    }
    return steps;
  }

  const std::vector<BlockCost>& costs_;
  double slot_bytes_;
  std::vector<Cell> cells_;  // (blocks, blocks, slots + 1)
};

/// Returns the most bytes that a schedule has alive at once, on paper and without slots.
inline std::int64_t peak_of(const RotorSchedule& steps, const std::vector<BlockCost>& costs) {
  const std::int64_t gradient = costs[steps.back().last - 1].output;
  std::int64_t kept = 0, peak = 0;
  for (const RotorStep& step : steps) {
    if (step.inside.empty()) {
      peak = std::max(peak, kept + costs[step.first].forward_peak + gradient);
      kept += costs[step.first].saved;
      continue;
    }
    for (std::size_t block = step.first; block < step.last; ++block) {
      const std::int64_t input = block > step.first ? costs[block - 1].output : 0;
      peak = std::max(peak, kept + input + costs[block].dropped_peak + gradient);
    }
    kept += costs[step.last - 1].output;
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const bool saves = step->inside.empty();
    kept -= saves ? costs[step->first].saved : costs[step->last - 1].output;
    peak = std::max(
        peak, kept + (saves ? costs[step->first].backward_peak : peak_of(step->inside, costs)));
  }
  return peak;
}

/// Returns the time of forward that a schedule spends, the first run and all others.
inline double forward_seconds_of(const RotorSchedule& steps, const std::vector<BlockCost>& costs) {
  double seconds = 0;
  for (const RotorStep& step : steps) {
    for (std::size_t block = step.first; block < step.last; ++block)
      seconds += costs[block].seconds;
    if (!step.inside.empty()) seconds += forward_seconds_of(step.inside, costs);
  }
  return seconds;
}

/// Returns the least limit for which there is a schedule, to a thousandth of `plain_peak`.
inline std::int64_t least_rotor_limit(const std::vector<BlockCost>& costs,
                                      std::int64_t plain_peak) {
  std::int64_t missed = 0, met = 2 * plain_peak;
  while (met - missed > std::max<std::int64_t>(1, plain_peak / 1000)) {
    const std::int64_t middle = missed + (met - missed) / 2;
    (Rotor(costs, middle).schedule() ? met : missed) = middle;
  }
  return met;
}

}  // namespace benchmarks
