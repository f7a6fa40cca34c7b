// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "remat/plan/step_trace.hpp"
#include "remat/units.hpp"

namespace remat {

/// Says for each value of a trace whether it stays.
using KeptValues = std::vector<bool>;

/// Says for each value of a trace whether it is transient; empty: none is.
///
/// What is not kept is recomputed, and then stays until its last use. A transient value goes at
/// once, unless it is the one that was asked for, and is recomputed once more when it is needed
/// again: the plan by values of what nested regions do.
using TransientValues = std::vector<bool>;

/// What a step costs with some values kept.
struct StepCost {
  Bytes peak;                         ///< the most bytes alive at once, above those before the step
  double seconds = 0;                 ///< of operations that backward runs again
  std::int64_t recomputed_count = 0;  ///< how many those are
};

/// Runs a traced step on paper, with other values kept than when it was traced.
///
/// Does to numbers what the engine does to tensors: the same counts of need, the same slices, the
/// same releases, so that the predicted peak is the one that the memory meter shows. It covers one
/// region without regions inside, and backward passes that release their graph.
///
/// @par Threads  one simulation per thread; it refers to the trace
class StepSimulation {
 public:
  explicit StepSimulation(const StepTrace& trace)
      : trace_(trace), saved_(trace.saved_counts()), block_(trace.values.size()) {
    for (std::size_t id = 0; id < trace.values.size(); ++id) {
      const StepTrace::Value& value = trace.values[id];
      const bool is_new = value.takes_over == StepTrace::kNone;
      block_[id] = is_new ? static_cast<std::int32_t>(id) : block_[at(value.takes_over)];
    }
    readers_.resize(trace.values.size());
    resting_readers_.resize(trace.values.size());
    state_.resize(trace.values.size());
    made_in_.resize(trace.values.size());
    seen_in_.resize(trace.operations.size());
  }

  /// Returns what the step costs if the given values stay and none is transient.
  ///
  /// @param timeline  gets for each event of the trace the most bytes alive from the event before
  /// on; may be null
  StepCost run(const KeptValues& kept, std::vector<Bytes>* timeline = nullptr) {
    return run(kept, {}, timeline);
  }

  /// Returns what the step costs if the given values stay, and the given others are transient.
  StepCost run(const KeptValues& kept, const TransientValues& transient,
               std::vector<Bytes>* timeline = nullptr) {
    std::fill(state_.begin(), state_.end(), State());
    for (std::size_t id = 0; id < transient.size(); ++id) state_[id].is_transient = transient[id];
    is_live_.assign(trace_.operations.size(), false);
    live_ = peak_ = 0;
    is_ended_ = false;
    cost_ = StepCost();
    if (timeline != nullptr) timeline->clear();
    for (const StepTrace::Event& event : trace_.events) {
      other_ = event.other;
      const std::int64_t before = std::exchange(peak_, live_ + event.peak);
      happen(event, kept);
      if (timeline != nullptr) timeline->push_back({peak_});
      peak_ = std::max(peak_, before);
    }
    cost_.peak = {peak_};
    return cost_;
  }

 private:
  enum class Memory : std::uint8_t { none, first, again };  // of forward, or of a recompute
  struct State {
    std::int32_t need = 0;
    std::int32_t holders = 0;  // of a block: values that the tape holds in it
    Memory held = Memory::none;
    bool is_revocable = false;
    bool is_used = false;  // a block: somebody besides the tape holds it
    bool is_made = false;  // in the running slice: its memory is there
    bool stays = false;    // it will be there when the slice has run
    bool is_transient = false;
  };

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  const StepTrace::Operation& operation(std::int32_t id) const { return trace_.operations[at(id)]; }
  State& state(std::int32_t id) { return state_[at(id)]; }
  const StepTrace::Value& value(std::int32_t id) const { return trace_.values[at(id)]; }

  void happen(const StepTrace::Event& event, const KeptValues& kept) {
    switch (event.kind) {
      case StepTrace::Kind::ran:
        return run_first(event.id, kept);
      case StepTrace::Kind::let_go:
        return let_go(event.id);
      case StepTrace::Kind::ended:
        return end_region();
      case StepTrace::Kind::asked:
        if (state(event.id).held == Memory::none) run_slice(event.id);
        return;
      case StepTrace::Kind::released:
        if (is_ended_ && lose_reader(event.id)) settle(value(event.id).producer);
        return;
      case StepTrace::Kind::saved:
      case StepTrace::Kind::done:
        return;
    }
  }

  void see(std::int64_t bytes) { peak_ = std::max(peak_, bytes + other_); }

  // --- forward ---

  void run_first(std::int32_t id, const KeptValues& kept) {
    see(live_ + operation(id).peak);
    for (const std::int32_t made : operation(id).makes) {
      const StepTrace::Value& result = value(made);
      State& block = state(block_[at(made)]);
      if (result.takes_over == StepTrace::kNone) {
        live_ += result.bytes;
        block.is_used = true;
      } else if (state(result.takes_over).held != Memory::none) {
        state(result.takes_over).held = Memory::none;  // let go: it would have to be copied
        --block.holders;
      }
      if (result.is_always_kept || kept[at(made)]) hold(made);
    }
  }

  void hold(std::int32_t id) {
    state(id).held = Memory::first;
    ++state(block_[at(id)]).holders;
  }

  void let_go(std::int32_t id) {
    State& block = state(block_[at(id)]);
    if (!block.is_used) return;
    block.is_used = false;
    if (block.holders == 0) live_ -= value(id).bytes;
  }

  void release(std::int32_t id) {
    State& released = state(id);
    const Memory memory = std::exchange(released.held, Memory::none);
    released.is_revocable = false;
    if (memory == Memory::again) live_ -= value(id).bytes;
    if (memory != Memory::first) return;
    State& block = state(block_[at(id)]);
    if (--block.holders == 0 && !block.is_used) live_ -= value(id).bytes;
  }

  void end_region() {
    is_ended_ = true;
    const auto count = static_cast<std::int32_t>(trace_.values.size());
    for (std::int32_t id = 0; id < count; ++id) {
      state(id).need += saved_[at(id)];
      if (!value(id).is_result || value(id).producer == StepTrace::kNone) continue;
      if (state(id).held == Memory::none) hold(id);
      state(id).is_revocable = true;
    }
    for (std::int32_t id = 0; id < count; ++id)
      if (saved_[at(id)] > 0 && !is_held(id)) wake(value(id).producer);
    for (std::int32_t id = 0; id < count; ++id)
      if (state(id).need == 0 && state(id).held != Memory::none) release(id);
  }

  // --- need ---

  bool is_held(std::int32_t id) {
    return state(id).held != Memory::none && !state(id).is_revocable;
  }

  void wake(std::int32_t first) {
    todo_.assign(1, first);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      if (id == StepTrace::kNone || is_live_[at(id)]) continue;
      is_live_[at(id)] = true;
      for (const std::int32_t read : operation(id).reads)
        if (state(read).need++ == 0 && !is_held(read)) todo_.push_back(value(read).producer);
    }
  }

  void settle(std::int32_t first) {
    todo_.assign(1, first);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      if (!is_live_[at(id)] || has_wanted_result(id)) continue;
      is_live_[at(id)] = false;
      for (const std::int32_t read : operation(id).reads)
        if (lose_reader(read)) todo_.push_back(value(read).producer);
    }
  }

  bool has_wanted_result(std::int32_t id) {
    return std::ranges::any_of(operation(id).makes, [this](std::int32_t made) {
      return state(made).need > 0 && !is_held(made);
    });
  }

  bool lose_reader(std::int32_t id) {
    if (--state(id).need > 0) return false;
    if (state(id).held != Memory::none) release(id);
    return value(id).producer != StepTrace::kNone;
  }

  // --- slices ---

  bool is_there(std::int32_t id) {
    return state(id).held != Memory::none || value(id).producer == StepTrace::kNone;
  }

  void run_slice(std::int32_t target) {
    ++slice_;
    collect(target);
    for (const std::int32_t id : order_) run_again(id);
    for (const std::int32_t id : touched_) {
      State& made = state(id);
      if (!std::exchange(made.is_made, false)) continue;
      if (!made.stays) {
        live_ -= value(id).bytes;
        continue;
      }
      made.held = Memory::again;
      if (made.need > 0) settle(value(id).producer);
    }
  }

  void collect(std::int32_t target) {
    order_.clear();
    touched_.clear();
    todo_.assign(1, target);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      const std::int32_t producer = value(id).producer;
      if (is_there(id) || seen_in_[at(producer)] == slice_) continue;
      seen_in_[at(producer)] = slice_;
      order_.push_back(producer);
      const auto& reads = operation(producer).reads;
      todo_.insert(todo_.end(), reads.begin(), reads.end());
    }
    std::ranges::sort(order_);
    for (const std::int32_t id : order_)
      for (const std::int32_t read : operation(id).reads)
        if (!is_there(read)) touch(read), ++readers_[at(read)];
    touch(target);
    state(target).stays = true;
    for (auto id = order_.rbegin(); id != order_.rend(); ++id) {
      if (!plan_stay(*id, target)) continue;
      for (const std::int32_t read : operation(*id).reads)
        if (!is_there(read)) ++resting_readers_[at(read)];
    }
  }

  /// Decides which results stay behind the slice, once that is known of whatever reads them; true
  /// if the operation need not run again after it.
  bool plan_stay(std::int32_t id, std::int32_t target) {
    bool rests = true;
    for (const std::int32_t made : operation(id).makes) {
      if (made == target || state(made).need == 0 || is_there(made)) continue;
      touch(made);
      if (state(made).need <= resting_readers_[at(made)]) continue;
      if (state(made).is_transient)
        rests = false;
      else
        state(made).stays = true;
    }
    return rests;
  }

  void touch(std::int32_t id) {
    if (made_in_[at(id)] == slice_) return;
    made_in_[at(id)] = slice_;
    readers_[at(id)] = resting_readers_[at(id)] = 0;
    state(id).stays = state(id).is_made = false;
    touched_.push_back(id);
  }

  bool is_touched(std::int32_t id) const { return made_in_[at(id)] == slice_; }

  void run_again(std::int32_t id) {
    const StepTrace::Operation& again = operation(id);
    cost_.seconds += again.seconds;
    ++cost_.recomputed_count;
    for (const std::int32_t made : again.makes) {
      const StepTrace::Value& result = value(made);
      // Written in place: into the old content if nobody else wants that, else into a copy.
      if (result.takes_over != StepTrace::kNone ? !read_last(result.takes_over) : result.is_copied)
        live_ += result.bytes;
    }
    see(live_ + again.peak);
    for (const std::int32_t made : again.makes) {
      const StepTrace::Value& result = value(made);
      const bool is_written = result.takes_over != StepTrace::kNone || result.is_copied;
      const bool is_wanted = is_touched(made) && (readers_[at(made)] > 0 || state(made).stays);
      if (is_wanted) state(made).is_made = true;
      if (is_wanted && !is_written) live_ += result.bytes;
      if (!is_wanted && is_written) live_ -= result.bytes;
    }
    for (const std::int32_t read : again.reads) {
      const bool is_written = std::ranges::any_of(
          again.makes, [&](std::int32_t made) { return value(made).takes_over == read; });
      if (!is_written && read_last(read)) live_ -= value(read).bytes;
    }
  }

  /// Counts a reader off; true if it was the last one and the memory is now its reader's.
  bool read_last(std::int32_t id) {
    if (!is_touched(id) || !state(id).is_made) return false;
    if (--readers_[at(id)] > 0 || state(id).stays) return false;
    state(id).is_made = false;
    return true;
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;  // saved tensors per value when the region ended
  std::vector<std::int32_t> block_;  // the value that first had the memory
  std::vector<State> state_;
  std::vector<bool> is_live_;
  std::vector<std::int32_t> readers_;          // operations of the slice that still have to read it
  std::vector<std::int32_t> resting_readers_;  // operations of it that will not run again
  std::vector<std::int64_t> made_in_, seen_in_;  // the last slice that a value, an operation was in
  std::vector<std::int32_t> todo_, order_, touched_;
  std::int64_t slice_ = 0, live_ = 0, peak_ = 0, other_ = 0;
  bool is_ended_ = false;
  StepCost cost_;
};

}  // namespace remat
