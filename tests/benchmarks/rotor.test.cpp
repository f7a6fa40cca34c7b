// SPDX-License-Identifier: MIT

#include "tests/support/doctest.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "tests/benchmarks/rotor.hpp"

namespace rotor_test {

using namespace benchmarks;

/// As many bytes as the program has slots, so that nothing is rounded.
constexpr std::int64_t kLimit = 500;

std::vector<BlockCost> random_costs(std::mt19937& random) {
  const auto between = [&](int low, int high) {
    return low + static_cast<std::int64_t>(random() % static_cast<unsigned>(high - low + 1));
  };
  std::vector<BlockCost> costs(static_cast<std::size_t>(between(2, 5)));
  for (BlockCost& cost : costs) {
    cost.seconds = static_cast<double>(between(1, 9));
    cost.output = between(20, 100);
    cost.saved = cost.output + between(0, 250);
    cost.dropped_peak = cost.output + between(0, 400);  // of any size, so that it matters
    cost.forward_peak = cost.saved + between(0, 30);
    cost.backward_peak = cost.saved + cost.output + between(0, 60);
  }
  return costs;
}

/// Every schedule of the blocks `[first, last)`.
std::vector<RotorSchedule> all_schedules(std::size_t first, std::size_t last) {
  if (first == last) return {{}};
  std::vector<RotorStep> begins{{first, first + 1, {}}};
  for (std::size_t resume = first + 1; resume < last; ++resume)
    for (const RotorSchedule& inside : all_schedules(first, resume))
      begins.push_back({first, resume, inside});
  std::vector<RotorSchedule> schedules;
  for (const RotorStep& begin : begins)
    for (const RotorSchedule& rest : all_schedules(begin.last, last)) {
      schedules.push_back({begin});
      schedules.back().insert(schedules.back().end(), rest.begin(), rest.end());
    }
  return schedules;
}

TEST_CASE("rotor's schedule needs the least time of all that fit the limit") {
  std::mt19937 random(7);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  int nested_count = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const std::vector<BlockCost> costs = random_costs(random);
    double least = kNever;
    for (const RotorSchedule& schedule : all_schedules(0, costs.size()))
      if (peak_of(schedule, costs) <= kLimit)
        least = std::min(least, forward_seconds_of(schedule, costs));

    const std::optional<RotorSchedule> found = Rotor(costs, kLimit).schedule();

    CHECK((found ? forward_seconds_of(*found, costs) : kNever) == least);
    if (!found) continue;
    CHECK(peak_of(*found, costs) <= kLimit);
    for (const RotorStep& step : *found)
      for (const RotorStep& inside : step.inside) nested_count += !inside.inside.empty();
  }
  CHECK(nested_count > 0);
}

TEST_CASE("rotor rounds memory against its schedule, never over the limit") {
  std::mt19937 random(8);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<BlockCost> costs = random_costs(random);
    for (BlockCost& cost : costs)
      for (std::int64_t* bytes :
           {&cost.output, &cost.saved, &cost.dropped_peak, &cost.forward_peak, &cost.backward_peak})
        *bytes *= 1000;
    const std::int64_t limit = 1000 * (301 + trial);

    const std::optional<RotorSchedule> found = Rotor(costs, limit).schedule();

    if (found) CHECK(peak_of(*found, costs) <= limit);
  }
}

TEST_CASE("the least limit of rotor has a schedule, and a limit well below it has none") {
  std::mt19937 random(9);
  const std::vector<BlockCost> costs = random_costs(random);

  const std::int64_t least = least_rotor_limit(costs, kLimit);

  CHECK(Rotor(costs, least).schedule().has_value());
  CHECK_FALSE(Rotor(costs, least * 9 / 10).schedule().has_value());
}

}  // namespace rotor_test
