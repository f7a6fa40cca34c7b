// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/concepts.hpp"
#include "remat/nn/toggle.hpp"

namespace remat {

namespace detail {

template <class Range>
using ElementOf = std::remove_cvref_t<decltype(*std::begin(std::declval<Range&>()))>;

template <class Element>
inline constexpr bool is_tensor_call =
    std::same_as<Element, torch::nn::AnyModule> ||
    std::is_invocable_r_v<torch::Tensor, Element&, torch::Tensor>;

template <class Range>
constexpr bool holds_tensor_calls() {
  if constexpr (NestedSequential<Range>)
    return true;
  else if constexpr (requires { typename ElementOf<Range>; })
    return is_tensor_call<ElementOf<Range>>;
  else
    return false;
}

template <class Element>
torch::Tensor call_with_tensor(Element& element, torch::Tensor x) {
  if constexpr (std::same_as<std::remove_cv_t<Element>, torch::nn::AnyModule>)
    return element.forward(std::move(x));
  else
    return std::invoke(element, std::move(x));
}

}  // namespace detail

/// A `torch::nn::Sequential`, or a range of AnyModules, module holders or callables that map a
/// tensor to a tensor.
template <class Candidate>
concept TensorCalls =
    detail::Holds<detail::holds_tensor_calls<std::remove_cvref_t<Candidate>>(),
                  "checkpoint_sequential needs a torch::nn::Sequential, or a range of modules or "
                  "callables that take a tensor and return one">;

/// Runs `modules` one after the other, in segments that backward recomputes: Python's function of
/// this name.
///
/// As there, segments have `size / segments` modules, the last takes the rest and is not
/// checkpointed. More segments than modules means one module per segment.
///
/// @param modules  a `torch::nn::Sequential`, or a range of modules or callables
/// @param segments  at least 1
/// @return  what running them plainly returns
/// @throws ArgumentError  if `segments` is below 1
/// @par Keeps  the tensors between segments, and all that the last segment saves
template <TensorCalls Modules>
torch::Tensor checkpoint_sequential(Modules&& modules, std::int64_t segments, torch::Tensor x) {
  detail::require_segment_count(segments, "remat::checkpoint_sequential");
  if constexpr (requires {
                  modules.ptr();
                  modules->begin();
                }) {
    return checkpoint_sequential(*modules.ptr(), segments, std::move(x));
  } else if constexpr (requires { modules->begin(); }) {
    return checkpoint_sequential(*modules, segments, std::move(x));
  } else {
    const auto count = static_cast<std::size_t>(std::ranges::distance(modules));
    const std::size_t segment_count = std::min(count, static_cast<std::size_t>(segments));
    auto module = std::begin(modules);
    for (std::size_t segment = 0; segment < segment_count; ++segment) {
      const bool is_last = segment + 1 == segment_count;
      const std::size_t size =
          is_last ? count - segment * (count / segment_count) : count / segment_count;
      const auto run = [&] {
        torch::Tensor value = std::move(x);
        for (std::size_t index = 0; index < size; ++index, ++module)
          value = detail::call_with_tensor(*module, std::move(value));
        return value;
      };
      x = is_last ? run() : checkpoint(run);
    }
    return x;
  }
}

}  // namespace remat
