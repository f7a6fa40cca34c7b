// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <pthread.h>

#include <exception>
#include <functional>
#include <vector>

namespace {
namespace scale_test {

namespace nn = torch::nn;
using torch::Tensor;

/// Runs `action` on a thread with a stack of that size.
template <class Action>
void on_stack(std::size_t bytes, Action action) {
  struct Call {
    Action& action;
    std::exception_ptr error;
  } call{action, nullptr};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_t thread;
  const int failed = pthread_create(
      &thread, &attributes,
      [](void* argument) -> void* {
        auto& run = *static_cast<Call*>(argument);
        try {
          run.action();
        } catch (...) {
          run.error = std::current_exception();
        }
        return nullptr;
      },
      &call);
  pthread_attr_destroy(&attributes);
  REQUIRE(failed == 0);
  pthread_join(thread, nullptr);
  if (call.error) std::rethrow_exception(call.error);
}

constexpr std::size_t eight_mebibytes = 8 << 20;

// FAIL-3, pytorch/pytorch#6959
TEST_CASE("5,000 and 20,000 independent regions, stacked, pass on a stack of 8 MiB") {
  nn::Sequential net(nn::Linear(10, 10), nn::ReLU(), nn::Linear(10, 1));
  for (const int count : {5000, 20000}) {
    on_stack(eight_mebibytes, [&] {
      auto x = torch::randn({1, 10});
      std::vector<Tensor> results;
      for (int i = 0; i < count; ++i) results.push_back(remat::checkpoint([&](const Tensor& t) { return net->forward(t); }, x));
      torch::stack(results).mean().backward();
    });
    const auto checkpointed = net[0]->as<nn::Linear>()->weight.grad().clone();
    net->zero_grad();
    CHECK(checkpointed.abs().sum().item<float>() > 0);
  }
}

TEST_CASE("5,000 and 20,000 chained regions pass on a stack of 8 MiB and give plain's gradient") {
  for (const int count : {5000, 20000}) {
    Tensor gradients[2];
    for (const bool is_checkpointed : {false, true})
      on_stack(eight_mebibytes, [&] {
        torch::manual_seed(1);
        auto x = torch::randn({10}, torch::requires_grad());
        Tensor h = x;
        const auto link = [](const Tensor& t) { return t.sin().mul(1.01).cos(); };
        for (int i = 0; i < count; ++i) h = is_checkpointed ? remat::checkpoint(link, h) : link(h);
        h.sum().backward();
        gradients[is_checkpointed] = x.grad();
      });
    CHECK(torch::equal(gradients[false], gradients[true]));
  }
}

TEST_CASE("20,000 chained regions whose backward never runs are freed on a stack of 8 MiB") {
  const compare::DropEverything drop;
  remat::MemoryMeter meter;
  on_stack(eight_mebibytes, [&] {
    auto x = torch::randn({10}, torch::requires_grad());
    Tensor h = x;
    for (int i = 0; i < 20000; ++i) h = remat::checkpoint([](const Tensor& t) { return t.sin().cos(); }, h);
  });
  CHECK(meter.current().count == 0);
}

TEST_CASE("regions nested 200 deep pass on a stack of 8 MiB and give plain's gradient") {
  Tensor gradients[2];
  for (const bool is_checkpointed : {false, true})
    on_stack(eight_mebibytes, [&] {
      torch::manual_seed(1);
      auto x = torch::randn({10}, torch::requires_grad());
      std::function<Tensor(const Tensor&, int)> level = [&](const Tensor& t, int depth) {
        auto h = torch::dropout(t.sin(), 0.1, true);
        if (depth > 0) h = is_checkpointed ? remat::checkpoint(level, h, depth - 1) : level(h, depth - 1);
        return (h + t).cos();
      };
      level(x, 200).sum().backward();
      gradients[is_checkpointed] = x.grad();
    });
  CHECK(torch::equal(gradients[false], gradients[true]));
}

TEST_CASE("a region of 100,000 operations passes on a stack of 8 MiB and gives plain's gradient") {
  const compare::DropEverything drop;
  Tensor gradients[2];
  for (const bool is_checkpointed : {false, true})
    on_stack(eight_mebibytes, [&] {
      auto x = torch::ones({4}, torch::requires_grad());
      const auto chain = [](Tensor t) {
        for (int i = 0; i < 100000; ++i) t = t.sin();
        return t;
      };
      const auto recomputed = compare::recomputed_by([&] { (is_checkpointed ? remat::checkpoint(chain, x) : chain(x)).sum().backward(); });
      CHECK(recomputed == (is_checkpointed ? 99999 : 0));
      gradients[is_checkpointed] = x.grad();
    });
  CHECK(torch::equal(gradients[false], gradients[true]));
}

TEST_CASE("lists of 70,000 tensors inside a region give plain's gradient") {
  const compare::DropEverything drop;
  auto x = torch::randn({70000, 2}, torch::requires_grad());
  Tensor gradients[2];
  for (const bool is_checkpointed : {false, true}) {
    const auto program = [](const Tensor& t) {
      auto rows = (t * 2).unbind(0);
      for (auto& row : rows) row = row + 1;
      return torch::stack(rows).sin().exp().sin();
    };
    auto y = is_checkpointed ? remat::checkpoint(program, x) : program(x);
    gradients[is_checkpointed] = torch::autograd::grad({y.sum()}, {x})[0];
  }
  CHECK(torch::equal(gradients[false], gradients[true]));
}

TEST_CASE("200 steps of training leave the live bytes unchanged") {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)), nn::BatchNorm2d(4), nn::ReLU(), nn::Dropout(0.2),
                     nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1)), nn::BatchNorm2d(4));
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-3));
  remat::MemoryMeter meter;
  std::int64_t after_first = 0;
  for (int step = 0; step < 200; ++step) {
    {
      auto x = torch::randn({2 + step % 3, 3, 6 + step % 5, 6});
      adam.zero_grad();
      auto y = remat::checkpoint(
          [&](const Tensor& t) { return remat::checkpoint([&](const Tensor& s) { return net->forward(s); }, t).sin(); }, x);
      if (step % 7 != 3) y.pow(2).mean().backward();  // now and then a graph is thrown away
      adam.step();
    }
    if (step == 1) after_first = meter.current().count;
    if (step > 1 && step % 7 != 3) CHECK(meter.current().count == after_first);  // without backward there are no gradients
  }
}

TEST_CASE("a region of 1,000 tiny operations keeps no LibTorch memory beside its result") {
  const compare::DropEverything drop;
  auto x = torch::randn({1}, torch::requires_grad());
  remat::MemoryMeter meter;
  auto y = remat::checkpoint(
      [](Tensor t) {
        for (int i = 0; i < 1000; ++i) t = t.sin();
        return t;
      },
      x);
  CHECK(meter.current().count <= 64);
}

}  // namespace scale_test
}  // namespace
