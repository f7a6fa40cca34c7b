// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/version.hpp"

#include "tests/support/doctest.hpp"

#include <ATen/autocast_mode.h>

/// LibTorch's CPU autocast as a scope, in both of its spellings. The cast cache is cleared at the end of the outermost scope.
namespace autocast {

inline bool is_enabled() {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  return at::autocast::is_autocast_enabled(at::kCPU);
#else
  return at::autocast::is_cpu_enabled();
#endif
}

inline void set_enabled(bool enabled) {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(at::kCPU, enabled);
#else
  at::autocast::set_cpu_enabled(enabled);
#endif
}

inline at::ScalarType dtype() {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  return at::autocast::get_autocast_dtype(at::kCPU);
#else
  return at::autocast::get_autocast_cpu_dtype();
#endif
}

inline void set_dtype(at::ScalarType dtype) {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_dtype(at::kCPU, dtype);
#else
  at::autocast::set_autocast_cpu_dtype(dtype);
#endif
}

/// BFloat16 on the CPU while it lives.
class Scope {
 public:
  explicit Scope(bool is_on = true, bool uses_cache = true)
      : was_enabled_(is_enabled()), had_dtype_(dtype()), had_cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    set_dtype(at::kBFloat16);
    set_enabled(is_on);
    at::autocast::set_autocast_cache_enabled(uses_cache);
  }
  ~Scope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set_enabled(was_enabled_);
    set_dtype(had_dtype_);
    at::autocast::set_autocast_cache_enabled(had_cache_);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  bool was_enabled_;
  at::ScalarType had_dtype_;
  bool had_cache_;
};

}  // namespace autocast
