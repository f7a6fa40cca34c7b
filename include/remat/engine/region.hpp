// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/install.hpp"
#include "remat/engine/tensors_in.hpp"

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace remat::detail {

/// How a region is to be checkpointed.
struct RegionOptions {
  KeepPredicate keep{};                         ///< empty: keep nothing
  std::string name = "checkpoint";              ///< for messages
  std::vector<UnitCost>* unit_costs = nullptr;  ///< filled by unit, see `begin_unit`
  bool measures_time = false;
  bool is_indivisible = false;  ///< regions inside are part of this one, if it is the outermost
  std::shared_ptr<TapeObserver> observer{};  ///< watches the tape, if this region is the outermost
  std::function<void(const at::Tensor&)>
      before_write{};  ///< sees what is about to be written and is from outside, if this region is
                       ///< the outermost
  std::function<void(Tape&)> at_end{};  ///< sees the tape when the region has ended well
};

/// Whether a region that is opened now would do anything: elsewhere it is a plain call.
inline bool records_regions() {
  const std::shared_ptr<Tape>& around = thread_state().tape;
  if (around && around->is_indivisible) return false;
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !thread_state().is_plain && install_engine();
}

/// An open region. The first one on a thread makes a tape; those inside share it.
class RegionScope {
 public:
  explicit RegionScope(const RegionOptions& options) : include_(c10::DispatchKeySet(recorder_key)) {
    ThreadState& thread = thread_state();
    is_outermost_ = !thread.tape;
    if (is_outermost_) thread.tape = std::make_shared<Tape>();
    tape_ = thread.tape;
    if (is_outermost_) {
      tape_->observer = options.observer;
      tape_->before_write = options.before_write;
      tape_->is_indivisible = options.is_indivisible;
    }

    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    parent_ = tape_->region;
    Region& region = tape_->regions.emplace_back();
    region.name = options.name;
    region.parent = parent_;
    region.depth = tape_->depth(parent_) + 1;
    region.first_operation = tape_->operations.size();
    region.first_saved = tape_->saved_count;
    region.keep = options.keep;
    region.unit_costs = options.unit_costs;
    tape_->region = static_cast<RegionId>(tape_->regions.size() - 1);
    tape_->measures_time = tape_->measures_time || options.measures_time;
    ++process_state().regions;
  }

  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

  ~RegionScope() {
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    Region& region = tape_->regions[static_cast<std::size_t>(tape_->region)];
    region.unit_costs = nullptr;
    region.keep = nullptr;  // what it captured may own what this graph hangs on
    tape_->region = parent_;
    if (!is_outermost_) return;
    if (tape_->observer) tape_->observer->ended(*tape_);
    tape_->before_write = nullptr;
    tape_->seal();
    thread_state().tape.reset();
  }

  /// Keeps a result of the outermost region: its user holds the memory anyway, and what follows it
  /// need not be recomputed for it. The user may edit it, so that it can be recomputed all the
  /// same.
  void keep_result(const at::Tensor& tensor) {
    if (!tensor.defined() || !has_plain_storage(tensor)) return;
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    const ValueId id = tape_->current(tensor, Version::number_of(tensor));
    if (id == none) return;
    Value& value = tape_->values[static_cast<std::size_t>(id)];
    value.is_result = true;
    if (is_outermost_ && value.producer != none) tape_->hold_revocably(id, tensor);
  }

  Tape& tape() { return *tape_; }

 private:
  std::shared_ptr<Tape> tape_;
  RegionId parent_ = none;
  bool is_outermost_ = false;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// Calls `fn(inputs...)` as a region: what autograd saves in it is let go and recomputed in
/// backward.
template <class Function, class... Inputs>
decltype(auto) run_region(const RegionOptions& options, Function&& fn, Inputs&&... inputs) {
  using ResultType = std::invoke_result_t<Function, Inputs...>;
  if (!records_regions())
    return static_cast<ResultType>(
        std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...));

  RegionScope scope(options);
  if constexpr (std::is_void_v<ResultType>) {
    std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
    if (options.at_end) options.at_end(scope.tape());
  } else {
    ResultType result = std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
    for_each_tensor_in(result, [&](const auto& tensor) { scope.keep_result(tensor); });
    if (options.at_end) options.at_end(scope.tape());
    if constexpr (std::is_reference_v<ResultType>)
      return static_cast<ResultType>(result);
    else
      return result;
  }
}

/// Within a region that measures units: what follows belongs to the next one. The unit's output is
/// the caller's to note.
inline void begin_unit() {
  ThreadState& thread = thread_state();
  if (!thread.tape) return;
  std::lock_guard<std::recursive_mutex> lock(thread.tape->mutex);
  Region& region = thread.tape->regions[static_cast<std::size_t>(thread.tape->region)];
  if (region.unit_costs != nullptr) region.unit_costs->emplace_back();
}

/// While it lives, operations on this thread run as if there were no checkpoint: what they make is
/// kept.
class PlainScope {
 public:
  PlainScope() : before_(std::exchange(thread_state().is_plain, true)) {}
  ~PlainScope() { thread_state().is_plain = before_; }
  PlainScope(const PlainScope&) = delete;
  PlainScope& operator=(const PlainScope&) = delete;

 private:
  bool before_;
};

}  // namespace remat::detail
