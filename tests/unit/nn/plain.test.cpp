// SPDX-License-Identifier: MIT
#include "tests/unit/nn/tiny_modules.hpp"

#include <string>

namespace {

using CheckpointedChain = remat::Checkpointed<remat::Sequential, remat::Segments<1>>;

CheckpointedChain make_named_chain() {
  return CheckpointedChain({{"stem", torch::nn::Linear(4, 4)},
                            {"layer1", torch::nn::Sequential(tiny::Block(4), tiny::Block(4))},
                            {"head", torch::nn::Linear(4, 4)}});
}

}  // namespace

TEST_CASE("a unit is exempted by its name, also inside a nested chain, and bits and keys stay") {
  auto chain = make_named_chain();
  auto other = make_named_chain();
  tiny::copy_weights(*chain, *other);
  const auto x = torch::randn({5, 4});
  tiny::step(chain, x);
  tiny::step(other, x);
  REQUIRE_FALSE(chain->unit_costs().empty());

  remat::plain(chain, "layer1.0");

  CHECK(chain->unit_costs().empty());  // what is plain saves for itself: measured anew
  CHECK(to_string(chain->plan()) == "[0,1) checkpoint | [1,2) plain | [2,4) checkpoint");
  CHECK(tiny::keys(*chain) == tiny::keys(*other));
  CHECK(tiny::difference(tiny::step(chain, x), tiny::step(other, x)) == "");
}

TEST_CASE("exempting a container exempts every unit in it") {
  torch::nn::Sequential root(make_named_chain());
  auto chain = root->ptr<CheckpointedChain::ContainedType>(0);

  remat::plain(*root, "0.layer1");
  CHECK(to_string(chain->plan()) ==
        "[0,1) checkpoint | [1,2) plain | [2,3) plain | [3,4) checkpoint");

  remat::plain(*root, "0");
  CHECK(chain->plan().checkpointed_count() == 0);
}

TEST_CASE(
    "a checkpointed module is exempted by its name, and stays so when everything is switched on") {
  remat::Checkpointed<tiny::Block> block(4);
  torch::nn::Sequential root(torch::nn::Linear(4, 4), block);

  remat::plain(root, "1");
  remat::enable_gradient_checkpointing(root);

  CHECK(tiny::region_count([&] { root->forward(torch::randn({5, 4})); }) == 0);
}

TEST_CASE("an unknown name is an error with the nearest names") {
  auto chain = make_named_chain();

  CHECK_THROWS_WITH_AS(
      remat::plain(chain, "layer1.5"),
      "[remat.plain.name] remat::plain: \"layer1.5\" was given, and "
      "remat::CheckpointedSequentialImpl "
      "has no module of that name. The nearest names are \"layer1.0\", \"layer1.1\", \"layer1\".",
      remat::ArgumentError);
}

TEST_CASE("a part of a unit cannot be exempted alone") {
  auto chain = make_named_chain();

  CHECK_THROWS_WITH_AS(remat::plain(chain, "layer1.0.fc"),
                       "[remat.plain.unit] remat::plain: \"layer1.0.fc\" was given, and a unit of "
                       "a checkpointed chain or a checkpointed "
                       "module was expected: It is a part of a unit, which is recomputed as one, "
                       "or nothing here is checkpointed. Exempt "
                       "the unit around it.",
                       remat::ArgumentError);
}
