// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include "tests/support/autocast.hpp"

#include <optional>
#include <vector>

namespace {
namespace autocast_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

nn::Sequential mixed_net() {
  return nn::Sequential(nn::Linear(8, 8), nn::GELU(), nn::Dropout(0.2), nn::Linear(8, 8), nn::Tanh(),
                        nn::Linear(8, 4));
}

// AMP-1, pytorch/pytorch#71124
TEST_CASE("with backward outside the autocast scope the region runs once, in bfloat16, and gradients equal plain's") {
  expect_same([](Run& run) {
    auto net = mixed_net();
    auto x = torch::randn({4, 8}, torch::requires_grad());
    std::vector<at::ScalarType> types;
    Tensor y;
    {
      const autocast::Scope scope;
      y = run.wrap(
          [&](const Tensor& t) {
            auto out = net->forward(t);
            types.push_back(out.scalar_type());
            return out;
          },
          x);
    }
    y.to(torch::kFloat).pow(2).sum().backward();

    CHECK(types.size() == 1);
    CHECK((types[0] == torch::kBFloat16));
    CHECK_FALSE(autocast::is_enabled());
    CHECK(at::autocast::is_autocast_cache_enabled());
    run.note("y", y);
    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("with backward inside the autocast scope gradients equal plain's and the settings stay") {
  expect_same([](Run& run) {
    auto net = mixed_net();
    auto x = torch::randn({4, 8}, torch::requires_grad());
    const autocast::Scope scope;
    auto y = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);
    y.to(torch::kFloat).pow(2).sum().backward();
    CHECK(autocast::is_enabled());
    CHECK((autocast::dtype() == torch::kBFloat16));
    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("autocast set otherwise around backward does not reach the recompute") {
  expect_same([](Run& run) {
    auto net = mixed_net();
    auto x = torch::randn({4, 8}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return net->forward(t).sin(); }, x);  // float
    Tensor z;
    {
      const autocast::Scope scope;
      z = run.wrap([&](const Tensor& t) { return net->forward(t).sin(); }, x);  // bfloat16
    }
    const autocast::Scope off(false, /*uses_cache=*/false);
    const auto loss = y.sum() + z.to(torch::kFloat).sum();
    autocast::set_enabled(true);
    loss.backward();
    autocast::set_enabled(false);
    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("a cold and a warm cast cache, and no cache, give plain's gradients") {
  for (const bool uses_cache : {true, false})
    for (const bool is_warm : {false, true}) {
      CAPTURE(uses_cache);
      CAPTURE(is_warm);
      expect_same([&](Run& run) {
        nn::Linear layer(8, 8);
        auto x = torch::randn({4, 8}, torch::requires_grad());
        Tensor sum;
        {
          const autocast::Scope scope(true, uses_cache);
          sum = torch::zeros({4, 8});
          if (is_warm) sum = sum + layer(x.sin());
          sum = sum + run.wrap([&](const Tensor& t) { return layer(layer(t).tanh()).sin(); }, x);
          sum = sum + run.wrap([&](const Tensor& t) { return layer(t.cos()).exp(); }, x);
          sum = sum + layer(x.exp());
        }
        sum.sum().backward();
        run.gradient("x", x);
        run.module("layer", *layer);
      });
    }
}

// AMP-4, pytorch/pytorch#141896
TEST_CASE("a weight used twice in a region and once in each of two neighbours raises no alarm") {
  expect_same([](Run& run) {
    nn::Linear shared(8, 8);
    nn::Conv1d conv(nn::Conv1dOptions(4, 4, 3).padding(1));
    auto x = torch::randn({4, 8}, torch::requires_grad());
    Tensor y;
    {
      const autocast::Scope scope;
      auto h = run.wrap([&](const Tensor& t) { return shared(shared(t).tanh()); }, x);
      h = run.wrap([&](const Tensor& t) { return shared(t).tanh(); }, h);
      h = run.wrap([&](const Tensor& t) { return run.wrap([&](const Tensor& s) { return shared(s).sin(); }, t) + shared(t); }, h);
      y = run.wrap([&](const Tensor& t) { return conv(conv(t.unsqueeze(0))).cos(); }, h);
    }
    y.to(torch::kFloat).sum().backward();
    run.gradient("x", x);
    run.module("shared", *shared);
    run.module("conv", *conv);
  });
}

// AMP-2, pytorch/pytorch#65766
TEST_CASE("casts that a no-grad pass left in the cache act as in plain") {
  expect_same([](Run& run) {
    nn::Linear layer(8, 8);
    auto x = torch::randn({4, 8}, torch::requires_grad());
    Tensor y;
    {
      const autocast::Scope scope;
      {
        torch::NoGradGuard no_grad;
        layer(x.detach());
      }
      y = run.wrap([&](const Tensor& t) { return layer(t.sin()).tanh(); }, x);
    }
    y.to(torch::kFloat).sum().backward();
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

TEST_CASE("an autocast scope opened and closed inside a region equals plain") {
  expect_same([](Run& run) {
    nn::Linear layer(8, 8);
    nn::BatchNorm1d norm(8);
    auto x = torch::randn({4, 8}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = layer(t);
          {
            const autocast::Scope scope;
            h = layer(h.tanh());
            {
              const autocast::Scope off(false);
              h = norm(h.to(torch::kFloat));
            }
            h = layer(h).sin();
          }
          return h.to(torch::kFloat).exp().sin();
        },
        x);
    y.sum().backward();
    run.gradient("x", x);
    run.module("layer", *layer);
    run.module("norm", *norm);
  });
}

TEST_CASE("a gradient penalty under autocast equals plain") {
  expect_same([](Run& run) {
    nn::Linear layer(8, 8);
    auto x = torch::randn({4, 8}, torch::requires_grad());
    Tensor loss;
    {
      const autocast::Scope scope;
      auto y = run.wrap([&](const Tensor& t) { return layer(layer(t).tanh()); }, x);
      auto g = torch::autograd::grad({y.to(torch::kFloat).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
      loss = y.to(torch::kFloat).pow(2).sum() + g.norm();
    }
    loss.backward();
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

TEST_CASE("a region adds no cast to the cache and moves no cached cast's version in backward") {
  nn::Linear layer(8, 8);
  auto x = torch::randn({4, 8}, torch::requires_grad());
  const compare::DropEverything drop;
  remat::MemoryMeter meter;
  {
    const autocast::Scope scope;
    auto y = remat::checkpoint([&](const Tensor& t) { return layer(t).tanh().sin(); }, x);
    const auto before = meter.current();
    torch::autograd::grad({y.to(torch::kFloat).sum()}, {x}, {}, /*retain_graph=*/true);
    CHECK(meter.current() == before);
  }
  CHECK(meter.current().count == 0);
}

}  // namespace autocast_test
}  // namespace
