// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/materialise.hpp"
#include "remat/engine/tape_observer.hpp"
#include "remat/errors.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

namespace remat::detail {

/// A tensor that autograd saved inside a region.
///
/// If the region made it, only the geometry is kept and unpacking asks the tape. Otherwise (inputs,
/// parameters, buffers, what was made unseen) it is what plain autograd keeps: the same memory,
/// with the same check of its version.
class SavedTensor final : public SavedTensorHooks {
 public:
  explicit SavedTensor(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}

  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  ~SavedTensor() override {
    if (value_ == none) return;
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    leave_recent();
    lose();
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = Version::of(tensor);
    if (!has_plain_storage(tensor)) {
      c10::impl::ExcludeDispatchKeyGuard unrecorded(recorder_key);
      opaque_ = tensor.detach();
      return;
    }
    geometry_ = Geometry::of(tensor);
    device_ = tensor.device();

    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    const ValueId id = tape_->current(tensor, version_.number);
    region_ = tape_->region;
    ++tape_->saved_count;
    if (id == none || tape_->values[static_cast<std::size_t>(id)].producer == none) {
      memory_ = tensor.storage();
      tape_->recent_memory.push_back(memory_.unsafeGetStorageImpl());
      const at::Tensor base =
          tensor.is_view() ? at::Tensor(tensor._base()) : tensor;  // linear saves weight.t()
      is_parameter_ = base.is_leaf() && base.requires_grad();
      if (is_parameter_) digest_ = digest_of(memory_, geometry_);
      return;
    }
    bind(id);
    tape_->recent.push_back(this);
  }

  at::Tensor call_unpack_hook() override {
    if (!version_.is_unchanged()) throw changed();
    if (opaque_.defined()) return opaque_;
    c10::Storage storage = memory_;
    if (!storage) {
      std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
      if (tape_->observer) tape_->observer->asked(*tape_, value_);
      storage = materialise(*tape_, value_, region_);
    } else if (digest_ != 0 && digest_ != digest_of(storage, geometry_)) {
      throw changed();
    }
    at::Tensor tensor = tensor_over(storage, geometry_);
    // Shared with the original, so that a graph of gradients notices later changes as in plain.
    if (version_.counter.enabled())
      tensor.unsafeGetTensorImpl()->set_version_counter(version_.counter);
    return tensor;
  }

  ValueId value() const { return value_; }

  /// The operation that saved this tensor has also written it: refer to what it holds afterwards.
  void rebind(ValueId id) {
    lose();
    bind(id);
  }

  /// As `rebind`, but the new content is external: hold the memory.
  void rebind(const c10::Storage& memory) {
    lose();
    value_ = none;
    memory_ = memory;
  }

 private:
  void bind(ValueId id) {
    value_ = id;
    Value& value = tape_->values[static_cast<std::size_t>(id)];
    value.is_saved = true;
    tape_->add_need(id);
    tape_->widen_scope(id, region_);
    count_cost(value);
    if (tape_->observer) tape_->observer->saved(*tape_, id);
  }

  void lose() {
    if (tape_->observer) tape_->observer->released(*tape_, value_);
    tape_->remove_need(value_);
  }

  /// A unit's cost is what it would have saved and does not, and what a policy keeps of it.
  void count_cost(Value& value) {
    if (value.is_counted) return;
    value.is_counted = true;
    for (RegionId id = region_; id != none;
         id = tape_->regions[static_cast<std::size_t>(id)].parent) {
      auto* costs = tape_->regions[static_cast<std::size_t>(id)].unit_costs;
      if (costs == nullptr || costs->empty()) continue;
      (value.held ? costs->back().kept : costs->back().saved) += Bytes{value.nbytes};
    }
  }

  void leave_recent() {
    auto& recent = tape_->recent;
    recent.erase(std::remove(recent.begin(), recent.end(), this), recent.end());
  }

  RecomputeError changed() const {
    ErrorMessage message("remat.recompute.saved_tensor_changed");
    message.where("checkpoint \"" + tape_->name_of(region_) + "\"")
        .what((is_parameter_ ? "the parameter " : "the saved tensor ") +
              describe(geometry_, device_) +
              ", needed for gradient computation, has been modified by an inplace operation: it "
              "was at version " +
              std::to_string(version_.number) + " in forward and is at version " +
              std::to_string(version_.now()) + " now")
        .cause(
            "it was edited between the operation that saved it and backward, for example by an "
            "optimizer step or an in-place operation")
        .cure("Edit it after backward, or give the region a clone of it");
    return RecomputeError(message);
  }

  std::shared_ptr<Tape> tape_;
  Geometry geometry_;
  Version version_;
  c10::Storage memory_;
  at::Tensor opaque_;
  std::uint64_t digest_ = 0;
  ValueId value_ = none;  // none: `memory_` or `opaque_` has it
  RegionId region_ = none;
  c10::Device device_{c10::kCPU};
  bool is_parameter_ = false;
};

}  // namespace remat::detail
