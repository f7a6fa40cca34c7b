// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <iostream>
#include <sstream>
#include <vector>

namespace {
namespace frozen_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// FROZEN-1, pytorch/pytorch#7617
TEST_CASE("a region whose input needs no grad still trains its weights") {
  expect_same([](Run& run) {
    nn::Linear layer(4, 3);
    auto x = torch::randn({10, 4});

    auto y = run.wrap([&](const Tensor& t) { return layer(t).tanh(); }, x);
    CHECK(y.requires_grad());
    y.sum().backward();

    run.gradient("x", x);
    run.module("layer", *layer);
    CHECK_FALSE(x.grad().defined());
  });
}

// FROZEN-2, huggingface/transformers#21381
TEST_CASE("of four blocks exactly the two that are not frozen get gradients") {
  expect_same([](Run& run) {
    std::vector<nn::Sequential> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(nn::Sequential(nn::Linear(6, 6), nn::LayerNorm(nn::LayerNormOptions({6})), nn::GELU()));
    for (std::size_t i = 0; i < 2; ++i)
      for (auto& p : blocks[i]->parameters()) p.set_requires_grad(false);

    Tensor h = torch::randn({5, 6});
    for (auto& block : blocks) h = run.wrap([&](const Tensor& t) { return block->forward(t); }, h);
    h.sum().backward();

    for (std::size_t i = 0; i < 4; ++i) {
      run.module("block " + std::to_string(i), *blocks[i]);
      for (auto& p : blocks[i]->parameters()) CHECK(p.grad().defined() == (i >= 2));
    }
  });
}

// FROZEN-3, facebookresearch/fairscale#787
TEST_CASE("a wholly frozen region needs no grad, runs once and keeps no bytes") {
  const compare::DropEverything drop;
  nn::Sequential net(nn::Linear(32, 32), nn::BatchNorm1d(32), nn::ReLU(), nn::Linear(32, 8));
  for (auto& p : net->parameters()) p.set_requires_grad(false);
  auto x = torch::randn({16, 32});
  int calls = 0;
  remat::MemoryMeter meter;

  const auto recomputed = compare::recomputed_by([&] {
    auto y = remat::checkpoint(
        [&](const Tensor& t) {
          ++calls;
          return net->forward(t);
        },
        x);
    CHECK_FALSE(y.requires_grad());
    CHECK(meter.current().count == 16 * 8 * 4);
  });

  CHECK(calls == 1);
  CHECK(recomputed == 0);
  CHECK(meter.current().count == 0);
}

// FROZEN-4, hiyouga/LlamaFactory#4905
TEST_CASE("nothing is printed when nothing in a region is trainable") {
  std::ostringstream out;
  auto* const standard_error = std::cerr.rdbuf(out.rdbuf());
  auto* const standard_out = std::cout.rdbuf(out.rdbuf());
  auto y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, torch::randn({4}));
  std::cerr.rdbuf(standard_error);
  std::cout.rdbuf(standard_out);

  CHECK_FALSE(y.requires_grad());
  CHECK(out.str().empty());
}

TEST_CASE("a frozen layer between trained ones passes the gradient on and gets none") {
  expect_same([](Run& run) {
    nn::Conv2d first(3, 4, 3), middle(4, 4, 3), last(4, 2, 3);
    nn::BatchNorm2d norm(4);
    for (auto& p : middle->parameters()) p.set_requires_grad(false);
    norm->weight.set_requires_grad(false);
    auto x = torch::randn({2, 3, 9, 9});

    auto y = run.wrap([&](const Tensor& t) { return last(norm(middle(first(t).relu())).relu()); }, x);
    y.pow(2).sum().backward();

    run.module("first", *first);
    run.module("middle", *middle);
    run.module("norm", *norm);
    run.module("last", *last);
    CHECK_FALSE(middle->weight.grad().defined());
  });
}

TEST_CASE("freezing between two steps takes effect at once") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(4, 4), nn::Tanh(), nn::Linear(4, 4));
    for (const bool is_frozen : {false, true, false}) {
      for (auto& p : net[0]->parameters()) p.set_requires_grad(!is_frozen);
      for (auto& p : net->parameters()) p.mutable_grad() = Tensor();
      run.wrap([&](const Tensor& t) { return net->forward(t); }, torch::randn({2, 4})).sum().backward();
      run.module("net", *net);
    }
  });
}

}  // namespace frozen_test
}  // namespace
