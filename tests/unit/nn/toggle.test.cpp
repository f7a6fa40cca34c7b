// SPDX-License-Identifier: MIT
#include "tests/unit/nn/tiny_modules.hpp"

TEST_CASE("the free functions switch everything checkpointed in a tree, and say how many") {
  remat::Checkpointed<tiny::Block> block(4);
  remat::Checkpointed<remat::Sequential> chain(torch::nn::Linear(4, 4), tiny::Block(4));
  torch::nn::Sequential tree(torch::nn::Linear(4, 4), block, chain);

  CHECK(remat::is_gradient_checkpointing_enabled(tree));
  CHECK(remat::disable_gradient_checkpointing(tree) == 2);
  CHECK_FALSE(block->is_gradient_checkpointing_enabled());
  CHECK_FALSE(chain->is_gradient_checkpointing_enabled());
  CHECK_FALSE(remat::is_gradient_checkpointing_enabled(tree));

  CHECK(remat::enable_gradient_checkpointing(tree, 2) == 2);
  CHECK(block->is_gradient_checkpointing_enabled());
  CHECK(chain->plan().segment_count() == 2);
  CHECK(remat::enable_gradient_checkpointing(static_cast<torch::nn::Module&>(*chain)) == 1);
}

TEST_CASE(
    "a tree without anything checkpointed is told by the count, and a module needs no shared_ptr") {
  tiny::BlockImpl on_the_stack(4);

  CHECK(remat::enable_gradient_checkpointing(on_the_stack) == 0);
  CHECK_FALSE(remat::is_gradient_checkpointing_enabled(on_the_stack));
}

TEST_CASE("fewer than one segment is an argument error at once, and nothing is switched") {
  remat::Checkpointed<remat::Sequential> chain(torch::nn::Linear(4, 4));
  chain->disable_gradient_checkpointing();

  CHECK_THROWS_WITH_AS(
      remat::enable_gradient_checkpointing(chain, 0),
      "[remat.segments.count] remat::enable_gradient_checkpointing: 0 segments were asked for "
      "and at least 1 is needed. To checkpoint nothing, call disable_gradient_checkpointing().",
      remat::ArgumentError);
  CHECK_THROWS_AS(chain->enable_gradient_checkpointing(-3), std::invalid_argument);
  CHECK_THROWS_AS(remat::Checkpointed<tiny::Block>(4)->enable_gradient_checkpointing(0),
                  std::invalid_argument);
  CHECK_FALSE(chain->is_gradient_checkpointing_enabled());
}
