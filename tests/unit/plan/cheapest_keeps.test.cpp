// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/chain_search.hpp"
#include "remat/plan/cheapest_keeps.hpp"
#include "remat/plan/cut_points.hpp"
#include "remat/plan/minimum_cut.hpp"
#include "remat/plan/price_walk.hpp"
#include "remat/plan/recompute_time.hpp"
#include "tests/support/random_trace.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

/// What proposes sets of values to keep, on steps that are made up: no LibTorch.
namespace cheapest_keeps_test {
namespace {

using random_traces::random_trace;
using remat::StepTrace;

struct Pipe {
  std::size_t from, to;
  std::int64_t cost;
};

std::int64_t cost_of(const std::vector<Pipe>& pipes, const std::vector<bool>& is_source_side) {
  std::int64_t cost = 0;
  for (const Pipe& pipe : pipes)
    if (is_source_side[pipe.from] && !is_source_side[pipe.to]) cost += pipe.cost;
  return cost;
}

/// A trace where only the last result of a layer of `length` operations is read by the next layer.
StepTrace chain_trace(std::uint32_t seed, std::int32_t layers, std::int32_t length) {
  StepTrace trace = random_trace(seed, layers * length);
  std::mt19937 random(seed);
  for (std::int32_t i = 0; i < layers * length; ++i) {
    std::vector<std::int32_t>& reads = trace.operations[static_cast<std::size_t>(i)].reads;
    reads = {i};
    const std::int32_t start = i / length * length;
    if (i > start && random() % 2 == 0)
      reads.push_back(start +
                      static_cast<std::int32_t>(random() % static_cast<unsigned>(i - start)));
  }
  return trace;
}

}  // namespace

TEST_CASE("a minimum cut is as cheap as the cheapest of all cuts") {
  constexpr std::size_t kNodes = 8;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    remat::MinimumCut cut(kNodes);
    std::vector<Pipe> pipes;
    for (int i = 0; i < 24; ++i) {
      const Pipe pipe{random() % (kNodes + 2), random() % (kNodes + 2),
                      static_cast<std::int64_t>(1 + random() % 3)};
      if (pipe.from == pipe.to) continue;
      pipes.push_back(pipe);
      cut.add(pipe.from, pipe.to, pipe.cost);
    }
    cut.find();
    std::int64_t cheapest = remat::MinimumCut::kUncuttable;
    std::vector<bool> is_source_side(kNodes + 2);
    for (std::uint32_t set = 0; set < 1U << kNodes; ++set) {
      for (std::size_t i = 0; i < kNodes; ++i) is_source_side[i] = (set >> i & 1U) != 0;
      is_source_side[cut.source()] = true;
      is_source_side[cut.sink()] = false;
      cheapest = std::min(cheapest, cost_of(pipes, is_source_side));
    }
    for (std::size_t i = 0; i < kNodes + 2; ++i) is_source_side[i] = cut.is_on_source_side(i);
    CHECK(is_source_side[cut.source()]);
    CHECK_FALSE(is_source_side[cut.sink()]);
    CHECK(cost_of(pipes, is_source_side) == cheapest);
  }
}

TEST_CASE("at any prices, what is kept costs no more than any other set") {
  for (std::uint32_t seed = 0; seed < 30; ++seed) {
    CAPTURE(seed);
    const StepTrace trace = random_trace(seed, 10);
    std::mt19937 random(seed);
    std::vector<double> prices(trace.values.size());
    for (double& price : prices) price = static_cast<double>(random() % 12);
    remat::RecomputeTime time(trace);
    const auto total = [&](const remat::KeptValues& kept) {
      double sum = time(kept);
      for (std::size_t id = 0; id < kept.size(); ++id)
        if (kept[id]) sum += prices[id];
      return sum;
    };
    remat::KeptValues chosen(trace.values.size(), false);
    for (const std::int32_t id : remat::CheapestKeeps(trace)(
             {0, trace.operations.size()},
             [&](std::int32_t value) { return prices[static_cast<std::size_t>(value)]; }))
      chosen[static_cast<std::size_t>(id)] = true;
    double least = total(chosen);
    for (std::uint32_t set = 0; set < 1U << 10U; ++set) {
      remat::KeptValues kept(trace.values.size(), false);
      for (std::size_t i = 0; i < 10; ++i) kept[i + 1] = (set >> i & 1U) != 0;
      least = std::min(least, total(kept));
    }
    CHECK(total(chosen) == doctest::Approx(least));
  }
}

TEST_CASE("a chain is cut where one value connects its layers, and nowhere else") {
  const StepTrace trace = chain_trace(2, 6, 4);
  const std::vector<remat::CutPoint> points = remat::cut_points(trace);
  REQUIRE(points.size() >= 5);
  for (const remat::CutPoint& point : points) {
    CHECK(trace.values[static_cast<std::size_t>(point.value)].producer ==
          static_cast<std::int32_t>(point.operation));
    for (std::size_t later = point.operation + 1; later < trace.operations.size(); ++later)
      for (const std::int32_t read : trace.operations[later].reads)
        CHECK((read >= point.value || read == 0));
  }
  for (std::int32_t layer = 1; layer < 6; ++layer)
    CHECK(std::ranges::any_of(
        points, [&](const remat::CutPoint& point) { return point.value == layer * 4; }));
  const std::vector<remat::CutPoint> few = remat::thin_out(points, trace, 4);
  CHECK(few.size() <= 5);
  CHECK(few.size() >= 2);
}

TEST_CASE("the program over a chain keeps to its limit and counts seconds as the simulation does") {
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    const StepTrace trace = chain_trace(seed, 12, 5);
    remat::StepSimulation simulation(trace);
    remat::KeptValues all(trace.values.size(), true);
    const std::int64_t plain_peak = simulation.run(all).peak.count;
    const remat::ChainSearch search(trace, simulation);
    double before = 0;
    bool has_ended = false;
    for (int percent = 100; percent > 5; percent -= 5) {
      const std::int64_t limit = plain_peak * percent / 100;
      const remat::KeptValues kept = search.run(limit);
      has_ended = has_ended || kept.empty();
      CHECK(kept.empty() == has_ended);
      if (kept.empty()) continue;
      const remat::StepCost cost = simulation.run(kept);
      CHECK(static_cast<double>(cost.peak.count) <= 1.02 * static_cast<double>(limit));
      CHECK(cost.seconds >= before * 0.98);  // steps of the table
      before = cost.seconds;
    }
    CHECK(before > 0);
  }
}

TEST_CASE("walking prices nearly always come to a set within the limit") {
  int met = 0;
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    const StepTrace trace = chain_trace(seed, 12, 5);
    remat::StepSimulation simulation(trace);
    const remat::Bytes all = simulation.run(remat::KeptValues(trace.values.size(), true)).peak;
    remat::PriceWalk walk(trace, simulation, all);
    const std::int64_t plain = walk.step(all.count).cost.peak.count;  // at prices of 0
    const std::int64_t limit = plain * 9 / 10;
    bool is_met = false;
    for (int i = 0; i < 100 && !is_met; ++i) is_met = walk.step(limit).cost.peak.count <= limit;
    met += is_met;
  }
  CHECK(met >= 8);
}

}  // namespace cheapest_keeps_test
