// SPDX-License-Identifier: MIT
#include "remat/plan/plan.hpp"

#include <sstream>

#include "tests/support/doctest.hpp"

using remat::Plan;

TEST_CASE("a plan prints its segments as ranges of units") {
  const Plan plan({{0, 1, true}, {1, 4, true}, {4, 8, false}});

  std::ostringstream stream;
  stream << plan;

  CHECK(stream.str() == "[0,1) checkpoint | [1,4) checkpoint | [4,8) plain");
  CHECK(to_string(Plan()) == "no units");
}

TEST_CASE("plans compare by their segments") {
  CHECK(Plan({{0, 2, true}, {2, 3, true}}) == Plan::from_sizes({2, 1}));
  CHECK(Plan::from_sizes({2, 1}) != Plan::from_sizes({1, 2}));
  CHECK(Plan::from_sizes({2, 1}) != Plan::from_sizes({2, 1}).with_last_plain());
}

TEST_CASE("a plan with a gap, an overlap or an empty segment is refused with both numbers") {
  CHECK_THROWS_WITH_AS(Plan({{0, 2, true}, {3, 4, true}}),
                       "[remat.plan.segments] remat::Plan: segment 1 is [3,4) where one that "
                       "begins at unit 2 and has "
                       "at least one unit was expected. Give segments that follow each other "
                       "without a gap, the first "
                       "from unit 0.",
                       remat::ArgumentError);
  CHECK_THROWS_AS(Plan({{0, 2, true}, {1, 4, true}}), remat::ArgumentError);
  CHECK_THROWS_AS(Plan({{0, 0, true}}), remat::ArgumentError);
  CHECK_THROWS_AS(Plan({{1, 2, true}}), remat::ArgumentError);
}

TEST_CASE("equal unit counts differ by at most one, the longer segments first") {
  CHECK(Plan::from_count(10, 4) == Plan::from_sizes({3, 3, 2, 2}));
  CHECK(Plan::from_count(3, 8) == Plan::from_sizes({1, 1, 1}));
  CHECK(Plan::from_count(0, 4) == Plan());
}

TEST_CASE("counts of a plan are those of its segments") {
  const Plan plan({{0, 1, true}, {1, 4, true}, {4, 8, false}});

  CHECK(plan.segment_count() == 3);
  CHECK(plan.checkpointed_count() == 2);
  CHECK(plan.unit_count() == 8);
  CHECK(plan.segments()[1].unit_count() == 3);
}

TEST_CASE("a plain unit splits the segment around it") {
  const Plan plan = Plan::from_sizes({4, 2});

  CHECK(to_string(plan.with_plain_units(std::vector<std::size_t>{1})) ==
        "[0,1) checkpoint | [1,2) plain | [2,4) checkpoint | [4,6) checkpoint");
  CHECK(to_string(plan.with_plain_units(std::vector<std::size_t>{0, 5})) ==
        "[0,1) plain | [1,4) checkpoint | [4,5) checkpoint | [5,6) plain");
  CHECK(plan.with_last_plain().with_plain_units(std::vector<std::size_t>{4}) ==
        plan.with_last_plain());
}
