// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {
namespace arguments_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

/// A result of the user's own, whose tensors are shown to the engine.
struct Detections {
  Tensor boxes;
  std::vector<Tensor> scores;
  int count = 0;
};

template <class Visit>
void visit_tensors(const Detections& detections, Visit visit) {
  visit(detections.boxes);
  for (const auto& score : detections.scores) visit(score);
}

/// A result that the engine knows nothing of.
struct Opaque {
  Tensor first, second;
};

// ARGS-1, pytorch/pytorch#45934
TEST_CASE("indices, masks and detached results need no grad, and the other results do") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 5}, torch::requires_grad());

    auto [twice, index, mask, detached] = run.wrap(
        [](const Tensor& t) { return std::make_tuple((t * 2).sin(), t.argmax(1), t > 0, (t * 3).detach()); }, x);
    CHECK(twice.requires_grad());
    CHECK_FALSE(index.requires_grad());
    CHECK_FALSE(mask.requires_grad());
    CHECK_FALSE(detached.requires_grad());
    twice.sum().backward();

    run.note("index", index);
    run.note("mask", mask);
    run.note("detached", detached);
    run.gradient("x", x);
  });
}

TEST_CASE("only the second of two differentiable results may be used") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 5}, torch::requires_grad());
    nn::Linear layer(5, 5);
    auto [first, second] = run.wrap(
        [&](const Tensor& t) {
          auto h = layer(t).tanh();
          return std::make_pair(h.exp(), (h * t).sin());
        },
        x);
    second.sum().backward();
    run.gradient("x", x);
    run.module("layer", *layer);
  });
}

// ARGS-2, huggingface/diffusers#12776
TEST_CASE("tensors with a graph inside tuples, vectors and maps get their gradients") {
  expect_same([](Run& run) {
    nn::Linear modulation(4, 8);
    auto condition = torch::randn({2, 4});
    auto x = torch::randn({2, 4}, torch::requires_grad());
    const auto vectors = modulation(condition).chunk(2, 1);

    auto block = [](const Tensor& t, const std::tuple<Tensor, Tensor>& scale_and_shift) {
      return (t * std::get<0>(scale_and_shift) + std::get<1>(scale_and_shift)).tanh();
    };
    auto h = run.wrap(block, x, std::make_tuple(vectors[0], vectors[1]));
    auto y = run.wrap([](const std::vector<Tensor>& all, const std::map<std::string, Tensor>& named) {
      return (all[0] * all[1] + named.at("shift")).sin() * all[1];
    }, std::vector<Tensor>{h, vectors[0]}, std::map<std::string, Tensor>{{"shift", vectors[1]}});
    y.sum().backward();

    run.gradient("x", x);
    run.module("modulation", *modulation);
  });
}

TEST_CASE("one tensor given twice gets the sum of both gradients") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    run.wrap([](const Tensor& a, const Tensor& b) { return (a.sin() * b.exp()).tanh(); }, x, x).sum().backward();
    run.gradient("x", x);
  });
}

// ARGS-3, csrhddlam/pytorch-checkpoint#2
TEST_CASE("numbers, flags, strings and empty optionals pass through beside tensors") {
  expect_same([](Run& run) {
    auto a = torch::randn({5}, torch::requires_grad());
    auto b = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& s, int i, double d, bool flag, const std::string& text, std::optional<Tensor> none, const Tensor& t) {
          auto h = (s * i + d).sin() * t.exp();
          return flag && text == "sum" && !none ? h.cos() : h;
        },
        a, 3, 0.5, true, std::string("sum"), std::optional<Tensor>(), b);
    y.sum().backward();
    run.gradient("a", a);
    run.gradient("b", b);
  });
}

// ARGS-4, pytorch/pytorch#85088
TEST_CASE("the type of the result is that of the plain call") {
  const auto tuple = [](const Tensor& t) { return std::make_tuple(t.sin(), t.cos(), 3); };
  const auto pair = [](const Tensor& t) { return std::make_pair(t.sin(), t.cos()); };
  const auto array = [](const Tensor& t) { return std::array<Tensor, 2>{t.sin(), t.cos()}; };
  auto x = torch::randn({3}, torch::requires_grad());

  static_assert(std::is_same_v<decltype(remat::checkpoint(tuple, x)), std::tuple<Tensor, Tensor, int>>);
  static_assert(std::is_same_v<decltype(remat::checkpoint(pair, x)), std::pair<Tensor, Tensor>>);
  static_assert(std::is_same_v<decltype(remat::checkpoint(array, x)), std::array<Tensor, 2>>);
  static_assert(std::is_same_v<decltype(remat::checkpoint([](Tensor& t) -> Tensor& { return t; }, x)), Tensor&>);
  static_assert(std::is_same_v<decltype(remat::checkpoint([](Tensor&) {}, x)), void>);
  CHECK(std::get<2>(remat::checkpoint(tuple, x)) == 3);

  expect_same([&](Run& run) {
    auto input = torch::randn({3}, torch::requires_grad());
    auto [s, c, three] = run.wrap(tuple, input);
    auto [first, second] = run.wrap(pair, input);
    auto both = run.wrap(array, input);
    (s * c * first.exp() * second * both[0] * both[1]).sum().backward();
    run.gradient("input", input);
  });
}

TEST_CASE("results in vectors, maps, optionals and structs of the user's own come back right") {
  expect_same([](Run& run) {
    auto x = torch::randn({3, 4}, torch::requires_grad());

    auto list = run.wrap([](const Tensor& t) { return std::vector<Tensor>{t.sin(), t.exp().cos(), Tensor()}; }, x);
    auto named = run.wrap([](const Tensor& t) { return std::map<std::string, Tensor>{{"a", t.tanh()}, {"b", t.exp().sin()}}; }, x);
    auto maybe = run.wrap([](const Tensor& t) { return std::optional<Tensor>((t * t).sin()); }, x);
    auto nothing = run.wrap([](const Tensor&) { return std::optional<Tensor>(); }, x);
    auto own = run.wrap(
        [](const Tensor& t) {
          auto h = t.exp();
          return Detections{h.sin(), {h.cos(), h.tanh()}, 2};
        },
        x);
    auto opaque = run.wrap([](const Tensor& t) { return Opaque{t.exp().sin(), t.sin().exp()}; }, x);
    auto pointer = run.wrap([](const Tensor& t) { return std::make_unique<Tensor>(t.sigmoid().exp()); }, x);

    CHECK_FALSE(list[2].defined());
    CHECK_FALSE(nothing.has_value());
    CHECK(own.count == 2);
    opaque.second = opaque.second * 2;
    (list[0] * list[1] * named.at("a") * named.at("b") * *maybe + own.boxes * own.scores[1] + opaque.first * opaque.second * *pointer)
        .sum()
        .backward();
    run.note("score", own.scores[0]);
    run.gradient("x", x);
  });
}

TEST_CASE("undefined tensors may be arguments and results") {
  expect_same([](Run& run) {
    auto x = torch::randn({3}, torch::requires_grad());
    auto [y, undefined] = run.wrap(
        [](const Tensor& t, const Tensor& mask) { return std::make_tuple(mask.defined() ? t : t.sin().exp(), Tensor()); }, x, Tensor());
    CHECK_FALSE(undefined.defined());
    y.sum().backward();
    run.gradient("x", x);
  });
}

TEST_CASE("a result that is the input itself, and one that is a captured tensor, stay those tensors") {
  expect_same([](Run& run) {
    auto x = torch::randn({3}, torch::requires_grad());
    auto w = torch::randn({3}, torch::requires_grad());
    auto [same, captured] = run.wrap([&](const Tensor& t) { return std::make_tuple(t, w); }, x);
    CHECK(same.is_same(x));
    CHECK(captured.is_same(w));
    (same * captured).sum().backward();
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

TEST_CASE("a region without arguments, one without result and one with move-only arguments work") {
  expect_same([](Run& run) {
    auto w = torch::randn({3}, torch::requires_grad());
    auto y = run.wrap([&] { return w.sin().exp(); });
    Tensor out;
    run.wrap([&](const Tensor& t) { out = t.cos().tanh(); }, y);
    auto z = run.wrap([](std::unique_ptr<Tensor> t) { return t->sin().exp(); }, std::make_unique<Tensor>(out));
    z.sum().backward();
    run.gradient("w", w);
  });
}

TEST_CASE("member functions, function pointers and mutable callables are called as std::invoke would") {
  struct Net {
    Tensor w = torch::ones({3}, torch::requires_grad());
    Tensor forward(const Tensor& t) { return (t * w).sin(); }
  };
  expect_same([](Run& run) {
    Net net;
    auto x = torch::randn({3}, torch::requires_grad());
    int calls = 0;
    auto counting = [calls, &run](const Tensor& t) mutable {
      run.count("calls", ++calls);
      return t.exp();
    };
    auto y = run.wrap(&Net::forward, net, x);
    auto z = run.wrap(counting, y);
    run.wrap(static_cast<Tensor (*)(const Tensor&)>(&torch::tanh), run.wrap(counting, z)).sum().backward();
    run.gradient("x", x);
    run.gradient("w", net.w);
  });
}

TEST_CASE("captured objects may be destroyed and options edited between forward and backward") {
  expect_same([](Run& run) {
    auto x = torch::randn({2, 3, 6, 6}, torch::requires_grad());
    Tensor y;
    {
      auto net = std::make_unique<nn::Sequential>(nn::Conv2d(3, 4, 3), nn::Dropout(0.5), nn::BatchNorm2d(4), nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)));
      auto scale = std::make_unique<double>(0.25);
      y = run.wrap([&](const Tensor& t) { return (*net)->forward(t) * *scale; }, x);
      (*net)[1]->as<nn::Dropout>()->options.p(0.9);
      (*net)->eval();
    }
    y.sum().backward();
    run.gradient("x", x);
  });
}

TEST_CASE("integer, boolean, complex and conjugate tensors come out right") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 4}, torch::dtype(torch::kComplexFloat)).requires_grad_();
    auto r = torch::randn({4, 4}, torch::requires_grad());

    auto [y, count] = run.wrap(
        [](const Tensor& z, const Tensor& t) {
          auto h = z.conj().mm(z.t()) * torch::complex(t, t.sin());
          auto c = h.conj() * h;
          auto negative = torch::imag(c.conj()) + torch::real(h.conj()).exp();
          auto views = torch::view_as_real(h.resolve_conj()).select(2, 1).sin();
          return std::make_tuple((negative * views).tanh() + torch::fft_fft(t).abs(), (t > 0).sum(0));
        },
        x, r);
    y.sum().backward();

    run.note("y", y);
    run.note("count", count);
    run.gradient("x", x);
    run.gradient("r", r);
  });
}

TEST_CASE("a part under no_grad and a detach inside stop the gradient where plain stops it") {
  expect_same([](Run& run) {
    nn::Linear a(4, 4), b(4, 4), teacher(4, 4);
    auto x = torch::randn({3, 4}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = a(t).tanh();
          Tensor target;
          {
            torch::NoGradGuard no_grad;
            target = teacher(h).sin() * h;
          }
          auto stopped = h.detach().exp();
          return (b(h) * target + stopped * h).sigmoid();
        },
        x);
    y.sum().backward();
    run.gradient("x", x);
    run.module("a", *a);
    run.module("b", *b);
    run.module("teacher", *teacher);
  });
}

TEST_CASE("recurrent, attention, transformer and embedding layers equal plain") {
  expect_same([](Run& run) {
    nn::LSTM lstm(nn::LSTMOptions(6, 8).num_layers(2).dropout(0.3).bidirectional(true));
    nn::GRU gru(nn::GRUOptions(16, 6).num_layers(2).dropout(0.2));
    nn::MultiheadAttention attention(nn::MultiheadAttentionOptions(6, 2).dropout(0.1));
    nn::TransformerEncoderLayer encoder(nn::TransformerEncoderLayerOptions(6, 3).dim_feedforward(12).dropout(0.2));
    nn::Embedding embedding(nn::EmbeddingOptions(10, 6).padding_idx(0));
    auto ids = torch::randint(0, 10, {5, 2});

    auto [y, weights] = run.wrap(
        [&](const Tensor& i) {
          auto [states, last] = lstm(embedding(i));
          auto [out, hidden] = gru(states);
          auto [mixed, w] = attention(out, out, out);
          return std::make_tuple(encoder(mixed) + hidden.mean() + std::get<1>(last).sum(), w);
        },
        ids);
    run.generator("after forward");
    (y.pow(2).sum() + weights.exp().sum()).backward();

    run.note("y", y);
    run.module("lstm", *lstm);
    run.module("gru", *gru);
    run.module("attention", *attention);
    run.module("encoder", *encoder);
    run.module("embedding", *embedding);
  });
}

TEST_CASE("a sparse embedding gets plain's sparse gradient") {
  expect_same([](Run& run) {
    nn::Embedding embedding(nn::EmbeddingOptions(10, 4).sparse(true));
    nn::EmbeddingBag bag(nn::EmbeddingBagOptions(10, 4).mode(torch::kSum));
    auto ids = torch::tensor({1, 5, 1, 7}).reshape({2, 2});
    auto y = run.wrap([&](const Tensor& i) { return embedding(i).sin().exp().sum(1) * bag(i).tanh(); }, ids);
    y.sum().backward();
    CHECK(embedding->weight.grad().is_sparse());
    run.module("embedding", *embedding);
    run.module("bag", *bag);
  });
}

TEST_CASE("sparse and oneDNN tensors inside a region are kept and right") {
  expect_same([](Run& run) {
    auto x = torch::randn({4, 4}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto sparse = torch::eye(4).to_sparse();
          auto product = torch::mm(sparse, t.sin());
          auto dense = t.exp().to_mkldnn().relu().to_dense();
          return (product * dense).tanh();
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
  });
}

}  // namespace arguments_test
}  // namespace
