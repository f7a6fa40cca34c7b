// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <tuple>
#include <vector>

namespace {
namespace in_place_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// INPLACE-1, hpcaitech/ColossalAI#1510
TEST_CASE("a region that starts with an in-place relu gives plain's mask and leaves its input as plain does") {
  expect_same([](Run& run) {
    auto x = torch::randn({20}, torch::requires_grad());
    auto h = x * 1;

    auto y = run.wrap([](Tensor t) { return t.relu_(); }, h);
    y.sum().backward();

    run.note("h", h);
    run.count("version of h", h._version());
    run.gradient("x", x);
    CHECK(torch::equal(x.grad(), (x > 0).to(torch::kFloat)));
  });
}

// INPLACE-1, the clone that cures nothing
TEST_CASE("an input that is doubled in place and squared at 3 has the gradient 24") {
  expect_same([](Run& run) {
    auto x = torch::full({1}, 3.0, torch::requires_grad());
    auto h = x * 1;

    auto y = run.wrap([](Tensor t) { return t.mul_(2).square(); }, h);
    y.backward();

    run.note("h", h);
    run.gradient("x", x);
    CHECK(x.grad().item<float>() == 24.0f);
  });
}

// INPLACE-2, pytorch/pytorch#26546
TEST_CASE("instance norm followed by an in-place relu at the end of a region keeps its gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({3, 2, 5}, torch::requires_grad());
    nn::InstanceNorm1d norm(2);

    auto y = run.wrap([&](const Tensor& t) { return norm(t).relu_(); }, x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    CHECK(x.grad().defined());
  });
}

// INPLACE-3
TEST_CASE("an input that is filled between forward and backward is an error, never another gradient") {
  auto x = torch::full({1}, 3.0, torch::requires_grad());
  auto h = x * 1;
  auto y = remat::checkpoint([](const Tensor& t) { return t.square(); }, h);
  {
    torch::NoGradGuard no_grad;
    h.fill_(5);
  }
  CHECK_THROWS_AS(y.backward(), remat::RecomputeError);
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("chains of in-place operations on tensors made inside give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t * w;
          h.add_(1).clamp_(-1.5, 1.5);
          h.sigmoid_();
          auto g = h.clone();
          g.mul_(w);
          g.slice(1, 0, 3).mul_(h.slice(1, 3, 6).exp());
          g.select(0, 2).copy_(w.sin());
          return torch::leaky_relu_(g.sub_(h.detach()), 0.1).mul(w).tanh_();
        },
        x);
    y.pow(2).sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("writes through views of values made inside give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 6}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          auto view = h.t().view({-1, 2, 2}).select(2, 1);
          view.mul_(3);
          auto z = h.exp();
          h.diagonal().zero_();
          h.unfold(1, 2, 2).select(2, 0).add_(t.slice(1, 0, 3).cos());
          auto squared = h.pow(2);
          return squared + z;
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("index_put_, masked_fill_, scatter_ and index_add_ inside give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({5, 5}, torch::requires_grad());
    auto rows = torch::tensor({0, 2, 4});

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t * 2;
          h.index_put_({rows}, t.index({rows}).sin());
          h.masked_fill_(t > 1, 0.5);
          auto s = torch::zeros({5, 5}).scatter_(1, (t.detach().abs() * 2).to(torch::kLong).clamp(0, 4), h.tanh());
          s.index_add_(0, rows, h.index({rows}));
          return (s * h).cumsum(0);
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a fill through an expanded view writes only what it covers") {
  expect_same([](Run& run) {
    auto x = torch::randn({4}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          h.detach().slice(0, 0, 1).expand({4}).fill_(0.25);  // as many elements as the storage has, but one of them four times
          return (h * 2).sin();
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a result may be edited in place by plain code when plain allows it") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());

    auto [y, z] = run.wrap(
        [](const Tensor& t) {
          auto h = t * 3;
          return std::make_tuple(h, (h + 1).sin());
        },
        x);
    y.add_(1);
    y.mul_(2);
    (y.sum() + z.sum()).backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a small result may be edited in place by plain code when plain allows it") {
  expect_same([](Run& run) {
    auto x = torch::randn({1000}, torch::requires_grad());

    auto [mean, z] = run.wrap(
        [](const Tensor& t) {
          auto m = t.mean();
          return std::make_tuple(m, (t + m).sin());
        },
        x);
    mean.add_(1);
    (mean + z.sum()).backward();

    run.note("mean", mean);
    run.gradient("x", x);
  });
}

TEST_CASE("a result that a policy keeps may be edited in place by plain code when plain allows it") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 4}, torch::requires_grad());
    auto w = torch::randn({4, 4}, torch::requires_grad());

    auto [h, z] = run.wrap_keeping(
        remat::keep::convolutions_and_matmuls{},
        [&](const Tensor& t) {
          auto product = t.mm(w);
          return std::make_tuple(product, (product + 1).sin().exp());
        },
        x);
    h.mul_(2);
    (h.sum() + z.sum()).backward();

    run.note("h", h);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a result that plain saved and that is edited in place is an error in both") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return t.sin().exp(); }, x);
    y.mul_(2);
    run.throws("backward", [&] { y.sum().backward(); });
    run.gradient("x", x);
  });
}

TEST_CASE("the next region may edit a region's result in place when plain allows it") {
  expect_same([](Run& run) {
    auto x = torch::randn({2, 3, 4, 4}, torch::requires_grad());
    nn::Conv2d first(nn::Conv2dOptions(3, 3, 3).padding(1)), second(nn::Conv2dOptions(3, 3, 3).padding(1));

    auto h = run.wrap([&](const Tensor& t) { return first(t.relu()); }, x);
    auto y = run.wrap([&](Tensor t) { return second(t.relu_()).mul_(2); }, h);
    auto z = run.wrap([](Tensor t) { return t.add_(1).sigmoid_(); }, y);
    z.sum().backward();

    run.note("h", h);
    run.note("z", z);
    run.gradient("x", x);
    run.module("first", *first);
    run.module("second", *second);
  });
}

TEST_CASE("views that a region returns may be edited later, and the base sees it") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 6}, torch::requires_grad());

    auto [base, left, right] = run.wrap(
        [](const Tensor& t) {
          auto h = t * 2;
          auto keeps = (h + 1).tanh().sum();
          auto halves = h.chunk(2, 1);
          return std::make_tuple(h + keeps, h.narrow(1, 0, 3), h.select(1, 5));
        },
        x);
    left.mul_(3);
    right.add_(1);
    (base.sum() + left.pow(2).sum() + right.exp().sum()).backward();

    run.note("left", left);
    run.note("right", right);
    run.gradient("x", x);
  });
}

TEST_CASE("a view of the input that a region returns is a view of the input") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 6}, torch::requires_grad());
    auto h = x * 1;

    auto view = run.wrap([](const Tensor& t) { return t.t().slice(0, 1, 3); }, h);
    CHECK(view.is_alias_of(h));
    view.mul_(5);
    (h.pow(2).sum() + view.sum()).backward();

    run.note("h", h);
    run.gradient("x", x);
  });
}

TEST_CASE("an input that is edited inside after it was read gives plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto h = x * 1;

    auto y = run.wrap(
        [](Tensor t) {
          auto a = (t + 1).sin();  // needs the input as it was
          t.mul_(2);
          auto b = (t + 2).cos();  // as it is now
          t.add_(a.detach());
          return a * b + (t * 3).exp();
        },
        h);
    run.count("version of h", h._version());
    y.sum().backward();

    run.note("h", h);
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a leaf edited inside under no_grad after it was read gives plain's gradient when plain saved nothing of it") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = (t + w).sin();
          {
            torch::NoGradGuard no_grad;
            w.mul_(0.5);
          }
          return (h + w).exp();
        },
        x);
    y.sum().backward();

    run.note("w", w);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a tensor that one region read and a later region edits gives plain's gradients") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto state = torch::randn({6});

    auto a = run.wrap([&](const Tensor& t) { return ((t + state).sin() + state).exp(); }, x);
    auto b = run.wrap(
        [&](const Tensor& t) {
          state.add_(1);
          return ((t + state).cos() + state).tanh();
        },
        x);
    auto c = run.wrap([&](const Tensor& t) { return (t + state.mul_(2)).sin(); }, x);
    (a * b * c).sum().backward();

    run.note("state", state);
    run.count("version of state", state._version());
    run.gradient("x", x);
  });
}

TEST_CASE("operations over lists of tensors, in place too, give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 4}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          // Detached: LibTorch 1.13 has no gradients for these.
          std::vector<Tensor> parts{(t * 2).detach(), t.sin().detach(), (t + 1).detach()};
          torch::_foreach_mul_(parts, 0.5);
          auto more = torch::_foreach_exp(parts);
          auto base = t * 3;
          torch::_foreach_add_({base.detach().select(0, 0), base.detach().select(0, 1)}, 1.0);  // two views of one storage
          return (t * parts[0] * more[1]).sin() + (more[2] * base).cos() + (t * torch::cat({parts[1], more[0]}, 1).sum(1)).exp();
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("empty tensors and tensors without dimensions give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({0, 3}, torch::requires_grad());
    auto s = torch::randn({}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t, const Tensor& u) {
          auto h = (t.sin() * u).exp().sin();
          return torch::cat({h.sum(0), (u.sin() * 2.5 + h.numel()).cos().reshape({1})});
        },
        x, s);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
    run.gradient("s", s);
  });
}

TEST_CASE("out= variants inside give plain's values and gradients") {
  expect_same([](Run& run) {
    auto x = torch::randn({3, 3}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          auto scratch = torch::empty({3, 3});
          torch::exp_out(scratch, h.detach());
          auto late = torch::empty({0});
          torch::mm_out(late, scratch, h.detach());
          return (h * scratch + late).tanh();
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("tensors resized or pointed elsewhere inside give plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({8}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          auto scratch = h.detach().exp();
          scratch.resize_({4});
          auto other = torch::zeros({8});
          other.set_(h.detach().cos());
          auto copy = h.detach().clone();
          copy.set_data(h.detach().tan());
          return h.slice(0, 0, 4) * scratch + (other * h + copy).exp().slice(0, 0, 4);
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a value edited through detach or data gives plain's gradient") {
  expect_same([](Run& run) {
    auto x = torch::randn({8}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t * 2;
          h.data().clamp_(-1, 1);
          auto g = h + 1;
          {
            torch::NoGradGuard no_grad;
            g.detach().mul_(0.5);
          }
          return (h * 3).sin() + (g + h).exp();
        },
        x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a result edited through data() after the region does not disturb other gradients") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());

    auto [h, z] = run.wrap(
        [](const Tensor& t) {
          auto scaled = t * 3;
          return std::make_tuple(scaled, (scaled + 1).sin().exp());
        },
        x);
    h.data().zero_();
    z.sum().backward();

    run.gradient("x", x);
  });
}

TEST_CASE("one region edits the result of another region whose backward still needs it recomputed") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());

    auto [h, z] = run.wrap(
        [](const Tensor& t) {
          auto scaled = t * 3;
          return std::make_tuple(scaled, (scaled + 1).sin());
        },
        x);
    auto y = run.wrap([](Tensor t) { return t.mul_(2).add_(1); }, h);
    (y.sum() + z.sum()).backward({}, /*retain_graph=*/true);
    run.gradient("x", x);
    z.sum().backward();
    run.gradient("x", x);
  });
}

}  // namespace in_place_test
}  // namespace
