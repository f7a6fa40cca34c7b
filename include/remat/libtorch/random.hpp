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
  at::Tensor state;  // bytes on the CPU: 5056 for the CPU's generator, seed and offset for an
                     // accelerator's
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

inline at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

/// Two states of the CPU's bytes: operations that carry the random tag and draw nothing share one
/// copy.
inline bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Serialises the operations that can only draw from a device's default generator, among regions
/// and their recomputes.
inline std::mutex& shared_generator_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

/// Calls `draw` and notes the generator's state before it. The default generator belongs to all
/// threads of the process.
///
/// An operation with a generator argument draws from a private copy while the generator's own mutex
/// is held, as it would be in plain: no other thread can come between. Without such an argument, a
/// thread outside of any region still can.
///
/// @param given  the generator argument, or null
template <class Draw>
void draw_and_note(RandomState& random, c10::IValue* given, Draw draw) {
  if (given == nullptr) {
    std::lock_guard<std::mutex> lock(shared_generator_mutex());
    random.state = state_of(random.generator);
    draw();
    return;
  }
  std::lock_guard<std::mutex> lock(random.generator.mutex());
  random.state = random.generator.get_state();
  at::Generator copy = random.generator.clone();
  *given = copy;
  try {
    draw();
  } catch (...) {
    random.generator.set_state(
        copy.get_state());  // numbers that were drawn before it failed are drawn, as in plain
    throw;
  }
  random.generator.set_state(copy.get_state());
}

/// Calls `draw` so that it draws what it drew in forward, and leaves the stream of numbers of the
/// process untouched.
template <class Draw>
void draw_again(const RandomState& random, c10::IValue* given, Draw draw) {
  if (given != nullptr) {
    at::Generator copy = random.generator.clone();
    copy.set_state(random.state);
    *given = copy;
    draw();
    return;
  }
  std::lock_guard<std::mutex> lock(shared_generator_mutex());
  struct Restore {
    const at::Generator& generator;
    at::Tensor state = state_of(generator);
    ~Restore() { set_state(generator, state); }
  } restore{random.generator};
  set_state(random.generator, random.state);
  draw();
}

}  // namespace remat::detail
