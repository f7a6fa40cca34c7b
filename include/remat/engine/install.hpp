// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/recorder.hpp"

#include <memory>
#include <mutex>

namespace remat::detail {

/// Where the hook engine gets its hooks: from the tape of the calling thread's region, if one is
/// open.
inline std::unique_ptr<SavedTensorHooks> saved_tensor_hooks(bool& handled) {
  ThreadState& thread = thread_state();
  if (thread.is_probing) {
    thread.probe_arrived = true;
    handled = true;
    return nullptr;
  }
  if (!thread.tape || thread.is_plain) return nullptr;
  handled = true;
  return std::make_unique<SavedTensor>(thread.tape);
}

inline torch::autograd::Engine& installed_hook_engine() { return *process_state().hook_engine; }

/// Whether autograd still asks our engine: libtorch_python, loaded later, installs its own over it.
/// Asking whether the current engine is ours would not do, since it may be wrapped by another one.
inline bool hooks_arrive() {
  ThreadState& thread = thread_state();
  thread.is_probing = true;
  thread.probe_arrived = false;
  torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks();
  thread.is_probing = false;
  return thread.probe_arrived;
}

/// Puts recorder and hooks in place at the first region, and the hooks again when somebody replaced
/// them.
inline bool install_engine() {
  ProcessStateLayout1& state = process_state();
  if (!state.is_refused && state.is_registered && hooks_arrive()) return true;

  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.is_refused) return false;
  if (!state.is_registered) {
    if (!register_recorder<&record_operation>()) {
      state.refusal =
          "the dispatch key that remat records on is taken: this LibTorch uses it, or another "
          "version of remat is loaded";
      state.is_refused = true;
      return false;
    }
    state.is_registered = true;
  }
  if (!hooks_arrive()) {
    // Leaked, like the one it may replace: threads may be inside of either.
    state.hook_engine =
        new HookEngine(torch::autograd::Engine::get_default_engine(), &saved_tensor_hooks);
    torch::autograd::set_default_engine_stub(&installed_hook_engine);
  }
  return true;
}

}  // namespace remat::detail

namespace remat {

/// Returns whether checkpointing works in this process, and the reason if it does not. Regions are
/// plain calls then.
inline EngineStatus engine_status() {
  if (detail::install_engine()) return {true, {}};
  return {false, detail::process_state().refusal};
}

}  // namespace remat
