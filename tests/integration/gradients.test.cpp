// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <vector>

namespace {
namespace gradients_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

nn::Sequential perceptron() {
  return nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 8), nn::GELU(), nn::Linear(8, 3));
}

TEST_CASE("backward gives inputs, parameters and captured tensors plain's gradients") {
  expect_same([](Run& run) {
    auto net = perceptron();
    auto x = torch::randn({5, 6}, torch::requires_grad());
    auto captured = torch::randn({5, 6}, torch::requires_grad());

    auto y = run.wrap([&](const Tensor& t) { return net->forward(t * captured) + captured.sum().sin(); }, x);
    run.note("y", y);
    y.pow(2).sum().backward();

    run.gradient("x", x);
    run.gradient("captured", captured);
    run.module("net", *net);
  });
}

// GRAD-2, bitsandbytes-foundation/bitsandbytes#2034
TEST_CASE("a parameter that was changed by hand between forward and backward is an error that says so") {
  auto w = torch::full({1}, 2.0, torch::requires_grad());
  auto x = torch::ones({1}, torch::requires_grad());

  auto y = remat::checkpoint([&](const Tensor& t) { return (w * t).pow(2); }, x);
  {
    torch::NoGradGuard no_grad;
    w.fill_(10);
  }

  CHECK_THROWS_AS(y.backward(), remat::RecomputeError);
  CHECK_FALSE(w.grad().defined());
}

// GRAD-3, pytorch/pytorch#11944
TEST_CASE("sixteen blocks of one weight, each used in its own region, all learn") {
  expect_same([](Run& run) {
    nn::Linear layer(nn::LinearOptions(12, 12).bias(false));
    auto x = torch::randn({2, 12}, torch::requires_grad());

    Tensor sum = torch::zeros({2, 3});
    for (int row = 0; row < 4; ++row)
      for (int column = 0; column < 4; ++column)
        sum = sum + run.wrap(
                        [&](const Tensor& t) {
                          const auto block = layer->weight.slice(0, 3 * row, 3 * row + 3).slice(1, 3 * column, 3 * column + 3);
                          return torch::tanh(t.slice(1, 3 * column, 3 * column + 3).mm(block.t()));
                        },
                        x);
    sum.pow(2).sum().backward();

    run.gradient("x", x);
    run.gradient("weight", layer->weight);
    CHECK(layer->weight.grad().count_nonzero().item<std::int64_t>() == 144);
  });
}

// GRAD-4, microsoft/FocalNet#4
TEST_CASE("a hook on a weight that two regions share fires once") {
  expect_same([](Run& run) {
    nn::Linear shared(4, 4);
    auto x = torch::randn({3, 4}, torch::requires_grad());
    std::int64_t hook_calls = 0;
    shared->weight.register_hook([&](const Tensor&) { ++hook_calls; });

    auto h = run.wrap([&](const Tensor& t) { return torch::tanh(shared(t)); }, x);
    auto y = run.wrap([&](const Tensor& t) { return torch::sigmoid(shared(t)); }, h);
    y.sum().backward();

    run.count("hook calls", hook_calls);
    CHECK(hook_calls == 1);
    run.gradient("x", x);
    run.module("shared", *shared);
  });
}

// GRAD-5, pytorch/pytorch#102223
TEST_CASE("autograd::grad gives what is asked for and fills no .grad") {
  expect_same([](Run& run) {
    nn::Linear layer(4, 3);
    auto x = torch::randn({2, 4}, torch::requires_grad());

    auto y = run.wrap([&](const Tensor& t) { return torch::tanh(layer(t)); }, x);
    const auto one = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
    const auto two = torch::autograd::grad({y.sum()}, {x, layer->weight});

    run.note("x alone", one[0]);
    run.note("x", two[0]);
    run.note("weight", two[1]);
    run.gradient("x", x);
    run.module("layer", *layer);
    CHECK_FALSE(layer->weight.grad().defined());
    CHECK_FALSE(layer->bias.grad().defined());
  });
}

// GRAD-6, pytorch/pytorch#33999
TEST_CASE("the gradient of a gradient of x cubed at 2 is 12") {
  expect_same([](Run& run) {
    auto x = torch::full({1}, 2.0, torch::requires_grad());

    auto y = run.wrap([](const Tensor& t) { return t * t * t; }, x);
    auto g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    g.backward();

    run.gradient("x", x);
    CHECK(x.grad().item<float>() == 12.0f);
  });
}

// GRAD-6, the mixed case
TEST_CASE("a gradient penalty through a captured weight gives 116") {
  expect_same([](Run& run) {
    auto w = torch::full({1}, 2.0, torch::requires_grad());
    auto x = torch::ones({1}, torch::requires_grad());

    auto y = run.wrap([&](const Tensor& t) { return (w * t).pow(2); }, x);
    auto g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    (y + (g - 1).pow(2)).backward();

    run.gradient("w", w);
    run.gradient("x", x);
    CHECK(w.grad().item<float>() == 116.0f);
  });
}

TEST_CASE("a gradient penalty over convolution, batch norm and dropout equals plain") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)), nn::BatchNorm2d(4), nn::SiLU(), nn::Dropout(0.3),
                       nn::Conv2d(nn::Conv2dOptions(4, 2, 3)));
    auto x = torch::randn({2, 3, 6, 6}, torch::requires_grad());

    auto y = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);
    auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    (y.sum() + (g.norm() - 1).pow(2)).backward();

    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("the third derivative equals plain's") {
  expect_same([](Run& run) {
    auto x = torch::randn({4}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return (t.sin() * t.exp()).tanh(); }, x).sum();

    for (int order = 1; order <= 3; ++order) {
      y = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0].sum();
      run.note("order " + std::to_string(order), y);
    }
  });
}

TEST_CASE("a second and a third backward over a retained graph give the same as plain's") {
  expect_same([](Run& run) {
    auto net = perceptron();
    auto x = torch::randn({5, 6}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return torch::dropout(net->forward(t), 0.5, true).exp(); }, x).sum();

    for (const bool retain : {true, true, false}) {
      y.backward({}, retain);
      run.gradient("x", x);
      run.module("net", *net);
    }
    run.throws("backward after the graph is freed", [&] { y.backward(); });
  });
}

TEST_CASE("a retained backward forgets what it recomputed") {
  const compare::DropEverything drop;
  remat::MemoryMeter meter;
  auto x = torch::randn({1000}, torch::requires_grad());
  auto y = remat::checkpoint([](const Tensor& t) { return t.sin().cos().exp().tanh(); }, x).sum();
  const auto before = meter.current();

  auto first = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0];
  first = Tensor();
  CHECK(meter.current() == before);

  std::int64_t recomputed = 0;
  auto second = torch::Tensor();
  recomputed = compare::recomputed_by([&] { second = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0]; });
  CHECK(recomputed == 3);
}

TEST_CASE("backward into a subset of the inputs equals plain and touches nothing else") {
  expect_same([](Run& run) {
    auto net = perceptron();
    auto a = torch::randn({5, 6}, torch::requires_grad());
    auto b = torch::randn({5, 6}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& s, const Tensor& t) { return net->forward(s.sin() * t.cos()); }, a, b).sum();

    y.backward({}, /*retain_graph=*/true, /*create_graph=*/false, std::vector<Tensor>{b});
    run.gradient("a", a);
    run.gradient("b", b);
    run.module("net", *net);
    y.backward({}, false, false, std::vector<Tensor>{a});
    run.gradient("a", a);
    run.gradient("b", b);
    CHECK_FALSE(net[0]->as<nn::Linear>()->weight.grad().defined());
  });
}

TEST_CASE("one of several results may be differentiated, then another") {
  expect_same([](Run& run) {
    auto x = torch::randn({7}, torch::requires_grad());
    auto [a, b, c] = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          auto g = h.exp();
          return std::make_tuple(h.cos(), g.tanh(), (h * g).sigmoid());
        },
        x);

    run.note("of b", torch::autograd::grad({b.sum()}, {x}, {}, /*retain_graph=*/true)[0]);
    run.note("of a", torch::autograd::grad({a.sum()}, {x}, {}, /*retain_graph=*/true)[0]);
    run.note("of c and a", torch::autograd::grad({c.sum(), a.sum()}, {x})[0]);
  });
}

TEST_CASE("a gradient with respect to a tensor inside the region equals plain's") {
  expect_same([](Run& run) {
    auto x = torch::randn({7}, torch::requires_grad());
    Tensor inner;
    auto y = run.wrap(
        [&](const Tensor& t) {
          inner = t.sin().exp();
          inner.retain_grad();
          return inner.tanh().pow(2);
        },
        x);

    run.note("of inner", torch::autograd::grad({y.sum()}, {inner}, {}, /*retain_graph=*/true)[0]);
    y.sum().backward();
    run.gradient("inner", inner);
    run.gradient("x", x);
  });
}

TEST_CASE("hooks on tensors inside, on inputs and on results fire as often as in plain and may change the gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({7}, torch::requires_grad());
    std::int64_t calls = 0;
    auto hook = [&](const Tensor& gradient) {
      ++calls;
      return gradient * 2;
    };
    auto h = x * 1;
    h.register_hook(hook);
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto inner = t.sin();
          inner.register_hook(hook);
          return inner.exp().cos();
        },
        h);
    y.register_hook(hook);

    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward();

    run.count("calls", calls);
    CHECK(calls == 6);
    run.gradient("x", x);
  });
}

// pytorch/pytorch#32005
TEST_CASE("a gradient asked for inside a region equals plain's and leaves grad mode and .grad alone") {
  expect_same([](Run& run) {
    nn::Linear layer(6, 6);
    auto x = torch::randn({3, 6}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t.sin().exp();
          auto out = layer(h.tanh());
          auto g = torch::autograd::grad({out.pow(2).sum()}, {h}, {}, /*retain_graph=*/true)[0];
          CHECK(at::GradMode::is_enabled());
          return (out * g.norm()).tanh() + h.cos();
        },
        x);
    run.module("layer before backward", *layer);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

TEST_CASE("a backward inside a region that frees part of the graph leaves the rest right") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto side = (w.sin() * w.exp()).tanh();
          side.sum().backward();  // frees the graph of `side`
          auto h = (t * w).sin().exp();
          return h.cos() + side.detach();
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a gradient with create_graph inside a region can be differentiated outside") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto energy = (t.sin() * w).exp().sum();
          return torch::autograd::grad({energy}, {t}, {}, true, /*create_graph=*/true)[0].tanh();
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a partial backward whose graph is then dropped leaves no bytes") {
  const compare::DropEverything drop;
  auto x = torch::randn({1000}, torch::requires_grad());
  remat::MemoryMeter meter;
  {
    auto [a, b] = remat::checkpoint(
        [](const Tensor& t) {
          auto h = t.sin().exp();
          return std::make_tuple(h.cos(), h.tanh().pow(2));
        },
        x);
    torch::autograd::grad({a.sum()}, {x});
  }
  CHECK(meter.current().count == 0);
}

TEST_CASE("losses over many regions accumulate as in plain over several steps of an optimizer") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(8, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.2), nn::Linear(16, 16), nn::GELU(), nn::Linear(16, 4));
    torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-2));
    for (int step = 0; step < 4; ++step) {
      adam.zero_grad();
      auto x = torch::randn({6, 8});
      auto first = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);
      auto second = run.wrap([&](const Tensor& t) { return net->forward(t + 1); }, x);
      auto loss = (first - second.detach()).pow(2).mean() + second.abs().mean();
      run.note("loss", loss);
      loss.backward();
      adam.step();
      run.generator("after a step");
    }
    run.module("net", *net);
    for (const auto& item : net->named_parameters()) run.note(item.key(), item.value());
  });
}

}  // namespace gradients_test
}  // namespace
