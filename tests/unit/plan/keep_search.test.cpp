// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_plan.hpp"
#include "tests/support/random_trace.hpp"

#include <algorithm>
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

/// Tries everything that can become of the values: kept or not, and with three fates transient.
std::vector<remat::StepCost> costs_by_force(const StepTrace& trace, std::uint32_t fates = 3) {
  remat::StepSimulation simulation(trace);
  const std::size_t count = trace.values.size();
  std::vector<remat::StepCost> costs;
  std::vector<std::uint32_t> fate(count, 0);  // the input's is 0
  for (std::size_t i = 0; i < count;) {
    remat::KeptValues kept(count, false);
    remat::TransientValues transient(count, false);
    for (std::size_t id = 1; id < count; ++id)
      kept[id] = fate[id] == 1, transient[id] = fate[id] == 2;
    costs.push_back(simulation.run(kept, transient));
    for (i = 1; i < count && ++fate[i] == fates; ++i) fate[i] = 0;
  }
  return costs;
}

double fastest_of(const std::vector<remat::StepCost>& costs, Bytes budget) {
  double fastest = -1;
  for (const remat::StepCost& cost : costs)
    if (cost.peak <= budget && (fastest < 0 || cost.seconds < fastest)) fastest = cost.seconds;
  return fastest;
}

/// A chain of four operations; backward asks for the given results, from the last to the first.
StepTrace chain_of_four(std::vector<std::int32_t> saved = {1, 2, 3, 4}) {
  StepTrace trace;
  trace.values.push_back({.bytes = 0});
  for (std::int32_t i = 0; i < 4; ++i) {
    trace.values.push_back({.bytes = 100, .producer = i});
    trace.operations.push_back({"op", {i}, {i + 1}, 100, 1.0});
    trace.events.push_back({StepTrace::Kind::ran, i});
    if (i > 0) trace.events.push_back({StepTrace::Kind::let_go, i});
  }
  for (const std::int32_t id : saved) trace.events.push_back({StepTrace::Kind::saved, id});
  trace.events.push_back({StepTrace::Kind::let_go, 4});
  trace.events.push_back({StepTrace::Kind::ended});
  for (std::size_t i = saved.size(); i-- > 0;) {
    trace.events.push_back({StepTrace::Kind::asked, saved[i]});
    trace.events.push_back({StepTrace::Kind::released, saved[i]});
  }
  trace.events.push_back({StepTrace::Kind::done});
  return trace;
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

TEST_CASE("a transient value goes behind a slice that was run for another one, and runs again") {
  const StepTrace trace = chain_of_four();
  remat::StepSimulation simulation(trace);
  const remat::KeptValues none(5, false);
  // All stay behind the first slice: four operations, four values at once.
  CHECK(simulation.run(none).recomputed_count == 4);
  CHECK(simulation.run(none).peak == Bytes{400});
  // Each slice runs from the start: 4 + 3 + 2 + 1 operations, and two values at once.
  const remat::StepCost all = simulation.run(none, {false, true, true, true, true});
  CHECK(all.recomputed_count == 10);
  CHECK(all.seconds == 10);
  CHECK(all.peak == Bytes{200});
  // The second stays: 4 for the fourth, 1 for the third from it, then the first once more, for the
  // second needs it no longer.
  const remat::StepCost nested = simulation.run(none, {false, true, false, true, true});
  CHECK(nested.recomputed_count == 4 + 1 + 1);
  CHECK(nested.peak == Bytes{300});
  // What is kept is never recomputed.
  CHECK(simulation.run({false, true, true, true, true}, {false, true, true, true, true})
            .recomputed_count == 0);
}

TEST_CASE("what a transient value is made of stays until that runs again") {
  const StepTrace trace = chain_of_four({2, 4});
  remat::StepSimulation simulation(trace);
  const remat::KeptValues none(5, false);
  CHECK(simulation.run(none, {false, false, true, false, false}).recomputed_count == 4 + 1);
  CHECK(simulation.run(none, {false, true, true, false, false}).recomputed_count == 4 + 2);
}

TEST_CASE("without transient values every operation runs at most once") {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const StepTrace trace = random_trace(seed, 14);
    remat::StepSimulation simulation(trace);
    const remat::KeptValues none(trace.values.size(), false);
    CHECK(simulation.run(none).recomputed_count <= 14);
    const remat::TransientValues all(trace.values.size(), true);
    CHECK(simulation.run(none, all).peak <= simulation.run(none).peak);
    CHECK(simulation.run(none, all).seconds >= simulation.run(none).seconds);
  }
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
    const StepTrace trace = random_trace(seed, 5 + static_cast<int>(seed % 5));
    const std::vector<remat::StepCost> costs = costs_by_force(trace);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    for (int percent = 20; percent <= 100; percent += 5) {
      const Bytes budget{points.most().cost.peak.count * percent / 100};
      const remat::StepPoint* point = points.fastest_within(budget);
      CHECK((point == nullptr ? -1 : point->cost.seconds) == fastest_of(costs, budget));
    }
  }
}

TEST_CASE("on steps of 14 values the search is seldom worse than all sets of kept values") {
  int budgets = 0, best = 0;
  for (std::uint32_t seed = 0; seed < 6; ++seed) {
    const StepTrace trace = random_trace(seed, 14);
    const std::vector<remat::StepCost> costs = costs_by_force(trace, 2);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    for (int percent = 30; percent <= 100; percent += 10) {
      const Bytes budget{points.most().cost.peak.count * percent / 100};
      const double expected = fastest_of(costs, budget);
      if (expected < 0) continue;  // transient values may reach it all the same
      const remat::StepPoint* point = points.fastest_within(budget);
      ++budgets;
      best += point != nullptr && point->cost.seconds <= expected;
    }
  }
  CHECK(budgets > 20);
  CHECK(best * 10 >= budgets * 9);
}

TEST_CASE("on steps of 10 values the search is never better than brute force, and seldom worse") {
  int budgets = 0, best = 0;
  for (std::uint32_t seed = 0; seed < 2; ++seed) {
    const StepTrace trace = random_trace(seed, 10);
    const std::vector<remat::StepCost> costs = costs_by_force(trace);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    for (int percent = 20; percent <= 100; percent += 5) {
      CAPTURE(percent);
      const Bytes budget{points.most().cost.peak.count * percent / 100};
      const double expected = fastest_of(costs, budget);
      const remat::StepPoint* point = points.fastest_within(budget);
      if (expected < 0) CHECK(point == nullptr);
      if (expected < 0) continue;
      ++budgets;
      if (point == nullptr) continue;
      CHECK(point->cost.seconds >= expected);
      best += point->cost.seconds == expected;
    }
  }
  CHECK(budgets > 10);
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

TEST_CASE("the least memory has transient values, and plain has none") {
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
    const StepTrace trace = random_trace(seed, 40);
    const auto list = remat::KeepSearch(trace).run().list();
    const auto is_transient = [](const remat::StepPoint& point) {
      return std::ranges::find(point.transient, true) != point.transient.end();
    };
    CHECK(is_transient(list.front()));
    CHECK_FALSE(is_transient(list.back()));
  }
}

TEST_CASE("no plan is slower than a schedule by segments that needs as much memory") {
  for (std::uint32_t seed = 0; seed < 4; ++seed) {
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
  for (std::size_t i = 0; i < first.size(); ++i) {
    CHECK(first[i].kept == second[i].kept);
    CHECK(first[i].transient == second[i].transient);
  }
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
  try {
    plan(least - Bytes{1});
    FAIL("a budget that has no plan");
  } catch (const remat::BudgetError& error) {
    CHECK(error.code() == "remat.budget.infeasible");
    CHECK(error.least() == least);
  }
  CHECK_THROWS_WITH_AS(plan(least - Bytes{1}),
                       doctest::Contains((std::to_string(least.count) + " bytes").c_str()),
                       remat::ArgumentError);
}

}  // namespace keep_search_test
