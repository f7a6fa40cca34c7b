// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include "remat/plan/cheapest_keeps.hpp"
#include "remat/plan/cut_points.hpp"
#include "remat/plan/recompute_time.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"

namespace remat {

/// Finds what to keep in a chain of layers by dynamic programming.
///
/// The chain is cut at some of its cut points, whose values stay; between two of them lies a
/// segment. For each segment, a few sets of values to keep are tried, those that are the cheapest
/// at a range of prices. Each has bytes that it keeps until its backward part, seconds, and a peak
/// while that part runs. What was kept before a segment and its own peak must fit together; within
/// that, the program minimises seconds.
///
/// @par Source  the recurrence over a chain is that of rotor (Beaumont et al. 2019, "Optimal
/// checkpointing for heterogeneous chains"), with more to choose from in a segment
/// @par Threads  one object per thread; it refers to the trace and the simulation
class ChainSearch {
 public:
  /// Tries the sets of each segment: some hundred simulations.
  ChainSearch(const StepTrace& trace, StepSimulation& simulation)
      : trace_(trace),
        simulation_(simulation),
        plain_(trace.kept_by_plain()),
        time_(trace),
        cheapest_(trace) {
    for (const CutPoint& point : thin_out(cut_points(trace), trace, kMostCuts))
      ends_.push_back({point.operation + 1, point.value});
    if (ends_.empty() || ends_.back().operation < trace.operations.size())
      ends_.push_back({trace.operations.size(), StepTrace::kNone});
    find_windows();
    plain_peak_ = static_cast<double>(simulation_.run(plain_).peak.count);
    plain_seconds_ = time_(plain_);
    segments_.resize(ends_.size());
    for (std::size_t from = 0; from < ends_.size(); ++from)
      for (std::size_t to = from; to < std::min(ends_.size(), from + kLongest); ++to)
        segments_[from].push_back(try_segment(from, to));
  }

  /// Returns the set that needs the least time within `limit` bytes; empty if there is none.
  ///
  /// The bytes of a segment are counted alone: the true peak may be a little higher.
  KeptValues run(std::int64_t limit) const {
    std::vector<std::vector<Cell>> table(ends_.size() + 1, std::vector<Cell>(kCells + 1));
    table[0][0].seconds = 0;
    const double cell_bytes = static_cast<double>(std::max<std::int64_t>(limit, 1)) / kCells;
    for (std::size_t from = 0; from < ends_.size(); ++from)
      for (std::size_t row = 0; row <= kCells; ++row) {
        const Cell cell = table[from][row];
        if (cell.seconds == kNever) continue;
        for (std::size_t length = 0; length < segments_[from].size(); ++length)
          for (const Choice& choice : segments_[from][length]) {
            if (cell.bytes + std::max(choice.peak, choice.bytes) > limit) continue;
            const std::int64_t bytes = cell.bytes + choice.bytes;
            const auto next_row = static_cast<std::size_t>(static_cast<double>(bytes) / cell_bytes);
            Cell& next = table[from + length + 1][std::min<std::size_t>(next_row, kCells)];
            const double seconds = cell.seconds + choice.seconds;
            if (seconds < next.seconds) next = {seconds, bytes, from, row, &choice};
          }
      }
    return trace_back(table);
  }

 private:
  struct End {
    std::size_t operation = 0;  // the first after the segment
    std::int32_t value = StepTrace::kNone;
  };
  struct Choice {
    std::vector<std::int32_t> kept;
    std::int64_t bytes = 0, peak = 0;  // the peak without what is kept before the segment
    double seconds = 0;
  };
  struct Cell {
    double seconds = kNever;
    std::int64_t bytes = 0;  // kept so far
    std::size_t from = 0, row = 0;
    const Choice* choice = nullptr;
  };
  struct Window {
    std::size_t first = 0, last = 0;  // events, the last one excluded
  };

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr std::size_t kMostCuts = 48, kLongest = 4, kCells = 400;
  static constexpr int kPrices = 14;
  static constexpr double kLeastPrice = 0.02, kPriceStep = 1.7;  // forward's times for plain's peak

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// In which events each operation runs, and in which ones of backward each value plays a part.
  void find_windows() {
    ran_.assign(trace_.operations.size() + 1, trace_.events.size());
    used_.assign(trace_.values.size(), {trace_.events.size(), 0});
    bool is_backward = false;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      if (event.kind == StepTrace::Kind::ran) ran_[at(event.id)] = i;
      if (event.kind == StepTrace::Kind::ended) ran_.back() = i, is_backward = true;
      const bool is_use =
          event.kind == StepTrace::Kind::asked || event.kind == StepTrace::Kind::released;
      if (!is_backward || !is_use) continue;
      used_[at(event.id)] = {std::min(used_[at(event.id)].first, i), i + 1};
    }
  }

  /// What plain keeps of the operations from `first` on.
  KeptValues plain_from(std::size_t first) const {
    KeptValues kept = plain_;
    for (std::size_t id = 0; id < kept.size(); ++id)
      kept[id] = kept[id] && at(trace_.values[id].producer) >= first;
    return kept;
  }

  std::vector<Choice> try_segment(std::size_t from, std::size_t to) {
    const OperationRange range{from == 0 ? 0 : ends_[from - 1].operation, ends_[to].operation};
    std::vector<Choice> choices;
    std::set<std::vector<std::int32_t>> known;
    double price = 0;
    for (int i = 0; i < kPrices; ++i) {
      std::vector<std::int32_t> kept = cheapest_(range, [&](std::int32_t id) {
        return id == ends_[to].value
                   ? 0.0
                   : price * trace_.seconds() * static_cast<double>(trace_.values[at(id)].bytes) /
                         plain_peak_;
      });
      price = i == 0 ? kLeastPrice : price * kPriceStep;
      if (known.insert(kept).second) choices.push_back(weigh(std::move(kept), from, to, range));
    }
    return choices;
  }

  Choice weigh(std::vector<std::int32_t> kept, std::size_t from, std::size_t to,
               OperationRange range) {
    const std::int32_t start = from == 0 ? StepTrace::kNone : ends_[from - 1].value;
    if (ends_[to].value != StepTrace::kNone) kept.push_back(ends_[to].value);
    std::ranges::sort(kept);
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());

    KeptValues alone = plain_from(range.last), others = plain_;
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes) others[at(id)] = false;
    if (start != StepTrace::kNone) alone[at(start)] = others[at(start)] = true;
    Choice choice;
    for (const std::int32_t id : kept) {
      alone[at(id)] = others[at(id)] = true;
      choice.bytes += trace_.values[at(id)].bytes;
    }
    choice.kept = std::move(kept);
    choice.seconds = time_(others) - plain_seconds_;
    simulation_.run(alone, &course_);
    const Window forward{ran_[range.first], std::min(ran_[range.last] + 1, course_.size())};
    choice.peak = std::max(peak_in(forward), peak_in(backward_of(range)));
    if (start != StepTrace::kNone) choice.peak -= trace_.values[at(start)].bytes;
    return choice;
  }

  Window backward_of(OperationRange range) const {
    Window window{trace_.events.size(), 0};
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes) {
        window.first = std::min(window.first, used_[at(id)].first);
        window.last = std::max(window.last, used_[at(id)].last);
      }
    return window;
  }

  std::int64_t peak_in(Window window) const {
    std::int64_t peak = 0;
    for (std::size_t i = window.first; i < window.last; ++i)
      peak = std::max(peak, course_[i].count);
    return peak;
  }

  KeptValues trace_back(const std::vector<std::vector<Cell>>& table) const {
    const auto last = std::ranges::min_element(table.back(), {}, &Cell::seconds);
    if (last->seconds == kNever) return {};
    KeptValues kept(trace_.values.size(), false);
    for (const Cell* cell = &*last; cell->choice != nullptr; cell = &table[cell->from][cell->row])
      for (const std::int32_t id : cell->choice->kept) kept[at(id)] = true;
    return kept;
  }

  const StepTrace& trace_;
  StepSimulation& simulation_;
  KeptValues plain_;
  RecomputeTime time_;
  CheapestKeeps cheapest_;
  std::vector<End> ends_;
  std::vector<std::size_t> ran_;
  std::vector<Window> used_;
  std::vector<std::vector<std::vector<Choice>>> segments_;  // by start and length
  std::vector<Bytes> course_;
  double plain_peak_ = 0, plain_seconds_ = 0;
};

}  // namespace remat
