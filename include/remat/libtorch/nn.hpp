// SPDX-License-Identifier: MIT
#pragma once

// tensor.hpp comes first: it holds the cure for the include order of LibTorch 1.13 with Clang.
#include "remat/libtorch/tensor.hpp"

#include <c10/core/InferenceMode.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/named_any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <type_traits>

namespace remat {

namespace detail {

template <class Member>
struct FirstArgument;
template <class Result, class Class, class Argument>
struct FirstArgument<Result (Class::*)(Argument) const> {
  using type = std::remove_cvref_t<Argument>;
};

}  // namespace detail

/// The optional device that LibTorch's `clone()` takes: `c10::optional` in 1.13, `std::optional`
/// later.
using OptionalDevice = detail::FirstArgument<decltype(&torch::nn::Module::clone)>::type;

namespace detail {

/// Whether autograd records on this thread; elsewhere a checkpoint has nothing to save.
inline bool autograd_records() {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

inline bool has_trainable_parameter(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters(/*recurse=*/false))
    if (parameter.requires_grad()) return true;
  for (const auto& child : module.children())
    if (has_trainable_parameter(*child)) return true;
  return false;
}

}  // namespace detail

}  // namespace remat
