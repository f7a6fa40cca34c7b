// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <cstring>
#include <mutex>

namespace remat::detail {

/// Where a random operation drew its numbers, and the generator's state before it did.
struct RandomState {
  at::Generator generator;
  at::Tensor state;  // bytes on the CPU: 5056 for the CPU's generator, seed and offset for an accelerator's
};

inline at::Tensor state_of(const at::Generator& generator) {
  at::Generator handle = generator;
  std::lock_guard<std::mutex> lock(handle.mutex());
  return handle.get_state();
}

inline void set_state(const at::Generator& generator, const at::Tensor& state) {
  at::Generator handle = generator;
  std::lock_guard<std::mutex> lock(handle.mutex());
  handle.set_state(state);
}

inline at::Generator default_generator(c10::Device device) { return at::globalContext().defaultGenerator(device); }

/// Two states of the CPU's bytes: operations that carry the random tag and draw nothing share one copy.
inline bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Puts a recorded state back while it lives, and the generator's own state afterwards, so that the outer stream of numbers is untouched.
class RandomStateGuard {
 public:
  explicit RandomStateGuard(const RandomState& recorded) : generator_(recorded.generator) {
    if (!generator_.defined()) return;
    current_ = state_of(generator_);
    set_state(generator_, recorded.state);
  }
  ~RandomStateGuard() {
    if (generator_.defined()) set_state(generator_, current_);
  }
  RandomStateGuard(const RandomStateGuard&) = delete;
  RandomStateGuard& operator=(const RandomStateGuard&) = delete;

 private:
  at::Generator generator_;
  at::Tensor current_;
};

}  // namespace remat::detail
