// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/policies/staged_hybrid.hpp"
#include "remat/policies/transformer_layers.hpp"

#include <string>
#include <vector>

namespace staged_hybrid_test {
namespace {

/// A stem, a stage of 3, a transition, a stage of 9.
remat::Chain staged_chain() {
  remat::Chain chain = remat::Chain::of(14);
  chain.stage_sizes = {1, 3, 1, 9};
  chain.lone_units = {0, 4};
  return chain;
}

}  // namespace

TEST_CASE("a staged network is one segment per stage, and what lies between stages is plain") {
  const remat::Chain chain = staged_chain();
  const remat::StagedHybrid pattern;

  CHECK(to_string(pattern(remat::StagedHybrid::DefaultRule()(chain), chain)) ==
        "[0,1) plain | [1,4) checkpoint | [4,5) plain | [5,14) checkpoint");
}

TEST_CASE("segments are shared out by depth, at least one per stage and at most one per unit") {
  const remat::Chain chain = staged_chain();
  const remat::StagedHybrid pattern;
  const auto sizes = [&](std::size_t segment_count) {
    std::vector<std::size_t> result;
    for (const remat::Segment& segment : pattern.segments(chain, segment_count).segments())
      result.push_back(segment.unit_count());
    return result;
  };

  CHECK(sizes(1) == std::vector<std::size_t>{1, 3, 1, 9});
  CHECK(sizes(2) == std::vector<std::size_t>{1, 3, 1, 9});
  CHECK(sizes(3) == std::vector<std::size_t>{1, 3, 1, 5, 4});
  CHECK(sizes(4) == std::vector<std::size_t>{1, 3, 1, 3, 3, 3});
  CHECK(sizes(5) == std::vector<std::size_t>{1, 2, 1, 1, 3, 3, 3});
  CHECK(sizes(12) == std::vector<std::size_t>(14, 1));
  CHECK(sizes(1000) == std::vector<std::size_t>(14, 1));
}

TEST_CASE("a chain without a stage is refused by the staged pattern, with the cure") {
  remat::Chain chain = remat::Chain::of(2);
  chain.stage_sizes = {1, 1};
  chain.lone_units = {0, 1};

  std::string text;
  try {
    remat::StagedHybrid()(remat::Plan::from_count(2, 2), chain);
  } catch (const remat::ArgumentError& error) {
    text = error.what();
  }

  CHECK(text ==
        "[remat.plan.no_stage] remat::StagedHybrid: the chain has 2 modules and no stage, and at "
        "least one stage was expected: there is nothing to checkpoint. Put the blocks of a stage "
        "into a torch::nn::Sequential, or use the pattern remat::Sequential.");
}

TEST_CASE("a transformer is one segment per layer, the last included, measured or not") {
  remat::Chain chain =
      remat::Chain::of(std::vector<remat::UnitCost>(3, {remat::Bytes{100}, remat::Bytes{10}}));
  const remat::TransformerLayers pattern;

  CHECK(to_string(pattern(remat::TransformerLayers::DefaultRule()(chain), chain)) ==
        "[0,1) checkpoint | [1,2) checkpoint | [2,3) checkpoint");
}

}  // namespace staged_hybrid_test
