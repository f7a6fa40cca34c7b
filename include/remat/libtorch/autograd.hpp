// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace remat::detail {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

/// The autograd engine of the process with one thing added: it asks `source` for saved-tensor hooks
/// first.
///
/// LibTorch's own default hooks exist in Python only. Everything else, execution above all, goes to
/// the engine that was there before (in a Python process Python's), so that its hooks, anomaly mode
/// and threads keep working. Never destroyed.
class HookEngine final : public torch::autograd::Engine {
 public:
  using Source = std::unique_ptr<SavedTensorHooks> (*)(bool& handled);
  using NodePtr =
      decltype(torch::autograd::Edge::function);  // shared_ptr up to 2.8, intrusive_ptr later

  HookEngine(torch::autograd::Engine& previous, Source source)
      : previous_(previous), source_(source) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePtr root,
      torch::autograd::InputBuffer&& buffer) override {
    return previous_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous_.make_anomaly_metadata();
  }
  std::unique_ptr<SavedTensorHooks> get_default_saved_variable_hooks() override {
    bool handled = false;
    auto hooks = source_(handled);
    return handled ? std::move(hooks) : previous_.get_default_saved_variable_hooks();
  }

 private:
  torch::autograd::Engine& previous_;
  Source source_;
};

/// What the running backward pass does with its graph, seen from inside an unpack.
enum class BackwardPass { outside, releases_graph, keeps_graph };

inline BackwardPass current_backward_pass() {
  using namespace torch::autograd;
  // The map's address is no identity (it repeats between passes), but it is null exactly outside of
  // a backward pass.
  if (get_current_graph_task_exec_info() == nullptr) return BackwardPass::outside;
  return get_current_graph_task_keep_graph() ? BackwardPass::keeps_graph
                                             : BackwardPass::releases_graph;
}

/// Ties `token` to the running backward pass: it is released when the pass ends, by success or by
/// an exception.
inline void attach_to_backward_pass(std::shared_ptr<void> token) {
  torch::autograd::Engine::get_default_engine().queue_callback([token = std::move(token)] {});
}

}  // namespace remat::detail
