// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/unit/nn/tiny_modules.hpp"

#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include <string>

namespace patterns_test {
namespace {

using tiny::Block;
using tiny::Masked;

constexpr std::int64_t kWidth = 6;

/// A stem, a stage of two blocks, a transition, a stage of four.
template <class Chain>
Chain staged() {
  torch::manual_seed(0);
  torch::nn::Sequential shallow, deep;
  for (int block = 0; block < 2; ++block) shallow->push_back(Block(kWidth));
  for (int block = 0; block < 4; ++block) deep->push_back(Block(kWidth));
  return Chain(torch::nn::Linear(kWidth, kWidth), shallow, torch::nn::Linear(kWidth, kWidth), deep);
}

torch::Tensor rows() {
  torch::manual_seed(5);
  return torch::randn({8, kWidth});
}

}  // namespace

TEST_CASE("a transformer's layers are a segment each, and a mask reaches every one of them") {
  torch::manual_seed(0);
  remat::Checkpointed<remat::TransformerLayers> net;
  for (int layer = 0; layer < 3; ++layer) net->push_back(Masked(kWidth));
  const torch::Tensor mask = torch::rand({8, kWidth});
  const auto forward = [&](torch::Tensor x) { return net->forward(std::move(x), mask); };

  const auto region_count = tiny::region_count([&] {
    const auto checkpointed = tiny::step(*net, rows(), forward);
    net->disable_gradient_checkpointing();
    CHECK(tiny::difference(tiny::step(*net, rows(), forward), checkpointed) == "");
  });

  CHECK(region_count == 3);
  for (const auto& layer : net->children())
    for (const torch::Tensor& seen : dynamic_cast<tiny::MaskedImpl&>(*layer).masks)
      CHECK(torch::equal(seen, mask));
  net->enable_gradient_checkpointing();
  CHECK(to_string(net->plan()) == "[0,1) checkpoint | [1,2) checkpoint | [2,3) checkpoint");
  CHECK(net->segment_count() == 3);
}

TEST_CASE("an embedding in front of a transformer is exempted and does not count as a segment") {
  torch::manual_seed(0);
  remat::Checkpointed<remat::TransformerLayers> net(remat::plain(torch::nn::Linear(kWidth, kWidth)),
                                                    Block(kWidth), Block(kWidth));

  tiny::step(net, rows());

  CHECK(to_string(net->plan()) == "[0,1) plain | [1,2) checkpoint | [2,3) checkpoint");
  CHECK(net->segment_count() == 2);
  net->disable_gradient_checkpointing();
  CHECK(net->segment_count() == 0);
}

TEST_CASE(
    "a staged network's stem and transitions run outside of any region, its bits are plain's") {
  auto net = staged<remat::Checkpointed<remat::StagedHybrid>>();
  auto plain = staged<remat::Checkpointed<remat::StagedHybrid>>();
  plain->disable_gradient_checkpointing();

  for (int round = 0; round < 3; ++round)
    CHECK(tiny::difference(tiny::step(plain, rows()), tiny::step(net, rows())) == "");

  CHECK(tiny::region_count([&] { net->forward(rows()); }) == 2);
  CHECK(to_string(net->plan()) ==
        "[0,1) plain | [1,3) checkpoint | [3,4) plain | [4,8) checkpoint");
  CHECK(net->segment_count() == 2);
}

TEST_CASE("segments asked for at run time are shared out to the stages by depth") {
  auto net = staged<remat::Checkpointed<remat::StagedHybrid>>();
  auto plain = staged<remat::Checkpointed<remat::StagedHybrid>>();
  plain->disable_gradient_checkpointing();

  net->enable_gradient_checkpointing(4);

  CHECK(to_string(net->plan()) ==
        "[0,1) plain | [1,2) checkpoint | [2,3) checkpoint | [3,4) plain | [4,6) checkpoint | "
        "[6,8) checkpoint");
  CHECK(net->segment_count() == 4);
  CHECK(tiny::difference(tiny::step(plain, rows()), tiny::step(net, rows())) == "");
  net->enable_gradient_checkpointing();
  CHECK(net->segment_count() == 2);
}

TEST_CASE("a nested checkpointed chain is a stage as well") {
  torch::manual_seed(0);
  remat::Checkpointed<remat::Sequential> stage{Block(kWidth), Block(kWidth)};
  remat::Checkpointed<remat::StagedHybrid> net{torch::nn::Linear(kWidth, kWidth), stage};

  CHECK(to_string(net->plan()) == "[0,1) plain | [1,3) checkpoint");
}

TEST_CASE("a staged chain without a stage is refused in forward") {
  remat::Checkpointed<remat::StagedHybrid> net{torch::nn::Linear(kWidth, kWidth)};

  CHECK_THROWS_AS(net->forward(rows()), remat::ArgumentError);
}

}  // namespace patterns_test
