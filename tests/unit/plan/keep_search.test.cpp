// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_plan.hpp"
#include "tests/support/random_trace.hpp"

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

/// The simulator and the search, on steps that are made up: no LibTorch.
namespace keep_search_test {
namespace {

using remat::Bytes;
using remat::StepTrace;

using random_traces::random_trace;

/// Tries every set of kept values.
double fastest_by_force(const StepTrace& trace, Bytes budget) {
  remat::StepSimulation simulation(trace);
  const std::size_t count = trace.values.size() - 1;
  double fastest = -1;
  for (std::uint32_t set = 0; set < std::uint32_t{1} << count; ++set) {
    remat::KeptValues kept(trace.values.size(), false);
    for (std::size_t i = 0; i < count; ++i) kept[i + 1] = (set >> i & 1U) != 0;
    const remat::StepCost cost = simulation.run(kept);
    if (cost.peak <= budget && (fastest < 0 || cost.seconds < fastest)) fastest = cost.seconds;
  }
  return fastest;
}

}  // namespace

TEST_CASE("nothing kept recomputes what was saved, everything kept recomputes nothing") {
  const StepTrace trace = random_trace(1, 10);
  remat::StepSimulation simulation(trace);
  const remat::StepCost none = simulation.run(remat::KeptValues(trace.values.size(), false));
  const remat::StepCost all = simulation.run(remat::KeptValues(trace.values.size(), true));

  CHECK(all.recomputed_count == 0);
  CHECK(all.seconds == 0);
  CHECK(none.recomputed_count > 0);
  CHECK(none.seconds <= trace.seconds());
}

TEST_CASE("the quick time is that of the simulation") {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    const StepTrace trace = random_trace(seed, 14);
    remat::StepSimulation simulation(trace);
    remat::RecomputeTime time(trace);
    std::mt19937 random(seed);
    for (int i = 0; i < 20; ++i) {
      remat::KeptValues kept(trace.values.size(), false);
      for (std::size_t id = 1; id < kept.size(); ++id) kept[id] = random() % 2 == 0;
      CHECK(time(kept) == simulation.run(kept).seconds);
    }
  }
}

TEST_CASE("on small steps the plan for every budget is the best there is") {
  for (std::uint32_t seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    const StepTrace trace = random_trace(seed, 6 + static_cast<int>(seed % 5));
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    for (int percent = 20; percent <= 100; percent += 10) {
      const Bytes budget{points.most().cost.peak.count * percent / 100};
      const remat::StepPoint* point = points.fastest_within(budget);
      CHECK((point == nullptr ? -1 : point->cost.seconds) == fastest_by_force(trace, budget));
    }
  }
}

TEST_CASE("on steps of 14 values the search is never better than brute force, and seldom worse") {
  int budgets = 0, best = 0;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const StepTrace trace = random_trace(seed, 14);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    for (int percent = 30; percent <= 100; percent += 10) {
      const Bytes budget{points.most().cost.peak.count * percent / 100};
      const double expected = fastest_by_force(trace, budget);
      const remat::StepPoint* point = points.fastest_within(budget);
      if (expected < 0) {
        CHECK(point == nullptr);
        continue;
      }
      ++budgets;
      if (point == nullptr) continue;
      CHECK(point->cost.seconds >= expected);
      best += point->cost.seconds == expected;
    }
  }
  CHECK(budgets > 20);
  CHECK(best * 10 >= budgets * 9);
}

TEST_CASE("less budget never gets more memory, and less memory never less time") {
  const StepTrace trace = random_trace(7, 40);
  const auto list = remat::KeepSearch(trace).run().list();
  REQUIRE(list.size() > 5);
  for (std::size_t i = 1; i < list.size(); ++i) {
    CHECK(list[i - 1].cost.peak < list[i].cost.peak);
    CHECK(list[i - 1].cost.seconds > list[i].cost.seconds);
  }
}

TEST_CASE("no plan is slower than a schedule by segments that needs as much memory") {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    StepTrace trace = random_trace(seed, 60);
    for (std::int32_t end = 5; end <= 60; end += 5) trace.layer_ends.push_back(end);
    const std::vector<remat::NamedKeeps> schedules = remat::segment_keeps(trace);
    REQUIRE(schedules.size() > 5);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    remat::StepSimulation simulation(trace);
    for (const remat::NamedKeeps& schedule : schedules) {
      const remat::StepCost cost = simulation.run(schedule.kept);
      CHECK(points.fastest_within(cost.peak)->cost.seconds <= cost.seconds);
    }
  }
}

TEST_CASE("the same trace gives the same plans") {
  const StepTrace trace = random_trace(3, 40);
  const auto first = remat::KeepSearch(trace).run().list();
  const auto second = remat::KeepSearch(trace).run().list();
  REQUIRE(first.size() == second.size());
  for (std::size_t i = 0; i < first.size(); ++i) CHECK(first[i].kept == second[i].kept);
}

TEST_CASE("a budget is refused where it is none, or too small, with what would do") {
  CHECK_THROWS_WITH_AS(remat::MemoryBudget::bytes(Bytes{0}),
                       doctest::Contains("remat.budget.bytes"), remat::ArgumentError);
  CHECK_THROWS_WITH_AS(remat::MemoryBudget::fraction_of_plain(0),
                       doctest::Contains("remat.budget.fraction"), remat::ArgumentError);

  const StepTrace trace = random_trace(5, 12);
  const remat::StepPoints points = remat::KeepSearch(trace).run();
  const Bytes least = points.least().cost.peak;
  const auto plan = [&](Bytes budget) {
    return remat::plan_within(trace, points, remat::MemoryBudget::bytes(budget), {}, "a test");
  };
  CHECK(plan(least).peak == least);
  CHECK_THROWS_WITH_AS(plan(least - Bytes{1}), doctest::Contains("remat.budget.infeasible"),
                       remat::ArgumentError);
  CHECK_THROWS_WITH_AS(plan(least - Bytes{1}),
                       doctest::Contains((std::to_string(least.count) + " bytes").c_str()),
                       remat::ArgumentError);
}

}  // namespace keep_search_test
