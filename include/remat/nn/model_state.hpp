// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "remat/libtorch/autocast.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/libtorch/random.hpp"
#include "remat/nn/toggle.hpp"

namespace remat::detail {

/// Puts back at its end everything that training steps change in a model: gradients, buffers with
/// their versions, modes, checkpoint switches with segment counts and plans, and the random states.
///
/// While it lives, steps see no gradients, and buffers with versions of their own, so that a graph
/// from before that has saved a buffer still finds it unchanged.
class ModelState {
 public:
  /// @param input  whose gradient is put back, too, if it is a leaf
  ModelState(torch::nn::Module& model, const torch::Tensor& input) {
    modes_.emplace_back(&model, model.is_training());
    for (const auto& below : model.modules(/*include_self=*/false))
      modes_.emplace_back(below.get(), below->is_training());
    for_each_toggle(model, [&](CheckpointToggle& toggle) {
      switches_.push_back(toggle.remember_checkpointing());
    });
    for (const torch::Tensor& parameter : model.parameters()) remember_gradient(parameter);
    remember_gradient(input);
    for (const torch::Tensor& buffer : model.buffers()) remember_buffer(buffer);
    remember_generator(at::kCPU);
    // From here on nothing throws.
    for (const Buffer& buffer : buffers_)
      impl(buffer.tensor)
          ->set_version_counter(c10::VariableVersion(buffer.version.current_version()));
    clear_gradients();
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
    for (const Buffer& buffer : buffers_) impl(buffer.tensor)->set_version_counter(buffer.version);
    for (const auto& [leaf, gradient] : gradients_) leaf.mutable_grad() = gradient;
    for (const auto& put_back : switches_) put_back();
    if (std::ranges::all_of(
            modes_, [](const auto& mode) { return mode.first->is_training() == mode.second; }))
      return;
    // From the root down, since train() reaches everything below.
    for (const auto& [module, is_training] : modes_) module->train(is_training);
  }

  /// Makes the next step start where the first one did: without gradients, with the same buffers
  /// and random numbers.
  void rewind() {
    clear_gradients();
    // Else the next pass finds this one's casts, and runs other operations than those to come.
    at::autocast::clear_cache();
    const torch::NoGradGuard no_grad;
    for (const Buffer& buffer : buffers_) buffer.tensor.copy_(buffer.content);
    for (const RandomState& random : generators_) set_state(random.generator, random.state);
  }

  /// Gives every parameter that had a gradient one of zeros: backward adds to those, which needs
  /// other memory than making them does.
  void zero_known_gradients() {
    for (const auto& [leaf, gradient] : gradients_)
      if (gradient.defined()) leaf.mutable_grad() = torch::zeros_like(gradient);
  }

 private:
  struct Buffer {
    torch::Tensor tensor, content;
    c10::VariableVersion version;
  };

  static c10::TensorImpl* impl(const torch::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

  void clear_gradients() {
    for (const auto& [leaf, gradient] : gradients_) leaf.mutable_grad() = torch::Tensor();
  }

  void remember_gradient(const torch::Tensor& leaf) {
    if (!leaf.defined()) return;
    remember_generator(leaf.device());
    if (leaf.is_leaf()) gradients_.emplace_back(leaf, leaf.grad());
  }

  void remember_buffer(const torch::Tensor& buffer) {
    if (!buffer.defined() || buffer.is_inference()) return;
    remember_generator(buffer.device());
    const auto is_same = [&](const Buffer& known) { return known.tensor.is_same(buffer); };
    if (std::ranges::any_of(buffers_, is_same)) return;
    buffers_.push_back({buffer, buffer.detach().clone(), impl(buffer)->version_counter()});
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
  std::vector<std::pair<torch::Tensor, torch::Tensor>> gradients_;
  std::vector<Buffer> buffers_;
  std::vector<RandomState> generators_;
};

}  // namespace remat::detail
