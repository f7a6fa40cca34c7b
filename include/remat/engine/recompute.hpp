// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/process.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/allocator.hpp"
#include "remat/libtorch/threads.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace remat::detail {

/// Shows whoever listens to allocations where a recompute begins and ends.
struct RecomputeMark {
  RecomputeMark() {
    if (listener != nullptr) listener->recompute_begins();
  }
  ~RecomputeMark() {
    if (listener != nullptr) listener->recompute_ended(operation_count);
  }
  RecomputeMark(const RecomputeMark&) = delete;
  RecomputeMark& operator=(const RecomputeMark&) = delete;

  AllocationListener* listener = allocation_listener();
  std::int64_t operation_count = 0;
};

/// Runs the operations that one dropped value needs, and nothing else.
///
/// A slice is a transaction. What it computes lives in its own table and moves to the tape only
/// after the last operation has succeeded, so that an exception (memory exhausted, a parameter that
/// was changed) leaves the tape as it was.
///
/// Regions nest on one tape. When a saved tensor of region R needs an operation of a region that is
/// neither R nor around R, that run is temporary: of its results only those stay that leave the
/// region, for the region's own backward part comes later and will run it again. So a chain of
/// chains costs one more run per level and the memory of one inner segment. A plan does the same
/// value by value: what it calls transient stays only behind the slice that is run for it.
class Slice {
 public:
  Slice(Tape& tape, ValueId target, RegionId for_region)
      : tape_(tape), target_(target), for_region_(for_region) {}

  c10::Storage run(bool lends) {
    collect();
    {
      RecomputeMark mark;
      c10::impl::ExcludeDispatchKeyGuard below(keys_above_recompute());
      // Kernels below autograd read grad mode (oneDNN's LSTM returns no workspace without it), and
      // only operations that ran with it on are recorded. No graph arises: autograd's keys are
      // excluded.
      at::AutoGradMode as_recorded(true);
      const ThreadCountGuard threads(tape_.thread_count);
      for (const OperationId id : order_)
        run_operation(tape_.operations[static_cast<std::size_t>(id)]);
      mark.operation_count = static_cast<std::int64_t>(order_.size());
    }
    process_state().recomputed += static_cast<std::int64_t>(order_.size());
    return commit(lends);
  }

 private:
  struct Made {
    c10::Storage storage;
    std::int32_t readers = 0;          // operations of this slice that still have to read it
    std::int32_t resting_readers = 0;  // those of them that will not run again
    bool stays = false;
  };

  Value& value(ValueId id) { return tape_.values[static_cast<std::size_t>(id)]; }

  void collect() {
    std::vector<ValueId> todo{target_};
    ska::flat_hash_map<OperationId, bool> seen;
    while (!todo.empty()) {
      const ValueId id = todo.back();
      todo.pop_back();
      if (is_available(id)) continue;
      const OperationId producer = value(id).producer;
      if (producer == none) throw lost(id);
      if (!seen.emplace(producer, true).second) continue;
      order_.push_back(producer);
      const Operation& operation = tape_.operations[static_cast<std::size_t>(producer)];
      for (std::size_t i = 0; i < operation.use_count; ++i) {
        const Use& use = tape_.uses[operation.first_use + i];
        if (use.needs_content) todo.push_back(use.value);
      }
    }
    std::sort(order_.begin(), order_.end());  // recorded order is a topological one

    for (const OperationId id : order_)
      for_each_missing_read(id, [this](ValueId read) { ++made_[read].readers; });
    made_[target_].stays = true;
    for (auto id = order_.rbegin(); id != order_.rend(); ++id)
      if (plan_stay(tape_.operations[static_cast<std::size_t>(*id)]))
        for_each_missing_read(*id, [this](ValueId read) { ++made_[read].resting_readers; });
  }

  template <class Visit>
  void for_each_missing_read(OperationId id, Visit visit) {
    const Operation& operation = tape_.operations[static_cast<std::size_t>(id)];
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape_.uses[operation.first_use + i];
      if (use.needs_content && !is_available(use.value)) visit(use.value);
    }
  }

  /// Decides which results stay behind the slice, once that is known of whatever reads them; true
  /// if the operation need not run again after it.
  bool plan_stay(const Operation& operation) {
    bool rests = true;
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const ValueId id = tape_.results[operation.first_result + i].value;
      if (id == target_ || !is_wanted_afterwards(id)) continue;
      if (may_stay(operation, value(id)))
        made_[id].stays = true;
      else
        rests = false;
    }
    return rests;
  }

  bool is_wanted_afterwards(ValueId id) {
    if (value(id).need == 0 || is_available(id)) return false;
    const auto found = made_.find(id);
    return found == made_.end() || value(id).need > found->second.resting_readers;
  }

  /// Neither transient by a plan nor an inner part of a temporary run.
  bool may_stay(const Operation& operation, const Value& made) const {
    if (made.is_transient) return false;
    const int shared_depth = tape_.depth(tape_.common_ancestor(operation.region, for_region_));
    return tape_.depth(made.scope) <= shared_depth || made.kept_from_depth <= shared_depth + 1;
  }

  bool is_available(ValueId id) {
    Value& there = value(id);
    if (there.lent) return true;
    if (!there.held) return false;
    return !there.is_revocable || is_unchanged(id);
  }

  bool is_unchanged(ValueId id) {
    const auto found = tape_.revocable.find(id);
    return found != tape_.revocable.end() && found->second.version.is_unchanged() &&
           found->second.digest == digest_of(value(id).held);
  }

  /// The bytes that a use reads, and a private copy of them if the operation writes there.
  c10::Storage content_for(const Operation& operation, const Use& use) {
    if (!use.needs_content)
      return use.is_written ? uninitialised_storage(value(use.value).nbytes, use.device)
                            : empty_storage(use.device);
    const auto found = made_.find(use.value);
    if (found != made_.end() && found->second.storage) {
      Made& made = found->second;
      const bool is_last = --made.readers == 0 && !made.stays;
      c10::Storage content = is_last ? std::move(made.storage) : made.storage;
      if (is_last) made.storage = c10::Storage();
      return use.is_written && content.use_count() > 1 ? copy_of(content) : content;
    }
    const Value& there = value(use.value);
    if (!there.lent && there.is_shared && !there.is_revocable) check_unchanged(operation, use);
    const c10::Storage& content = there.lent ? there.lent : there.held;
    return use.is_written ? copy_of(content) : content;
  }

  void skip_read(ValueId id) {
    const auto found = made_.find(id);
    if (found != made_.end() && found->second.storage && --found->second.readers == 0 &&
        !found->second.stays)
      found->second.storage = c10::Storage();
  }

  static c10::Storage empty_storage(c10::Device device) { return uninitialised_storage(0, device); }

  void check_unchanged(const Operation& operation, const Use& use) {
    const Value& there = value(use.value);
    const std::uint32_t now = use.version.now();
    if (use.version.is_unchanged() &&
        (use.digest == 0 || use.digest == digest_of(there.held, use.geometry)))
      return;
    ErrorMessage message("remat.recompute.changed");
    message.where("checkpoint \"" + tape_.name_of(operation.region) + "\"")
        .what("the tensor " + describe(use.geometry, use.device) + ", which " +
              operation.traits->name + " (argument " + std::to_string(use.argument) +
              ") needs again, has been modified by an inplace operation: it was at version " +
              std::to_string(use.version.number) + " in forward and is at version " +
              std::to_string(now) + " now" +
              (use.version.is_unchanged() ? ", with another content" : ""))
        .cause(
            "something wrote into it between forward and backward, for example an optimizer step")
        .cure(
            "Step the optimizer after backward, give the region a clone, or exempt the layer with "
            "remat::plain");
    throw RecomputeError(message);
  }

  using WrittenContents =
      c10::SmallVector<std::pair<std::int32_t, c10::Storage>, 2>;  // use and private copy

  /// Puts the tensors of one argument, those of uses `first` and on, into the stack; returns the
  /// next argument's first use.
  std::size_t put_argument(const Operation& operation, std::size_t first,
                           const WrittenContents& written, Stack& stack) {
    const Use& use = tape_.uses[operation.first_use + first];
    c10::IValue& argument = stack[use.argument];
    if (use.position == none) {
      argument = tensor_for(operation, use, written);
      return first + 1;
    }
    const bool is_optional = argument.isOptionalTensorList();
    auto list = is_optional ? c10::List<at::Tensor>() : argument.toTensorList().copy();
    auto optional_list =
        is_optional ? argument.to<c10::List<OptionalTensor>>().copy() : c10::List<OptionalTensor>();
    std::size_t i = first;
    for (; i < operation.use_count; ++i) {
      const Use& element = tape_.uses[operation.first_use + i];
      if (element.argument != use.argument) break;
      at::Tensor tensor = tensor_for(operation, element, written);
      if (is_optional)
        optional_list.set(static_cast<std::size_t>(element.position),
                          OptionalTensor(std::move(tensor)));
      else
        list.set(static_cast<std::size_t>(element.position), std::move(tensor));
    }
    if (is_optional)
      argument = optional_list;
    else
      argument = list;
    return i;
  }

  /// The private copy that a use shares with a written one, since they shared memory in forward;
  /// null if it has none.
  const c10::Storage* find_written(const Operation& operation, const Use& use,
                                   const WrittenContents& written) const {
    for (const auto& [index, content] : written)
      if (tape_.uses[operation.first_use + static_cast<std::size_t>(index)].value == use.value)
        return &content;
    return nullptr;
  }

  at::Tensor tensor_for(const Operation& operation, const Use& use,
                        const WrittenContents& written) {
    const c10::Storage* shared = find_written(operation, use, written);
    if (shared == nullptr) return tensor_over(content_for(operation, use), use.geometry);
    if (!use.is_written && use.needs_content) skip_read(use.value);
    return tensor_over(*shared, use.geometry);
  }

  void run_operation(Operation& operation) {
    Stack stack;
    stack.reserve(operation.traits->argument_count);
    for (std::size_t i = 0; i < operation.traits->argument_count; ++i)
      stack.push_back(tape_.arguments[operation.first_argument + i]);

    WrittenContents written;
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape_.uses[operation.first_use + i];
      if (use.is_written && find_written(operation, use, written) == nullptr)
        written.emplace_back(static_cast<std::int32_t>(i), content_for(operation, use));
      else if (use.is_written && use.needs_content)
        skip_read(use.value);
    }
    for (std::size_t i = 0; i < operation.use_count;)
      i = put_argument(operation, i, written, stack);
    const auto call = [&] { operation.handle.callBoxed(&stack); };
    if (operation.random)
      draw_again(*operation.random, generator_argument(operation, stack), call);
    else
      call();
    std::vector<at::Tensor> list;  // of the return that was unpacked last
    std::int32_t unpacked = none;
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const Result& result = tape_.results[operation.first_result + i];
      const auto found = made_.find(result.value);
      if (found == made_.end() || (found->second.readers == 0 && !found->second.stays)) continue;
      c10::Storage storage;
      if (result.index != none) {
        const c10::IValue& returned = stack[static_cast<std::size_t>(result.index)];
        if (result.position != none && unpacked != result.index)
          list = returned.toTensorVector(), unpacked = result.index;
        storage = result.position == none
                      ? returned.toTensor().storage()
                      : list[static_cast<std::size_t>(result.position)].storage();
      } else {
        for (auto& [use, content] : written)
          if (use == result.use) storage = content;
      }
      check_same(operation, result.value, storage);
      found->second.storage = std::move(storage);
    }
  }

  static c10::IValue* generator_argument(const Operation& operation, Stack& stack) {
    const int index = operation.traits->generator_argument;
    return index < 0 ? nullptr : &stack[static_cast<std::size_t>(index)];
  }

  void check_same(const Operation& operation, ValueId id, const c10::Storage& storage) {
    const Value& expected = value(id);
    const bool has_size = static_cast<std::int64_t>(storage.nbytes()) == expected.nbytes;
    if (has_size && (expected.digest == 0 || expected.digest == digest_of(storage, true))) return;
    ErrorMessage message("remat.recompute.differs");
    message.where("checkpoint \"" + tape_.name_of(operation.region) + "\"")
        .what(operation.traits->name + " gave " +
              (has_size ? "another content" : std::to_string(storage.nbytes()) + " bytes") +
              " when it was recomputed, " +
              (has_size ? "digests differ"
                        : "and " + std::to_string(expected.nbytes) + " in forward"))
        .cause(
            "the operation does not depend on its arguments alone, or its result was written "
            "through a raw pointer in forward")
        .cure("Exempt the layer with remat::plain");
    throw RecomputeError(message);
  }

  RecomputeError lost(ValueId id) {
    ErrorMessage message("remat.recompute.lost");
    message.where("checkpoint \"" + tape_.name_of(value(id).scope) + "\"")
        .what("a content of " + std::to_string(value(id).nbytes) +
              " bytes that backward needs is gone")
        .cause("a defect of remat")
        .cure("Please report it; exempting the layer with remat::plain avoids it");
    return RecomputeError(message);
  }

  c10::Storage commit(bool lends) {
    c10::Storage wanted = made_[target_].storage;
    for (auto& [id, made] : made_) {
      if (!made.stays || !made.storage) continue;
      if (lends) {
        value(id).lent = std::move(made.storage);
        tape_.lent.push_back(id);
      } else {
        value(id).is_recomputed = true;
        tape_.set_held(id, std::move(made.storage));
      }
    }
    return wanted;
  }

  Tape& tape_;
  ValueId target_;
  RegionId for_region_;
  std::vector<OperationId> order_;
  ska::flat_hash_map<ValueId, Made> made_;
};

}  // namespace remat::detail
