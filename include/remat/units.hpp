// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <system_error>

namespace remat {

/// Counts bytes; a difference may be negative.
struct Bytes {
  std::int64_t count = 0;

  friend constexpr auto operator<=>(const Bytes&, const Bytes&) = default;

  constexpr Bytes& operator+=(Bytes other) { return count += other.count, *this; }
  constexpr Bytes& operator-=(Bytes other) { return count -= other.count, *this; }
  friend constexpr Bytes operator+(Bytes left, Bytes right) { return left += right; }
  friend constexpr Bytes operator-(Bytes left, Bytes right) { return left -= right; }
  friend constexpr Bytes operator-(Bytes bytes) { return {-bytes.count}; }
  friend constexpr Bytes operator*(Bytes bytes, std::int64_t factor) {
    return {bytes.count * factor};
  }
  friend constexpr Bytes operator*(std::int64_t factor, Bytes bytes) { return bytes * factor; }

  /// Returns the number of mebibytes, for a table or a ratio.
  constexpr double mebibytes() const { return static_cast<double>(count) / (1 << 20); }
};

namespace detail {

/// Each 1024 of the one before.
inline constexpr std::array<const char*, 5> kByteUnits = {"B", "KiB", "MiB", "GiB", "TiB"};

/// Reads a whole text as a number without a sign or an exponent; 010 is none.
template <class Number>
std::optional<Number> parse_digits(std::string_view text) {
  const auto is_digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos) return {};
  if (text.size() > 1 && text[0] == '0' && is_digit(text[1])) return {};
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

}  // namespace detail

/// Writes bytes with the largest unit that leaves at least 1: "512 B", "12.3 MiB".
inline std::string to_string(Bytes bytes) {
  auto value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  while ((value >= 1024 || value <= -1024) && unit + 1 < detail::kByteUnits.size())
    value /= 1024, ++unit;
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value,
                detail::kByteUnits[unit]);
  return text.data();
}

/// Reads bytes as people and `to_string` write them: "2147483648", "512 B", "1.5GiB", "12.3 MiB".
///
/// A part of a byte is left out. KB, MB and GB mean two things, and are none of these.
///
/// @return  nothing for any other text, a negative number and more than an int64 holds among them
inline std::optional<Bytes> parse_bytes(std::string_view text) {
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, end);
  std::string_view name = text.substr(end);
  if (name.size() > 1 && name[0] == ' ') name.remove_prefix(1);
  if (name.empty()) name = detail::kByteUnits.front();
  const auto unit = std::find(detail::kByteUnits.begin(), detail::kByteUnits.end(), name);
  if (unit == detail::kByteUnits.end()) return {};
  const std::int64_t factor = std::int64_t{1} << (10 * (unit - detail::kByteUnits.begin()));
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (number.find('.') == std::string_view::npos || factor == 1) {
    const auto count = detail::parse_digits<std::int64_t>(number);
    if (!count || *count > kMost / factor) return {};
    return Bytes{*count * factor};
  }
  const auto count = detail::parse_digits<double>(number);
  if (!count || *count >= static_cast<double>(kMost / factor)) return {};
  return Bytes{static_cast<std::int64_t>(*count * static_cast<double>(factor))};
}

inline std::ostream& operator<<(std::ostream& stream, Bytes bytes) {
  return stream << to_string(bytes);
}

/// Counts milliseconds.
struct Milliseconds {
  double count = 0;

  friend constexpr auto operator<=>(const Milliseconds&, const Milliseconds&) = default;

  constexpr Milliseconds& operator+=(Milliseconds other) { return count += other.count, *this; }
  friend constexpr Milliseconds operator+(Milliseconds left, Milliseconds right) {
    return left += right;
  }
};

/// Writes milliseconds with one decimal: "12.3 ms".
inline std::string to_string(Milliseconds time) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.1f ms", time.count);
  return text.data();
}

inline std::ostream& operator<<(std::ostream& stream, Milliseconds time) {
  return stream << to_string(time);
}

namespace literals {

constexpr Bytes operator""_B(unsigned long long count) {
  return {static_cast<std::int64_t>(count)};
}
constexpr Bytes operator""_KiB(unsigned long long count) { return operator""_B(count << 10); }
constexpr Bytes operator""_MiB(unsigned long long count) { return operator""_B(count << 20); }
constexpr Bytes operator""_GiB(unsigned long long count) { return operator""_B(count << 30); }

}  // namespace literals

}  // namespace remat
