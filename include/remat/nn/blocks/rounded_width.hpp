// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>

namespace remat::blocks {

/// Returns the multiple of `divisor` next to a scaled channel count, one more where rounding down
/// would lose over a tenth of it.
///
/// @par Source  the rule of the MobileNet papers' code; torchvision's `_make_divisible`
constexpr std::int64_t rounded_width(double width, std::int64_t divisor = 8) {
  const auto half = static_cast<double>(divisor) / 2;
  const std::int64_t nearest = static_cast<std::int64_t>(width + half) / divisor * divisor;
  const std::int64_t rounded = std::max(divisor, nearest);
  return static_cast<double>(rounded) < 0.9 * width ? rounded + divisor : rounded;
}

}  // namespace remat::blocks
