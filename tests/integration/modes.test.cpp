// SPDX-License-Identifier: MIT
#include "remat/libtorch/version.hpp"
#include "tests/support/compare.hpp"

#include <torch/script.h>

#include <iostream>
#include <sstream>
#include <vector>

namespace {
namespace modes_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

// MODE-1, facebookresearch/fairscale#709
TEST_CASE("with grad mode off a region is one plain call that keeps nothing") {
  const auto regions = remat::statistics().regions;
  auto x = torch::randn({100}, torch::requires_grad());
  int calls = 0;
  remat::MemoryMeter meter;
  torch::NoGradGuard no_grad;
  auto y = remat::checkpoint(
      [&](const Tensor& t) {
        ++calls;
        CHECK_FALSE(remat::detail::thread_state().tape);
        return t.sin().exp();
      },
      x);
  CHECK(calls == 1);
  CHECK_FALSE(y.requires_grad());
  CHECK(meter.current().count == 400);
  CHECK(remat::statistics().regions == regions);
}

TEST_CASE("in inference mode a region is a plain call whose results are inference tensors") {
  nn::Linear layer(4, 4);
  c10::InferenceMode guard;
  auto y = remat::checkpoint([&](const Tensor& t) { return layer(t).tanh(); }, torch::randn({2, 4}));
  CHECK(y.is_inference());
  CHECK_FALSE(y.requires_grad());
}

// MODE-1
TEST_CASE("a saliency map in eval mode with grad on equals plain") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Conv2d(3, 4, 3), nn::BatchNorm2d(4), nn::ReLU(), nn::Dropout(0.5), nn::Conv2d(4, 2, 3));
    net->forward(torch::randn({4, 3, 8, 8}));
    net->eval();
    auto x = torch::randn({2, 3, 8, 8}, torch::requires_grad());
    run.wrap([&](const Tensor& t) { return net->forward(t); }, x).max().backward();
    run.gradient("x", x);
    run.module("net", *net);
  });
}

// MODE-2, petko-nikolov/pysemseg#5
TEST_CASE("nothing is printed in eval mode and without grad") {
  std::ostringstream out;
  auto* const before = std::cerr.rdbuf(out.rdbuf());
  {
    nn::Sequential net(nn::Linear(4, 4), nn::Dropout(0.5));
    net->eval();
    remat::checkpoint([&](const Tensor& t) { return net->forward(t); }, torch::randn({2, 4}));
    torch::NoGradGuard no_grad;
    remat::checkpoint([&](const Tensor& t) { return net->forward(t); }, torch::randn({2, 4}));
  }
  std::cerr.rdbuf(before);
  CHECK(out.str().empty());
}

TEST_CASE("a region in which nothing requires grad keeps no bytes and leaves its result alone") {
  expect_same([](Run& run) {
    auto x = torch::randn({50});
    remat::MemoryMeter meter;
    {
      auto y = run.wrap([](const Tensor& t) { return torch::dropout(t.sin(), 0.5, true).exp(); }, x);
      run.note("y", y);
      y.mul_(2);
      run.note("doubled", y);
      if (run.is_checkpointed()) CHECK_FALSE(y.requires_grad());
    }
    CHECK(meter.current().count <= 0 + 3 * 200 + 5056 * 4);  // what the run noted
  });
}

TEST_CASE("grad mode switched inside a region acts as in plain and comes back") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          at::GradMode::set_enabled(false);
          auto fixed = h.exp();
          {
            at::AutoGradMode on(true);
            fixed = fixed * h.cos();
          }
          at::GradMode::set_enabled(true);
          return (fixed * h).tanh();
        },
        x);
    CHECK(at::GradMode::is_enabled());
    y.sum().backward();
    run.gradient("x", x);
  });
}

TEST_CASE("backward under no_grad and in a thread that has grad off equals plain") {
  expect_same([](Run& run) {
    nn::LSTM lstm(nn::LSTMOptions(4, 4));
    auto x = torch::randn({3, 2, 4}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return std::get<0>(lstm(t.sin())).exp().sin(); }, x);
    {
      torch::NoGradGuard no_grad;
      y.sum();
    }
    auto loss = y.sum();
    torch::NoGradGuard no_grad;
    loss.backward();
    run.gradient("x", x);
    run.module("lstm", *lstm);
  });
}

TEST_CASE("anomaly mode neither breaks a region nor hides its own errors") {
  expect_same([](Run& run) {
    torch::autograd::AnomalyMode::set_enabled(true);
    auto x = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap([](const Tensor& t) { return torch::dropout(t.sin(), 0.3, true).exp().tanh(); }, x);
    y.sum().backward();
    run.gradient("x", x);

    auto zero = torch::zeros({1}, torch::requires_grad());
    auto nan = run.wrap([](const Tensor& t) { return (t.sqrt() * 0).sin(); }, zero);
    run.throws("backward into a nan", [&] { nan.backward(); });
    torch::autograd::AnomalyMode::set_enabled(false);
  });
}

/// Custom functions: saves an input, an output, a captured tensor; edits an input; asks for double backward.
struct SavesEverything : torch::autograd::Function<SavesEverything> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& t, const Tensor& scale) {
    auto out = (t * scale).exp();
    context->save_for_backward({t, scale, out});
    return out;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[2] * saved[1], (gradients[0] * saved[2] * saved[0]).sum_to_size(saved[1].sizes())};
  }
};

struct DoublesInPlace : torch::autograd::Function<DoublesInPlace> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor t) {
    auto* data = t.data_ptr<float>();
    for (std::int64_t i = 0; i < t.numel(); ++i) data[i] *= 2;
    context->mark_dirty({t});
    return t;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list gradients) {
    return {gradients[0] * 2};
  }
};

TEST_CASE("custom autograd functions inside a region equal plain, also twice differentiated") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto scale = torch::randn({1}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = SavesEverything::apply(t.sin(), scale.cos());
          return SavesEverything::apply((h * 0.5).sin(), scale).cos();
        },
        x);
    auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    (y.sum() + g.pow(2).sum()).backward();
    run.gradient("x", x);
    run.gradient("scale", scale);
  });
}

TEST_CASE("a custom function that writes its input through a raw pointer and marks it dirty equals plain") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t * 3;
          auto doubled = DoublesInPlace::apply(h);
          return (doubled + 1).sin() * (doubled * 0.5).cos();
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

// LibTorch 1.13 holds the gradient accumulator of a hooked saved leaf weakly: there such a function needs remat::call_plain.
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
TEST_CASE("a custom function that saves a captured leaf equals plain") {
  struct SavesCapture : torch::autograd::Function<SavesCapture> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& t, const std::vector<Tensor>& captured) {
      context->save_for_backward({captured[0]});
      return t * captured[0].detach();
    }
    static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context, torch::autograd::tensor_list gradients) {
      return {gradients[0] * context->get_saved_variables()[0].detach(), Tensor()};
    }
  };
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    std::vector<Tensor> weights{torch::randn({5}, torch::requires_grad())};
    auto y = run.wrap([&](const Tensor& t) { return SavesCapture::apply(t.sin(), weights).exp().sin(); }, x);
    y.sum().backward();
    run.gradient("x", x);
    run.gradient("w", weights[0]);
  });
}

#endif

TEST_CASE("an argument that is saved without a gradient of its own, a class weight that requires grad, equals plain") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 3}, torch::requires_grad());
    auto weight = torch::rand({3}).requires_grad_();
    auto target = torch::tensor({0, 2, 1, 1});
    run.throws("the step", [&] {
      auto loss = run.wrap([&](const Tensor& t) { return torch::nll_loss(t.sin().log_softmax(1), target, weight); }, x);
      loss.backward();
    });
    run.gradient("x", x);
    run.gradient("weight", weight);
  });
}

TEST_CASE("a TorchScript function inside a region equals plain") {
  expect_same([](Run& run) {
    auto script = torch::jit::compile(R"(
      def block(x, w):
          h = torch.tanh(torch.mm(x, w))
          for i in range(3):
              h = torch.sigmoid(h * 2.0 + torch.dropout(h, 0.5, True))
          return h.exp().sin()
    )");
    auto x = torch::randn({4, 4}, torch::requires_grad());
    auto w = torch::randn({4, 4}, torch::requires_grad());
    for (int i = 0; i < 4; ++i) {  // the profiling executor needs runs to settle
      auto y = run.wrap([&](const Tensor& t) { return script->run_method("block", t, w).toTensor(); }, x);
      y.sum().backward();
      run.note("y", y);
      run.generator("after a run");
    }
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a TorchScript module with buffers and parameters inside a region equals plain") {
  expect_same([](Run& run) {
    torch::jit::Module module("net");
    module.register_parameter("weight", torch::randn({4, 4}), false);
    module.register_buffer("steps", torch::zeros({1}));
    module.define(R"(
      def forward(self, x):
          self.steps.add_(1)
          return torch.tanh(torch.mm(x, self.weight)) * torch.cos(self.steps)
    )");
    auto x = torch::randn({4, 4}, torch::requires_grad());
    for (int i = 0; i < 4; ++i) {
      auto y = run.wrap([&](const Tensor& t) { return module.forward({t.sin()}).toTensor(); }, x);
      y.sum().backward();
      run.note("y", y);
    }
    run.note("steps", module.attr("steps").toTensor());
    run.gradient("weight", module.attr("weight").toTensor());
    run.gradient("x", x);
  });
}

TEST_CASE("call_plain inside a region keeps what is made there and equals plain") {
  const compare::DropEverything drop;
  expect_same([](Run& run) {
    nn::Linear layer(5, 5);
    auto x = torch::randn({3, 5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = layer(t).tanh();
          auto g = remat::call_plain([&](const Tensor& s) { return torch::dropout(layer(s).sin(), 0.5, true).exp(); }, h);
          return (g * h).sin();
        },
        x);
    y.sum().backward();
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

TEST_CASE("call_plain may edit what the region made, and open regions of its own, which are plain calls") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t * 2;
          auto before = (h + 1).sin();
          remat::call_plain([&] { h.mul_(3); });
          auto g = remat::call_plain([&] { return run.wrap([](const Tensor& s) { return s.exp().sin(); }, h); });
          return (g * before).tanh() + (h + 2).cos();
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("deterministic algorithms are left on and give plain's gradients") {
  at::globalContext().setDeterministicAlgorithms(true, false);
  expect_same([](Run& run) {
    auto x = torch::randn({4, 5}, torch::requires_grad());
    auto index = torch::tensor({0, 1, 1, 0});
    auto y = run.wrap([&](const Tensor& t) { return torch::zeros({2, 5}).index_add(0, index, t.sin()).exp().sin(); }, x);
    y.sum().backward();
    run.gradient("x", x);
  });
  CHECK(at::globalContext().deterministicAlgorithms());
  at::globalContext().setDeterministicAlgorithms(false, false);
}

TEST_CASE("the engine's status is a sentence") {
  std::ostringstream words;
  words << remat::engine_status() << "; " << remat::EngineStatus{false, "no stub"};
  CHECK(words.str() == "checkpointing works; checkpointing is off: no stub");
}

}  // namespace modes_test
}  // namespace
