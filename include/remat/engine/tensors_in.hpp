// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>

namespace remat::detail {

template <class Type, class Visit>
concept VisitsItsTensors =
    requires(const Type& value, Visit visit) { visit_tensors(value, visit); };

template <class Type>
concept TupleLike = requires { std::tuple_size<Type>::value; };

template <class Type>
concept OptionalLike = requires(const Type& value) {
  { value.has_value() } -> std::convertible_to<bool>;
  *value;
};

template <class Type>
concept RangeLike = requires(const Type& value) {
  value.begin() != value.end();
  requires !std::is_same_v<std::remove_cvref_t<decltype(*value.begin())>, Type>;
};

/// Calls `visit` for every tensor in a result: bare, or inside optional, vector, list, map, array,
/// pair and tuple, to any depth.
///
/// A user's own struct takes part with `template <class Visit> void visit_tensors(const Mine& mine,
/// Visit visit)` beside it. A type that is not known holds none: its tensors are still right, they
/// are only recomputed where a kept result would have spared that.
template <class Type, class Visit>
void for_each_tensor_in(const Type& value, Visit visit) {
  if constexpr (std::is_base_of_v<at::TensorBase, Type>) {
    visit(value);
  } else if constexpr (VisitsItsTensors<Type, Visit>) {
    visit_tensors(value, visit);
  } else if constexpr (TupleLike<Type>) {
    std::apply([&](const auto&... elements) { (for_each_tensor_in(elements, visit), ...); }, value);
  } else if constexpr (OptionalLike<Type>) {
    if (value.has_value()) for_each_tensor_in(*value, visit);
  } else if constexpr (RangeLike<Type>) {
    for (const auto& element : value) for_each_tensor_in(element, visit);
  }
}

}  // namespace remat::detail
