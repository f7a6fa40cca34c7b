// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "remat/libtorch/autocast.hpp"
#include "remat/libtorch/leaf_slots.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/libtorch/random.hpp"
#include "remat/nn/toggle.hpp"

namespace remat::detail {

/// Puts back at its end everything that training steps change in a model: gradients, buffers,
/// modes, checkpoint switches with segment counts and plans, the random states, and what
/// `before_write` was told of.
///
/// While it lives, steps see no gradients and call no hooks of parameters; parameters and buffers
/// have versions of their own, so that a graph from before that has saved one still finds it
/// unchanged. Backward passes of other threads must not use the model's parameters meanwhile: their
/// gradients would go the same way.
class ModelState {
 public:
  /// @param input  gets the same care as a parameter
  ModelState(torch::nn::Module& model, const torch::Tensor& input) {
    modes_.emplace_back(&model, model.is_training());
    for (const auto& below : model.modules(/*include_self=*/false))
      modes_.emplace_back(below.get(), below->is_training());
    for_each_toggle(model, [&](CheckpointToggle& toggle) {
      switches_.push_back(toggle.remember_checkpointing());
    });
    for (const torch::Tensor& parameter : model.parameters()) remember_leaf(parameter);
    remember_leaf(input);
    for (const torch::Tensor& buffer : model.buffers()) remember_buffer(buffer);
    remember_generator(at::kCPU);
    // From here on nothing throws.
    for (const Versioned& versioned : versions_) own_version(versioned);
    exchange_leaves();
    at::autocast::clear_cache();
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  ~ModelState() {
    // A destructor that throws ends the process; a device that has failed cannot be put back.
    try {
      rewind();
    } catch (...) {
    }
    // Backwards, for a tensor may have been remembered twice: as it was first is how it was.
    std::for_each(versions_.rbegin(), versions_.rend(), [](const Versioned& versioned) {
      impl(versioned.first)->set_version_counter(versioned.second);
    });
    exchange_leaves();
    for (const auto& put_back : switches_) put_back();
    if (std::ranges::all_of(
            modes_, [](const auto& mode) { return mode.first->is_training() == mode.second; }))
      return;
    // From the root down, since train() reaches everything below.
    for (const auto& [module, is_training] : modes_) module->train(is_training);
  }

  /// Makes the next step start where the first one did: without gradients, with the same content
  /// and random numbers.
  void rewind() {
    for (const auto& [leaf, slots] : leaves_)
      if (leaf.grad().defined()) leaf.mutable_grad() = torch::Tensor();
    // Else the next pass finds this one's casts, and runs other operations than those to come.
    at::autocast::clear_cache();
    const torch::NoGradGuard no_grad;
    for (const Buffer& buffer : buffers_) buffer.tensor.copy_(buffer.content);
    for (const Written& written : written_)
      bytes_of(written.storage).copy_(bytes_of(written.content));
    for (const RandomState& random : generators_) set_state(random.generator, random.state);
  }

  /// Gives every parameter that had a gradient one of zeros: backward adds to those, which needs
  /// other memory than making them does.
  void zero_known_gradients() {
    for (const auto& [leaf, slots] : leaves_)
      if (slots.gradient().defined()) leaf.mutable_grad() = torch::zeros_like(slots.gradient());
  }

  /// Gives a leaf that is no parameter of the model the same care, from here on.
  void add_leaf(const torch::Tensor& leaf) {
    if (!remember_leaf(leaf)) return;
    own_version(versions_.back());
    leaves_.back().second.exchange(leaf);
  }

  /// Keeps the content of a tensor that a step is about to write and that is no buffer: a parameter
  /// that follows another, a queue.
  void before_write(const torch::Tensor& tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    const auto is_known = [&](const Written& known) {
      return known.storage.unsafeGetStorageImpl() == storage;
    };
    const auto is_buffer = [&](const Buffer& known) {
      return has_plain_storage(known.tensor) && storage_of(known.tensor) == storage;
    };
    if (std::ranges::any_of(written_, is_known) || std::ranges::any_of(buffers_, is_buffer)) return;
    written_.push_back({tensor.storage(), copy_of(tensor.storage())});
    remember_generator(tensor.device());
    remember_version(tensor);
    own_version(versions_.back());
  }

 private:
  struct Buffer {
    torch::Tensor tensor, content;
  };
  struct Written {
    c10::Storage storage, content;
  };

  using Versioned = std::pair<torch::Tensor, c10::VariableVersion>;

  static c10::TensorImpl* impl(const torch::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

  static void own_version(const Versioned& versioned) {
    const auto& [tensor, version] = versioned;
    impl(tensor)->set_version_counter(c10::VariableVersion(version.current_version()));
  }

  void exchange_leaves() {
    for (auto& [leaf, slots] : leaves_) slots.exchange(leaf);
  }

  /// False if it was known, as tied weights are, or is none.
  bool remember_leaf(const torch::Tensor& leaf) {
    if (!leaf.defined() || !leaf.is_leaf() || leaf.is_inference()) return false;
    const auto is_same = [&](const auto& known) { return known.first.is_same(leaf); };
    if (std::ranges::any_of(leaves_, is_same)) return false;
    remember_generator(leaf.device());
    remember_version(leaf);
    leaves_.emplace_back(leaf, LeafSlots());
    return true;
  }

  void remember_buffer(const torch::Tensor& buffer) {
    if (!buffer.defined() || buffer.is_inference()) return;
    remember_generator(buffer.device());
    const auto is_same = [&](const Buffer& known) { return known.tensor.is_same(buffer); };
    if (std::ranges::any_of(buffers_, is_same)) return;
    remember_version(buffer);
    buffers_.push_back({buffer, buffer.detach().clone()});
  }

  void remember_version(const torch::Tensor& tensor) {
    if (!tensor.is_inference()) versions_.emplace_back(tensor, impl(tensor)->version_counter());
  }

  void remember_generator(c10::Device device) {
    if (device.is_meta()) return;
    const at::Generator generator = default_generator(device);
    const auto is_same = [&](const RandomState& known) { return known.generator == generator; };
    if (std::ranges::none_of(generators_, is_same))
      generators_.push_back({generator, state_of(generator)});
  }

  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
  std::vector<std::function<void()>> switches_;
  std::vector<std::pair<torch::Tensor, LeafSlots>> leaves_;
  std::vector<Versioned> versions_;
  std::vector<Buffer> buffers_;
  std::vector<Written> written_;
  std::vector<RandomState> generators_;
};

}  // namespace remat::detail
