// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace remat::detail {

/// Asks for one enumerator that only newer LibTorch versions have.
template <class Ask>
constexpr std::optional<c10::ScalarType> newer_type(Ask ask) {
  if constexpr (requires { ask(std::type_identity<c10::ScalarType>{}); })
    return ask(std::type_identity<c10::ScalarType>{});
  else
    return std::nullopt;
}

using NamedType = std::pair<std::string_view, std::optional<c10::ScalarType>>;

#define REMAT_NEWER_TYPE(name)                                       \
  newer_type([](auto type) -> decltype(decltype(type)::type::name) { \
    return decltype(type)::type::name;                               \
  })

/// Python's names of the dtypes that tensors of LibTorch can have, here or in a newer version.
inline constexpr std::array kNamedTypes{
    NamedType{"float32", c10::ScalarType::Float},
    NamedType{"float64", c10::ScalarType::Double},
    NamedType{"float16", c10::ScalarType::Half},
    NamedType{"bfloat16", c10::ScalarType::BFloat16},
    NamedType{"int64", c10::ScalarType::Long},
    NamedType{"int32", c10::ScalarType::Int},
    NamedType{"int16", c10::ScalarType::Short},
    NamedType{"int8", c10::ScalarType::Char},
    NamedType{"uint8", c10::ScalarType::Byte},
    NamedType{"bool", c10::ScalarType::Bool},
    NamedType{"complex64", c10::ScalarType::ComplexFloat},
    NamedType{"complex128", c10::ScalarType::ComplexDouble},
    NamedType{"complex32", c10::ScalarType::ComplexHalf},
    NamedType{"uint16", REMAT_NEWER_TYPE(UInt16)},
    NamedType{"uint32", REMAT_NEWER_TYPE(UInt32)},
    NamedType{"uint64", REMAT_NEWER_TYPE(UInt64)},
    NamedType{"float8_e4m3fn", REMAT_NEWER_TYPE(Float8_e4m3fn)},
    NamedType{"float8_e5m2", REMAT_NEWER_TYPE(Float8_e5m2)},
    NamedType{"float8_e4m3fnuz", REMAT_NEWER_TYPE(Float8_e4m3fnuz)},
    NamedType{"float8_e5m2fnuz", REMAT_NEWER_TYPE(Float8_e5m2fnuz)},
    NamedType{"float8_e8m0fnu", REMAT_NEWER_TYPE(Float8_e8m0fnu)},
};

#undef REMAT_NEWER_TYPE

/// Returns the type that Python calls `torch.<name>`; nothing if tensors cannot have it here.
inline std::optional<c10::ScalarType> scalar_type(std::string_view name) {
  for (const auto& [known, type] : kNamedTypes)
    if (known == name) return type;
  return std::nullopt;
}

/// Returns Python's name without `torch.`, or LibTorch's where Python has none.
inline std::string_view dtype_name(c10::ScalarType type) {
  for (const auto& [name, known] : kNamedTypes)
    if (known == type) return name;
  return c10::toString(type);
}

}  // namespace remat::detail
