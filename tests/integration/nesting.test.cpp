// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <functional>
#include <vector>

namespace {
namespace nesting_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// NEST-1, pytorch/pytorch#90105
TEST_CASE("three levels with dropout and batch norm in each equal plain and run user code once") {
  expect_same([](Run& run) {
    std::vector<nn::BatchNorm1d> norms;
    std::vector<nn::Linear> linears;
    for (int i = 0; i < 3; ++i) {
      norms.emplace_back(6);
      linears.emplace_back(6, 6);
    }
    int calls = 0;
    std::function<Tensor(const Tensor&, std::size_t)> level = [&](const Tensor& t, std::size_t depth) {
      ++calls;
      auto h = torch::dropout(norms[depth](linears[depth](t)).tanh(), 0.3, true);
      if (depth < 2) h = run.wrap(level, h, depth + 1);
      return (h * t).sin();
    };
    auto x = torch::randn({5, 6}, torch::requires_grad());

    auto y = run.wrap(level, x, std::size_t{0});
    run.generator("after forward");
    y.sum().backward();

    CHECK(calls == 3);
    run.note("y", y);
    run.gradient("x", x);
    for (std::size_t i = 0; i < 3; ++i) {
      run.module("norm", *norms[i]);
      run.module("linear", *linears[i]);
      CHECK(norms[i]->num_batches_tracked.item<std::int64_t>() == 1);
    }
  });
}

/// How often each operation may run again: once for each region around it.
TEST_CASE("an operation is recomputed at most once per level that encloses it") {
  const compare::DropEverything drop;
  auto x = torch::randn({50}, torch::requires_grad());
  const auto chain = [](Tensor t, int length) {
    for (int i = 0; i < length; ++i) t = t.sin();
    return t;
  };

  for (int depth = 1; depth <= 4; ++depth) {
    // Each level: 5 operations, then an inner region, then 5 operations.
    std::function<Tensor(const Tensor&, int)> level = [&](const Tensor& t, int inner) {
      auto h = chain(t, 5);
      if (inner > 0) h = remat::checkpoint(level, h, inner - 1);
      return chain(h, 5);
    };
    auto y = remat::checkpoint(level, x, depth - 1).sum();
    const auto recomputed = compare::recomputed_by([&] { y.backward(); });
    std::int64_t most = 0;
    for (int i = 1; i <= depth; ++i) most += 10 * i;
    CAPTURE(depth);
    CHECK(recomputed <= most);
    CHECK(recomputed >= 9);
  }
}

TEST_CASE("a chain of chains costs one more forward per level, however long it is") {
  const compare::DropEverything drop;
  for (const int count : {4, 16, 64}) {
    auto x = torch::randn({50}, torch::requires_grad());
    auto y = remat::checkpoint(
        [&](Tensor t) {
          for (int i = 0; i < count; ++i)
            t = remat::checkpoint([](const Tensor& s) { return s.sin().cos().sin().cos(); }, t);
          return t;
        },
        x);
    const auto recomputed = compare::recomputed_by([&] { y.sum().backward(); });
    CAPTURE(count);
    CHECK(recomputed <= 2 * 4 * count);
  }
}

TEST_CASE("a chain of chains holds one inner region's tensors at a time in backward") {
  const compare::DropEverything drop;
  constexpr std::int64_t bytes = 40000;
  constexpr int chains = 16, length = 10;
  auto x = torch::randn({bytes / 4}, torch::requires_grad());
  const auto run = [&](bool is_nested) {
    const auto inner = [](Tensor t) {
      for (int i = 0; i < length; ++i) t = t.sin();
      return t;
    };
    return remat::checkpoint(
        [&](Tensor t) {
          for (int i = 0; i < chains; ++i) t = is_nested ? remat::checkpoint(inner, t) : inner(t);
          return t;
        },
        x);
  };
  std::int64_t peaks[2];
  for (const bool is_nested : {false, true}) {
    auto y = run(is_nested).sum();
    remat::MemoryMeter meter;
    torch::autograd::grad({y}, {x});
    peaks[is_nested] = meter.peak().count;
  }
  CHECK(peaks[false] >= chains * (length - 1) * bytes);
  CHECK(peaks[true] <= (chains + length + 6) * bytes);
}

TEST_CASE("inner results that leave, views across levels and in-place edits across levels equal plain") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());
    Tensor leaked;
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t * w;
          auto [a, b] = run.wrap(
              [&](const Tensor& s) {
                auto u = (s + 1).sin();
                leaked = u.exp();
                auto v = (u * 2).cos();
                return std::make_pair(v.t(), u.slice(1, 0, 3));
              },
              h);
          auto edited = run.wrap([](Tensor s) { return s.mul_(3).add_(1); }, h);
          auto c = run.wrap([&](const Tensor& s) { return (s.t() * leaked).tanh() + edited.sin(); }, a);
          return (c.slice(1, 0, 3) * b).exp().sin() + h.slice(1, 3, 6).cos();
        },
        x);
    (y.sum() + leaked.sum()).backward();
    run.note("y", y);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("shared weights across levels, with a retained second backward, equal plain") {
  expect_same([](Run& run) {
    nn::Linear shared(5, 5);
    auto x = torch::randn({3, 5}, torch::requires_grad());
    std::int64_t hook_calls = 0;
    shared->weight.register_hook([&](const Tensor&) { ++hook_calls; });
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = shared(t).tanh();
          for (int i = 0; i < 3; ++i) h = run.wrap([&](const Tensor& s) { return torch::dropout(shared(s).sin(), 0.2, true); }, h);
          return shared(h).exp().sin();
        },
        x);
    y.sum().backward({}, /*retain_graph=*/true);
    y.sum().backward({}, /*retain_graph=*/true);
    y.pow(2).sum().backward();
    run.count("hook calls", hook_calls);
    run.gradient("x", x);
    run.module("shared", *shared);
  });
}

TEST_CASE("double backward through nested regions equals plain") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto w = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) { return run.wrap([&](const Tensor& s) { return (s * w).sin().exp() * s; }, (t * w).tanh()).cos(); }, x);
    auto g = torch::autograd::grad({y.sum()}, {x, w}, {}, true, /*create_graph=*/true);
    (g[0].norm() * g[1].sum().sin()).backward();
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("inner regions without grad, or with nothing to train, are part of the outer one") {
  expect_same([](Run& run) {
    nn::Linear layer(5, 5);
    auto x = torch::randn({3, 5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          Tensor fixed;
          {
            torch::NoGradGuard no_grad;
            fixed = run.wrap([&](const Tensor& s) { return layer(s).sigmoid(); }, t);
          }
          auto constant = run.wrap([](const Tensor& s) { return s.sin().exp(); }, torch::ones({5}) * 2);
          return (layer(t.sin()) * fixed).tanh() * (constant + 1).cos();
        },
        x);
    y.sum().backward();
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

// NEST-2, pytorch/pytorch#32005
TEST_CASE("a nested region that scales by a gradient norm touches no .grad") {
  expect_same([](Run& run) {
    nn::Embedding embedding(10, 5);
    nn::Linear head(5, 1);
    auto ids = torch::tensor({1, 3, 5});
    auto y = run.wrap(
        [&](const Tensor& i) {
          auto e = embedding(i);
          return run.wrap(
              [&](const Tensor& s) {
                auto score = head(s.tanh()).sum();
                auto g = torch::autograd::grad({score}, {s}, {}, /*retain_graph=*/true)[0];
                return head((s + g / g.norm()).sin());
              },
              e);
        },
        ids);
    CHECK_FALSE(head->weight.grad().defined());
    CHECK(at::GradMode::is_enabled());
    y.sum().backward();
    run.module("embedding", *embedding);
    run.module("head", *head);
  });
}

TEST_CASE("keep policies of nested regions hold together") {
  expect_same([](Run& run) {
    auto w = torch::randn({6, 6}, torch::requires_grad());
    auto x = torch::randn({4, 6}, torch::requires_grad());
    const remat::keep::convolutions_and_matmuls keeps;
    auto y = run.wrap_keeping(
        keeps,
        [&](const Tensor& t) {
          auto h = t.mm(w).tanh();
          h = run.wrap([&](const Tensor& s) { return s.mm(w).sin().mm(w); }, h);
          return run.wrap_keeping(keeps, [&](const Tensor& s) { return s.mm(w).exp().sin(); }, h * 0.1).mm(w).cos();
        },
        x);
    y.sum().backward({}, true);
    y.sum().backward();
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

}  // namespace nesting_test
}  // namespace
