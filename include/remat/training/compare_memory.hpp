// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/memory/meter.hpp"
#include "remat/nn/model_state.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/training/memory_report.hpp"

namespace remat {

/// Says how `compare_memory` measures.
struct CompareMemoryOptions {
  std::optional<std::int64_t> segments{};  ///< empty: the switches as they are, or all by own rule
  int timed_pairs = 3;                     ///< pairs of steps for the time ratio; 0: none
};

namespace detail {

/// Runs forward, loss, `before_backward` and backward.
using MeasuredStep = std::function<void(const std::function<void()>& before_backward)>;

inline void require_loss(const torch::Tensor& value) {
  require(value.defined() && value.numel() == 1 && value.requires_grad(), [&] {
    return ErrorMessage("remat.memory.loss")
        .where("remat::compare_memory")
        .what(!value.defined() ? std::string("the loss is undefined, a scalar was expected")
                               : "the loss has " + std::to_string(value.numel()) +
                                     " elements and requires_grad = " +
                                     (value.requires_grad() ? "true" : "false") +
                                     ", a scalar that requires grad was expected")
        .cure("Return what a training step calls backward() on, and leave grad mode on");
  });
}

inline StepMemory measure(ModelState& state, const MeasuredStep& step) {
  state.rewind();  // outside: what it frees was not allocated by the step
  const MemoryMeter meter;
  StepMemory memory;
  step([&] { memory.kept = meter.current(); });
  memory.peak = meter.peak();
  return memory;
}

inline double seconds_of(ModelState& state, const MeasuredStep& step) {
  state.rewind();
  const auto start = std::chrono::steady_clock::now();
  step([] {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Where checkpointing does not work, both steps would be the same.
inline void require_engine(const EngineStatus& status) {
  if (status.is_available) return;
  throw EnvironmentError(ErrorMessage("remat.memory.engine")
                             .where("remat::compare_memory")
                             .what("there is nothing to compare")
                             .cause(status.reason));
}

/// Checks what can be checked before a step.
inline void require_comparable(torch::nn::Module& model, const CompareMemoryOptions& options) {
  require(model.is_training(), [&] {
    return ErrorMessage("remat.memory.eval")
        .where("remat::compare_memory")
        .what(model.name() + " is in eval mode, training mode was expected")
        .cause("Checkpointing does nothing in eval mode")
        .cure("Call train() first");
  });
  if (options.segments) require_segment_count(*options.segments, "remat::compare_memory");
  require_engine(engine_status());
}

inline void switch_on(torch::nn::Module& model, const std::optional<std::int64_t>& segments) {
  if (segments)
    enable_gradient_checkpointing(model, *segments);
  else if (!is_gradient_checkpointing_enabled(model))
    enable_gradient_checkpointing(model);
}

/// Measures the step twice, and leaves the model as it was.
inline MemoryReport compare_steps(torch::nn::Module& model, const torch::Tensor& input,
                                  const MeasuredStep& step, const CompareMemoryOptions& options) {
  require_comparable(model, options);
  ModelState state(model, input);
  switch_on(model, options.segments);
  const MeasuredStep plain = [&](const std::function<void()>& before_backward) {
    const PlainScope scope;
    step(before_backward);
  };
  step([] {});  // chains plan by bytes from their second forward on

  MemoryReport report;
  report.plain = measure(state, plain);
  const Statistics before = statistics();
  report.checkpointed = measure(state, step);
  report.regions = statistics().regions - before.regions;
  report.recomputed_operations = statistics().recomputed_operations - before.recomputed_operations;
  require(report.regions > 0 || for_each_toggle(model, [](CheckpointToggle&) {}) > 0, [&] {
    return ErrorMessage("remat.memory.nothing")
        .where("remat::compare_memory")
        .what("nothing inside " + model.name() + " is checkpointed")
        .cure("Make parts of it Checkpointed<...>, or call remat::checkpoint in its forward");
  });
  std::vector<double> ratios;
  for (int pair = 0; pair < options.timed_pairs; ++pair) {
    const double plain_seconds = seconds_of(state, plain);
    ratios.push_back(seconds_of(state, step) / plain_seconds);
  }
  std::ranges::sort(ratios);
  if (!ratios.empty()) report.time_ratio = ratios[ratios.size() / 2];
  return report;
}

}  // namespace detail

/// Runs one training step plain and checkpointed, and reports the memory of both.
///
/// A step is forward, loss and backward, without gradients at its start; both draw the same random
/// numbers. Afterwards the model is as it was, also after an exception: parameters, gradients,
/// buffers, modes, switches, plans and random states. Where nothing is switched on, everything is
/// for the comparison. What `MemoryMeter` does not see is not in the figures, and regions that
/// other threads run meanwhile are counted as this step's. Leaf tensors that only `loss` knows keep
/// the gradients that they get.
///
/// @param model  in training mode; a module with forward(input)
/// @param loss   makes a scalar of what forward returned
/// @throws ArgumentError     if the model is in eval mode or has nothing checkpointed, or the loss
/// is no scalar that requires grad
/// @throws EnvironmentError  if checkpointing does not work in this process
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
MemoryReport compare_memory(Module& model, const torch::Tensor& input, Loss&& loss,
                            const CompareMemoryOptions& options = {}) {
  const bool is_inner = input.defined() && !input.is_leaf();
  const torch::Tensor x = is_inner ? input.detach().requires_grad_() : input;
  const auto step = [&](const std::function<void()>& before_backward) {
    auto output = model.forward(x);
    const torch::Tensor value = loss(output);
    detail::require_loss(value);
    before_backward();
    value.backward();
  };
  return detail::compare_steps(model, x, step, options);
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
MemoryReport compare_memory(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& input,
                            Loss&& loss, const CompareMemoryOptions& options = {}) {
  return compare_memory(*model.ptr(), input, std::forward<Loss>(loss), options);
}

}  // namespace remat
