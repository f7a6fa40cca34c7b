// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/plan/budget_text.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/yaml/keys.hpp"

namespace remat::detail {

/// What is wrong with a value.
struct ValueProblem {
  std::string code, what, cure{};
};

/// Returns the shortest text that reads back as the same number.
inline std::string number_text(double number) {
  std::array<char, 40> text{};
  const auto result = std::to_chars(text.data(), text.data() + text.size(), number);
  return {text.data(), result.ptr};
}

/// Reads a whole text as a number, in the decimal notation only.
///
/// Not by yaml-cpp: some of its versions read 010 as 8, and refuse 1e3.
template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const std::string_view digits = text.starts_with('-') ? text.substr(1) : text;
  const auto is_digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  if (digits.empty() || (!is_digit(digits[0]) && digits[0] != '.')) return {};
  if (digits.size() > 1 && digits[0] == '0' && is_digit(digits[1])) return {};
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

inline std::string range_text(const ConfigKey& key) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::string text;
  if (key.least > -kInfinity)
    text = (key.is_least_allowed ? "at least " : "more than ") + number_text(key.least);
  if (key.most < kInfinity)
    text += (text.empty() ? "at most " : " and at most ") + number_text(key.most);
  return text;
}

/// Returns what values a key takes, as messages and the documentation say it.
inline std::string expected_text(const ConfigKey& key) {
  const std::string range = range_text(key);
  const std::string suffix = range.empty() ? "" : " of " + range;
  switch (key.field.index()) {
    case 0:
      return "true or false";
    case 1:
      return "a whole number" + suffix;
    case 2:
      return "a number" + suffix;
    case 4:
      return std::string("none, ") + kBudgetForms;
    default:
      break;
  }
  if (key.choices.empty()) return "a text";
  std::string text;
  for (const std::string_view choice : key.choices)
    text += (text.empty() ? "" : ", ") + std::string(choice);
  return "one of " + text;
}

inline bool is_in_range(const ConfigKey& key, double number) {
  const bool is_enough = key.is_least_allowed ? number >= key.least : number > key.least;
  return is_enough && number <= key.most && std::isfinite(number);
}

/// Says what was given and what was expected.
inline ValueProblem unexpected(std::string code, const ConfigKey& key, const std::string& given,
                               std::string cure) {
  return {
      std::move(code),
      "\"" + std::string(key.name) + "\" is " + given + ", " + expected_text(key) + " was expected",
      std::move(cure)};
}
inline ValueProblem wrong_type(const ConfigKey& key, const std::string& given,
                               std::string cure = {}) {
  return unexpected("remat.config.type", key, given, std::move(cure));
}
inline ValueProblem out_of_range(const ConfigKey& key, const std::string& given) {
  return unexpected("remat.config.range", key, given, {});
}

inline std::optional<ValueProblem> assign(const ConfigKey& key, bool& target,
                                          const std::string& text) {
  if (text != "true" && text != "false") return wrong_type(key, quoted_list({text}));
  target = text == "true";
  return {};
}

inline std::optional<ValueProblem> assign(const ConfigKey& key, double& target,
                                          const std::string& text) {
  const std::optional<double> number = parse_number<double>(text);
  if (!number) return wrong_type(key, quoted_list({text}));
  if (!is_in_range(key, *number)) return out_of_range(key, text);
  target = *number;
  return {};
}

inline std::optional<ValueProblem> assign(const ConfigKey& key, std::int64_t& target,
                                          const std::string& text) {
  const std::optional<std::int64_t> number = parse_number<std::int64_t>(text);
  if (!number) {
    const std::optional<double> other = parse_number<double>(text);
    const bool is_whole = other && *other == std::floor(*other) && std::abs(*other) < 1e15;
    return wrong_type(
        key, quoted_list({text}),
        is_whole ? "Write " + std::to_string(static_cast<std::int64_t>(*other)) : std::string());
  }
  if (!is_in_range(key, static_cast<double>(*number))) return out_of_range(key, text);
  target = *number;
  return {};
}

inline std::optional<ValueProblem> assign(const ConfigKey& key, std::string& target,
                                          const std::string& text) {
  const std::vector<std::string> names(key.choices.begin(), key.choices.end());
  bool is_known = names.empty();
  for (const std::string& name : names) is_known = is_known || name == text;
  if (!is_known && names.size() <= 6) return out_of_range(key, quoted_list({text}));
  if (!is_known)
    return ValueProblem{"remat.config.range",
                        "\"" + std::string(key.name) + "\" is " + quoted_list({text}) +
                            ", one of " + std::to_string(names.size()) + " names was expected",
                        "The nearest names are " + quoted_list(nearest_names(text, names))};
  target = text;
  return {};
}

inline std::optional<ValueProblem> assign(const ConfigKey& key, std::optional<MemoryBudget>& target,
                                          const std::string& text) {
  const BudgetText read = text == "none" ? BudgetText() : read_budget(text);
  if (!read.budget && text != "none")
    return unexpected(read.is_out_of_range ? "remat.config.range" : "remat.config.type", key,
                      quoted_list({text}), read.cure);
  target = read.budget;
  return {};
}

/// Gives a key of `config` the value that `text` says.
///
/// @param is_quoted  whether the text stood in quotes, and so is no number
/// @return  what is wrong with it, if anything; then nothing has changed
inline std::optional<ValueProblem> assign_value(Config& config, const ConfigKey& key,
                                                const std::string& text, bool is_quoted) {
  return std::visit(
      [&](auto* field) -> std::optional<ValueProblem> {
        using Held = std::remove_reference_t<decltype(field(config))>;
        // To YAML a budget is a text with or without quotes.
        constexpr bool kMayBeQuoted =
            std::is_same_v<Held, std::string> || std::is_same_v<Held, std::optional<MemoryBudget>>;
        if (is_quoted && !kMayBeQuoted)
          return wrong_type(key, "the text " + quoted_list({text}), "Take the quotes off");
        return assign(key, field(config), text);
      },
      key.field);
}

}  // namespace remat::detail
