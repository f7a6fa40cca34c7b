// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <string>
#include <tuple>
#include <vector>

namespace {
namespace changes_test {

namespace nn = torch::nn;
using compare::contains;
using compare::expect_same;
using compare::message_of;
using compare::Run;
using torch::Tensor;

/// Checks the four parts of a message: where, what with both versions, the cause, the cure.
void check_text(const std::string& text, const std::string& code, const std::string& tensor) {
  CAPTURE(text);
  CHECK(contains(text, "[" + code + "]"));
  CHECK(contains(text, "checkpoint \"checkpoint\""));
  CHECK(contains(text, tensor));
  CHECK(contains(text, "modified by an inplace operation"));
  CHECK(contains(text, "at version "));
  CHECK(contains(text, " in forward"));
  CHECK(contains(text, "optimizer step"));
  CHECK((contains(text, "clone") || contains(text, "remat::plain")));
}

// GRAD-2
TEST_CASE("a parameter that the recompute needs and that was edited is named with both versions, cause and cure") {
  auto w = torch::randn({3, 2}, torch::requires_grad());
  auto x = torch::randn({4, 3}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return (t + 1).mm(w).exp().sin(); }, x);
  {
    torch::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto text = message_of<remat::RecomputeError>([&] { y.sum().backward(); });
  check_text(text, "remat.recompute.changed", "[3, 2] float cpu");
  CHECK(contains(text, "aten::mm"));
  CHECK(contains(text, "at version 0 in forward and is at version 1 now"));
}

TEST_CASE("a parameter that was saved directly and edited is called a parameter, with both versions, cause and cure") {
  auto w = torch::randn({3, 2}, torch::requires_grad());
  auto x = torch::randn({4, 3}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return t.mm(w); }, x);
  {
    torch::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto text = message_of<remat::RecomputeError>([&] { y.sum().backward(); });
  check_text(text, "remat.recompute.saved_tensor_changed", "the parameter [3, 2] float cpu");
}

TEST_CASE("an input that was edited is an error wherever plain raises one") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 3}, torch::requires_grad());
    auto h = x * 1;
    auto y = run.wrap([](const Tensor& t) { return t.sin().exp(); }, h);
    h.mul_(2);
    run.throws("backward", [&] { y.sum().backward(); });
    run.gradient("x", x);
  });
}

TEST_CASE("a step of SGD between forward and backward is an error when the recompute needs the weight") {
  nn::Linear layer(4, 4);
  torch::optim::SGD sgd(layer->parameters(), 0.1);
  layer(torch::randn({2, 4})).sum().backward();
  auto x = torch::randn({2, 4}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return layer(t).tanh().sin(); }, x);
  sgd.step();
  CHECK_THROWS_AS(y.sum().backward(), remat::RecomputeError);
}

TEST_CASE("a step of SGD between forward and backward is an error when the weight was saved directly") {
  nn::Linear layer(4, 4);
  torch::optim::SGD sgd(layer->parameters(), 0.1);
  layer(torch::randn({2, 4})).sum().backward();
  auto x = torch::randn({2, 4}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return layer(t); }, x);
  sgd.step();
  CHECK_THROWS_AS(y.sum().backward(), remat::RecomputeError);
}

TEST_CASE("steps of AdamW, RMSprop and Adagrad between forward and backward are errors, as in plain") {
  const auto check = [](auto make) {
    expect_same([&](Run& run) {
      nn::Linear layer(4, 4);
      auto optimizer = make(layer->parameters());
      layer(torch::randn({2, 4})).sum().backward();
      auto x = torch::randn({2, 4}, torch::requires_grad());
      auto y = run.wrap([&](const Tensor& t) { return layer(t.sin()).tanh(); }, x);
      optimizer.step();
      run.throws("backward", [&] { y.sum().backward(); });
      CHECK_FALSE(x.grad().defined());
    });
  };
  check([](auto parameters) { return torch::optim::AdamW(parameters, 0.1); });
  check([](auto parameters) { return torch::optim::RMSprop(parameters, 0.1); });
  check([](auto parameters) { return torch::optim::Adagrad(parameters, 0.1); });
}

TEST_CASE("after the error the edit can be undone by loading the old weights into a new forward") {
  nn::Linear layer(4, 4);
  auto x = torch::randn({2, 4}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return layer(t).tanh(); }, x);
  {
    torch::NoGradGuard no_grad;
    layer->weight.add_(1);
  }
  CHECK_THROWS_AS(y.sum().backward(), remat::RecomputeError);
  remat::checkpoint([&](const Tensor& t) { return layer(t).tanh(); }, x).sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("train, eval, options and requires_grad changed between forward and backward raise no alarm") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Dropout(0.5), nn::Tanh(), nn::Linear(4, 2));
    auto x = torch::randn({3, 4}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);
    net->eval();
    net[1]->as<nn::BatchNorm1d>()->options.eps(1.0);
    net[2]->as<nn::Dropout>()->options.p(0.0);
    y.sum().backward();
    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("statistics moved by other batches between forward and backward raise no alarm") {
  expect_same([](Run& run) {
    nn::BatchNorm1d norm(4);
    auto x = torch::randn({3, 4}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return norm(t.sin()).exp(); }, x);
    norm(torch::randn({5, 4}));
    y.sum().backward();
    run.gradient("x", x);
    run.module("norm", *norm);
  });
}

TEST_CASE("an edit of another tensor in the same storage raises no alarm") {
  expect_same([](Run& run) {
    auto flat = torch::randn({20});
    auto first = flat.narrow(0, 0, 10).detach().requires_grad_();
    auto second = torch::empty({10}, torch::requires_grad());
    second.set_data(flat.narrow(0, 10, 10));  // a storage in common, version counters apart
    auto x = torch::randn({10}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return (t + first).sin() * first; }, x);
    second.data().add_(1);
    y.sum().backward();
    run.gradient("x", x);
    run.gradient("first", first);
  });
}

TEST_CASE("set_data on a weight between forward and backward does not reach the gradient of the old one") {
  auto w = torch::randn({3}, torch::requires_grad());
  auto x = torch::randn({3}, torch::requires_grad());
  auto y = remat::checkpoint([&](const Tensor& t) { return (t * w).sin(); }, x);
  const auto expected = ((x * w).cos() * w).detach();
  w.set_data(torch::zeros({3}));
  const auto error = message_of([&] { y.sum().backward(); });
  if (error.empty()) CHECK(torch::equal(x.grad(), expected));
  else CHECK(contains(error, "remat."));
}

TEST_CASE("the name that a region was given stands in its error, outermost first") {
  auto w = torch::randn({3}, torch::requires_grad());
  auto x = torch::randn({3}, torch::requires_grad());
  remat::detail::RegionOptions outer, inner;
  outer.name = "stage3";
  inner.name = "block2";
  auto y = remat::detail::run_region(
      outer,
      [&](const Tensor& t) {
        return remat::detail::run_region(inner, [&](const Tensor& s) { return (s + w).sin().exp(); }, t.cos()).tanh();
      },
      x);
  {
    torch::NoGradGuard no_grad;
    w.add_(1);
  }
  const auto text = message_of<remat::RecomputeError>([&] { y.sum().backward(); });
  CAPTURE(text);
  CHECK(contains(text, "checkpoint \"stage3 / block2\""));
}

TEST_CASE("the debug mode finds a write through a raw pointer and names the operation") {
  const compare::DropEverything drop;
  const compare::DebugMode debug;
  auto x = torch::randn({6}, torch::requires_grad());
  auto y = remat::checkpoint(
      [](const Tensor& t) {
        auto h = t.sin();
        h.data_ptr<float>()[2] = 7;  // nobody can see this
        return (h + 1).exp();
      },
      x);
  auto z = remat::checkpoint(
      [](const Tensor& t) {
        auto h = t.sin();
        h.data_ptr<float>()[2] = 7;
        return (h + 1).exp() * 2;
      },
      x);
  const auto text = message_of<remat::RecomputeError>([&] { z.sum().backward(); });
  CAPTURE(text);
  CHECK(contains(text, "[remat.recompute.differs]"));
  CHECK(contains(text, "aten::sin"));
  CHECK(contains(text, "raw pointer"));
  CHECK(contains(text, "remat::plain"));
}

TEST_CASE("the debug mode raises no alarm over the layers of torch::nn") {
  const compare::DropEverything drop;
  const compare::DebugMode debug;
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1).stride(2)), nn::BatchNorm2d(8), nn::ReLU(nn::ReLUOptions(true)),
                     nn::MaxPool2d(2), nn::Dropout(0.3), nn::ConvTranspose2d(8, 4, 2), nn::GroupNorm(2, 4), nn::SiLU(),
                     nn::AdaptiveAvgPool2d(2), nn::Flatten(), nn::Linear(16, 8), nn::LayerNorm(nn::LayerNormOptions({8})));
  nn::LSTM lstm(nn::LSTMOptions(8, 8).num_layers(2));
  auto x = torch::randn({2, 3, 16, 16}, torch::requires_grad());
  auto y = remat::checkpoint(
      [&](const Tensor& t) { return std::get<0>(lstm(net->forward(t).unsqueeze(0))).tanh().pow(2); }, x);
  y.sum().backward();
  CHECK(x.grad().defined());
}

TEST_CASE("tensors that factories made and a raw pointer filled are kept and right") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto table = torch::empty({6}), like = torch::zeros_like(t), fresh = torch::ones({6}).mul(2);
          for (std::int64_t i = 0; i < 6; ++i) {
            table.data_ptr<float>()[i] = static_cast<float>(i) / 3;
            like.data_ptr<float>()[i] = t.data_ptr<float>()[i] * 2;
          }
          std::vector<float> outside{1, 2, 3, 4, 5, 6};
          auto blob = torch::from_blob(outside.data(), {6}).clone();
          auto listed = torch::tensor({1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f});
          return ((t * table).sin() + like * fresh + blob).exp() * listed;
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("an operator outside aten is kept unless it was declared recomputable") {
  expect_same([](Run& run) {
    struct Twice : torch::autograd::Function<Twice> {
      static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& t) {
        context->save_for_backward({t});
        auto out = torch::empty_like(t);
        for (std::int64_t i = 0; i < t.numel(); ++i) out.data_ptr<float>()[i] = 2 * t.data_ptr<float>()[i] * t.data_ptr<float>()[i];
        return out;
      }
      static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list gradients) {
        return {4 * context->get_saved_variables()[0] * gradients[0]};
      }
    };
    auto x = torch::randn({6}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return (Twice::apply(t.sin()) + 1).exp(); }, x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

}  // namespace changes_test
}  // namespace
