// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace remat::detail {

// Numbers from files may be anything. Counts stay below 2^62, so that sums of two and signed copies
// of them cannot overflow either.
inline constexpr std::uint64_t kMostCounted = std::uint64_t{1} << 62;

/// Returns `a` times `b`, or nothing if that is no count.
constexpr std::optional<std::uint64_t> checked_product(std::uint64_t a, std::uint64_t b) {
  if (a != 0 && b > kMostCounted / a) return std::nullopt;
  return a * b;
}

/// Returns `a` plus `b`, or nothing if that is no count.
constexpr std::optional<std::uint64_t> checked_sum(std::uint64_t a, std::uint64_t b) {
  if (a > kMostCounted || b > kMostCounted - a) return std::nullopt;
  return a + b;
}

/// Returns how many elements a tensor of these sizes has; nothing if that is no count, not even
/// without its sizes of 0: LibTorch multiplies them, too, when it makes strides.
constexpr std::optional<std::uint64_t> element_count(std::span<const std::int64_t> sizes) {
  std::optional<std::uint64_t> count = 1;
  bool is_empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    count = checked_product(*count, size == 0 ? 1 : static_cast<std::uint64_t>(size));
    if (!count) return std::nullopt;
  }
  return is_empty ? 0 : count;
}

/// Returns the index after the last element that a tensor reaches in its storage; nothing if that
/// is no count. Strides are not negative.
constexpr std::optional<std::uint64_t> end_of_elements(std::uint64_t offset,
                                                       std::span<const std::int64_t> sizes,
                                                       std::span<const std::int64_t> strides) {
  std::optional<std::uint64_t> end = checked_sum(offset, 1);
  for (std::size_t i = 0; i < sizes.size() && end; ++i) {
    if (sizes[i] < 2) continue;
    const auto reach = checked_product(static_cast<std::uint64_t>(sizes[i] - 1),
                                       static_cast<std::uint64_t>(strides[i]));
    end = reach ? checked_sum(*end, *reach) : std::nullopt;
  }
  return end;
}

}  // namespace remat::detail
