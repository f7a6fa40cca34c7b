// SPDX-License-Identifier: MIT
#pragma once

// tensor.hpp comes first: it holds the cure for the include order of LibTorch 1.13 with Clang.
#include "remat/libtorch/tensor.hpp"
#include "remat/libtorch/version.hpp"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace remat::detail {

// By version: a call of a free function in LibTorch's namespace cannot be asked for by `requires`,
// since its name is looked up where it is written. The old spellings still compile with a newer
// LibTorch, but print a warning at each call.

/// Whether LibTorch has autocast for this kind of device at all.
inline bool has_autocast(c10::DeviceType device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  return at::autocast::is_autocast_available(device);
#else
  return device == at::kCPU || device == at::kCUDA || device == at::kXPU;
#endif
}

/// Whether the CPU's kernels take float16.
inline constexpr bool kHasCpuHalf = REMAT_LIBTORCH_AT_LEAST(2, 4);

/// Whether a weight that is cast while autograd is off enters the cache without history, so that
/// later uses in the same scope give it no gradient (pytorch/pytorch#65766).
inline constexpr bool kCachesCastsWithoutHistory = !REMAT_LIBTORCH_AT_LEAST(2, 13);

/// What autocast is set to on this thread, for one kind of device. The cache is common to all.
struct AutocastState {
  bool is_enabled = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool uses_cache = true;

  friend bool operator==(const AutocastState&, const AutocastState&) = default;
};

/// @param device  one that `has_autocast`
inline AutocastState autocast_state(c10::DeviceType device) {
  AutocastState state;
  state.uses_cache = at::autocast::is_autocast_cache_enabled();
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  state.is_enabled = at::autocast::is_autocast_enabled(device);
  state.dtype = at::autocast::get_autocast_dtype(device);
#else
  switch (device) {
    case at::kCUDA:
      state.is_enabled = at::autocast::is_enabled();
      state.dtype = at::autocast::get_autocast_gpu_dtype();
      break;
    case at::kXPU:
      state.is_enabled = at::autocast::is_xpu_enabled();
      state.dtype = at::autocast::get_autocast_xpu_dtype();
      break;
    default:
      state.is_enabled = at::autocast::is_cpu_enabled();
      state.dtype = at::autocast::get_autocast_cpu_dtype();
  }
#endif
  return state;
}

/// @param device  one that `has_autocast`
inline void set_autocast_state(c10::DeviceType device, const AutocastState& state) {
  at::autocast::set_autocast_cache_enabled(state.uses_cache);
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(device, state.is_enabled);
  at::autocast::set_autocast_dtype(device, state.dtype);
#else
  switch (device) {
    case at::kCUDA:
      at::autocast::set_enabled(state.is_enabled);
      at::autocast::set_autocast_gpu_dtype(state.dtype);
      break;
    case at::kXPU:
      at::autocast::set_xpu_enabled(state.is_enabled);
      at::autocast::set_autocast_xpu_dtype(state.dtype);
      break;
    default:
      at::autocast::set_cpu_enabled(state.is_enabled);
      at::autocast::set_autocast_cpu_dtype(state.dtype);
  }
#endif
}

/// Counts an open scope of this thread; returns how many are open now.
inline int enter_autocast() { return at::autocast::increment_nesting(); }

/// Takes back `enter_autocast`; the outermost scope leaves no casts behind.
inline void leave_autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

/// Whether a device of this kind is there; for kinds that cannot be asked, true.
inline bool has_device(c10::DeviceType device) { return device != at::kCUDA || at::hasCUDA(); }

}  // namespace remat::detail
