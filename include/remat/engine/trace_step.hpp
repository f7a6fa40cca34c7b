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

/// While a step is traced: keeps a layer's output, so that backward recomputes layer by layer.
inline void keep_while_tracing(const at::Tensor& output) {
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  if (!tape || !tape->observer || !output.defined() || !has_plain_storage(output)) return;
  const std::lock_guard<std::recursive_mutex> lock(tape->mutex);
  const ValueId id = tape->current(output, Version::number_of(output));
  if (id == none) return;
  Value& value = tape->values[static_cast<std::size_t>(id)];
  if (value.producer == none || value.held) return;
  value.is_shared = true;
  tape->set_held(id, output.storage());
  tape->observer->kept(*tape, id);
}

}  // namespace remat::detail
