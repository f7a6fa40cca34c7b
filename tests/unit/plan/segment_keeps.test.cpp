// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/segment_keeps.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// The known schedules by segments as sets of kept values, on steps that are made up.
namespace segment_keeps_test {
namespace {

using remat::Bytes;
using remat::NamedKeeps;
using remat::Plan;
using remat::StepTrace;
using remat::UnitCost;

/// A chain of operations, one second each. Value 0 is the input, value i + 1 operation i's result.
struct Maker {
  StepTrace trace;
  std::vector<std::int32_t> saved;  // one entry per saved tensor

  Maker() { trace.values.push_back({.bytes = 0}); }

  void event(StepTrace::Kind kind, std::int32_t id, std::int64_t other = 0) {
    trace.events.push_back({kind, id, other, other});
  }
  void save(std::int32_t id) {
    saved.push_back(id);
    event(StepTrace::Kind::saved, id);
  }
  /// An operation that reads the value before; autograd saves that, its result, both or none.
  std::int32_t run(std::int64_t bytes, bool saves_argument, bool saves_result) {
    const auto id = static_cast<std::int32_t>(trace.operations.size());
    if (saves_argument && id > 0) save(id);
    trace.operations.push_back({"op", {id}, {id + 1}, bytes, 1.0});
    trace.values.push_back({.bytes = bytes, .producer = id});
    event(StepTrace::Kind::ran, id);
    if (id > 0) event(StepTrace::Kind::let_go, id);
    if (saves_result) save(id + 1);
    return id + 1;
  }
  /// A layer: two operations that save their arguments, of the given bytes.
  void layer(std::int64_t inner, std::int64_t outer) {
    run(inner, true, false);
    trace.layer_ends.push_back(run(outer, true, false));
  }
  StepTrace finish() {
    const auto last = static_cast<std::int32_t>(trace.values.size()) - 1;
    trace.values.back().is_result = true;
    event(StepTrace::Kind::let_go, last);
    event(StepTrace::Kind::ended, StepTrace::kNone);
    for (std::size_t i = saved.size(); i-- > 0;) {
      event(StepTrace::Kind::asked, saved[i]);
      event(StepTrace::Kind::released, saved[i]);
    }
    event(StepTrace::Kind::done, StepTrace::kNone);
    return trace;
  }
};

StepTrace layers_of(const std::vector<std::int64_t>& inner, std::int64_t outer) {
  Maker maker;
  for (const std::int64_t bytes : inner) maker.layer(bytes, outer);
  return maker.finish();
}

const NamedKeeps& find(const std::vector<NamedKeeps>& list, const std::string& name) {
  const auto found = std::ranges::find(list, name, &NamedKeeps::name);
  REQUIRE(found != list.end());
  return *found;
}

std::vector<std::int32_t> kept_of(const NamedKeeps& keeps) {
  std::vector<std::int32_t> ids;
  for (std::size_t id = 0; id < keeps.kept.size(); ++id)
    if (keeps.kept[id]) ids.push_back(static_cast<std::int32_t>(id));
  return ids;
}

}  // namespace

TEST_CASE("one region per layer keeps the ends of layers, and a plain last layer what it saved") {
  const auto list = remat::segment_keeps(layers_of({10, 10, 10}, 1));

  CHECK(kept_of(find(list, "one region per layer")) == std::vector<std::int32_t>{2, 4, 6});
  CHECK(kept_of(find(list, "one region per layer, the last plain")) ==
        std::vector<std::int32_t>{2, 4, 5});
}

TEST_CASE("segments keep the ends of the layers between them") {
  const auto list = remat::segment_keeps(layers_of({10, 10, 10, 10}, 1));
  // Equal and balanced segments are one plan here, which has one name.
  const NamedKeeps& equal = find(list, "2 segments, sqrt(4)");

  CHECK(equal.plan == Plan::from_sizes({2, 2}).with_last_plain());
  // The border 4, and 5, 6, 7, which the plain half saved; 8 is the result, which nobody saved.
  CHECK(kept_of(equal) == std::vector<std::int32_t>{4, 5, 6, 7});
}

TEST_CASE("n segments are those of a measured chain, balanced by what its layers save") {
  const StepTrace trace = layers_of({80, 40, 20, 10, 10}, 1);
  const NamedKeeps balanced = find(remat::segment_keeps(trace), "2 segments, sqrt(5)");

  // Measured in segments of 3 and 2 layers: of the layers' inputs only those from inside count.
  const std::vector<UnitCost> costs{
      {{80}, {1}}, {{41}, {1}}, {{21}, {1}}, {{10}, {1}}, {{11}, {1}}};
  CHECK(remat::detail::TracedLayers(trace).costs(Plan::from_count(5, 2)) == costs);
  CHECK(balanced.plan == remat::balanced_plan(remat::Chain::of(costs), 2).with_last_plain());
  CHECK(balanced.plan.segments().front().unit_count() == 1);
}

TEST_CASE("what goes into a region stays even if autograd saves it nowhere") {
  Maker maker;
  maker.trace.layers_begin = maker.run(7, false, false);         // 1
  maker.trace.layer_ends.push_back(maker.run(7, false, false));  // 2
  maker.run(10, false, true);                                    // 3
  maker.trace.layer_ends.push_back(maker.run(1, true, false));   // 4
  const StepTrace trace = maker.finish();

  const Plan plan({{0, 1, false}, {1, 2, true}});
  const remat::KeptValues kept = remat::detail::TracedLayers(trace).keeps(plan);
  CHECK(kept == remat::KeptValues{false, true, true, false, true});
}

TEST_CASE("what ran before the first layer and after the last one is plain") {
  Maker maker;
  maker.run(7, false, true);                              // value 1, saved
  maker.trace.layers_begin = maker.run(7, false, false);  // value 2
  maker.layer(10, 1);                                     // 3, 4
  maker.layer(10, 1);                                     // 5, 6
  maker.run(7, true, true);                               // 7, saved
  maker.run(7, false, false);                             // 8, not saved
  const auto list = remat::segment_keeps(maker.finish());

  const NamedKeeps& each = find(list, "one region per layer");
  CHECK(each.plan.unit_count() == 2);
  CHECK(kept_of(each) == std::vector<std::int32_t>{1, 2, 4, 6, 7});
}

TEST_CASE("on paper a schedule has the peak and the recomputed operations of its segments") {
  // Each layer saves 10 + 1 bytes of which the 1 is the layer's input; gradients are left out.
  const StepTrace trace = layers_of({10, 10, 10, 10, 10, 10}, 1);
  const auto list = remat::segment_keeps(trace);
  remat::StepSimulation simulation(trace);

  const auto each = simulation.run(find(list, "one region per layer").kept);
  // Five borders before the last layer, its inner value, and its result.
  CHECK(each.peak == Bytes{5 + 10 + 1});
  CHECK(each.recomputed_count == 6);
  const auto thirds = simulation.run(find(list, "3 segments").kept);
  // Two borders, and the plain segment's two layers with the end between them and its result.
  CHECK(thirds.peak == Bytes{2 + 10 + 1 + 10 + 1});
  // Of each of the first two segments all but the last operation.
  CHECK(thirds.recomputed_count == 2 * 3);
}

TEST_CASE("a border that the next layer saves as its argument is no cost of a layer") {
  Maker maker;
  for (int i = 0; i < 4; ++i) {
    maker.run(10, true, false);
    // As relu does: its result is saved for itself, and again as the next one's argument.
    maker.trace.layer_ends.push_back(maker.run(4, true, true));
  }
  const StepTrace trace = maker.finish();
  const remat::detail::TracedLayers layers(trace);
  const std::vector<UnitCost> costs = layers.costs(Plan::from_sizes({2, 2}));

  REQUIRE(costs.size() == 4);
  for (const UnitCost& cost : costs) CHECK(cost == UnitCost{{14}, {4}});
}

TEST_CASE("each plan is there once, and common ones are marked") {
  const auto list = remat::segment_keeps(layers_of(std::vector<std::int64_t>(16, 10), 1));

  int common = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    common += list[i].is_common;
    for (std::size_t j = 0; j < i; ++j) CHECK(list[i].plan != list[j].plan);
  }
  CHECK(common == 4);  // 2, 4 and 8 segments, of which 4 is the square root, and one per layer
  CHECK(find(list, "4 segments, sqrt(16)").is_common);
}

TEST_CASE("a layer that hands on what another made is none, and a trace without layers has none") {
  StepTrace trace = layers_of({10, 10}, 1);
  trace.layer_ends = {2, 1, 4};
  CHECK(find(remat::segment_keeps(trace), "one region per layer").plan.unit_count() == 2);
  trace.layer_ends.clear();
  CHECK(remat::segment_keeps(trace).empty());
}

}  // namespace segment_keeps_test
