// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace {
namespace leaks_test {

namespace nn = torch::nn;
using torch::Tensor;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

WeakTensor weak(const Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); }

/// A state object of a user's own that ends up holding its region's result.
struct State {
  Tensor output;
};

// LEAK-1
TEST_CASE("a closure whose state stores the region's result is no cycle") {
  std::weak_ptr<State> watched;
  WeakTensor output = weak(torch::zeros({1}));
  {
    auto x = torch::randn({10}, torch::requires_grad());
    auto state = std::make_shared<State>();
    watched = state;
    auto y = remat::checkpoint(
        [state](const Tensor& t) {
          state->output = t.sin().exp();
          return state->output;
        },
        x);
    output = weak(y);
    y.sum().backward();
  }
  CHECK(watched.expired());
  CHECK(output.expired());
}

TEST_CASE("a closure whose state stores the result is freed when backward never runs") {
  std::weak_ptr<State> watched;
  remat::MemoryMeter meter;
  {
    auto x = torch::randn({10}, torch::requires_grad());
    auto state = std::make_shared<State>();
    watched = state;
    auto y = remat::checkpoint(
        [state](const Tensor& t) {
          state->output = torch::dropout(t.sin(), 0.5, true).exp();
          return state->output.sin();
        },
        x);
  }
  CHECK(watched.expired());
  CHECK(meter.current().count == 0);
}

TEST_CASE("a keep policy whose state stores the result is no cycle when backward never runs") {
  std::weak_ptr<State> watched;
  {
    auto x = torch::randn({10}, torch::requires_grad());
    auto state = std::make_shared<State>();
    watched = state;
    state->output = remat::checkpoint([state](const remat::keep::Operation&, remat::Bytes) { return false; },
                                      [](const Tensor& t) { return t.sin().exp().sin(); }, x);
  }
  CHECK(watched.expired());
}

// LEAK-2, pytorch/pytorch#5569
TEST_CASE("a result that its own gradient needs is released with the graph") {
  remat::MemoryMeter meter;
  WeakTensor output = weak(torch::zeros({1}));
  {
    auto x = torch::randn({1000}, torch::requires_grad());
    auto y = remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x);  // exp saves its result
    output = weak(y);
  }
  CHECK(output.expired());
  CHECK(meter.current().count == 0);
}

// LEAK-3, pytorch/pytorch#82482
TEST_CASE("after backward exactly plain's bytes are alive, and at most one region's during it") {
  const compare::DropEverything drop;
  constexpr std::int64_t bytes = 40000;
  constexpr int regions = 12, length = 8;
  auto x = torch::randn({bytes / 4}, torch::requires_grad());
  std::int64_t left[2], peaks[2];
  for (const bool is_checkpointed : {false, true}) {
    const auto chain = [](Tensor t) {
      for (int i = 0; i < length; ++i) t = t.sin();
      return t;
    };
    remat::MemoryMeter meter;
    Tensor h = x;
    for (int i = 0; i < regions; ++i) h = is_checkpointed ? remat::checkpoint(chain, h) : chain(h);
    h = h.sum();
    meter.reset_peak();
    h.backward();
    peaks[is_checkpointed] = meter.peak().count;
    h = Tensor();
    left[is_checkpointed] = meter.current().count;
    x.mutable_grad() = Tensor();
  }
  CHECK(left[true] == left[false]);
  CHECK(peaks[false] >= regions * length * bytes - bytes);
  CHECK(peaks[true] <= (regions + length + 3) * bytes);
}

// LEAK-4, NVIDIA/Megatron-LM#6339
TEST_CASE("gradients of inner tensors are gone after backward") {
  WeakTensor gradient = weak(torch::zeros({1}));
  auto x = torch::randn({10}, torch::requires_grad());
  {
    Tensor inner;
    auto y = remat::checkpoint(
        [&](const Tensor& t) {
          inner = t.sin();
          inner.register_hook([&](const Tensor& g) {
            gradient = weak(g);
            return g;
          });
          return inner.exp().tanh();
        },
        x);
    y.sum().backward();
  }
  CHECK(gradient.expired());
  x.mutable_grad() = Tensor();
}

TEST_CASE("a graph that is dropped before, in the middle of, or after its backward leaves no bytes") {
  for (const int kind : {0, 1, 2, 3, 4}) {
    CAPTURE(kind);
    remat::MemoryMeter meter;
    {
      nn::Sequential net(nn::Linear(16, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.5), nn::Linear(16, 16));
      auto x = torch::randn({8, 16}, torch::requires_grad());
      Tensor inner;
      auto [a, b] = remat::checkpoint(
          [&](const Tensor& t) {
            inner = net->forward(t).sin();
            return std::make_pair(remat::checkpoint([](const Tensor& s) { return s.exp().sin(); }, inner), inner.cos());
          },
          x);
      if (kind == 1) torch::autograd::grad({a.sum()}, {inner});
      if (kind == 2) torch::autograd::grad({b.sum()}, {x}, {}, /*retain_graph=*/true);
      if (kind == 3) torch::autograd::grad({a.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true);
      if (kind == 4) (a + b).sum().backward();
    }
    CHECK(meter.current().count == 0);
  }
}

TEST_CASE("a retained backward in which only a part is needed leaves the bytes that it found") {
  const compare::DropEverything drop;
  auto x = torch::randn({1000}, torch::requires_grad());
  auto [a, b] = remat::checkpoint(
      [](const Tensor& t) {
        auto h = t.sin().cos();
        return std::make_pair(h.exp().sin(), h.tanh().cos());
      },
      x);
  remat::MemoryMeter meter;
  for (int i = 0; i < 3; ++i) {
    torch::autograd::grad({a.sum()}, {x}, {}, /*retain_graph=*/true);
    torch::autograd::grad({b.sum()}, {x}, {}, /*retain_graph=*/true);
    CHECK(meter.current().count == 0);
  }
}

TEST_CASE("a tensor that a region made and its user dropped does not stay when nothing needs it") {
  const compare::DropEverything drop;
  auto x = torch::randn({1000}, torch::requires_grad());
  remat::MemoryMeter meter;
  Tensor y;
  {
    auto [big, small] = remat::checkpoint(
        [](const Tensor& t) {
          auto h = t.repeat({100});
          return std::make_pair(h + 1, t.sin().exp());
        },
        x);
    y = small;
  }
  CHECK(meter.current().count == 4000);
}

TEST_CASE("temporaries of a region do not raise forward's peak above plain's") {
  auto x = torch::randn({10000}, torch::requires_grad());
  std::int64_t peaks[2];
  for (const bool is_checkpointed : {false, true}) {
    const auto program = [](Tensor t) {
      for (int i = 0; i < 20; ++i) {
        t = t + 1;
        t = t * 2 - t.detach() * 0.5;
        t.add_(t.detach().cos());
        torch::NoGradGuard no_grad;
        (t * 3).sin();
      }
      return t;
    };
    remat::MemoryMeter meter;
    auto y = is_checkpointed ? remat::checkpoint(program, x) : program(x);
    peaks[is_checkpointed] = meter.peak().count;
  }
  CHECK(peaks[true] <= peaks[false]);
}

}  // namespace leaks_test
}  // namespace
