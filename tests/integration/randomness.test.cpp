// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

namespace {
namespace randomness_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// RNG-1, allenai/OLMo-core#828
TEST_CASE("gradients belong to the forward's dropout mask") {
  expect_same([](Run& run) {
    auto x = torch::ones({10000}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return torch::dropout(t * 1, 0.5, true) * 1; }, x);
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
    CHECK(torch::equal(x.grad(), y.detach()));
  });
}

TEST_CASE("Dropout2d, AlphaDropout, FeatureAlphaDropout and stochastic depth use the forward's masks") {
  expect_same([](Run& run) {
    nn::Dropout2d dropout2d(0.4);
    nn::AlphaDropout alpha(0.3);
    nn::FeatureAlphaDropout feature(0.3);
    auto x = torch::randn({8, 6, 3, 3}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto keep = torch::empty({t.size(0), 1, 1, 1}).bernoulli_(0.5) / 0.5;
          return (feature(alpha(dropout2d(t.sin()).exp())) * keep).tanh() + t;
        },
        x);
    run.generator("after forward");
    y.sum().backward();
    run.generator("after backward");

    run.note("y", y);
    run.gradient("x", x);
  });
}

// RNG-2, pytorch/pytorch#14253
TEST_CASE("the numbers drawn after a step, and the next step's loss, are plain's") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(6, 6), nn::Dropout(0.5), nn::ReLU(), nn::Linear(6, 1));
    for (int step = 0; step < 2; ++step) {
      auto loss = run.wrap([&](const Tensor& t) { return net->forward(t); }, torch::randn({4, 6})).pow(2).sum();
      run.generator("after forward");
      loss.backward();
      run.note("loss", loss);
      run.note("drawn", torch::rand({4}));
    }
    run.module("net", *net);
  });
}

TEST_CASE("every way of drawing numbers inside a region is repeated in backward") {
  expect_same([](Run& run) {
    auto x = torch::rand({40}, torch::requires_grad());

    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin() * torch::rand_like(t);
          h = h * torch::randn_like(h).abs() + torch::randint_like(h, 3);
          h = (h * torch::bernoulli(t.detach())).exp();
          h = h * torch::empty_like(h).exponential_() + torch::zeros_like(h).normal_(0, 2);
          h = h + torch::randn({40}) * torch::rand({40}) + torch::randperm(40).to(torch::kFloat) / 40;
          h = h * torch::normal(0.0, 1.0, {40}) + torch::poisson(t.detach() * 3);
          h = h + at::normal(t.detach(), 0.5) * h.tanh();
          h = h * torch::multinomial(t.detach(), 40, true).to(torch::kFloat).cos();
          h = torch::rrelu(h, 0.1, 0.4, true).sigmoid();
          auto noise = torch::_standard_gamma(t.detach() + 1);
          return (h * noise).tanh() + nn::functional::gumbel_softmax(t * h, nn::functional::GumbelSoftmaxFuncOptions().dim(0).tau(0.5));
        },
        x);
    run.generator("after forward");
    y.sum().backward();

    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("the pathwise gradients of random operations equal plain's") {
  expect_same([](Run& run) {
    auto alpha = (torch::rand({20}) + 0.5).requires_grad_();

    auto y = run.wrap(
        [](const Tensor& t) {
          auto a = torch::_standard_gamma(t.exp());
          return (a.log() * torch::_sample_dirichlet(t.detach().abs() + 1)).tanh();
        },
        alpha);
    y.sum().backward();

    run.note("y", y);
    run.gradient("alpha", alpha);
  });
}

TEST_CASE("a generator of the user's own is where plain would have left it, and its masks are repeated") {
  expect_same([](Run& run) {
    auto generator = at::detail::createCPUGenerator(42);
    auto x = torch::ones({200}, torch::requires_grad());

    auto y = run.wrap(
        [&](const Tensor& t) {
          auto mask = torch::empty_like(t).bernoulli_(0.5, generator);
          auto more = torch::bernoulli(t.detach() * 0.25, generator);
          return (t * mask).exp() * more.add(1) * torch::rand({200}, generator);
        },
        x);
    run.note("generator after forward", remat::detail::state_of(generator));
    y.sum().backward();

    run.note("generator after backward", remat::detail::state_of(generator));
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("a seed that is set inside a region takes effect as in plain") {
  expect_same([](Run& run) {
    auto x = torch::ones({100}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto a = torch::dropout(t.sin(), 0.5, true);
          torch::manual_seed(99);
          auto b = torch::dropout(t.cos(), 0.5, true);
          torch::manual_seed(99);
          return (a.exp() * b).tanh() + torch::dropout(t, 0.5, true);
        },
        x);
    run.generator("after forward");
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("random numbers drawn between forward and backward do not reach the recompute") {
  expect_same([](Run& run) {
    auto x = torch::ones({100}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return torch::dropout(t.sin(), 0.5, true).exp(); }, x);
    run.note("between", torch::randn({3}));
    torch::manual_seed(5);
    run.note("reseeded", torch::randn({3}));
    y.sum().backward();
    run.gradient("x", x);
  });
}

TEST_CASE("a region in which random operations follow each other without a draw keeps one state") {
  auto x = torch::ones({10}, torch::requires_grad());
  remat::MemoryMeter meter;
  auto y = remat::checkpoint(
      [](const Tensor& t) {
        auto h = t.sin();
        for (int i = 0; i < 50; ++i) h = torch::dropout(h, 0.5, false).cos();  // draws nothing in eval mode
        return h;
      },
      x);
  CHECK(meter.current().count < 4096);
}

}  // namespace randomness_test
}  // namespace
