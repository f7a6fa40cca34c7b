// SPDX-License-Identifier: MIT
#include "tests/unit/nn/tiny_modules.hpp"

#include <functional>
#include <vector>

namespace {

using tiny::Block;
using torch::Tensor;

}  // namespace

TEST_CASE(
    "checkpoint_sequential gives the bits of running the modules, for any number of segments") {
  torch::nn::Sequential plain(Block(4), torch::nn::Linear(4, 4), Block(4), Block(4),
                              torch::nn::ReLU());
  torch::nn::Sequential checkpointed =
      std::dynamic_pointer_cast<torch::nn::SequentialImpl>(plain->clone());
  const auto x = torch::randn({5, 4});

  for (const std::int64_t segments : {1, 2, 3, 5, 99}) {
    CAPTURE(segments);
    const auto run = [&](Tensor input) {
      return remat::checkpoint_sequential(checkpointed, segments, input);
    };
    CHECK(tiny::difference(tiny::step(plain, x), tiny::step(*checkpointed, x, run)) == "");
  }
}

TEST_CASE("checkpoint_sequential takes holders, erased modules and callables") {
  Block first(4), second(4), third(4);
  for (auto* block : {&first, &second, &third}) (*block)->dropout->eval(), (*block)->norm->eval();
  const auto x = torch::randn({5, 4}, torch::requires_grad());
  const auto plain = third(second(first(x)));
  const auto check = [&](const Tensor& y) {
    CHECK(torch::equal(y, plain));
    CHECK(torch::equal(torch::autograd::grad({y.sum()}, {x})[0],
                       torch::autograd::grad({plain.sum()}, {x}, {}, /*retain_graph=*/true)[0]));
  };

  check(remat::checkpoint_sequential(torch::nn::Sequential(first, second, third), 2, x));
  check(remat::checkpoint_sequential(*torch::nn::Sequential(first, second, third), 2, x));
  check(remat::checkpoint_sequential(std::vector<Block>{first, second, third}, 3, x));
  check(remat::checkpoint_sequential(
      std::vector<torch::nn::AnyModule>{torch::nn::AnyModule(first), torch::nn::AnyModule(second),
                                        torch::nn::AnyModule(third)},
      2, x));
  std::vector<std::function<Tensor(Tensor)>> calls = {[&](Tensor t) { return first(t); },
                                                      [&](Tensor t) { return second(t); },
                                                      [&](Tensor t) { return third(t); }};
  check(remat::checkpoint_sequential(calls, 2, x));
  CHECK(torch::equal(remat::checkpoint_sequential(std::vector<Block>(), 2, x), x));
}

TEST_CASE("as in Python the last segment is plain") {
  const torch::nn::Sequential blocks(Block(4), Block(4), Block(4));
  const auto x = torch::randn({5, 4});

  CHECK(tiny::region_count([&] { remat::checkpoint_sequential(blocks, 1, x); }) == 0);
  CHECK(tiny::region_count([&] { remat::checkpoint_sequential(blocks, 2, x); }) == 1);
  CHECK(tiny::region_count([&] { remat::checkpoint_sequential(blocks, 99, x); }) == 2);
}

TEST_CASE("checkpoint_sequential needs at least one segment") {
  CHECK_THROWS_WITH_AS(
      remat::checkpoint_sequential(torch::nn::Sequential(Block(4)), 0, torch::randn({5, 4})),
      "[remat.segments.count] remat::checkpoint_sequential: 0 segments were asked for and at least "
      "1 is "
      "needed. To checkpoint nothing, call disable_gradient_checkpointing().",
      remat::ArgumentError);
}
