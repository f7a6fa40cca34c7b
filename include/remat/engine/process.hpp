// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/tape.hpp"
#include "remat/libtorch/autograd.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <ostream>
#include <string>

namespace remat {

/// Whether checkpointing works in this process, and why not if it does not.
struct EngineStatus {
  bool is_available = false;
  std::string reason;  ///< empty when available
};

/// Writes "checkpointing works", or why it does not.
inline std::ostream& operator<<(std::ostream& stream, const EngineStatus& status) {
  return status.is_available ? stream << "checkpointing works"
                             : stream << "checkpointing is off: " << status.reason;
}

/// Counts over the whole process since the start or the last `reset_statistics()`.
struct Statistics {
  std::int64_t regions = 0;
  std::int64_t recorded_operations = 0;
  std::int64_t recomputed_operations = 0;
};

namespace detail {

/// What a thread's recorder and hooks work on.
struct REMAT_VISIBLE ThreadState {
  std::shared_ptr<Tape> tape;  // of the outermost region that is open on this thread
  bool is_plain = false;       // within `plain`: results are kept, nothing is recorded
  bool is_probing = false;     // `hooks_arrive` asks whether the hook engine is still installed
  bool probe_arrived = false;
};

/// The engine's state, one object for all libraries of a process that contain this header: with
/// default visibility the linker and the loader make one of it even under -fvisibility=hidden. Its
/// name carries the layout's version, so that libraries with different layouts do not meet here;
/// the second one then finds the dispatch key taken and stays off.
struct REMAT_VISIBLE ProcessStateLayout1 {
  std::mutex mutex;
  std::atomic<HookEngine*> hook_engine{nullptr};
  std::atomic<bool> is_registered{false};
  std::atomic<bool> is_refused{false};  // set after `refusal`
  std::string refusal;
  std::atomic<std::int64_t> regions{0}, recorded{0}, recomputed{0};
  std::atomic<bool> is_debug{std::getenv("REMAT_DEBUG") != nullptr};
  std::atomic<bool> keeps_statistics{true};  // small side results such as a batch norm's mean;
                                             // tests switch it off to drop everything
};

REMAT_VISIBLE inline ProcessStateLayout1& process_state() {
  static auto* state = new ProcessStateLayout1;
  return *state;
}

REMAT_VISIBLE inline ThreadState& thread_state() {
  static thread_local ThreadState state;
  return state;
}

}  // namespace detail

/// Returns the counts of regions and operations so far.
inline Statistics statistics() {
  const auto& state = detail::process_state();
  return {state.regions, state.recorded, state.recomputed};
}

/// Sets all counts to 0.
inline void reset_statistics() {
  auto& state = detail::process_state();
  state.regions = state.recorded = state.recomputed = 0;
}

/// Switches the debug mode: regions remember a digest of every value that they drop, and backward
/// compares what it recomputed.
///
/// It finds what no tape can see, a write through a raw pointer, and names operation and value.
/// Costs a pass over each value. The environment variable REMAT_DEBUG switches it on from the
/// start.
inline void set_debug(bool enabled) { detail::process_state().is_debug = enabled; }

/// Declares that the operator `name` ("mylib::gelu") computes its results from its arguments alone,
/// so that it may be recomputed.
///
/// Operators outside `aten` are kept otherwise. Never declare one that communicates, or that reads
/// or writes anything but its arguments.
inline void allow_recompute(std::string name) {
  detail::recomputable_operators().allow(std::move(name));
}

}  // namespace remat
