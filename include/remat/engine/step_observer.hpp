// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/tape_observer.hpp"
#include "remat/libtorch/allocator.hpp"
#include "remat/plan/step_trace.hpp"

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace remat::detail {

/// Traces one training step for `StepSimulation`: set as the tape's observer and, on the thread
/// that runs forward and backward, as the allocation listener.
///
/// Autograd's own memory is observed and not modelled: what is allocated is either a recorded
/// value, or made by a recompute, or other memory, whose course does not depend on what is kept.
class REMAT_VISIBLE StepObserver final : public AllocationListener, public TapeObserver {
 public:
  /// Returns the trace; called after the backward pass.
  StepTrace finish() {
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::done, none);
    return std::move(trace_);
  }

  // --- memory ---

  void changed(const void* block, std::int64_t bytes, c10::Device) override {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      blocks_[block] = {slice_depth_ > 0 ? Owner::slice
                        : is_running_    ? Owner::operation
                                         : Owner::other,
                        bytes, none};
      if (slice_depth_ == 0) grow(is_running_, bytes);
      return;
    }
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;  // from before the step
    const Block gone = found->second;
    blocks_.erase(found);
    if (gone.owner == Owner::value) {
      emit_let_go(gone.value);
    } else if (gone.owner != Owner::slice) {
      grow(gone.owner == Owner::operation, -gone.bytes);
    }
  }

  void recompute_begins() override {
    const std::lock_guard lock(mutex_);
    ++slice_depth_;
  }
  void recompute_ended(std::int64_t) override {
    const std::lock_guard lock(mutex_);
    --slice_depth_;
  }

  // --- the tape ---

  void operation_begins(Tape& tape) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::ran, none);
    is_running_ = true;
    running_event_ = trace_.events.size() - 1;
    operation_bytes_ = operation_peak_ = 0;
  }

  void operation_ended(Tape& tape, OperationId id, const MadeValues& made) override {
    const std::lock_guard lock(mutex_);
    is_running_ = false;
    trace_.events[running_event_].id = id;
    trace_.operations.resize(static_cast<std::size_t>(id) + 1);
    trace_.operations[static_cast<std::size_t>(id)].peak = operation_peak_;
    for (const auto& [value, storage] : made) {
      StepTrace::Value& noted = this->value(value);
      const auto found = blocks_.find(storage.data());
      if (found == blocks_.end()) continue;
      Block& block = found->second;
      noted.bytes = block.bytes;
      if (block.owner == Owner::operation) operation_bytes_ -= block.bytes;
      if (block.owner == Owner::other) other_ -= block.bytes, noted.is_copied = true;
      if (block.owner == Owner::value) noted.takes_over = block.value;
      block.owner = Owner::value;
      block.value = value;
      if (tape.values[static_cast<std::size_t>(value)].held) kept_.push_back(value);
    }
    // What else the operation left behind, such as the state of a random number generator.
    for (auto& [address, block] : blocks_)
      if (block.owner == Owner::operation) block.owner = Owner::other;
    other_ += operation_bytes_;
    peak_ = std::max(peak_, other_);
  }

  void layer_begins(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    if (!has_layers_) trace_.layers_begin = id;
    has_layers_ = true;
  }
  void kept(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(kept_, id) == kept_.end()) kept_.push_back(id);
    auto& ends = trace_.layer_ends;
    // A layer that hands on its input, or a view of it, did nothing that could be dropped.
    if (std::ranges::find(ends, id) == ends.end()) ends.push_back(id);
  }
  void saved(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::saved, id);
  }
  void asked(Tape& tape, ValueId id) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::asked, id);
  }
  void released(Tape& tape, ValueId id) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::released, id);
  }

  void ended(Tape& tape) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::ended, none);
    trace_.saved_count = static_cast<std::int64_t>(tape.saved_count);
    trace_.operations.resize(tape.operations.size());
    for (std::size_t i = 0; i < tape.values.size(); ++i) {
      StepTrace::Value& noted = value(static_cast<ValueId>(i));
      noted.producer = tape.values[i].producer;
      noted.is_always_kept = tape.values[i].is_tiny;
      noted.is_result = tape.values[i].is_result;
      if (noted.is_result && tape.values[i].held && noted.producer != none)
        kept_.push_back(static_cast<ValueId>(i));
    }
    for (std::size_t i = 0; i < tape.operations.size(); ++i) note(tape, i);
  }

 private:
  enum class Owner : std::uint8_t { value, operation, slice, other };
  struct Block {
    Owner owner = Owner::other;
    std::int64_t bytes = 0;
    ValueId value = none;
  };

  StepTrace::Value& value(ValueId id) {
    if (trace_.values.size() <= static_cast<std::size_t>(id))
      trace_.values.resize(static_cast<std::size_t>(id) + 1);
    return trace_.values[static_cast<std::size_t>(id)];
  }

  void note(const Tape& tape, std::size_t index) {
    const Operation& operation = tape.operations[index];
    StepTrace::Operation& noted = trace_.operations[index];
    noted.name = operation.traits->name;
    noted.seconds = static_cast<double>(operation.seconds);
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape.uses[operation.first_use + i];
      if (use.needs_content) noted.reads.push_back(use.value);
    }
    for (std::size_t i = 0; i < operation.result_count; ++i)
      noted.makes.push_back(tape.results[operation.first_result + i].value);
  }

  void grow(bool in_operation, std::int64_t bytes) {
    if (in_operation) {
      operation_bytes_ += bytes;
      operation_peak_ = std::max(operation_peak_, operation_bytes_);
    } else {
      other_ += bytes;
      peak_ = std::max(peak_, other_);
    }
  }

  void emit(StepTrace::Kind kind, std::int32_t id) {
    trace_.events.push_back({kind, id, other_, peak_});
    peak_ = other_;
  }

  void emit_let_go(ValueId id) {
    if (is_let_go_.size() <= static_cast<std::size_t>(id))
      is_let_go_.resize(static_cast<std::size_t>(id) + 1);
    if (is_let_go_[static_cast<std::size_t>(id)]) return;
    is_let_go_[static_cast<std::size_t>(id)] = true;
    emit(StepTrace::Kind::let_go, id);
  }

  /// What the tape holds does not show by a release that nobody else holds it any more.
  void look_for_unused(Tape& tape) {
    const std::lock_guard tape_lock(tape.mutex);
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](ValueId id) {
      const Value& value = tape.values[static_cast<std::size_t>(id)];
      if (value.held && value.held.use_count() > 1) return false;
      if (value.held) emit_let_go(id);
      return true;
    });
  }

  std::recursive_mutex mutex_;  // a block that is freed in a look at the tape is reported at once
  StepTrace trace_;
  ska::flat_hash_map<const void*, Block> blocks_;
  std::vector<ValueId> kept_;  // by the tape, and by others as far as is known
  std::vector<bool> is_let_go_;
  std::int64_t other_ = 0, peak_ = 0;                      // of other memory
  std::int64_t operation_bytes_ = 0, operation_peak_ = 0;  // of the running operation
  std::size_t running_event_ = 0;
  int slice_depth_ = 0;
  bool is_running_ = false;
  bool has_layers_ = false;
};

}  // namespace remat::detail
