// SPDX-License-Identifier: MIT
#include "tests/unit/nn/tiny_modules.hpp"

#include <sstream>
#include <type_traits>

namespace {

using tiny::Block;
using CheckpointedBlock = remat::Checkpointed<Block>;

static_assert(std::is_same_v<decltype(&CheckpointedBlock::Impl::forward),
                             torch::Tensor (CheckpointedBlock::Impl::*)(const torch::Tensor&)>);

/// Registers its child in reset(), as LibTorch's clone() wants it.
struct ParentImpl : torch::nn::Cloneable<ParentImpl> {
  ParentImpl() { reset(); }
  void reset() override { block = register_module("block", CheckpointedBlock(4)); }
  torch::Tensor forward(torch::Tensor x) { return block->forward(x); }
  CheckpointedBlock block{nullptr};
};
TORCH_MODULE(Parent);

}  // namespace

TEST_CASE("a checkpointed module gives the bits of the module it is made of") {
  Block plain(6);
  CheckpointedBlock checkpointed(6);
  tiny::copy_weights(*plain, *checkpointed);
  const auto x = torch::randn({5, 6});

  for (int index = 0; index < 3; ++index)
    CHECK(tiny::difference(tiny::step(plain, x), tiny::step(checkpointed, x)) == "");

  CHECK(checkpointed->call_count == 3);
}

TEST_CASE("a checkpointed module opens a region in training, and backward recomputes") {
  CheckpointedBlock block(6);
  const auto before = remat::statistics();

  tiny::step(block, torch::randn({5, 6}));

  CHECK(remat::statistics().regions == before.regions + 1);
  CHECK(remat::statistics().recomputed_operations > before.recomputed_operations);
}

TEST_CASE("a checkpointed module is a plain call when there is nothing to drop") {
  CheckpointedBlock block(6);
  const auto x = torch::randn({5, 6});
  const auto count = [&] { return tiny::region_count([&] { block->forward(x); }); };
  REQUIRE(count() == 1);

  SUBCASE("in eval mode") { block->eval(); }
  SUBCASE("when switched off") { block->disable_gradient_checkpointing(); }
  SUBCASE("when neither a parameter nor the input requires grad") {
    for (auto& parameter : block->parameters()) parameter.set_requires_grad(false);
  }
  SUBCASE("without grad mode") {
    const torch::NoGradGuard no_grad;
    CHECK(count() == 0);
    block->eval();
  }
  SUBCASE("in inference mode") {
    const c10::InferenceMode guard;
    CHECK(tiny::region_count([&] { block->forward(torch::ones({5, 6})); }) == 0);
    block->eval();
  }

  CHECK(count() == 0);
}

TEST_CASE("a frozen module is checkpointed when its input requires grad") {
  CheckpointedBlock block(6);
  for (auto& parameter : block->parameters()) parameter.set_requires_grad(false);

  CHECK(tiny::region_count([&] { block->forward(torch::randn({5, 6}, torch::requires_grad())); }) ==
        1);
}

TEST_CASE("wrapping a module changes no name, and archives are exchanged both ways") {
  Block plain(6);
  CheckpointedBlock checkpointed(6);
  CHECK(tiny::keys(*plain) == tiny::keys(*checkpointed));

  std::stringstream from_plain, from_checkpointed;
  torch::save(plain, from_plain);
  torch::load(checkpointed, from_plain);
  CHECK(torch::equal(plain->fc->weight, checkpointed->fc->weight));

  torch::nn::init::ones_(checkpointed->fc->weight);
  torch::save(checkpointed, from_checkpointed);
  torch::load(plain, from_checkpointed);
  CHECK(torch::equal(plain->fc->weight, checkpointed->fc->weight));
}

TEST_CASE("a checkpointed module fits into LibTorch's containers") {
  CheckpointedBlock block(6);
  torch::nn::Sequential sequential(torch::nn::Linear(6, 6), block);
  torch::nn::AnyModule any(block);
  const auto x = torch::randn({5, 6});
  block->norm->eval();
  block->dropout->eval();

  CHECK(torch::equal(any.forward(x), block->forward(x)));
  CHECK(torch::equal(sequential->forward(x),
                     block(sequential[0]->as<torch::nn::Linear>()->forward(x))));
  CHECK(any.get<CheckpointedBlock>().get() == block.get());
}

TEST_CASE("arguments with defaults may be left out, through the holder and through AnyModule") {
  remat::Checkpointed<torch::nn::MultiheadAttention> attention(8, 2);
  const auto x = torch::randn({3, 2, 8});
  const auto full = attention->forward(x, x, x, {}, true, {}, true);
  torch::nn::AnyModule any(attention);

  CHECK(tiny::region_count(
            [&] { CHECK(torch::equal(std::get<0>(attention(x, x, x)), std::get<0>(full))); }) == 1);
  CHECK(tiny::region_count([&] {
          const auto result = any.forward<std::tuple<torch::Tensor, torch::Tensor>>(x, x, x);
          CHECK(torch::equal(std::get<0>(result), std::get<0>(full)));
        }) == 1);

  decltype(attention) copy =
      std::dynamic_pointer_cast<decltype(attention)::ContainedType>(attention->clone());
  CHECK(torch::equal(std::get<0>(copy(x, x, x)), std::get<0>(full)));
}

TEST_CASE("a forward that is const stays so") {
  const remat::Checkpointed<tiny::ConstBlock> block;
  const auto x = torch::randn({4});

  CHECK(tiny::region_count([&] { CHECK(torch::equal(block->forward(x), (x * 2).tanh())); }) == 1);
}

TEST_CASE("a module class is as good as its holder") {
  remat::Checkpointed<tiny::BlockImpl> block(6);

  CHECK(tiny::region_count([&] { block->forward(torch::randn({5, 6})); }) == 1);
}

TEST_CASE("a keep policy is the second argument of a checkpointed module") {
  CheckpointedBlock drops(6);
  remat::Checkpointed<Block, remat::keep::convolutions_and_matmuls> keeps(6);
  tiny::copy_weights(*drops, *keeps);
  const auto x = torch::randn({5, 6});
  const auto recomputed = [&](auto& block) {
    const auto before = remat::statistics().recomputed_operations;
    tiny::step(block, x);
    return remat::statistics().recomputed_operations - before;
  };

  CHECK(recomputed(keeps) < recomputed(drops));
  CHECK(tiny::difference(tiny::step(drops, x), tiny::step(keeps, x)) == "");
}

TEST_CASE("a clone is checkpointed, has weights of its own and runs its own layers") {
  CheckpointedBlock block(6);
  CheckpointedBlock copy =
      std::dynamic_pointer_cast<CheckpointedBlock::ContainedType>(block->clone());
  REQUIRE(!copy.is_empty());
  const auto x = torch::randn({5, 6});

  CHECK(tiny::keys(*copy) == tiny::keys(*block));
  CHECK(tiny::difference(tiny::step(block, x), tiny::step(copy, x)) == "");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.zero_();
  }
  CHECK(tiny::region_count([&] { CHECK(copy->forward(x).abs().sum().item<float>() == 0); }) == 1);
  CHECK(block->forward(x).abs().sum().item<float>() != 0);
}

TEST_CASE("a clone of a module that is switched off is switched off") {
  CheckpointedBlock block(6);
  block->disable_gradient_checkpointing();

  CHECK_FALSE(remat::is_gradient_checkpointing_enabled(*block->clone()));
}

TEST_CASE("a checkpointed member is cloned with its parent") {
  Parent parent;
  Parent copy = std::dynamic_pointer_cast<ParentImpl>(parent->clone());
  const auto x = torch::randn({5, 4});

  CHECK(tiny::difference(tiny::step(parent, x), tiny::step(copy, x)) == "");
  CHECK(copy->block->fc->weight.data_ptr() != parent->block->fc->weight.data_ptr());
  CHECK(tiny::region_count([&] { copy->forward(x); }) == 1);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.zero_();
  }
  CHECK(copy->forward(x).abs().sum().item<float>() == 0);
}
