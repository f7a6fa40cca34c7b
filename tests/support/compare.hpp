// SPDX-License-Identifier: MIT
#pragma once

// Before doctest.hpp, for Clang: see remat/libtorch/tensor.hpp.
#include "remat/checkpoint.hpp"
#include "remat/memory/meter.hpp"

#include "tests/support/doctest.hpp"

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// Runs a program plain and checkpointed from the same seed, and compares everything that it notes bit by bit.
///
/// A program is a callable `void(compare::Run& run)`. It builds its own tensors and modules (both runs start from one seed), marks what
/// is to be a region by calling `run.wrap(fn, inputs...)`, and notes what must come out the same.
namespace compare {

using torch::Tensor;

/// While it lives, regions keep nothing at all, not even a batch norm's mean.
class DropEverything {
 public:
  explicit DropEverything(bool is_on = true) : before_(remat::detail::process_state().keeps_statistics) {
    if (is_on) remat::detail::process_state().keeps_statistics = false;
  }
  ~DropEverything() { remat::detail::process_state().keeps_statistics = before_; }
  DropEverything(const DropEverything&) = delete;
  DropEverything& operator=(const DropEverything&) = delete;

 private:
  bool before_;
};

/// Switches the debug mode on while it lives.
class DebugMode {
 public:
  explicit DebugMode(bool is_on = true) { remat::set_debug(is_on); }
  ~DebugMode() { remat::set_debug(false); }
  DebugMode(const DebugMode&) = delete;
  DebugMode& operator=(const DebugMode&) = delete;
};

enum class Mode { plain, drop_everything, keep_small_results, debug };

inline std::string name_of(Mode mode) {
  switch (mode) {
    case Mode::plain: return "plain";
    case Mode::drop_everything: return "everything dropped";
    case Mode::keep_small_results: return "small results kept";
    case Mode::debug: return "debug mode";
  }
  return "";
}

inline Tensor random_state() {
  return remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
}

/// One run of a program: how it wraps, and what it noted.
class Run {
 public:
  explicit Run(Mode mode) : mode_(mode) {}

  bool is_checkpointed() const { return mode_ != Mode::plain; }

  /// Calls `fn(inputs...)`: plain in the one run, as a region in the other.
  template <class Function, class... Inputs>
  decltype(auto) wrap(Function&& fn, Inputs&&... inputs) const {
    using ResultType = std::invoke_result_t<Function, Inputs...>;
    if (is_checkpointed()) return static_cast<ResultType>(remat::checkpoint(std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
    return static_cast<ResultType>(std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  }

  /// As `wrap`, with a keep policy.
  template <class Keep, class Function, class... Inputs>
  decltype(auto) wrap_keeping(Keep keep, Function&& fn, Inputs&&... inputs) const {
    using ResultType = std::invoke_result_t<Function, Inputs...>;
    if (is_checkpointed())
      return static_cast<ResultType>(remat::checkpoint(keep, std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
    return static_cast<ResultType>(std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  }

  /// Notes a tensor's content, type and whether it requires grad, as they are now.
  void note(const std::string& name, const Tensor& tensor) {
    Noted& noted = noted_[unique(name)];
    noted.is_defined = tensor.defined();
    if (!tensor.defined()) return;
    noted.number = tensor.requires_grad();
    torch::NoGradGuard no_grad;
    noted.tensor = tensor.is_sparse() ? tensor.detach().to_dense().clone() : tensor.detach().clone().resolve_conj().resolve_neg();
  }

  /// Notes a count.
  void count(const std::string& name, std::int64_t number) {
    Noted& noted = noted_[unique(name)];
    noted.is_defined = true;
    noted.number = number;
  }

  /// Notes whether a tensor has a gradient, and which.
  void gradient(const std::string& name, const Tensor& tensor) { note("grad of " + name, tensor.grad()); }

  /// Notes the state of the random generator.
  void generator(const std::string& when) { note("generator " + when, random_state()); }

  /// Notes all gradients of parameters, all buffers, and the buffers' version counters.
  void module(const std::string& name, torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) gradient(name + "." + item.key(), item.value());
    buffers(name, module);
  }

  void buffers(const std::string& name, torch::nn::Module& module) {
    for (const auto& item : module.named_buffers()) {
      note(name + "." + item.key(), item.value());
      if (item.value().defined()) count("version of " + name + "." + item.key(), item.value()._version());
    }
  }

  /// Runs `action`; notes whether it threw an exception derived from std::exception.
  template <class Action>
  bool throws(const std::string& name, Action action) {
    bool has_thrown = false;
    try {
      action();
    } catch (const std::exception&) {
      has_thrown = true;
    }
    count(name + " throws", has_thrown);
    return has_thrown;
  }

  struct Noted {
    bool is_defined = false;
    std::int64_t number = 0;
    Tensor tensor;
  };
  const std::map<std::string, Noted>& noted() const { return noted_; }

 private:
  std::string unique(const std::string& name) {
    const int number = ++names_[name];
    return number == 1 ? name : name + " #" + std::to_string(number);
  }

  Mode mode_;
  std::map<std::string, int> names_;
  std::map<std::string, Noted> noted_;
};

template <class Program>
Run run_once(Mode mode, Program& program, std::uint64_t seed) {
  const DropEverything drop(mode == Mode::drop_everything || mode == Mode::debug);
  const DebugMode debug(mode == Mode::debug);
  torch::manual_seed(seed);
  Run run(mode);
  try {
    program(run);
  } catch (const std::exception& error) {
    FAIL_CHECK("the program threw (" << name_of(mode) << "): " << std::string(error.what()));
  }
  run.generator("at the end");
  return run;
}

inline bool is_same(const Run::Noted& a, const Run::Noted& b) {
  if (a.is_defined != b.is_defined || a.number != b.number || a.tensor.defined() != b.tensor.defined()) return false;
  if (!a.tensor.defined()) return true;
  return a.tensor.scalar_type() == b.tensor.scalar_type() && a.tensor.sizes() == b.tensor.sizes() && torch::equal(a.tensor, b.tensor);
}

inline void check_same(const Run& plain, const Run& checkpointed, Mode mode) {
  CHECK(plain.noted().size() == checkpointed.noted().size());
  for (const auto& [name, expected] : plain.noted()) {
    const auto found = checkpointed.noted().find(name);
    const bool same = found != checkpointed.noted().end() && is_same(expected, found->second);
    CHECK_MESSAGE(same, "\"" << name << "\" differs from plain (" << name_of(mode) << ")");
  }
}

/// Checks that `program` leaves the same in all modes as in plain.
template <class Program>
void expect_same(Program program, std::uint64_t seed = 0) {
  const Run plain = run_once(Mode::plain, program, seed);
  CHECK(plain.noted().size() > 1);
  for (const Mode mode : {Mode::drop_everything, Mode::keep_small_results, Mode::debug})
    check_same(plain, run_once(mode, program, seed), mode);
}

/// The text of the exception that `action` throws; empty if it throws none.
template <class Exception = std::exception, class Action>
std::string message_of(Action action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return {};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Operations that were recomputed while `action` ran.
template <class Action>
std::int64_t recomputed_by(Action action) {
  const std::int64_t before = remat::statistics().recomputed_operations;
  action();
  return remat::statistics().recomputed_operations - before;
}

}  // namespace compare
