// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/saved_tensor.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace remat::detail {

/// Notes one operation of a region while it runs: before, what it reads and will write; after, what it made.
class Recorder {
 public:
  Recorder(Tape& tape, const OperatorHandle& handle, const OperatorTraits& traits, c10::DispatchKeySet keys, Stack& stack)
      : tape_(tape), handle_(handle), traits_(traits), keys_(keys), stack_(stack), first_(stack.size() - traits.argument_count) {}

  void run() {
    inspect_arguments();
    if (is_recordable()) record();
    else run_unrecorded();
  }

 private:
  struct Written {
    at::Tensor tensor;
    std::uint16_t argument;
    std::int32_t position;
    bool is_read;       // its old content matters
    bool is_external;   // nobody recorded how its old content came about
    std::int64_t nbytes;
  };

  Value& value(ValueId id) { return tape_.values[static_cast<std::size_t>(id)]; }
  c10::IValue& argument(std::size_t index) { return stack_[first_ + index]; }
  c10::IValue& returned(std::size_t index) { return stack_[stack_.size() - traits_.returns.size() + index]; }

  /// Calls `visit(tensor, position)` for each defined tensor in an argument or return.
  template <class Visit>
  static void for_each_tensor(const c10::IValue& value, OperatorTraits::Kind kind, Visit visit) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined()) visit(tensor, std::int32_t{none});
    } else if (kind == OperatorTraits::Kind::tensor_list && value.isTensorList()) {
      std::int32_t position = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor, position);
        ++position;
      }
    } else if (kind == OperatorTraits::Kind::optional_tensor_list && value.isOptionalTensorList()) {
      std::int32_t position = 0;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) visit(*tensor, position);
        ++position;
      }
    }
  }

  /// A tensor over memory that it does not own, such as from_blob's: it may be gone before backward, unless plain holds it as well.
  static bool is_borrowed(const at::Tensor& tensor) {
    return tensor.storage().data_ptr().get_context() == nullptr && tensor.storage().nbytes() > 0 && tensor.is_cpu() && !tensor.requires_grad();
  }

  bool holds_borrowed() {
    if (borrowed_.empty()) return true;
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    return std::all_of(borrowed_.begin(), borrowed_.end(), [this](const c10::StorageImpl* storage) {
      return std::find(tape_.recent_memory.begin(), tape_.recent_memory.end(), storage) != tape_.recent_memory.end();
    });
  }

  bool writes_hidden(const OperatorTraits::Argument& traits) {
    return traits.hidden_write_if == -1 ||
           (traits.hidden_write_if >= 0 && argument(static_cast<std::size_t>(traits.hidden_write_if)).toBool());
  }

  void inspect_arguments() {
    for (const auto& traits : traits_.arguments) {
      const bool is_hidden = traits.hidden_write_if != -2 && writes_hidden(traits);
      for_each_tensor(argument(traits.index), traits.kind, [&](const at::Tensor& tensor, std::int32_t position) {
        has_tensor_ = true;
        if (!has_plain_storage(tensor)) {
          has_opaque_ = true;
          return;
        }
        largest_ = std::max(largest_, static_cast<std::int64_t>(tensor.nbytes()));
        if (position == none && !device_) device_ = tensor.device();
        sources_.push_back(storage_of(tensor));
        if (is_borrowed(tensor)) borrowed_.push_back(storage_of(tensor));
        if (!traits.is_written && !is_hidden) return;
        const bool covers = tensor.is_non_overlapping_and_dense() && tensor.nbytes() == tensor.storage().nbytes();
        const bool is_read = is_hidden ? traits.hidden_write_reads : !(traits.is_overwritten && covers);
        written_.push_back({tensor, traits.index, position, is_read, true, static_cast<std::int64_t>(tensor.storage().nbytes())});
      });
    }
    // An argument that shares the written one's memory reads it after all.
    for (Written& written : written_)
      written.is_read = written.is_read || std::count(sources_.begin(), sources_.end(), storage_of(written.tensor)) > 1;
  }

  bool is_recordable() {
    if (!at::GradMode::is_enabled() || thread_state().is_plain || has_opaque_ || !has_tensor_ || traits_.is_factory) return false;
    if (!traits_.is_recordable() || !holds_borrowed()) return false;
    if (traits_.is_nondeterministic && device_ && device_->type() != c10::kCPU && !at::globalContext().deterministicAlgorithms()) return false;
    if (traits_.makes_tensors) return true;
    // It only writes: worth a record if it changes something that this region made.
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : written_)
      if (is_made_here(written)) return true;
    return false;
  }

  /// Made by a recorded operation, or by a factory of this region and about to be overwritten from end to end.
  bool is_made_here(const Written& written) {
    const ValueId id = tape_.current(storage_of(written.tensor));
    return id != none && (value(id).producer != none || (value(id).is_fresh && !written.is_read));
  }

  void call() { handle_.redispatchBoxed(below_recorder(keys_), &stack_); }

  // --- operations that are not recorded -----------------------------------------------------------------------------------------

  /// What it writes and makes is external from its next use on, and costs nothing if there is none.
  void run_unrecorded() {
    for (const Written& written : written_) save_content_of(written.tensor);
    call();
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : written_) {
      rebind_recent(written.tensor, none);
      tape_.forget(storage_of(written.tensor));
    }
    for_each_made([&](const at::Tensor& tensor, std::int32_t, std::int32_t) {
      tape_.forget(storage_of(tensor));
      // Content may come later, by a filler that the recorder sees or through a raw pointer that it does not.
      if (traits_.is_factory && at::GradMode::is_enabled() && !thread_state().is_plain) value(tape_.define(tensor, none)).is_fresh = true;
    });
    tape_.forget_recent();
  }

  /// A write is coming: whoever needs the content as it is now gets a copy, or lets go of what it can make again.
  void save_content_of(const at::Tensor& tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    {
      std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
      const ValueId id = tape_.current(storage);
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
      if (now != none) saved->rebind(now);
      else saved->rebind(tensor.storage());
    }
  }

  /// Calls `visit(tensor, return index, list position)` for each returned tensor with a storage of its own.
  template <class Visit>
  void for_each_made(Visit visit) {
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      if (!traits_.returns[i].is_tensor || traits_.returns[i].is_alias) continue;
      for_each_tensor(returned(i), traits_.returns[i].kind, [&](const at::Tensor& tensor, std::int32_t position) {
        // Some operations return an argument's storage although their schema does not say so.
        if (has_plain_storage(tensor) && std::find(sources_.begin(), sources_.end(), storage_of(tensor)) == sources_.end())
          visit(tensor, static_cast<std::int32_t>(i), position);
      });
    }
  }

  // --- operations that are recorded ---------------------------------------------------------------------------------------------

  void record() {
    note_uses();
    for (const Written& written : written_) save_content_of(written.tensor);
    std::unique_ptr<RandomState> random = traits_.is_random ? std::make_unique<RandomState>() : nullptr;

    const auto start = tape_.measures_time ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point{};
    if (random) draw(*random);
    else call();
    const float seconds = tape_.measures_time ? std::chrono::duration<float>(std::chrono::steady_clock::now() - start).count() : 0;

    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    const auto id = static_cast<OperationId>(tape_.operations.size());
    Operation& operation = tape_.operations.emplace_back(Operation{handle_, &traits_, std::move(random)});
    operation.seconds = seconds;
    operation.region = tape_.region;
    operation.first_argument = first_argument_;
    operation.first_use = first_use_;
    operation.first_result = tape_.results.size();
    operation.use_count = static_cast<std::uint32_t>(tape_.uses.size() - first_use_);
    define_results(id);
    operation.result_count = static_cast<std::uint32_t>(tape_.results.size() - operation.first_result);
    apply_keep_policy(operation);
    tape_.forget_recent();
    ++process_state().recorded;
  }

  /// Notes the arguments, with what their tensors refer to in place of the tensors. If the kernel throws these notes stay behind
  /// without an operation, which does no harm.
  void note_uses() {
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    first_argument_ = tape_.arguments.size();
    first_use_ = tape_.uses.size();
    for (std::size_t i = 0; i < traits_.argument_count; ++i) tape_.arguments.push_back(argument(i));
    for (Written& written : written_) written.is_external = !is_made_here(written);
    for (const auto& traits : traits_.arguments) {
      c10::IValue& noted = tape_.arguments[first_argument_ + traits.index];
      for_each_tensor(argument(traits.index), traits.kind, [&](const at::Tensor& tensor, std::int32_t position) {
        const Written* written = find_written(traits.index, position);
        if (written != nullptr && !written->is_read && traits.hidden_write_if != -2) return;  // running statistics: recompute without
        Use& use = tape_.uses.emplace_back();
        use.geometry = Geometry::of(tensor);
        use.version = Version::of(tensor);
        use.device = tensor.device();
        use.argument = traits.index;
        use.position = position;
        use.is_written = written != nullptr;
        use.needs_content = !traits.is_geometry_only && (written == nullptr || written->is_read);
        use.value = use.needs_content ? value_to_read(tensor, use.version) : value_to_overwrite(tensor);
        if (use.needs_content && value(use.value).producer == none) use.digest = digest_of(tensor.storage(), use.geometry);
        tape_.widen_scope(use.value, tape_.region);
      });
      strip(noted, traits.kind);
    }
  }

  const Written* find_written(std::uint16_t argument, std::int32_t position) const {
    for (const Written& written : written_)
      if (written.argument == argument && written.position == position) return &written;
    return nullptr;
  }

  static void strip(c10::IValue& argument, OperatorTraits::Kind kind) {
    if (argument.isTensor()) {
      argument = at::Tensor();
    } else if (kind == OperatorTraits::Kind::tensor_list && argument.isTensorList()) {
      c10::List<at::Tensor> empty;
      for (std::size_t i = argument.toTensorVector().size(); i > 0; --i) empty.push_back(at::Tensor());
      argument = empty;
    } else if (kind == OperatorTraits::Kind::optional_tensor_list && argument.isOptionalTensorList()) {
      c10::List<OptionalTensor> empty;
      for (std::size_t i = argument.toOptionalTensorVector().size(); i > 0; --i) empty.push_back(OptionalTensor());
      argument = empty;
    }
  }

  /// The value that a tensor's storage holds. What nobody recorded is external: the storage itself is held, and watched.
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

  /// Debug mode: what a reader sees is what the recompute must bring, whatever happened to it since it was made.
  void note_digest(ValueId id, const at::Tensor& tensor) {
    Value& read = value(id);
    if (!process_state().is_debug || read.digest != 0 || read.producer == none) return;
    read.digest = digest_of(tensor.storage(), true);
  }

  /// Runs a random operation and notes the state from which it drew.
  void draw(RandomState& random) {
    c10::IValue* given = traits_.generator_argument < 0 ? nullptr : &argument(static_cast<std::size_t>(traits_.generator_argument));
    if (given != nullptr && given->isGenerator()) random.generator = given->toGenerator();
    if (!random.generator.defined()) random.generator = default_generator(device_.value_or(c10::Device(c10::kCPU)));
    draw_and_note(random, given, [this] { call(); });
    at::Tensor& last = tape_.last_random_state;
    if (last.defined() && same_state(random.state, last)) random.state = last;
    last = random.state;
  }

  void define_results(OperationId id) {
    for (const Written& written : written_) {
      const c10::StorageImpl* storage = storage_of(written.tensor);
      const std::int32_t use = use_of(written);
      const bool has_moved = std::find(sources_.begin(), sources_.end(), storage) == sources_.end() ||
                             static_cast<std::int64_t>(written.tensor.storage().nbytes()) != written.nbytes;
      if (written.is_external || use == none || has_moved) {
        rebind_recent(written.tensor, none);
        tape_.forget(storage);
        continue;
      }
      const ValueId before = tape_.current(storage);
      if (value(before).producer == id) continue;  // another view of the same storage was written too
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
      largest_ = std::max(largest_, static_cast<std::int64_t>(tensor.nbytes()));
    });
  }

  std::int32_t use_of(const Written& written) const {
    for (std::size_t i = first_use_; i < tape_.uses.size(); ++i)
      if (tape_.uses[i].argument == written.argument && tape_.uses[i].position == written.position) return static_cast<std::int32_t>(i - first_use_);
    return none;
  }

  /// Kept: what the policies of this and all enclosing regions want, and side results that are tiny beside what they come with.
  void apply_keep_policy(const Operation& operation) {
    constexpr std::int64_t tiny_share = 64;
    const bool keeps_statistics = process_state().keeps_statistics;
    for (auto& [id, storage] : made_) {
      Value& made = value(id);
      made.kept_from_depth = keeps_statistics && made.nbytes * tiny_share <= largest_ ? 0 : kept_from(made);
      if (made.kept_from_depth == 0) {
        made.is_shared = true;
        tape_.set_held(id, storage);
      }
    }
    for (RegionId id = operation.region; id != none; id = tape_.regions[static_cast<std::size_t>(id)].parent) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      if (region.keep) ++region.ordinals[&traits_];
    }
  }

  /// The depth from which on every region that encloses the operation keeps the value.
  int kept_from(const Value& made) {
    RegionId id = tape_.region;
    int depth = tape_.depth(id) + 1;
    for (; id != none; id = tape_.regions[static_cast<std::size_t>(id)].parent, --depth) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      if (!region.keep || !region.keep({traits_.name, region.ordinals[&traits_], Bytes{largest_}}, Bytes{made.nbytes})) break;
    }
    return depth;
  }

  Tape& tape_;
  const OperatorHandle& handle_;
  const OperatorTraits& traits_;
  c10::DispatchKeySet keys_;
  Stack& stack_;
  std::size_t first_;
  std::size_t first_argument_ = 0;
  std::size_t first_use_ = 0;
  bool has_tensor_ = false;
  bool has_opaque_ = false;
  std::int64_t largest_ = 0;
  std::optional<c10::Device> device_;
  c10::SmallVector<const c10::StorageImpl*, 8> sources_;
  c10::SmallVector<const c10::StorageImpl*, 2> borrowed_;
  c10::SmallVector<Written, 2> written_;
  c10::SmallVector<std::pair<ValueId, c10::Storage>, 4> made_;
};

/// The fallback on the recorder's dispatch key.
inline void record_operation(const OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(recorder_key);  // what the kernel calls in turn is part of this operation
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  const OperatorTraits& traits = traits_of(handle);
  const bool matters = traits.writes || (!traits.is_view && traits.makes_tensors) || traits.repoints;
  if (!tape || !matters) handle.redispatchBoxed(below_recorder(keys), stack);
  else Recorder(*tape, handle, traits, keys, *stack).run();
}

}  // namespace remat::detail
