// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <ostream>
#include <string>

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

/// Writes bytes with the largest unit that leaves at least 1: "512 B", "12.3 MiB".
inline std::string to_string(Bytes bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  while ((value >= 1024 || value <= -1024) && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
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
