// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/units.hpp"

namespace remat {

namespace detail {

/// What a text for a budget may be, for messages and documentation.
inline constexpr const char* kBudgetForms =
    "bytes (2147483648, 512MiB, 1.5GiB) or a part of what plain needs (0.33)";

/// What a text says; without a budget, what is wrong with it.
struct BudgetText {
  std::optional<MemoryBudget> budget{};
  bool is_out_of_range = false;  ///< a number as it should be, and too small or too large
  std::string cure{};
};

/// Returns a number in full, without an exponent, so that it reads back as the same.
inline std::string plain_number(double number) {
  std::array<char, 400> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  return {text.data(), end.ptr};
}

/// Says what to write in place of a number with a unit that is none of ours.
inline std::string cure_of_unit(double number, std::string_view unit) {
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit == "%") return "Write " + plain_number(number / 100);
  std::string upper;
  for (const char letter : unit)
    upper += static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  if (upper.find_first_not_of("E+-0123456789") == std::string::npos)
    return "Write the number in full";
  const std::string rest = upper.substr(1);
  const bool is_prefix = std::string_view("KMGT").find(upper[0]) != std::string_view::npos;
  if (!is_prefix || (rest != "" && rest != "B" && rest != "I" && rest != "IB")) return "";
  const std::string written = plain_number(number) + upper[0] + "iB";
  if (rest.starts_with('I')) return "Write " + written;
  return std::string(unit) + " is a power of 1000 to some and of 1024 to others: write " + written +
         ", or count the bytes";
}

/// Reads a budget: a number with a unit, or a whole one above 1, is bytes; any other is a part of
/// plain.
inline BudgetText read_budget(std::string_view text) {
  if (text.starts_with('-')) return {.is_out_of_range = true, .cure = "A budget is above 0"};
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view unit = text.substr(end);
  const std::optional<double> number = parse_digits<double>(text.substr(0, end));
  if (!number) return {};
  if (*number == 0) return {.is_out_of_range = true, .cure = "A budget is above 0"};
  if (unit.empty() && (*number <= 1 || text.find('.') != std::string_view::npos))
    return {.budget = MemoryBudget::fraction_of_plain(*number)};
  if (const std::optional<Bytes> bytes = parse_bytes(text)) {
    if (bytes->count > 0) return {.budget = MemoryBudget::bytes(*bytes)};
    return {.is_out_of_range = true, .cure = "A budget is at least 1 byte"};
  }
  if (parse_bytes("1" + std::string(unit)))
    return {.is_out_of_range = true, .cure = "It is a whole number of bytes, below 8388608TiB"};
  return {.cure = cure_of_unit(*number, unit)};
}

}  // namespace detail

/// Reads a budget as people write it: "2GiB", "1.5 GiB", "2147483648" are bytes, "0.33" and "1" are
/// parts of what the plain step needs.
///
/// A number without a unit is bytes if it is whole and above 1. Part of a byte is left out. KB, MB
/// and GB are refused, since they mean two things.
///
/// @throws ArgumentError  with the forms that there are
inline MemoryBudget parse_memory_budget(std::string_view text) {
  const detail::BudgetText read = detail::read_budget(text);
  require(read.budget.has_value(), [&] {
    return ErrorMessage("remat.budget.text")
        .where("remat::parse_memory_budget")
        .what("the budget is \"" + std::string(text) + "\", " + detail::kBudgetForms +
              " was expected")
        .cure(read.cure);
  });
  return *read.budget;
}

/// Writes a budget so that `parse_memory_budget` reads the same: "2GiB", "1000B", "0.33".
inline std::string to_string(const MemoryBudget& budget) {
  if (budget.fraction() > 0) {
    const std::string text = detail::plain_number(budget.fraction());
    return text.find('.') == std::string::npos ? text + ".0" : text;
  }
  std::int64_t count = budget.resolve({}).count;
  std::size_t unit = 0;
  while (count % 1024 == 0 && unit + 1 < detail::kByteUnits.size()) count /= 1024, ++unit;
  return std::to_string(count) + detail::kByteUnits[unit];
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryBudget& budget) {
  return stream << to_string(budget);
}

}  // namespace remat
