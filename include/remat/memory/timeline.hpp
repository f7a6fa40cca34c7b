// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>
#include <vector>

#include "remat/units.hpp"

namespace remat {

/// Live bytes at a moment.
struct MemorySample {
  double seconds;  ///< since the measurement began
  Bytes live;

  friend bool operator==(const MemorySample&, const MemorySample&) = default;
};

/// Returns about `count` of the samples, or all if there are no more: of each run of neighbours the
/// lowest and the highest, and the first and the last of all, so that peaks stay what they are.
inline std::vector<MemorySample> thinned(const std::vector<MemorySample>& samples,
                                         std::size_t count = 800) {
  if (samples.size() <= count || count < 2) return samples;
  const std::size_t runs = count / 2;
  std::vector<MemorySample> kept{samples.front()};
  const auto keep = [&](const MemorySample& sample) {
    if (!(sample == kept.back())) kept.push_back(sample);
  };
  for (std::size_t run = 0; run < runs; ++run) {
    const auto at = [&](std::size_t index) {
      return samples.begin() + static_cast<std::ptrdiff_t>(index * samples.size() / runs);
    };
    auto [low, high] = std::minmax_element(
        at(run), at(run + 1),
        [](const MemorySample& left, const MemorySample& right) { return left.live < right.live; });
    if (high < low) std::swap(low, high);
    keep(*low), keep(*high);
  }
  keep(samples.back());
  return kept;
}

}  // namespace remat
