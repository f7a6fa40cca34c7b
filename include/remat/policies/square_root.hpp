// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "remat/plan/balance.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// Makes about sqrt(n) segments for n units, where borders and one segment's inside are about
/// equally large.
///
/// Balanced as `Segments` are.
///
/// @par Source  Chen et al., Training Deep Nets with Sublinear Memory Cost (2016)
struct SquareRoot {
  Plan operator()(const Chain& chain) const {
    const auto root = std::lround(std::sqrt(static_cast<double>(chain.unit_count)));
    return balanced_plan(chain, static_cast<std::size_t>(std::max(1L, root)));
  }
};

}  // namespace remat
