// SPDX-License-Identifier: MIT
#pragma once

#include "remat/detail/stable_list.hpp"
#include "remat/engine/write_watch.hpp"
#include "remat/libtorch/threads.hpp"
#include "remat/plan/cost.hpp"
#include "remat/policies/keep.hpp"

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace remat::detail {

/// Which results stay although they could be recomputed; empty: none.
using KeepPredicate = std::function<bool(const keep::Operation&, Bytes)>;

class SavedTensor;
class TapeObserver;

/// A checkpointed region of a tape. Regions that are opened inside another share its tape.
struct Region {
  std::string name;
  RegionId parent = none;
  int depth = 0;
  std::size_t first_operation = 0;
  std::size_t first_saved = 0;
  KeepPredicate keep;
  ska::flat_hash_map<const OperatorTraits*, std::size_t>
      ordinals;  // operations of each kind so far, for `keep`
  std::vector<UnitCost>* unit_costs = nullptr;
};

/// The operations of a region and all regions inside it, with the values between them.
///
/// The invariant that everything rests on: an operation is **live** exactly when one of its results
/// is dropped and needed, and a value's **need** counts the saved tensors that wait for it and the
/// live operations that read its content. So when a saved tensor goes away, what only it depended
/// on goes with it, at once and without a search. Held values without need are released as soon as
/// the tape is sealed; until then any value may still find a reader.
///
/// Threads: every member is guarded by `mutex`, which is recursive because freeing part of a graph
/// inside a backward pass ends here again.
class REMAT_VISIBLE Tape : public std::enable_shared_from_this<Tape> {
 public:
  Tape() { current_.reserve(16); }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape() {
    for (std::size_t i = 0; i < values.size(); ++i) release(static_cast<ValueId>(i));
  }

  std::recursive_mutex mutex;
  StableList<Value> values;
  StableList<Operation> operations;
  StableList<Use> uses;
  StableList<Result> results;
  StableList<c10::IValue> arguments;  // with nothing in the place of tensors
  StableList<Region, 1> regions;
  RegionId region = none;  // the innermost open one
  struct Unedited {
    Version version;
    std::uint64_t digest = 0;
  };
  ska::flat_hash_map<ValueId, Unedited>
      revocable;  // of the results that are held although their user may edit them
  std::vector<SavedTensor*>
      recent;  // saved since the last operation: that operation may be the one that saves them
  std::size_t saved_count = 0;                         // of all tensors that autograd saved so far
  std::vector<const c10::StorageImpl*> recent_memory;  // of the external tensors among those
  std::weak_ptr<void> lent_until;  // alive while a backward pass that keeps its graph will take
                                   // back what it was lent
  std::vector<ValueId> lent;
  at::Tensor last_random_state;
  int thread_count = at::get_num_threads();
  std::shared_ptr<TapeObserver> observer;               // null: nobody looks
  std::function<void(const at::Tensor&)> before_write;  // empty: nobody minds
  bool measures_time = false;
  bool is_indivisible = false;  // regions inside are part of the outermost one
  bool is_sealed = false;

  // --- values of storages ---

  /// The value that a storage holds now; none if nothing is known of it.
  ValueId current(const c10::StorageImpl* storage) const {
    const auto found = current_.find(storage);
    return found == current_.end() ? none : found->second;
  }

  /// The same, unless the tensor's version shows that something wrote it where the recorder does
  /// not look (another thread, a raw kernel that marks its argument): then nothing is known of it,
  /// and it counts as external from here on.
  ValueId current(const at::Tensor& tensor, std::uint32_t version) const {
    const ValueId id = current(storage_of(tensor));
    if (id == none) return none;
    const Value& value = values[static_cast<std::size_t>(id)];
    if (value.is_fresh || (value.producer == none && !value.held)) return id;
    const bool is_known =
        version == value.version || (value.is_written && version == value.version + 1);
    return is_known ? id : none;
  }

  /// A new value that `tensor`'s storage holds from now on.
  ValueId define(const at::Tensor& tensor, OperationId producer) {
    const auto id = static_cast<ValueId>(values.size());
    Value& value = values.emplace_back();
    value.producer = producer;
    value.nbytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    value.version = Version::number_of(tensor);
    value.scope = region;
    value.kept_from_depth = regions[static_cast<std::size_t>(region)].depth + 1;
    current_[storage_of(tensor)] = id;
    // While its address is a key the storage's block must not be given to another storage.
    identities_.push_back(tensor.storage().getWeakStorageImpl());
    return id;
  }

  /// The storage's content was made where the recorder does not look: it counts as external from
  /// its next use on.
  void forget(const c10::StorageImpl* storage) { current_.erase(storage); }

  /// Lets go of the content that is held, for the storage is about to be overwritten; true if the
  /// value can still be had.
  bool let_go(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (!value.held || !value.is_shared) return true;
    if (value.producer == none) return false;
    release(id);
    if (value.need > 0) wake(value.producer);
    return true;
  }

  /// Keeps the content of a storage that others may write from now on in a copy. The copy may be
  /// shared.
  void replace_by_snapshot(ValueId id, const c10::Storage& snapshot) {
    Value& value = values[static_cast<std::size_t>(id)];
    release(id);
    value.held = snapshot;
  }

  void watch(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    value.is_watched = true;
    write_watch().enter(value.held.unsafeGetStorageImpl(), weak_from_this(), id);
  }

  void forget_recent() {
    recent.clear();
    recent_memory.clear();
  }

  // --- need ---

  void add_need(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.need++ == 0 && !is_held(value) && value.producer != none) wake(value.producer);
  }

  void remove_need(ValueId id) {
    if (lose_reader(id)) settle(values[static_cast<std::size_t>(id)].producer);
  }

  /// Gives a dropped value its content. Its producer may now rest, and what only that needed goes.
  void set_held(ValueId id, c10::Storage storage) {
    Value& value = values[static_cast<std::size_t>(id)];
    value.held = std::move(storage);
    if (value.need > 0 && value.producer != none) settle(value.producer);
  }

  /// Holds a result in a storage that its user may edit: while it is unedited it need not be
  /// recomputed, but it can be.
  void hold_revocably(ValueId id, const at::Tensor& tensor) {
    Value& value = values[static_cast<std::size_t>(id)];
    const bool was_held = is_held(value);
    value.held = tensor.storage();
    value.is_shared = value.is_revocable = true;
    revocable[id] = {Version::of(tensor), digest_of(value.held)};
    if (was_held && value.need > 0) wake(value.producer);
  }

  /// Whether the content counts as there for good. A revocable one does not: its producer stays
  /// live behind it.
  static bool is_held(const Value& value) { return value.held && !value.is_revocable; }

  /// Ends recording: what nothing needs is released.
  void seal() {
    is_sealed = true;
    current_.clear();
    identities_.clear();
    forget_recent();
    last_random_state = at::Tensor();
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i].need == 0 && values[i].held) release(static_cast<ValueId>(i));
  }

  // --- regions ---

  RegionId common_ancestor(RegionId a, RegionId b) const {
    while (a != b) {
      if (depth(a) >= depth(b))
        a = regions[static_cast<std::size_t>(a)].parent;
      else
        b = regions[static_cast<std::size_t>(b)].parent;
    }
    return a;
  }

  int depth(RegionId id) const {
    return id == none ? -1 : regions[static_cast<std::size_t>(id)].depth;
  }

  /// Notes that something in `user` reads the value.
  void widen_scope(ValueId id, RegionId user) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.scope != user) value.scope = common_ancestor(value.scope, user);
  }

  /// "segment 2 (units 3-5)" or, nested, "outer / inner".
  std::string name_of(RegionId id) const {
    if (id == none) return "checkpoint";
    const Region& here = regions[static_cast<std::size_t>(id)];
    return here.parent == none ? here.name : name_of(here.parent) + " / " + here.name;
  }

 private:
  using Worklist =
      c10::SmallVector<OperationId, 16>;  // no recursion: chains are as long as networks are deep

  /// An operation becomes live: it needs what it reads, and so may the producers of that.
  void wake(OperationId first) {
    Worklist todo{first};
    while (!todo.empty()) {
      Operation& operation = operations[static_cast<std::size_t>(todo.pop_back_val())];
      if (operation.is_live) continue;
      operation.is_live = true;
      for_each_read(operation, [&](ValueId id) {
        Value& value = values[static_cast<std::size_t>(id)];
        if (value.need++ == 0 && !is_held(value) && value.producer != none)
          todo.push_back(value.producer);
      });
    }
  }

  /// An operation may have lost its last wanted result: then it rests, and what only it needed
  /// goes.
  void settle(OperationId first) {
    Worklist todo{first};
    while (!todo.empty()) {
      Operation& operation = operations[static_cast<std::size_t>(todo.pop_back_val())];
      if (!operation.is_live || has_wanted_result(operation)) continue;
      operation.is_live = false;
      for_each_read(operation, [&](ValueId id) {
        if (lose_reader(id)) todo.push_back(values[static_cast<std::size_t>(id)].producer);
      });
    }
  }

  /// True if it was the last one and a producer may rest.
  bool lose_reader(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (--value.need > 0) return false;
    // Before the tape is sealed a later operation may still read what is there, unless it can be
    // made again.
    if (value.held && (is_sealed || value.is_recomputed)) release(id);
    return value.producer != none;
  }

  bool has_wanted_result(const Operation& operation) const {
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const Value& value =
          values[static_cast<std::size_t>(results[operation.first_result + i].value)];
      if (value.need > 0 && !is_held(value)) return true;
    }
    return false;
  }

  template <class Visit>
  void for_each_read(const Operation& operation, Visit visit) {
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = uses[operation.first_use + i];
      if (use.needs_content) visit(use.value);
    }
  }

  void release(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.is_watched)
      write_watch().leave(value.held.unsafeGetStorageImpl(), weak_from_this(), id);
    value.is_watched = value.is_shared = value.is_revocable = value.is_recomputed = false;
    value.held = c10::Storage();
  }

  ska::flat_hash_map<const c10::StorageImpl*, ValueId> current_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> identities_;
};

}  // namespace remat::detail
