// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/region.hpp"
#include "remat/engine/step_observer.hpp"

#include <memory>
#include <string>
#include <utility>

namespace remat::detail {

/// Calls `step(options)`, which runs forward as a region with these options and then backward, and
/// returns what it did.
///
/// The region keeps nothing but what `keep_while_tracing` is given, so that a step that does not
/// fit in memory without checkpointing can be traced.
template <class Step>
StepTrace trace_step(std::string name, Step&& step) {
  const auto observer = std::make_shared<StepObserver>();
  RegionOptions options;
  options.name = std::move(name);
  options.measures_time = true;
  options.is_indivisible = true;
  options.observer = observer;
  const AllocationListenerGuard guard(observer);
  std::forward<Step>(step)(options);
  return observer->finish();
}

/// While a step is traced: calls `visit(tape, value)` with what the tensor's storage holds, if the
/// region made that, else with none.
template <class Visit>
void visit_while_tracing(const at::Tensor& tensor, Visit&& visit) {
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  if (!tape || !tape->observer || !tensor.defined() || !has_plain_storage(tensor)) return;
  const std::lock_guard<std::recursive_mutex> lock(tape->mutex);
  const ValueId id = tape->current(tensor, Version::number_of(tensor));
  const bool is_made = id != none && tape->values[static_cast<std::size_t>(id)].producer != none;
  visit(*tape, is_made ? id : none);
}

/// While a step is traced: notes where the layers of a chain begin.
inline void begin_layer_while_tracing(const at::Tensor& input) {
  visit_while_tracing(input, [](Tape& tape, ValueId id) { tape.observer->layer_begins(tape, id); });
}

/// While a step is traced: keeps a layer's output, so that backward recomputes layer by layer.
inline void keep_while_tracing(const at::Tensor& output) {
  visit_while_tracing(output, [&](Tape& tape, ValueId id) {
    if (id == none) return;
    Value& value = tape.values[static_cast<std::size_t>(id)];
    if (!value.held) {
      value.is_shared = true;
      tape.set_held(id, output.storage());
    }
    tape.observer->kept(tape, id);
  });
}

}  // namespace remat::detail
