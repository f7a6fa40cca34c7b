// SPDX-License-Identifier: MIT
#include "remat/plan/balance.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/doctest.hpp"

using namespace remat::literals;
using remat::Bytes;
using remat::Chain;
using remat::Plan;
using remat::UnitCost;

namespace {

std::vector<UnitCost> random_costs(std::size_t unit_count, std::uint32_t seed) {
  std::mt19937 random(seed);
  // Small numbers make ties, which are to be decided, too.
  const auto limit = static_cast<std::int64_t>(seed % 2 == 0 ? 4 : 1000);
  std::uniform_int_distribution<std::int64_t> any(0, limit);
  std::vector<UnitCost> costs(unit_count);
  for (UnitCost& cost : costs) cost = {{any(random)}, {any(random)}, {any(random) / 4}};
  return costs;
}

using Score = std::pair<Bytes, Bytes>;  // predicted peak, recomputed bytes

Score score(const Plan& plan, const std::vector<UnitCost>& costs) {
  return {predicted_peak(plan, costs), recomputed_bytes(plan.with_last_plain(), costs)};
}

/// Tries every choice of borders, one bit per unit.
Score best_score_of_all(const std::vector<UnitCost>& costs, std::size_t segment_count) {
  Score best{Bytes{1} * (std::int64_t{1} << 60), Bytes{}};
  for (std::uint32_t borders = 0; borders < (1U << (costs.size() - 1)); ++borders) {
    std::vector<std::size_t> sizes(1, 1);
    for (std::size_t unit = 1; unit < costs.size(); ++unit) {
      if ((borders >> (unit - 1) & 1U) != 0) sizes.push_back(0);
      ++sizes.back();
    }
    if (sizes.size() == segment_count) best = std::min(best, score(Plan::from_sizes(sizes), costs));
  }
  return best;
}

}  // namespace

TEST_CASE("no choice of borders has a lower peak, or the same with less to recompute") {
  std::uint32_t seed = 0;
  for (std::size_t unit_count = 1; unit_count <= 10; ++unit_count)
    for (std::size_t segment_count = 1; segment_count <= unit_count; ++segment_count)
      for (int trial = 0; trial < 6; ++trial) {
        const std::vector<UnitCost> costs = random_costs(unit_count, ++seed);

        const Plan plan = balanced_plan(Chain::of(costs), segment_count);

        CAPTURE(seed);
        REQUIRE(plan.segment_count() == segment_count);
        REQUIRE(score(plan, costs) == best_score_of_all(costs, segment_count));
      }
}

TEST_CASE("a chain that is not measured is shared out by unit count") {
  CHECK(balanced_plan(Chain::of(10), 4) == Plan::from_count(10, 4));
}

TEST_CASE("more segments than units means one segment per unit") {
  CHECK(balanced_plan(Chain::of(random_costs(3, 1)), 99) == Plan::from_sizes({1, 1, 1}));
  CHECK(balanced_plan(Chain::of(3), 99) == Plan::from_sizes({1, 1, 1}));
}

TEST_CASE("no segments at all is an argument error") {
  CHECK_THROWS_WITH_AS(balanced_plan(Chain::of(3), 0),
                       "[remat.segments.count] remat::balanced_plan: 0 segments were asked for and "
                       "at least 1 is needed.",
                       remat::ArgumentError);
}

TEST_CASE("a chain of no units has no segments") {
  CHECK(balanced_plan(Chain::of(0), 4) == Plan());
}

TEST_CASE("units that cost nothing are a chain like any other") {
  CHECK(balanced_plan(Chain::of(std::vector<UnitCost>(5)), 2).segment_count() == 2);
}

TEST_CASE("large early units get short segments") {
  // Halving sizes, as in a convolutional network: the units of each stage cost half of those
  // before.
  std::vector<UnitCost> costs;
  for (const std::int64_t size : {16, 16, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2})
    costs.push_back({1_MiB * (6 * size), 1_MiB * size});

  const Plan plan = balanced_plan(Chain::of(costs), 4);

  CHECK(plan.segments().front().unit_count() < plan.segments().back().unit_count());
  CHECK(predicted_peak(plan, costs) < predicted_peak(Plan::from_count(12, 4), costs));
}

TEST_CASE("a chain of a thousand units is balanced to a per mille of its peak") {
  const std::vector<UnitCost> costs = random_costs(1600, 1);

  const Plan plan = balanced_plan(Chain::of(costs), 64);

  CHECK(plan.segment_count() == 64);
  CHECK(predicted_peak(plan, costs) <= predicted_peak(Plan::from_count(1600, 64), costs));
}
