// SPDX-License-Identifier: MIT
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "remat/errors.hpp"
#include "remat/libtorch/autocast.hpp"
#include "remat/libtorch/dtypes.hpp"

namespace remat::amp {

/// What an `Autocast` sets; meant for designated initialisers. The defaults are Python's.
struct AutocastOptions {
  /// bfloat16 or float16; unset: what the thread has, which is bfloat16 on the CPU and float16 on
  /// CUDA if no scope around this one says otherwise
  std::optional<c10::ScalarType> dtype{};
  /// false: operations run in the dtype of their arguments, in an outer scope too
  bool enabled = true;
  /// whether a weight is cast once for the whole scope; unset: as it is, and at first it is on
  std::optional<bool> cache_enabled{};
};

/// Runs what LibTorch lists as safe in a lower precision while it lives: Python's `torch.autocast`
/// as a C++ scope.
///
/// Scopes nest; each restores what it found. Parameters stay in float32 and are cast when used;
/// such casts are cached until the outermost scope ends, so do not step an optimizer inside. A
/// scope around forward and loss is enough: the recompute runs in the precision of forward wherever
/// backward is called.
///
/// With LibTorch before 2.13 a weight cast without autograd would stay in the cache and get no
/// gradient later: open another scope for the part without autograd; it leaves the cache alone.
///
/// @par Threads  acts on the thread that made it, and is destroyed there, in the order of a stack
/// @par Source   Micikevicius et al., Mixed Precision Training (2017)
class Autocast {
 public:
  /// @param device  the kind of device that the operations run on; others are not affected
  /// @throws ArgumentError     if the device has no autocast, or the dtype is no lower precision
  /// @throws EnvironmentError  if this LibTorch cannot do that: float16 on the CPU before 2.4, CUDA
  ///                           without a GPU
  explicit Autocast(c10::DeviceType device, const AutocastOptions& options = {}) : device_(device) {
    require_autocast(device);
    before_ = remat::detail::autocast_state(device);
    remat::detail::AutocastState state = before_;
    state.is_enabled = options.enabled;
    state.dtype = options.dtype.value_or(before_.dtype);
    if (options.enabled) {
      require_dtype(device, state.dtype);
      require_present(device);
    }
    const bool is_nested = remat::detail::enter_autocast() > 1;
    if (remat::detail::kCachesCastsWithoutHistory && is_nested && !at::GradMode::is_enabled())
      state.uses_cache = false;
    state.uses_cache = options.cache_enabled.value_or(state.uses_cache);
    remat::detail::set_autocast_state(device, state);
  }
  ~Autocast() {
    remat::detail::leave_autocast();
    remat::detail::set_autocast_state(device_, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  static std::string place(c10::DeviceType device) {
    return "autocast on " + c10::DeviceTypeName(device, /*lower_case=*/true);
  }

  static void require_autocast(c10::DeviceType device) {
    require(remat::detail::has_autocast(device), [&] {
      return ErrorMessage("remat.autocast.device")
          .where(place(device))
          .what("LibTorch has no autocast for this kind of device")
          .cure("Give the one that the network runs on, for example torch::kCPU or torch::kCUDA");
    });
  }

  static void require_dtype(c10::DeviceType device, c10::ScalarType dtype) {
    require(dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half, [&] {
      return ErrorMessage("remat.autocast.dtype")
          .where(place(device))
          .what("the dtype is " + std::string(remat::detail::dtype_name(dtype)) +
                ", and bfloat16 or float16 was expected")
          .cure("Give one of them, or enabled = false for a part that is to run as it is");
    });
    if (device == c10::DeviceType::CPU && dtype == c10::ScalarType::Half &&
        !remat::detail::kHasCpuHalf)
      throw EnvironmentError(ErrorMessage("remat.autocast.cpu_half")
                                 .where(place(device))
                                 .what("the dtype is float16, and LibTorch " TORCH_VERSION
                                       " has no such kernels for the CPU")
                                 .cause("they came with LibTorch 2.4")
                                 .cure("Use bfloat16, which needs no loss scaling either"));
  }

  static void require_present(c10::DeviceType device) {
    if (remat::detail::has_device(device)) return;
    throw EnvironmentError(ErrorMessage("remat.autocast.no_device")
                               .where(place(device))
                               .what("LibTorch sees no such device")
                               .cure("Give the one that the network runs on, or enabled = "
                                     "torch::cuda::is_available()"));
  }

  c10::DeviceType device_;
  remat::detail::AutocastState before_;
};

/// Returns whether operations on this kind of device run in a lower precision on this thread; false
/// for a kind that has no autocast.
inline bool is_autocast_enabled(c10::DeviceType device) {
  return remat::detail::has_autocast(device) && remat::detail::autocast_state(device).is_enabled;
}

}  // namespace remat::amp
