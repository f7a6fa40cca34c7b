// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <vector>

namespace {
namespace buffers_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// BUF-1, pytorch/pytorch#62471
TEST_CASE("one training step moves batch norm's statistics once") {
  expect_same([](Run& run) {
    nn::BatchNorm2d norm(nn::BatchNorm2dOptions(3).momentum(0.1));
    auto x = (torch::arange(96, torch::kFloat) / 10).reshape({2, 3, 4, 4}).requires_grad_();

    auto y = run.wrap([&](const Tensor& t) { return norm(t); }, x);
    y.pow(2).sum().backward();

    run.gradient("x", x);
    run.module("norm", *norm);
    CHECK(norm->running_mean[0].item<float>() == doctest::Approx(0.315));
    CHECK(norm->running_var[0].item<float>() == doctest::Approx(1.51652));
    CHECK(norm->num_batches_tracked.item<std::int64_t>() == 1);
  });
}

// BUF-2, facebookresearch/fairscale#1035
TEST_CASE("statistics are plain's right after forward, backward leaves them, and a forward alone is enough") {
  expect_same([](Run& run) {
    nn::BatchNorm1d norm(4);
    auto x = torch::randn({6, 4}, torch::requires_grad());

    auto y = run.wrap([&](const Tensor& t) { return norm(t).tanh(); }, x);
    run.buffers("norm after forward", *norm);
    y.sum().backward();
    run.buffers("norm after backward", *norm);
    run.wrap([&](const Tensor& t) { return norm(t + 1).tanh(); }, x);
    run.buffers("norm after a forward alone", *norm);
  });
}

// BUF-3, open-mmlab/mmdetection#577
TEST_CASE("checkpointing changes no module's mode, and frozen statistics stay bit-identical") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Conv2d(3, 4, 3), nn::BatchNorm2d(4), nn::ReLU(), nn::Conv2d(4, 4, 3), nn::BatchNorm2d(4));
    net->train();
    auto& frozen = *net[1]->as<nn::BatchNorm2d>();
    frozen.eval();
    const auto mean = frozen.running_mean.clone(), var = frozen.running_var.clone();

    for (int step = 0; step < 2; ++step) {
      run.wrap([&](const Tensor& t) { return net->forward(t); }, torch::randn({2, 3, 8, 8})).sum().backward();
      CHECK_FALSE(frozen.is_training());
      CHECK(net[4]->is_training());
      CHECK(torch::equal(frozen.running_mean, mean));
      CHECK(torch::equal(frozen.running_var, var));
    }
    run.module("net", *net);
  });
}

// BUF-4, pytorch/pytorch#22095
TEST_CASE("three views through one network before one backward equal plain and count three batches") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Conv2d(3, 4, 3), nn::BatchNorm2d(4), nn::ReLU(), nn::Conv2d(4, 2, 3), nn::BatchNorm2d(2));
    auto views = torch::randn({3, 2, 3, 8, 8}, torch::requires_grad());

    Tensor sum = torch::zeros({});
    for (int view = 0; view < 3; ++view)
      sum = sum + run.wrap([&](const Tensor& t) { return net->forward(t); }, views[view]).tanh().sum();
    sum.backward();

    run.gradient("views", views);
    run.module("net", *net);
    CHECK(net[1]->as<nn::BatchNorm2d>()->num_batches_tracked.item<std::int64_t>() == 3);
  });
}

TEST_CASE("batch norm with no momentum averages as in plain") {
  expect_same([](Run& run) {
    nn::BatchNorm2dOptions options(3);
    options.momentum() = {};
    nn::BatchNorm2d norm(options);
    for (int step = 0; step < 3; ++step) {
      auto x = torch::randn({2, 3, 4, 4}, torch::requires_grad());
      run.wrap([&](const Tensor& t) { return norm(t).sigmoid(); }, x).sum().backward();
      run.gradient("x", x);
    }
    run.module("norm", *norm);
    CHECK(norm->num_batches_tracked.item<std::int64_t>() == 3);
  });
}

TEST_CASE("batch norm without statistics, without affine, and in eval mode with grad equal plain") {
  expect_same([](Run& run) {
    nn::BatchNorm2d bare(nn::BatchNorm2dOptions(3).track_running_stats(false).affine(false));
    nn::BatchNorm2d fixed(3);
    fixed->running_mean.normal_();
    fixed->running_var.uniform_(0.5, 2);
    fixed->eval();
    auto x = torch::randn({2, 3, 4, 4}, torch::requires_grad());

    run.wrap([&](const Tensor& t) { return fixed(bare(t.sin())).exp(); }, x).sum().backward();

    run.gradient("x", x);
    run.module("fixed", *fixed);
  });
}

TEST_CASE("a batch norm that is called twice inside a region, in two modes, equals plain") {
  expect_same([](Run& run) {
    nn::BatchNorm1d norm(4);
    auto x = torch::randn({6, 4}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto a = norm(t);
          norm->eval();
          auto b = norm(t.sin()).cos();  // reads the statistics that the call before wrote
          norm->train();
          auto c = norm(a + b);
          norm->eval();
          auto d = norm(c).tanh();
          norm->train();
          return d;
        },
        x);
    // Plain's second eval-mode backward reads statistics that were moved without a version: compare the sound part.
    run.note("y", y);
    run.buffers("norm", *norm);
    run.generator("after forward");
  });
}

TEST_CASE("statistics that later training overwrites do not disturb an eval-mode region's recompute") {
  expect_same([](Run& run) {
    nn::BatchNorm1d norm(4);
    auto x = torch::randn({6, 4}, torch::requires_grad());
    // Statistics read by ordinary operations that save nothing of them in plain.
    auto y = run.wrap([&](const Tensor& t) { return (t + norm->running_mean).sin() - norm->running_var; }, x);
    run.wrap([&](const Tensor& t) { return norm(t); }, torch::randn({6, 4}) + 3).sum().backward();
    y.sum().backward();
    run.gradient("x", x);
    run.module("norm", *norm);
  });
}

TEST_CASE("instance norm with statistics equals plain, buffers included") {
  expect_same([](Run& run) {
    nn::InstanceNorm2d norm(nn::InstanceNorm2dOptions(3).track_running_stats(true).affine(true));
    for (int step = 0; step < 2; ++step) {
      auto x = torch::randn({2, 3, 4, 4}, torch::requires_grad());
      run.wrap([&](const Tensor& t) { return norm(t.sin()).sigmoid(); }, x).sum().backward();
      run.gradient("x", x);
    }
    norm->eval();
    auto x = torch::randn({2, 3, 4, 4}, torch::requires_grad());
    run.wrap([&](const Tensor& t) { return norm(t.sin()).sigmoid(); }, x).sum().backward();
    run.gradient("x", x);
    run.module("norm", *norm);
  });
}

/// A linear layer whose weight is divided by its largest singular value, which a buffer follows by power iteration.
struct SpectralLinear : nn::Module {
  Tensor weight, u;
  SpectralLinear() {
    weight = register_parameter("weight", torch::randn({5, 4}));
    u = register_buffer("u", torch::randn({5}));
  }
  Tensor forward(const Tensor& x) {
    Tensor v;
    {
      torch::NoGradGuard no_grad;
      v = nn::functional::normalize(weight.t().mv(u), nn::functional::NormalizeFuncOptions().dim(0));
      u.copy_(nn::functional::normalize(weight.mv(v), nn::functional::NormalizeFuncOptions().dim(0)));
    }
    auto sigma = u.clone().dot(weight.mv(v));
    return torch::tanh(x.mm((weight / sigma).t()));
  }
};

TEST_CASE("a power iteration under no_grad runs once per forward and gradients use the vector of its time") {
  expect_same([](Run& run) {
    SpectralLinear layer;
    auto x = torch::randn({3, 4}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return layer.forward(t); }, x);
    auto z = run.wrap([&](const Tensor& t) { return layer.forward(t.sin()); }, x);
    run.buffers("layer after forward", layer);
    (y * z).sum().backward();
    run.gradient("x", x);
    run.module("layer", layer);
  });
}

TEST_CASE("moving averages and counters that a region updates are plain's") {
  expect_same([](Run& run) {
    auto average = torch::zeros({4});
    auto count = torch::zeros({}, torch::kLong);
    auto momentum = torch::randn({4});
    auto x = torch::randn({6, 4}, torch::requires_grad());

    Tensor total = torch::zeros({});
    for (int i = 0; i < 3; ++i)
      total = total + run.wrap(
                          [&](const Tensor& t) {
                            auto h = (t - average).tanh();  // plain saves nothing of the average
                            {
                              torch::NoGradGuard no_grad;
                              average.mul_(0.9).add_(h.mean(0), 0.1);
                              momentum.lerp_(average, 0.5);
                            }
                            count.add_(1);
                            return (h + average + momentum).sin() / count.to(torch::kFloat);
                          },
                          x)
                          .sum();
    total.backward();

    run.note("average", average);
    run.note("momentum", momentum);
    run.note("count", count);
    run.count("version of average", average._version());
    run.count("version of count", count._version());
    run.gradient("x", x);
  });
}

TEST_CASE("a teacher that is updated inside a region from the student equals plain") {
  expect_same([](Run& run) {
    nn::Linear student(4, 4), teacher(4, 4);
    for (auto& p : teacher->parameters()) p.set_requires_grad(false);
    auto x = torch::randn({3, 4}, torch::requires_grad());

    auto step = [&](const Tensor& t) {
      Tensor target;
      {
        torch::NoGradGuard no_grad;
        for (std::size_t i = 0; i < 2; ++i) teacher->parameters()[i].mul_(0.9).add_(student->parameters()[i], 0.1);
        target = teacher(t);
      }
      return (student(t).tanh() - target).pow(2);
    };
    auto y = run.wrap(step, x) + run.wrap(step, x.sin());
    y.sum().backward();

    run.gradient("x", x);
    run.module("student", *student);
    for (const auto& item : teacher->named_parameters()) run.note(item.key(), item.value());
  });
}

TEST_CASE("no version counter of a buffer moves in backward, so that another graph's saved tensors stay valid") {
  expect_same([](Run& run) {
    nn::BatchNorm1d norm(4);
    auto x = torch::randn({6, 4}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return norm(t).tanh(); }, x);
    auto other = (x * norm->running_mean).sum();  // saves the buffer
    const auto version = norm->running_mean._version();

    y.sum().backward();

    CHECK(norm->running_mean._version() == version);
    other.backward();
    run.gradient("x", x);
    run.module("norm", *norm);
  });
}

TEST_CASE("buffers written in the forward by other kinds of state equal plain's") {
  expect_same([](Run& run) {
    nn::Embedding embedding(nn::EmbeddingOptions(10, 4).max_norm(1.0));
    {
      torch::NoGradGuard no_grad;
      embedding->weight.mul_(5);
    }
    auto history = torch::zeros({3, 4});
    auto ids = torch::tensor({1, 5, 1});

    auto y = run.wrap(
        [&](const Tensor& i) {
          auto h = embedding(i).tanh();
          history.copy_(h.detach());
          return (h * 2 + history).sin();
        },
        ids);
    y.sum().backward();

    run.note("history", history);
    run.note("weight", embedding->weight);
    run.module("embedding", *embedding);
  });
}

}  // namespace buffers_test
}  // namespace
