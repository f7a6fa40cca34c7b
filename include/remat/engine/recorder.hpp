// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/call.hpp"
#include "remat/engine/saved_tensor.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace remat::detail {

/// Notes one operation of a region while it runs: before, what it reads and will write; after, what
/// it made.
class Recorder {
 public:
  Recorder(Tape& tape, const OperatorHandle& handle, const OperatorTraits& traits,
           c10::DispatchKeySet keys, Stack& stack)
      : tape_(tape), handle_(handle), traits_(traits), call_(handle, traits, keys, stack) {}

  void run() {
    if (is_recordable())
      record();
    else
      run_unrecorded();
  }

 private:
  using Written = Call::Written;

  Value& value(ValueId id) { return tape_.values[static_cast<std::size_t>(id)]; }

  bool holds_borrowed() {
    if (call_.borrowed.empty()) return true;
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    return std::all_of(
        call_.borrowed.begin(), call_.borrowed.end(), [this](const c10::StorageImpl* storage) {
          return std::find(tape_.recent_memory.begin(), tape_.recent_memory.end(), storage) !=
                 tape_.recent_memory.end();
        });
  }

  bool is_recordable() {
    if (!at::GradMode::is_enabled() || thread_state().is_plain || call_.has_opaque ||
        !call_.has_tensor || traits_.is_factory)
      return false;
    if (!traits_.is_recordable() || !holds_borrowed()) return false;
    if (traits_.is_nondeterministic && call_.device && call_.device->type() != c10::kCPU &&
        !at::globalContext().deterministicAlgorithms())
      return false;
    if (traits_.makes_tensors) return true;
    // It only writes: worth a record if it changes something that this region made.
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : call_.written)
      if (is_made_here(written)) return true;
    return false;
  }

  /// Made by a recorded operation, or by a factory of this region and about to be overwritten from
  /// end to end.
  bool is_made_here(const Written& written) {
    const ValueId id = tape_.current(storage_of(written.tensor));
    return id != none && (value(id).producer != none || (value(id).is_fresh && !written.is_read));
  }

  // --- operations that are not recorded ---

  /// What it writes and makes is external from its next use on, and costs nothing if there is none.
  void run_unrecorded() {
    for (const Written& written : call_.written) save_content_of(written.tensor);
    call_.run();
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : call_.written) {
      rebind_recent(written.tensor, none);
      tape_.forget(storage_of(written.tensor));
    }
    for_each_made([&](const at::Tensor& tensor, std::int32_t, std::int32_t) {
      tape_.forget(storage_of(tensor));
      // Content may come later, by a filler that the recorder sees or through a raw pointer that it
      // does not.
      if (traits_.is_factory && at::GradMode::is_enabled() && !thread_state().is_plain)
        value(tape_.define(tensor, none)).is_fresh = true;
    });
    tape_.forget_recent();
  }

  /// A write is coming: whoever needs the content as it is now gets a copy, or lets go of what it
  /// can make again.
  void save_content_of(const at::Tensor& tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    {
      std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
      const ValueId id = tape_.current(storage);
      const bool is_made_here = id != none && (value(id).producer != none || value(id).is_fresh);
      if (tape_.before_write && !is_made_here) tape_.before_write(tensor);
      if (id != none) tape_.let_go(id);
    }
    c10::Storage snapshot;
    for (const WriteWatch::Entry& entry : write_watch().find(storage)) {
      const std::shared_ptr<Tape> tape = entry.tape.lock();
      if (!tape) continue;
      std::lock_guard<std::recursive_mutex> lock(tape->mutex);
      if (!tape->values[static_cast<std::size_t>(entry.value)].is_watched) continue;
      if (!snapshot) snapshot = copy_of(tensor.storage());
      tape->replace_by_snapshot(entry.value, snapshot);
    }
  }

  void rebind_recent(const at::Tensor& tensor, ValueId now) {
    const ValueId before = tape_.current(storage_of(tensor));
    if (before == none) return;
    for (SavedTensor* saved : tape_.recent) {
      if (saved->value() != before) continue;
      if (now != none)
        saved->rebind(now);
      else
        saved->rebind(tensor.storage());
    }
  }

  /// Calls `visit(tensor, return index, list position)` for each returned tensor with a storage of
  /// its own.
  template <class Visit>
  void for_each_made(Visit visit) {
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      if (!traits_.returns[i].is_tensor || traits_.returns[i].is_alias) continue;
      Call::for_each_tensor(call_.returned(i), traits_.returns[i].kind,
                            [&](const at::Tensor& tensor, std::int32_t position) {
                              // Some operations return an argument's storage although their schema
                              // does not say so.
                              if (has_plain_storage(tensor) && !call_.is_source(storage_of(tensor)))
                                visit(tensor, static_cast<std::int32_t>(i), position);
                            });
    }
  }

  // --- operations that are recorded ---

  void record() {
    note_uses();
    for (const Written& written : call_.written) save_content_of(written.tensor);
    std::unique_ptr<RandomState> random =
        traits_.is_random ? std::make_unique<RandomState>() : nullptr;

    if (tape_.observer) tape_.observer->operation_begins(tape_);
    const auto start = tape_.measures_time ? std::chrono::steady_clock::now()
                                           : std::chrono::steady_clock::time_point{};
    if (random)
      draw(*random);
    else
      call_.run();
    const float seconds =
        tape_.measures_time
            ? std::chrono::duration<float>(std::chrono::steady_clock::now() - start).count()
            : 0;

    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    const auto id = static_cast<OperationId>(tape_.operations.size());
    Operation& operation =
        tape_.operations.emplace_back(Operation{handle_, &traits_, std::move(random)});
    operation.seconds = seconds;
    operation.region = tape_.region;
    operation.first_argument = first_argument_;
    operation.first_use = first_use_;
    operation.first_result = tape_.results.size();
    operation.use_count = static_cast<std::uint32_t>(tape_.uses.size() - first_use_);
    define_results(id);
    operation.result_count =
        static_cast<std::uint32_t>(tape_.results.size() - operation.first_result);
    apply_keep_policy(operation);
    if (tape_.observer) tape_.observer->operation_ended(tape_, id, made_);
    tape_.forget_recent();
    ++process_state().recorded;
  }

  /// Notes the arguments, with what their tensors refer to in place of the tensors. If the kernel
  /// throws these notes stay behind without an operation, which does no harm.
  void note_uses() {
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    first_argument_ = tape_.arguments.size();
    first_use_ = tape_.uses.size();
    for (std::size_t i = 0; i < traits_.argument_count; ++i)
      tape_.arguments.push_back(call_.argument(i));
    for (Written& written : call_.written) written.is_external = !is_made_here(written);
    for (const auto& traits : traits_.arguments) {
      c10::IValue& noted = tape_.arguments[first_argument_ + traits.index];
      Call::for_each_tensor(
          call_.argument(traits.index), traits.kind,
          [&](const at::Tensor& tensor, std::int32_t position) {
            const Written* written = call_.find_written(traits.index, position);
            if (written != nullptr && !written->is_read && traits.hidden_write_if != -2)
              return;  // running statistics: recompute without
            Use& use = tape_.uses.emplace_back();
            use.geometry = Geometry::of(tensor);
            use.version = Version::of(tensor);
            use.device = tensor.device();
            use.argument = traits.index;
            use.position = position;
            use.is_written = written != nullptr;
            use.needs_content =
                !traits.is_geometry_only && (written == nullptr || written->is_read);
            use.value =
                use.needs_content ? value_to_read(tensor, use.version) : value_to_overwrite(tensor);
            if (use.needs_content && value(use.value).producer == none)
              use.digest = digest_of(tensor.storage(), use.geometry);
            tape_.widen_scope(use.value, tape_.region);
          });
      strip(noted, traits.kind);
    }
  }

  static void strip(c10::IValue& argument, OperatorTraits::Kind kind) {
    if (argument.isTensor()) {
      argument = at::Tensor();
    } else if (kind == OperatorTraits::Kind::tensor_list && argument.isTensorList()) {
      c10::List<at::Tensor> empty;
      for (std::size_t i = argument.toTensorVector().size(); i > 0; --i)
        empty.push_back(at::Tensor());
      argument = empty;
    } else if (kind == OperatorTraits::Kind::optional_tensor_list &&
               argument.isOptionalTensorList()) {
      c10::List<OptionalTensor> empty;
      for (std::size_t i = argument.toOptionalTensorVector().size(); i > 0; --i)
        empty.push_back(OptionalTensor());
      argument = empty;
    }
  }

  /// The value that a tensor's storage holds. What nobody recorded is external: the storage itself
  /// is held, and watched.
  ValueId value_to_read(const at::Tensor& tensor, const Version& version) {
    ValueId id = tape_.current(tensor, version.number);
    if (id != none && (value(id).producer != none || value(id).held)) {
      note_digest(id, tensor);
      return id;
    }
    if (id == none) id = tape_.define(tensor, none);
    Value& external = value(id);
    external.is_fresh = false;
    external.version = version.number;
    external.held = tensor.storage();
    external.is_shared = true;
    tape_.watch(id);
    return id;
  }

  /// Only the storage's size matters.
  ValueId value_to_overwrite(const at::Tensor& tensor) {
    const ValueId id = tape_.current(storage_of(tensor));
    return id != none ? id : tape_.define(tensor, none);
  }

  /// Debug mode: what a reader sees is what the recompute must bring, whatever happened to it since
  /// it was made.
  void note_digest(ValueId id, const at::Tensor& tensor) {
    Value& read = value(id);
    if (!process_state().is_debug || read.digest != 0 || read.producer == none) return;
    read.digest = digest_of(tensor.storage(), true);
  }

  /// Runs a random operation and notes the state from which it drew.
  void draw(RandomState& random) {
    c10::IValue* given =
        traits_.generator_argument < 0
            ? nullptr
            : &call_.argument(static_cast<std::size_t>(traits_.generator_argument));
    if (given != nullptr && given->isGenerator()) random.generator = given->toGenerator();
    if (!random.generator.defined())
      random.generator = default_generator(call_.device.value_or(c10::Device(c10::kCPU)));
    draw_and_note(random, given, [this] { call_.run(); });
    at::Tensor& last = tape_.last_random_state;
    if (last.defined() && same_state(random.state, last)) random.state = last;
    last = random.state;
  }

  void define_results(OperationId id) {
    for (const Written& written : call_.written) {
      const c10::StorageImpl* storage = storage_of(written.tensor);
      const std::int32_t use = use_of(written);
      const bool has_moved =
          !call_.is_source(storage) ||
          static_cast<std::int64_t>(written.tensor.storage().nbytes()) != written.nbytes;
      if (written.is_external || use == none || has_moved) {
        rebind_recent(written.tensor, none);
        tape_.forget(storage);
        continue;
      }
      const ValueId before = tape_.current(storage);
      if (value(before).producer == id)
        continue;  // another view of the same storage was written too
      const ValueId now = tape_.define(written.tensor, id);
      value(now).is_written = true;
      for (SavedTensor* saved : tape_.recent)
        if (saved->value() == before) saved->rebind(now);
      tape_.results.push_back({now, none, none, use});
      made_.emplace_back(now, written.tensor.storage());
    }
    for_each_made([&](const at::Tensor& tensor, std::int32_t index, std::int32_t position) {
      const ValueId made = tape_.define(tensor, id);
      tape_.results.push_back({made, index, position, none});
      made_.emplace_back(made, tensor.storage());
      largest_made_ = std::max(largest_made_, static_cast<std::int64_t>(tensor.nbytes()));
    });
  }

  std::int32_t use_of(const Written& written) const {
    for (std::size_t i = first_use_; i < tape_.uses.size(); ++i)
      if (tape_.uses[i].argument == written.argument && tape_.uses[i].position == written.position)
        return static_cast<std::int32_t>(i - first_use_);
    return none;
  }

  /// Kept: what the policies of this and all enclosing regions want, and side results that are tiny
  /// beside what they come with: a batch norm's statistics, but not a layer norm's, of which there
  /// are two for each position.
  void apply_keep_policy(const Operation& operation) {
    constexpr std::int64_t tiny_share = 64, tiny_bytes = 16 << 10;
    const bool keeps_statistics = process_state().keeps_statistics;
    const std::int64_t largest = std::max(call_.largest, largest_made_);
    std::size_t index = 0;
    for (auto& [id, storage] : made_) {
      Value& made = value(id);
      made.is_tiny =
          keeps_statistics && made.nbytes <= tiny_bytes && made.nbytes * tiny_share <= largest;
      made.kept_from_depth = made.is_tiny ? 0 : kept_from(made, index);
      ++index;
      if (made.kept_from_depth == 0) {
        made.is_shared = true;
        tape_.set_held(id, storage);
      }
    }
    for (RegionId id = operation.region; id != none;
         id = tape_.regions[static_cast<std::size_t>(id)].parent) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      if (region.keep) ++region.ordinals[&traits_];
    }
  }

  /// The depth from which on every region that encloses the operation keeps the value.
  int kept_from(const Value& made, std::size_t index) {
    RegionId id = tape_.region;
    int depth = tape_.depth(id) + 1;
    for (; id != none; id = tape_.regions[static_cast<std::size_t>(id)].parent, --depth) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      const std::size_t position = tape_.operations.size() - 1 - region.first_operation;
      if (!region.keep || !region.keep({traits_.name, region.ordinals[&traits_],
                                        Bytes{call_.largest}, position, index},
                                       Bytes{made.nbytes}))
        break;
    }
    return depth;
  }

  Tape& tape_;
  const OperatorHandle& handle_;
  const OperatorTraits& traits_;
  Call call_;
  std::size_t first_argument_ = 0;
  std::size_t first_use_ = 0;
  std::int64_t largest_made_ = 0;  // bytes of the largest result
  MadeValues made_;
};

/// The fallback on the recorder's dispatch key.
inline void record_operation(const OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(
      recorder_key);  // what the kernel calls in turn is part of this operation
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  const OperatorTraits& traits = traits_of(handle);
  const bool matters =
      traits.writes || (!traits.is_view && traits.makes_tensors) || traits.repoints;
  if (!tape || !matters)
    handle.redispatchBoxed(below_recorder(keys), stack);
  else
    Recorder(*tape, handle, traits, keys, *stack).run();
}

}  // namespace remat::detail
