// SPDX-License-Identifier: MIT
#pragma once

// First, for Clang: see libtorch/tensor.hpp.
#include <ATen/core/ivalue.h>

#include <ATen/Parallel.h>

namespace remat::detail {

/// Sums depend on how many threads share them: recompute with as many as forward had.
class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(int count)
      : before_(at::get_num_threads()), differs_(before_ != count) {
    if (differs_) at::set_num_threads(count);
  }
  ~ThreadCountGuard() {
    if (differs_) at::set_num_threads(before_);
  }
  ThreadCountGuard(const ThreadCountGuard&) = delete;
  ThreadCountGuard& operator=(const ThreadCountGuard&) = delete;

 private:
  int before_;
  bool differs_;
};

}  // namespace remat::detail
