// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include "tests/support/autocast.hpp"

#include <atomic>
#include <thread>
#include <vector>

namespace {
namespace threads_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

template <class Action>
void in_another_thread(Action action) {
  std::exception_ptr error;
  std::thread thread([&] {
    try {
      action();
    } catch (...) {
      error = std::current_exception();
    }
  });
  thread.join();
  if (error) std::rethrow_exception(error);
}

TEST_CASE("backward on another thread than forward gives plain's gradients") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::Tanh(), nn::Dropout(0.5), nn::Linear(6, 2));
    auto x = torch::randn({4, 6}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);

    in_another_thread([&] { y.sum().backward(); });

    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("two threads go backward over one retained graph at once") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(32, 32), nn::Tanh(), nn::Linear(32, 32), nn::Sigmoid(), nn::Dropout(0.5), nn::Linear(32, 2));
    auto x = torch::randn({16, 32}, torch::requires_grad());
    auto y = run.wrap([&](const Tensor& t) { return net->forward(t).sin().exp(); }, x).sum();

    std::vector<Tensor> gradients(4);
    std::vector<std::thread> threads;
    for (auto& gradient : gradients)
      threads.emplace_back([&] {
        for (int round = 0; round < 20; ++round) gradient = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true)[0];
      });
    for (auto& thread : threads) thread.join();

    for (const auto& gradient : gradients) run.note("gradient", gradient);
    y.backward();
    run.gradient("x", x);
  });
}

TEST_CASE("several threads train their own models at once and end as they would alone") {
  const auto train = [](Run& run, std::uint64_t number, bool is_checkpointed) {
    auto generator = at::detail::createCPUGenerator(number);
    nn::Sequential net(nn::Linear(nn::LinearOptions(16, 16)), nn::BatchNorm1d(16), nn::ReLU(), nn::Linear(16, 16), nn::GELU(), nn::Linear(16, 1));
    for (auto& p : net->parameters()) {
      torch::NoGradGuard no_grad;
      p.normal_(0, 0.3, generator);
    }
    torch::optim::SGD sgd(net->parameters(), 0.05);
    for (int step = 0; step < 15; ++step) {
      sgd.zero_grad();
      auto x = torch::empty({8, 16}).normal_(0, 1, generator);
      const auto forward = [&](const Tensor& t) {
        auto mask = torch::empty_like(t).bernoulli_(0.5, generator);
        return net->forward(t * mask);
      };
      auto y = is_checkpointed ? remat::checkpoint(forward, x) : forward(x);
      y.pow(2).mean().backward();
      sgd.step();
    }
    for (const auto& item : net->named_parameters()) run.note(item.key(), item.value());
    run.buffers("net", *net);
  };

  constexpr std::size_t thread_count = 4;
  std::vector<Run> alone, together;
  for (std::size_t i = 0; i < thread_count; ++i) {
    alone.emplace_back(compare::Mode::plain);
    train(alone.back(), i, false);
    together.emplace_back(compare::Mode::drop_everything);
  }
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < thread_count; ++i) threads.emplace_back([&, i] { train(together[i], i, true); });
  for (auto& thread : threads) thread.join();
  for (std::size_t i = 0; i < thread_count; ++i) compare::check_same(alone[i], together[i], compare::Mode::drop_everything);
}

TEST_CASE("threads that share the default generator each get the gradient of their own dropout mask") {
  std::atomic<int> mismatches{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        auto x = torch::ones({500}, torch::requires_grad());
        auto y = remat::checkpoint([](const Tensor& t) { return torch::dropout(t, 0.5, true) * 1; }, x);
        y.sum().backward();
        if (!torch::equal(x.grad(), y.detach())) ++mismatches;
      }
    });
  for (auto& thread : threads) thread.join();
  CHECK(mismatches.load() == 0);
}

TEST_CASE("a region's dropout is right while another thread draws random numbers plainly") {
  std::atomic<bool> is_done{false};
  std::atomic<int> mismatches{0};
  std::thread other([&] {
    while (!is_done) torch::rand({10});
  });
  for (int round = 0; round < 200; ++round) {
    auto x = torch::ones({500}, torch::requires_grad());
    auto y = remat::checkpoint([](const Tensor& t) { return torch::dropout(t, 0.5, true) * 1; }, x);
    y.sum().backward();
    if (!torch::equal(x.grad(), y.detach())) ++mismatches;
  }
  is_done = true;
  other.join();
  CHECK(mismatches.load() == 0);
}

TEST_CASE("a backward with another number of threads recomputes the forward's bits") {
  const int before = at::get_num_threads();
  expect_same([](Run& run) {
    auto x = torch::rand({300001}, torch::requires_grad());
    auto w = torch::randn({200, 200}, torch::requires_grad());
    at::set_num_threads(2);
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto sum = (t * 1.1).sum();  // each thread adds its share: the bits depend on their number
          auto product = w.mm(w).exp().mean();
          return (t.slice(0, 0, 100) * sum + product).sin();
        },
        x);
    run.note("y", y);
    at::set_num_threads(1);
    run.note("gradient", torch::autograd::grad({y.sum()}, {x})[0]);
  });
  at::set_num_threads(before);
}

TEST_CASE("what another thread writes into a region's tensor is seen") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto y = run.wrap(
        [](const Tensor& t) {
          auto h = t.sin();
          in_another_thread([&] {
            torch::NoGradGuard no_grad;
            h.mul_(2);
          });
          return (h + 1).exp().tanh();
        },
        x);
    run.throws("backward", [&] { y.sum().backward(); });
    run.note("y", y);
    run.gradient("x", x);
  });
}

TEST_CASE("what another thread computes for a region is kept and right") {
  expect_same([](Run& run) {
    auto x = torch::randn({6}, torch::requires_grad());
    auto w = torch::randn({6}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t.sin();
          std::vector<Tensor> parts(3);
          std::vector<std::thread> workers;
          for (auto& part : parts) workers.emplace_back([&] { part = (h * w).exp(); });
          for (auto& worker : workers) worker.join();
          return (parts[0] + parts[1] * parts[2].cos()).tanh() + h;
        },
        x);
    y.sum().backward();
    run.note("y", y);
    run.gradient("x", x);
    run.gradient("w", w);
  });
}

// FAIL-4, pytorch/pytorch#20528
TEST_CASE("a bfloat16 and a float training in two threads equal their serial runs") {
  const auto train = [](Run& run, bool is_half, std::uint64_t seed) {
    auto generator = at::detail::createCPUGenerator(seed);
    nn::Sequential net(nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 1));
    for (auto& p : net->parameters()) {
      torch::NoGradGuard no_grad;
      p.normal_(0, 0.3, generator);
    }
    torch::optim::SGD sgd(net->parameters(), 0.05);
    for (int step = 0; step < 10; ++step) {
      sgd.zero_grad();
      auto x = torch::empty({4, 8}).normal_(0, 1, generator);
      Tensor y;
      {
        const autocast::Scope scope(is_half);
        y = run.wrap([&](const Tensor& t) { return net->forward(t); }, x);
      }
      CHECK((y.scalar_type() == (is_half ? torch::kBFloat16 : torch::kFloat)));
      y.to(torch::kFloat).pow(2).mean().backward();
      sgd.step();
    }
    for (const auto& item : net->named_parameters()) run.note(item.key(), item.value());
  };

  std::vector<Run> alone, together;
  for (int i = 0; i < 2; ++i) {
    alone.emplace_back(compare::Mode::plain);
    train(alone.back(), i == 0, 7);
    together.emplace_back(compare::Mode::drop_everything);
  }
  std::thread first([&] { train(together[0], true, 7); }), second([&] { train(together[1], false, 7); });
  first.join();
  second.join();
  for (std::size_t i = 0; i < 2; ++i) compare::check_same(alone[i], together[i], compare::Mode::drop_everything);
}

TEST_CASE("graphs built by one thread are freed by another without harm") {
  for (int round = 0; round < 20; ++round) {
    auto x = torch::randn({100}, torch::requires_grad());
    auto y = remat::checkpoint([](const Tensor& t) { return t.sin().exp().tanh().cos(); }, x);
    std::thread thread([y = std::move(y)]() mutable { y = Tensor(); });
    auto z = remat::checkpoint([](const Tensor& t) { return t.cos().exp().tanh().sin(); }, x);
    z.sum().backward();
    thread.join();
    CHECK(x.grad().defined());
  }
}

}  // namespace threads_test
}  // namespace
