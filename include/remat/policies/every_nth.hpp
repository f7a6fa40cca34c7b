// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <vector>

#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// Keeps the tensor between units at every `Count`-th unit: segments of `Count` units, the last may
/// be shorter.
///
/// @tparam Count  at least 1; `EveryNth<1>` is `EachUnit`
template <int Count>
struct EveryNth {
  static_assert(Count >= 1, "remat::EveryNth<N> needs N >= 1");

  Plan operator()(const Chain& chain) const {
    constexpr auto kSize = static_cast<std::size_t>(Count);
    std::vector<std::size_t> sizes(chain.unit_count / kSize, kSize);
    if (chain.unit_count % kSize != 0) sizes.push_back(chain.unit_count % kSize);
    return Plan::from_sizes(sizes);
  }
};

}  // namespace remat
