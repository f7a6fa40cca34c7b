// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string_view>

namespace remat::detail {

/// Holds a string literal, so that it can be a template argument.
template <std::size_t size>
struct Literal {
  char text[size]{};
  constexpr Literal(const char (&words)[size]) {  // NOLINT(*-explicit-*): a literal is to convert
    for (std::size_t index = 0; index < size; ++index) text[index] = words[index];
  }
  constexpr std::string_view view() const { return {text, size - 1}; }
};

}  // namespace remat::detail
