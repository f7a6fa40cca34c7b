// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_plan.hpp"

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

/// A chain of operations, some of which read an earlier value too; autograd saves the results of
/// most, and each backward operation asks for one and makes a gradient.
StepTrace random_trace(std::uint32_t seed, int operation_count) {
  std::mt19937 random(seed);
  const auto draw = [&](std::uint32_t count) {
    return static_cast<std::int32_t>(random() % count);
  };
  StepTrace trace;
  trace.values.push_back({.bytes = 0});  // the input, from outside
  std::vector<std::int32_t> saved;
  const auto event = [&](StepTrace::Kind kind, std::int32_t id, std::int64_t other = 0) {
    trace.events.push_back({kind, id, other, other});
  };
  for (std::int32_t i = 0; i < operation_count; ++i) {
    StepTrace::Operation operation{"op", {i}, {i + 1}, 0, 1.0 + draw(9)};
    if (i > 1 && draw(3) == 0) operation.reads.push_back(draw(static_cast<std::uint32_t>(i)));
    const std::int64_t bytes = 100 * (1 + draw(9));
    operation.peak = bytes + 10;
    trace.values.push_back({.bytes = bytes, .producer = i});
    trace.operations.push_back(operation);
    event(StepTrace::Kind::ran, i);
    if (i > 0) event(StepTrace::Kind::let_go, i);  // the user's code goes on with the result
    if (draw(4) != 0) {
      saved.push_back(i + 1);
      event(StepTrace::Kind::saved, i + 1);
    }
  }
  event(StepTrace::Kind::let_go, operation_count);
  event(StepTrace::Kind::ended, StepTrace::kNone);
  for (std::size_t i = saved.size(); i-- > 0;) {
    event(StepTrace::Kind::asked, saved[i], 50);
    event(StepTrace::Kind::released, saved[i], 120);
  }
  event(StepTrace::Kind::done, StepTrace::kNone);
  return trace;
}

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
