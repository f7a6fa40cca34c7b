// SPDX-License-Identifier: MIT
#include "remat/plan/simulate.hpp"

#include <vector>

#include "tests/support/doctest.hpp"

using namespace remat::literals;
using remat::Plan;

TEST_CASE("the predicted peak counts borders, the segment's saved bytes and two gradients") {
  const std::vector<remat::UnitCost> costs = {{10_B, 3_B}, {20_B, 2_B}, {30_B, 1_B}};

  CHECK(predicted_peak(Plan::keep_all(3), costs) == 66_B);            // 60 + 2 * 3
  CHECK(predicted_peak(Plan::from_sizes({3}), costs) == 66_B);        // all recomputed at once
  CHECK(predicted_peak(Plan::from_sizes({1, 1, 1}), costs) == 37_B);  // 3 + 2 + 30 + 2 * 1
  CHECK(predicted_peak(Plan::from_sizes({2, 1}), costs) == 36_B);  // 30 + 2 * 3 before 2 + 30 + 2
}

TEST_CASE("a plain segment's bytes stay until its backward is over") {
  const std::vector<remat::UnitCost> costs = {{10_B, 3_B}, {20_B, 2_B}, {30_B, 1_B}};

  CHECK(predicted_peak(Plan({{0, 1, false}, {1, 3, true}}), costs) == 67_B);  // 10 + 3 + 50 + 2 * 2
  CHECK(predicted_peak(Plan({{0, 1, false}, {1, 3, false}}), costs) ==
        64_B);  // no border of its own
  CHECK(predicted_peak(Plan({{0, 2, true}, {2, 3, false}}), costs) == 36_B);
  CHECK(predicted_peak(Plan({{0, 1, true}, {1, 3, false}}), costs) == 57_B);  // 3 + 50 + 2 * 2
}

TEST_CASE("recomputed bytes are those of the checkpointed segments") {
  const std::vector<remat::UnitCost> costs = {{10_B, 3_B}, {20_B, 2_B}, {30_B, 1_B}};

  CHECK(recomputed_bytes(Plan::from_sizes({2, 1}), costs) == 60_B);
  CHECK(recomputed_bytes(Plan::from_sizes({2, 1}).with_last_plain(), costs) == 30_B);
  CHECK(recomputed_bytes(Plan::keep_all(3), costs) == 0_B);
}

TEST_CASE("a plan for another number of units is refused with both numbers") {
  CHECK_THROWS_WITH_AS(predicted_peak(Plan::from_sizes({2, 1}), std::vector<remat::UnitCost>(2)),
                       "[remat.plan.costs] remat::predicted_peak: the plan has 3 units and there "
                       "are costs of 2. Give "
                       "one cost per unit.",
                       remat::ArgumentError);
}
