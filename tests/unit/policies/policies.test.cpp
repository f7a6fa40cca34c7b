// SPDX-License-Identifier: MIT
#include "remat/policies.hpp"

#include <vector>

#include "tests/support/doctest.hpp"

using namespace remat::literals;
using remat::Chain;
using remat::Plan;

namespace {

const std::vector<remat::UnitCost> kFalling = {
    {60_B, 9_B}, {30_B, 5_B}, {20_B, 3_B}, {10_B, 2_B}, {8_B, 1_B}};

/// The smallest conforming types.
struct Halves {
  Plan operator()(const Chain& chain) const { return Plan::from_count(chain.unit_count, 2); }
};
struct AsItIs {
  using DefaultRule = Halves;
  Plan operator()(const Plan& plan, const Chain&) const { return plan; }
};
struct KeepSmall {
  bool operator()(const remat::keep::Operation&, remat::Bytes result) const {
    return result < 1_KiB;
  }
};

struct RuleWithoutCall {};
struct RuleWithArgument {
  explicit RuleWithArgument(int) {}
  Plan operator()(const Chain&) const { return {}; }
};
struct RuleThatReturnsCount {
  std::size_t operator()(const Chain&) const { return 1; }
};
struct PatternWithoutRule {
  Plan operator()(const Plan& plan, const Chain&) const { return plan; }
};
struct PatternWithoutCall {
  using DefaultRule = Halves;
};
struct KeepWithoutBytes {
  bool operator()(const remat::keep::Operation&) const { return true; }
};

}  // namespace

TEST_CASE("the smallest rule, pattern and keep policy are accepted") {
  CHECK(remat::Rule<Halves>);
  CHECK(remat::Pattern<AsItIs>);
  CHECK(remat::KeepPolicy<KeepSmall>);
  CHECK(remat::KeepPolicy<bool (*)(const remat::keep::Operation&, remat::Bytes)>);
}

TEST_CASE("a type that lacks one requirement is refused") {
  CHECK_FALSE(remat::Rule<RuleWithoutCall>);
  CHECK_FALSE(remat::Rule<RuleWithArgument>);
  CHECK_FALSE(remat::Rule<RuleThatReturnsCount>);
  CHECK_FALSE(remat::Rule<AsItIs>);
  CHECK_FALSE(remat::Pattern<Halves>);
  CHECK_FALSE(remat::Pattern<PatternWithoutRule>);
  CHECK_FALSE(remat::Pattern<PatternWithoutCall>);
  CHECK_FALSE(remat::KeepPolicy<KeepWithoutBytes>);
}

TEST_CASE_TEMPLATE("every rule of the library conforms and covers a chain of any length", RuleType,
                   remat::Segments<1>, remat::Segments<4>, remat::EachUnit, remat::EachStage,
                   remat::EveryNth<1>, remat::EveryNth<3>, remat::SquareRoot, remat::KeepAll) {
  CHECK(remat::Rule<RuleType>);
  for (std::size_t unit_count = 0; unit_count < 12; ++unit_count) {
    CHECK(RuleType()(Chain::of(unit_count)).unit_count() == unit_count);
    CHECK(
        RuleType()(Chain::of(std::vector<remat::UnitCost>(unit_count, {3_B, 1_B}))).unit_count() ==
        unit_count);
  }
}

TEST_CASE("Segments shares out by count, and by bytes once the units are measured") {
  CHECK(remat::Segments<2>()(Chain::of(5)) == Plan::from_sizes({3, 2}));
  CHECK(remat::Segments<2>()(Chain::of(kFalling)) == Plan::from_sizes({1, 4}));
}

TEST_CASE("EachUnit makes a segment of every unit") {
  CHECK(remat::EachUnit()(Chain::of(3)) == Plan::from_sizes({1, 1, 1}));
}

TEST_CASE("EachStage follows the stages and refuses sizes that do not add up") {
  Chain chain = Chain::of(5);
  CHECK(remat::EachStage()(chain) == Plan::from_sizes({5}));

  chain.stage_sizes = {2, 3};
  CHECK(remat::EachStage()(chain) == Plan::from_sizes({2, 3}));

  chain.stage_sizes = {2, 2};
  CHECK_THROWS_WITH_AS(
      remat::EachStage()(chain),
      "[remat.plan.stages] remat::EachStage: the stages have 4 units and the chain "
      "has 5. Give stage sizes that add up to the number of units.",
      remat::ArgumentError);
}

TEST_CASE("EveryNth makes segments of N units and a shorter last one") {
  CHECK(remat::EveryNth<2>()(Chain::of(5)) == Plan::from_sizes({2, 2, 1}));
  CHECK(remat::EveryNth<9>()(Chain::of(5)) == Plan::from_sizes({5}));
}

TEST_CASE("SquareRoot makes about sqrt(n) segments") {
  CHECK(remat::SquareRoot()(Chain::of(16)).segment_count() == 4);
  CHECK(remat::SquareRoot()(Chain::of(17)).segment_count() == 4);
  CHECK(remat::SquareRoot()(Chain::of(1)).segment_count() == 1);
}

TEST_CASE("KeepAll checkpoints nothing") {
  CHECK(to_string(remat::KeepAll()(Chain::of(5))) == "[0,5) plain");
}

TEST_CASE("Sequential leaves the last segment plain where that costs no peak") {
  const Plan plan = Plan::from_sizes({1, 4});

  CHECK(remat::Sequential()(plan, Chain::of(kFalling)) == plan.with_last_plain());
  CHECK(remat::Sequential()(plan, Chain::of(5)) == plan);  // not measured yet
  CHECK(remat::Sequential()(Plan::keep_all(5), Chain::of(kFalling)) == Plan::keep_all(5));
}

TEST_CASE("a ResNet-50 in bytes: short segments early, the rest plain") {
  // MiB of batch 8 at 224 px: a stem and blocks of 3, 4, 6 and 3; a stage's first block is larger.
  std::vector<remat::UnitCost> costs = {{67_MiB, 6_MiB}, {98_MiB, 24_MiB}};
  costs.insert(costs.end(), 2, {73_MiB, 24_MiB});
  costs.push_back({67_MiB, 12_MiB});
  costs.insert(costs.end(), 3, {37_MiB, 12_MiB});
  costs.push_back({34_MiB, 6_MiB});
  costs.insert(costs.end(), 5, {18_MiB, 6_MiB});
  costs.push_back({17_MiB, 3_MiB});
  costs.insert(costs.end(), 2, {9_MiB, 3_MiB});
  const Chain chain = Chain::of(costs);

  const Plan plan = remat::Sequential()(remat::Segments<4>()(chain), chain);

  CHECK(plan.segments().back() == remat::Segment{8, 17, false});
  CHECK(predicted_peak(plan, costs).count * 10 <
        4 * predicted_peak(Plan::keep_all(17), costs).count);
}
