// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include "tests/support/autocast.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace {
namespace failures_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using torch::Tensor;

/// What a refused allocation throws.
struct Refused : std::bad_alloc {
  const char* what() const noexcept override { return "refused by the test"; }
};

/// LibTorch's CPU allocator, which refuses one allocation of this thread's choice.
class RefusingAllocator final : public c10::Allocator {
 public:
  explicit RefusingAllocator(c10::Allocator* inner) : inner_(inner) {}

  // The signature differs between versions; the one that matches overrides.
  c10::DataPtr allocate(std::size_t size) { return allocate_or_refuse(size); }
  c10::DataPtr allocate(std::size_t size) const { return allocate_or_refuse(size); }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t size) const { std::memcpy(to, from, size); }

  static inline thread_local std::int64_t left = -1;  // allocations until the one that is refused; negative: never

 private:
  c10::DataPtr allocate_or_refuse(std::size_t size) const {
    if (left >= 0 && left-- == 0) throw Refused();
    return inner_->allocate(size);
  }

  c10::Allocator* inner_;
};

/// Puts the refusing allocator in place while it lives.
class Refusals {
 public:
  Refusals() : before_(c10::GetCPUAllocator()), allocator_(new RefusingAllocator(before_)) { c10::SetCPUAllocator(allocator_, 255); }
  ~Refusals() {
    RefusingAllocator::left = -1;
    c10::SetCPUAllocator(before_, 255);  // the other one stays alive: tensors may still refer to it
  }
  Refusals(const Refusals&) = delete;
  Refusals& operator=(const Refusals&) = delete;

  /// Runs `action` with the allocation number `index` refused; true if that many were made and the refusal came out unchanged.
  template <class Action>
  bool refuses(std::int64_t index, Action action) {
    RefusingAllocator::left = index;
    bool has_refused = false;
    try {
      action();
    } catch (const Refused&) {
      has_refused = true;
    }
    const bool was_reached = RefusingAllocator::left < 0;
    RefusingAllocator::left = -1;
    CHECK(was_reached == has_refused);
    return has_refused;
  }

 private:
  c10::Allocator* before_;
  c10::Allocator* allocator_;
};

std::atomic<int> fragile_calls{0};
std::atomic<int> fragile_fails_at{-1};

/// Adds one, and throws at the call that `fragile_fails_at` names.
Tensor fragile(const Tensor& x) {
  if (++fragile_calls == fragile_fails_at) throw std::out_of_range("the fragile operator failed");
  return x + 1;
}

TORCH_LIBRARY(remat_failures_test, library) {
  library.def("fragile(Tensor x) -> Tensor");
  library.impl("fragile", c10::DispatchKey::CPU, fragile);
  remat::allow_recompute("remat_failures_test::fragile");
}

Tensor call_fragile(const Tensor& x) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("remat_failures_test::fragile", "").typed<Tensor(const Tensor&)>();
  return op.call(x);
}

/// What an exception must not have changed on this thread.
struct Surroundings {
  bool grad_mode = at::GradMode::is_enabled();
  bool autocast = autocast::is_enabled();
  bool cache = at::autocast::is_autocast_cache_enabled();
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  bool has_tape = remat::detail::thread_state().tape != nullptr;

  void check_unchanged() const {
    const Surroundings now;
    CHECK(now.grad_mode == grad_mode);
    CHECK(now.autocast == autocast);
    CHECK(now.cache == cache);
    CHECK((now.keys.included_ == keys.included_ && now.keys.excluded_ == keys.excluded_));
    CHECK(now.has_tape == has_tape);
  }
};

// FAIL-1
TEST_CASE("an exception in the middle of a region arrives unchanged and leaves everything as plain does") {
  expect_same([](Run& run) {
    nn::Sequential net(nn::Linear(4, 4), nn::BatchNorm1d(4), nn::Dropout(0.5));
    auto x = torch::randn({3, 4}, torch::requires_grad());
    const Surroundings before;

    std::string text;
    try {
      run.wrap(
          [&](const Tensor& t) -> Tensor {
            auto h = net->forward(t).tanh();
            if (h.numel() > 0) throw std::length_error("half-way");
            return h;
          },
          x);
    } catch (const std::length_error& error) {
      text = error.what();
    }
    CHECK(text == "half-way");
    before.check_unchanged();
    run.generator("after the exception");
    run.buffers("net", *net);

    run.wrap([&](const Tensor& t) { return net->forward(t).tanh(); }, x).sum().backward();
    run.gradient("x", x);
    run.module("net", *net);
  });
}

TEST_CASE("LibTorch's own error inside a region arrives as plain's") {
  const auto bad = [](const Tensor& t) { return t.sin().mm(torch::ones({7, 7})); };
  auto x = torch::randn({2, 3}, torch::requires_grad());
  CHECK_THROWS_AS(remat::checkpoint(bad, x), c10::Error);
  CHECK_FALSE(remat::detail::thread_state().tape);
  remat::checkpoint([](const Tensor& t) { return t.sin().exp(); }, x).sum().backward();
  CHECK(torch::allclose(x.grad(), x.cos() * x.sin().exp()));
}

TEST_CASE("the part of a graph that survives an exception in its region is differentiated as in plain") {
  expect_same([](Run& run) {
    auto x = torch::randn({3, 4}, torch::requires_grad());
    Tensor survivor;
    try {
      run.wrap(
          [&](const Tensor& t) -> Tensor {
            survivor = torch::dropout(t.sin().exp(), 0.5, true).tanh();
            throw std::length_error("half-way");
          },
          x);
    } catch (const std::length_error&) {
    }
    survivor.sum().backward();
    run.gradient("x", x);
  });
}

// FAIL-1
TEST_CASE("an operation that fails in the recompute: the exception is unchanged, and the same backward then succeeds") {
  const compare::DropEverything drop;
  auto x = torch::randn({5}, torch::requires_grad());
  fragile_calls = 0;
  fragile_fails_at = 2;
  auto y = remat::checkpoint([](const Tensor& t) { return t * call_fragile(t.detach().sin()).exp(); }, x);
  CHECK(fragile_calls == 1);
  const Surroundings before;
  const auto random = compare::random_state();

  CHECK_THROWS_WITH_AS(y.sum().backward(), "the fragile operator failed", std::out_of_range);
  before.check_unchanged();
  CHECK(torch::equal(compare::random_state(), random));
  CHECK_FALSE(x.grad().defined());

  y.sum().backward();
  CHECK(torch::equal(x.grad(), (x.detach().sin() + 1).exp()));
  CHECK(fragile_calls == 3);
}

TEST_CASE("whichever allocation of a backward is refused, the same graph then gives the right gradients") {
  const compare::DropEverything drop;
  nn::Sequential inner(nn::Linear(6, 6), nn::BatchNorm1d(6), nn::Dropout(0.5), nn::Tanh());
  nn::Linear last(6, 3);
  auto x = torch::randn({4, 6}, torch::requires_grad());
  const auto program = [&](bool is_checkpointed) {
    const auto block = [&](const Tensor& t) { return (inner->forward(t) * 2).add_(1).sin(); };
    const auto outer = [&](const Tensor& t) {
      auto h = is_checkpointed ? remat::checkpoint(block, t.sin()) : block(t.sin());
      return last(is_checkpointed ? remat::checkpoint(block, h) : block(h)).exp();
    };
    torch::manual_seed(3);
    return (is_checkpointed ? remat::checkpoint(outer, x) : outer(x)).sum();
  };
  std::vector<Tensor> wanted = inner->parameters();
  wanted.push_back(x);
  const auto expected = torch::autograd::grad({program(false)}, wanted);

  auto y = program(true);
  const auto random = compare::random_state();
  const Surroundings before;
  Refusals refusals;
  std::int64_t index = 0;
  while (index < 500 && refusals.refuses(index, [&] { torch::autograd::grad({y}, wanted, {}, /*retain_graph=*/true); })) {
    before.check_unchanged();
    CHECK(torch::equal(compare::random_state(), random));
    if (index % 5 == 0) {
      const auto again = torch::autograd::grad({y}, wanted, {}, /*retain_graph=*/true);
      for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(torch::equal(again[i], expected[i]));
    }
    ++index;
  }
  CHECK(index > 30);
  CHECK(index < 500);
  const auto at_last = torch::autograd::grad({y}, wanted);
  for (std::size_t i = 0; i < wanted.size(); ++i) CHECK(torch::equal(at_last[i], expected[i]));
}

TEST_CASE("whichever allocation of a forward is refused, nothing stays behind and the next region is right") {
  const compare::DropEverything drop;
  nn::Linear layer(6, 6);
  auto x = torch::randn({4, 6}, torch::requires_grad());
  auto state = torch::ones({6});
  const auto block = [&](const Tensor& t) {
    auto h = (layer(t) + state).tanh();
    {
      torch::NoGradGuard no_grad;
      state.mul_(1);
    }
    return torch::dropout((h + state).sin().add_(1), 0.5, true).sin();
  };
  torch::manual_seed(3);
  const auto expected = torch::autograd::grad({block(x).sum()}, {x})[0];

  const Surroundings before;
  Refusals refusals;
  remat::MemoryMeter meter;
  std::int64_t index = 0;
  while (index < 500 && refusals.refuses(index, [&] { remat::checkpoint(block, x); })) {
    before.check_unchanged();
    CHECK(meter.current().count == 0);
    ++index;
  }
  CHECK(index > 5);
  CHECK(index < 500);
  torch::manual_seed(3);
  CHECK(torch::equal(torch::autograd::grad({remat::checkpoint(block, x).sum()}, {x})[0], expected));
}

TEST_CASE("a backward that fails in plain code after a region leaves nothing once the graph is gone") {
  const compare::DropEverything drop;
  remat::MemoryMeter meter;
  {
    auto x = torch::randn({100}, torch::requires_grad());
    auto h = x * 1;
    h.register_hook([](const Tensor& gradient) -> Tensor {
      if (gradient.numel() == 100) throw std::domain_error("a hook failed");
      return gradient;
    });
    auto y = remat::checkpoint([](const Tensor& t) { return t.sin().exp().tanh(); }, h);
    CHECK_THROWS_WITH_AS(y.sum().backward(), "a hook failed", std::domain_error);
  }
  CHECK(meter.current().count == 0);
}

// FAIL-2, pytorch/pytorch#102241
TEST_CASE("a function that would give another shape at a second call gets the gradients of its only one") {
  expect_same([](Run& run) {
    int calls = 0;
    auto x = torch::randn({4, 5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          ++calls;
          return (calls == 1 ? t : t.slice(1, 0, 4)).sin().exp();
        },
        x);
    y.sum().backward();
    CHECK(calls == 1);
    run.gradient("x", x);
  });
}

TEST_CASE("an exception of a nested region ends that region only") {
  expect_same([](Run& run) {
    auto x = torch::randn({5}, torch::requires_grad());
    auto y = run.wrap(
        [&](const Tensor& t) {
          auto h = t.sin();
          try {
            run.wrap(
                [](const Tensor& s) -> Tensor {
                  s.exp().tanh();
                  throw std::length_error("inner");
                },
                h);
          } catch (const std::length_error&) {
            h = h.cos();
          }
          return run.wrap([](const Tensor& s) { return s.exp().sin(); }, h).tanh();
        },
        x);
    y.sum().backward();
    run.gradient("x", x);
  });
}

}  // namespace failures_test
}  // namespace
