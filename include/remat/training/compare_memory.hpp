// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/allocator.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/model_state.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/training/memory_report.hpp"
#include "remat/training/step_recorder.hpp"

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

inline StepRecord measure(ModelState& state, const MeasuredStep& step) {
  state.rewind();  // outside: what it frees was not allocated by the step
  const auto recorder = std::make_shared<StepRecorder>();
  const AllocationListenerGuard guard(recorder);
  step([&] { recorder->backward_begins(); });
  return recorder->finish();
}

/// Returns a unit's name in the model; a unit that a backbone has put together from registered
/// parts, such as its stem, has the name that its chain gave it.
inline std::string name_of_unit(const torch::nn::Module& model, const torch::nn::Module* unit) {
  if (unit == &model) return model.name();
  const auto modules = model.named_modules(/*name_prefix=*/{}, /*include_self=*/false);
  for (const auto& item : modules)
    if (item.value().get() == unit) return item.key();
  const auto name_in = [&](const torch::nn::Module& parent) {
    const auto* toggle = dynamic_cast<const CheckpointToggle*>(&parent);
    return toggle == nullptr ? std::string() : toggle->unit_name(unit);
  };
  if (std::string name = name_in(model); !name.empty()) return name;
  for (const auto& item : modules)
    if (const std::string name = name_in(*item.value()); !name.empty())
      return item.key() + "." + name;
  return "unregistered";
}

/// Joins what both steps found of each unit, in the order of the plain one.
inline std::vector<UnitMemory> join_units(const torch::nn::Module& model, const StepRecord& plain,
                                          const StepRecord& checkpointed) {
  std::vector<UnitMemory> units;
  std::map<const void*, std::size_t> places;
  const auto unit_of = [&](const void* module) -> UnitMemory& {
    const auto [place, is_new] = places.emplace(module, units.size());
    if (is_new)
      units.push_back({name_of_unit(model, static_cast<const torch::nn::Module*>(module)), {}, {}});
    return units[place->second];
  };
  for (const auto& unit : plain.units) unit_of(unit.module).plain = unit.memory;
  for (const auto& unit : checkpointed.units) unit_of(unit.module).checkpointed = unit.memory;
  return units;
}

inline double seconds_of(ModelState& state, const MeasuredStep& step) {
  state.rewind();
  const auto start = std::chrono::steady_clock::now();
  step([] {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Returns the median of alternating pairs, without a listener, which costs time.
inline std::optional<double> time_ratio(ModelState& state, const MeasuredStep& plain,
                                        const MeasuredStep& step, int pairs) {
  std::vector<double> ratios;
  for (int pair = 0; pair < pairs; ++pair) {
    const double plain_seconds = seconds_of(state, plain);
    ratios.push_back(seconds_of(state, step) / plain_seconds);
  }
  std::ranges::sort(ratios);
  return ratios.empty() ? std::nullopt : std::optional(ratios[ratios.size() / 2]);
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
  for (const torch::Tensor& parameter : model.parameters())  // a forward may move some
    if (parameter.defined() && has_plain_storage(parameter)) state.before_write(parameter);
  switch_on(model, options.segments);
  const MeasuredStep plain = [&](const std::function<void()>& before_backward) {
    const PlainScope scope;
    step(before_backward);
  };
  step([] {});   // chains plan by bytes from their second forward on
  plain([] {});  // and what is set up once should be in neither timeline

  StepRecord plain_record = measure(state, plain);
  const Statistics before = statistics();
  StepRecord checkpointed_record = measure(state, step);
  MemoryReport report;
  report.regions = statistics().regions - before.regions;
  report.recomputed_operations = statistics().recomputed_operations - before.recomputed_operations;
  require(report.regions > 0 || for_each_toggle(model, [](CheckpointToggle&) {}) > 0, [&] {
    return ErrorMessage("remat.memory.nothing")
        .where("remat::compare_memory")
        .what("nothing inside " + model.name() + " is checkpointed")
        .cure("Make parts of it Checkpointed<...>, or call remat::checkpoint in its forward");
  });
  report.plain = plain_record.memory;
  report.checkpointed = checkpointed_record.memory;
  report.units = join_units(model, plain_record, checkpointed_record);
  report.plain_timeline = std::move(plain_record.timeline);
  report.checkpointed_timeline = std::move(checkpointed_record.timeline);
  report.time_ratio = time_ratio(state, plain, step, options.timed_pairs);
  return report;
}

}  // namespace detail

/// Runs one training step plain and checkpointed, and reports the memory of both: its peak, its
/// course, and what each unit takes.
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
