// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

namespace remat::detail {

/// Hooks that run when a gradient has been accumulated; LibTorch has them from 2.1 on.
template <class Meta>
struct AccumulationHooks {
  void exchange(Meta&) {}
};
template <class Meta>
  requires requires(Meta& meta) { meta.post_acc_grad_hooks_; }
struct AccumulationHooks<Meta> {
  decltype(Meta::post_acc_grad_hooks_) hooks;

  void exchange(Meta& meta) { std::swap(hooks, meta.post_acc_grad_hooks_); }
};

/// What a backward pass finds at a leaf: the gradient, hooks, and the node that accumulates, which
/// may have hooks of its own.
///
/// Exchanged for an empty one, passes leave the leaf's gradient alone and call none of its hooks.
class LeafSlots {
 public:
  const at::Tensor& gradient() const { return gradient_; }

  /// Swaps these with a leaf's.
  void exchange(const at::Tensor& leaf) {
    Meta* meta = torch::autograd::impl::get_autograd_meta(leaf);
    if (meta == nullptr) return;  // it never required grad
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    std::swap(gradient_, meta->grad_);
    std::swap(hooks_, meta->hooks_);
    std::swap(hook_list_, meta->cpp_hooks_list_);
    std::swap(accumulator_, meta->grad_accumulator_);
    accumulation_hooks_.exchange(*meta);
  }

 private:
  using Meta = torch::autograd::AutogradMeta;

  at::Tensor gradient_;
  decltype(Meta::hooks_) hooks_;
  decltype(Meta::cpp_hooks_list_) hook_list_;
  decltype(Meta::grad_accumulator_) accumulator_{decltype(torch::autograd::Edge::function)()};
  AccumulationHooks<Meta> accumulation_hooks_;
};

}  // namespace remat::detail
