// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace remat::detail {

using OperatorHandle = c10::OperatorHandle;
using Stack = torch::jit::Stack;
using RecordFunction = void (*)(const OperatorHandle&, c10::DispatchKeySet, Stack*);

/// The dispatch key on which the recorder sits: below autograd and autocast, above the factories'
/// BackendSelect, with no kernel and no fallback in LibTorch 1.13 to 2.13. Newer headers reserve
/// it, so `register_recorder` asks first.
inline constexpr c10::DispatchKey recorder_key = c10::DispatchKey::Fake;

/// Everything below the recorder, to pass an operation on.
inline c10::DispatchKeySet below_recorder(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, recorder_key);
}

/// What a recompute must not meet again: autograd and its version counters, autocast (recorded
/// arguments are already cast), the recorder.
inline c10::DispatchKeySet keys_above_recompute() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet(recorder_key);
}

/// Puts `record` on the recorder's key for the rest of the process; false when somebody else holds
/// the key.
template <RecordFunction record>
bool register_recorder() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(recorder_key)) return false;
  // Never destroyed, on purpose: that would deregister, and regions may outlive any static object.
  // A static pointer, so that leak checkers see it held.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "_", recorder_key, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<record>());
  return true;
}

}  // namespace remat::detail
