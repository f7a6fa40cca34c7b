// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/policies/concepts.hpp"
#include "remat/policies/keep.hpp"

namespace remat {

namespace detail {

/// The module class behind a holder; a module class is its own.
template <class Type>
struct ImplOf {
  using type = Type;
};
template <class Type>
  requires requires { typename Type::ContainedType; }
struct ImplOf<Type> {
  using type = typename Type::ContainedType;
};
template <class Module>
struct ImplOf<std::shared_ptr<Module>> {
  using type = Module;
};

/// What a forward takes and returns, as a function type: without class and noexcept, with const.
template <class Member>
struct SignatureOf {};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...)> {
  using type = Result(Arguments...);
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) noexcept> {
  using type = Result(Arguments...);
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) const> {
  using type = Result(Arguments...) const;
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) const noexcept> {
  using type = Result(Arguments...) const;
};

template <class Impl>
using ForwardSignature = typename SignatureOf<decltype(&Impl::forward)>::type;

template <class Impl>
inline constexpr bool has_one_forward = requires { typename ForwardSignature<Impl>; };

/// AnyModule, which holds the units, takes no const forward, no reference that can be written, no
/// void.
template <class Signature>
inline constexpr bool suits_any_module = false;
template <class Result, class... Arguments>
inline constexpr bool suits_any_module<Result(Arguments...)> =
    !std::is_void_v<Result> && ((!std::is_lvalue_reference_v<Arguments> ||
                                 std::is_const_v<std::remove_reference_t<Arguments>>) &&
                                ...);

template <class Impl>
constexpr bool has_storable_forward() {
  if constexpr (has_one_forward<Impl>)
    return suits_any_module<ForwardSignature<Impl>>;
  else
    return false;
}

template <class Type>
using UnitImpl = typename ImplOf<std::remove_cvref_t<Type>>::type;

/// Whether `forward` can be called with all but the last of its arguments.
template <class Impl, class... Arguments>
constexpr bool has_default_arguments() {
  if constexpr (sizeof...(Arguments) == 0) {
    return false;
  } else {
    return []<std::size_t... index>(std::index_sequence<index...>) {
      using All = std::tuple<Arguments...>;
      return requires(Impl& impl) {
        impl.forward(std::declval<std::tuple_element_t<index, All>>()...);
      };
    }(std::make_index_sequence<sizeof...(Arguments) - 1>());
  }
}

}  // namespace detail

/// A module class, or the holder of one, of which `Checkpointed` can make a checkpointed one.
template <class Candidate>
concept CheckpointableModule =
    detail::Holds<std::derived_from<detail::UnitImpl<Candidate>, torch::nn::Module>,
                  "a module to checkpoint needs to derive from torch::nn::Module"> &&
    detail::Holds<!std::is_final_v<detail::UnitImpl<Candidate>>,
                  "a module to checkpoint needs to be a class that is not final"> &&
    detail::Holds<
        detail::has_one_forward<detail::UnitImpl<Candidate>>,
        "a module to checkpoint needs a forward that is public, not a template and not overloaded">;

}  // namespace remat
