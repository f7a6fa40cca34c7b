// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "remat/backbones/backbone.hpp"

namespace benchmarks {

constexpr std::int64_t kClasses = 1000;

/// Parts of plain's peak that budgets and rotor's limits are: 1/2 and so on.
constexpr std::array kBudgetDivisors{2, 3, 4, 5};

/// A way to checkpoint a network that the library offers.
struct Strategy {
  std::string name;
  std::function<std::shared_ptr<remat::Backbone>(const std::string& model)> create;
  bool has_keep_policy = false;  // one that was chosen by hand
};

/// Returns all of them; the first one is plain.
std::vector<Strategy> all_strategies();

}  // namespace benchmarks
