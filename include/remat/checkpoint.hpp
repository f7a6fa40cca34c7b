// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/region.hpp"

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>

namespace remat {

/// Runs `fn(inputs...)` and drops the tensors that autograd would save; backward recomputes the
/// operations it needs.
///
/// `fn` runs exactly once. Any callable, any arguments, any result; tensors that `fn` captures get
/// their gradients too.
///
/// @param fn      any callable; tensors it reads may not be edited before backward
/// @param inputs  handed to `fn` as they are
/// @return        exactly what `fn` returns
/// @throws RecomputeError  in backward, if a tensor that it needs was changed in the meantime
/// @par Keeps     the tensors that enter, the results, small side results such as a batch norm's
/// mean, and 5 KiB of random state per
///                random operation on the CPU
/// @par Threads   several threads may run regions, and backward passes over them, at once
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(Function&& fn, Inputs&&... inputs) {
  return detail::run_region(detail::RegionOptions{}, std::forward<Function>(fn),
                            std::forward<Inputs>(inputs)...);
}

/// As `checkpoint(fn, inputs...)`, but keeps the results for which `keep` says so.
///
/// @param keep  `keep::convolutions_and_matmuls{}`, `keep::attention{}`, or a predicate of your own
/// on `(keep::Operation, Bytes)`
template <class Keep, class Function, class... Inputs>
  requires std::predicate<const Keep&, const keep::Operation&, Bytes> &&
           std::invocable<Function, Inputs...>
decltype(auto) checkpoint(Keep keep, Function&& fn, Inputs&&... inputs) {
  detail::RegionOptions options;
  if constexpr (!std::is_same_v<Keep, keep::nothing>) options.keep = std::move(keep);
  return detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// Calls `fn(inputs...)` inside a region as if there were no checkpoint: what it makes is kept. For
/// an operation that does not fit.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) call_plain(Function&& fn, Inputs&&... inputs) {
  const detail::PlainScope scope;
  return std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace remat
