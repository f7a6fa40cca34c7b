// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <string>
#include <utility>
#include <vector>

namespace {
namespace memory_test {

namespace nn = torch::nn;
using torch::Tensor;

/// What is alive after a region beyond what was before: its results, and what it keeps.
template <class Program>
std::int64_t bytes_kept(Program program) {
  const compare::DropEverything drop;
  remat::MemoryMeter meter;
  const auto result = program();
  return meter.current().count;
}

constexpr std::int64_t random_state_bytes = 5056;

TEST_CASE("between forward and backward a chain of operations keeps its result alone") {
  auto x = torch::randn({1000}, torch::requires_grad());
  CHECK(bytes_kept([&] {
          return remat::checkpoint([](const Tensor& t) { return t.sin().exp().tanh().cos().pow(2).sigmoid().sin(); }, x);
        }) == 4000);
}

TEST_CASE("a region keeps inputs that only it still refers to, and nothing else") {
  CHECK(bytes_kept([] {
          auto x = torch::randn({1000}, torch::requires_grad());
          return remat::checkpoint([](const Tensor& t) { return t.sin().exp().tanh().sin(); }, x);
        }) == 4000 + 4000);
  auto w = torch::randn({1}, torch::requires_grad());
  CHECK(bytes_kept([&] {
          auto x = torch::randn({1000});
          return remat::checkpoint([&](const Tensor& t) { return t + w; }, x);  // needs no input
        }) == 4000);
}

TEST_CASE("a residual block of convolutions, batch norms and in-place relus keeps its result alone") {
  nn::Conv2d first(nn::Conv2dOptions(4, 8, 3).padding(1).bias(false)), second(nn::Conv2dOptions(8, 4, 3).padding(1).bias(false));
  nn::BatchNorm2d norm(8), last(4);
  auto x = torch::randn({2, 4, 16, 16}, torch::requires_grad());
  CHECK(bytes_kept([&] {
          return remat::checkpoint([&](const Tensor& t) { return (last(second(norm(first(t)).relu_())) + t).relu_(); }, x);
        }) == 2 * 4 * 16 * 16 * 4);
}

TEST_CASE("dropout adds the state of the generator and no mask") {
  auto x = torch::randn({10000}, torch::requires_grad());
  const auto kept = bytes_kept([&] {
    return remat::checkpoint([](const Tensor& t) { return torch::dropout(t.sin(), 0.5, true).exp().sin(); }, x);
  });
  CHECK(kept <= 40000 + random_state_bytes + 64);
  CHECK(kept >= 40000);
}

TEST_CASE("a result of no-grad work and of a factory is kept only while something needs it") {
  auto x = torch::randn({1000}, torch::requires_grad());
  CHECK(bytes_kept([&] {
          return remat::checkpoint(
              [](const Tensor& t) {
                Tensor unused, used;
                {
                  torch::NoGradGuard no_grad;
                  unused = t.sin();
                  used = t.cos();
                }
                auto constant = torch::ones({1000});
                return (t * used).sin() + unused + constant;
              },
              x);
        }) == 4000 /* result */ + 4000 /* used */);
}

TEST_CASE("a keep policy is told the bytes of an operation's largest argument, whatever the result's") {
  const auto x = torch::ones({1000}, torch::requires_grad());
  std::vector<std::pair<remat::Bytes, remat::Bytes>> told;

  remat::checkpoint(
      [&](const remat::keep::Operation& operation, remat::Bytes result) {
        if (operation.name == "aten::cat") told.emplace_back(operation.largest_input, result);
        return false;
      },
      [](const torch::Tensor& t) { return torch::cat({t, t, t}).tanh(); }, x);

  REQUIRE(told.size() == 1);
  CHECK(told[0].first == remat::Bytes{4000});
  CHECK(told[0].second == remat::Bytes{12000});
}

TEST_CASE("keep policies keep exactly what they say") {
  auto x = torch::randn({10, 100}, torch::requires_grad());
  auto w = torch::randn({100, 100}, torch::requires_grad());
  const auto block = [&](const Tensor& t) { return t.mm(w).tanh().mm(w).tanh().mm(w).exp().sin(); };

  CHECK(bytes_kept([&] { return remat::checkpoint(remat::keep::nothing{}, block, x); }) == 4000);
  CHECK(bytes_kept([&] { return remat::checkpoint(remat::keep::convolutions_and_matmuls{}, block, x); }) == 4000 + 3 * 4000);
  CHECK(bytes_kept([&] {
          return remat::checkpoint([](const remat::keep::Operation& op, remat::Bytes) { return op.name == "aten::tanh"; }, block, x);
        }) == 4000 + 2 * 4000);
  CHECK(bytes_kept([&] {
          return remat::checkpoint(
              [](const remat::keep::Operation& op, remat::Bytes bytes) {
                CHECK(bytes.count == 4000);
                return op.name == "aten::mm" && op.ordinal == 1;
              },
              block, x);
        }) == 4000 + 4000);
}

TEST_CASE("kept results are not recomputed, and everything else at most once") {
  const compare::DropEverything drop;
  auto x = torch::randn({10, 100}, torch::requires_grad());
  auto w = torch::randn({100, 100}, torch::requires_grad());
  const auto block = [&](const Tensor& t) { return t.mm(w).tanh().mm(w).tanh().mm(w).exp().sin(); };
  const auto recomputed = [&](auto keep) {
    auto y = remat::checkpoint(keep, block, x).sum();
    return compare::recomputed_by([&] { y.backward(); });
  };
  CHECK(recomputed(remat::keep::nothing{}) == 6);                   // all but the result
  CHECK(recomputed(remat::keep::convolutions_and_matmuls{}) == 3);  // two tanh, one exp
  CHECK(recomputed([](const remat::keep::Operation&, remat::Bytes) { return true; }) == 0);
}

TEST_CASE("an operation whose result nobody needs is not recomputed, and parts are recomputed only when their turn comes") {
  const compare::DropEverything drop;
  auto x = torch::randn({100}, torch::requires_grad());
  auto [a, b] = remat::checkpoint(
      [](const Tensor& t) {
        auto h = t + 1;
        auto left = h.sin().sin().sin();
        auto right = (h * 2).cos().cos();
        (h * 3).exp().detach();
        return std::make_pair(left, (right + 1).add(2).mul(3));
      },
      x);
  CHECK(compare::recomputed_by([&] { torch::autograd::grad({a.sum()}, {x}, {}, true); }) == 3);
  CHECK(compare::recomputed_by([&] { torch::autograd::grad({b.sum()}, {x}, {}, true); }) == 3);
  CHECK(compare::recomputed_by([&] { torch::autograd::grad({a.sum() + b.sum()}, {x}); }) == 5);
}

TEST_CASE("what a backward recomputed goes as soon as it is used") {
  const compare::DropEverything drop;
  constexpr std::int64_t bytes = 40000;
  constexpr int length = 20;
  auto x = torch::randn({bytes / 4}, torch::requires_grad());
  remat::MemoryMeter meter;
  std::vector<std::int64_t> alive;  // when the gradient of each operation's result is there, from the last to the first
  auto y = remat::checkpoint(
      [&](Tensor t) {
        for (int i = 0; i < length; ++i) {
          t = t.sin();
          t.register_hook([&](const Tensor&) { alive.push_back(meter.current().count); });
        }
        return t;
      },
      x);
  auto loss = y.sum();
  y = Tensor();
  loss.backward();

  REQUIRE(alive.size() == length);
  for (std::size_t i = 2; i < alive.size(); ++i) CHECK(alive[i] == alive[i - 1] - bytes);
  CHECK(meter.peak().count <= (length + 3) * bytes);
}

TEST_CASE("forward's own peak is plain's and at most a kibibyte per operation") {
  const compare::DropEverything drop;
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::ReLU(nn::ReLUOptions(true)),
                     nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)), nn::BatchNorm2d(8), nn::SiLU());
  auto x = torch::randn({2, 3, 16, 16}, torch::requires_grad());
  std::int64_t peaks[2];
  for (const bool is_checkpointed : {false, true}) {
    net->forward(x);
    remat::MemoryMeter meter;
    const auto forward = [&](const Tensor& t) { return net->forward(t); };
    auto y = is_checkpointed ? remat::checkpoint(forward, x) : forward(x);
    peaks[is_checkpointed] = meter.peak().count;
  }
  CHECK(peaks[true] < peaks[false]);
}

// METER-1, pytorch/pytorch#78731
TEST_CASE("sixteen convolution blocks, one region each, peak at half of plain or less") {
  std::vector<nn::Sequential> blocks;
  for (int i = 0; i < 16; ++i)
    blocks.push_back(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(16, 16, 3).padding(1).bias(false)), nn::BatchNorm2d(16), nn::ReLU(),
                                    nn::Conv2d(nn::Conv2dOptions(16, 16, 1).bias(false)), nn::BatchNorm2d(16), nn::ReLU()));
  auto x = torch::randn({2, 16, 28, 28});
  std::int64_t peaks[2];
  for (const bool is_checkpointed : {false, true}) {
    for (auto& block : blocks)
      for (auto& p : block->parameters()) p.mutable_grad() = torch::zeros_like(p);
    remat::MemoryMeter meter;
    Tensor h = x;
    for (auto& block : blocks) {
      const auto forward = [&](const Tensor& t) { return block->forward(t); };
      h = is_checkpointed ? remat::checkpoint(forward, h) : forward(h);
    }
    h.sum().backward();
    peaks[is_checkpointed] = meter.peak().count;
  }
  CHECK(2 * peaks[true] <= peaks[false]);
}

TEST_CASE("the meter counts a tensor to the byte, on this thread and on backward's, and the same in ten runs") {
  remat::MemoryMeter meter;
  auto megabyte = torch::empty({1 << 20}, torch::kByte);
  CHECK(meter.current().count == 1048576);
  megabyte = Tensor();
  CHECK(meter.current().count == 0);
  CHECK(meter.peak().count == 1048576);
  meter.reset_peak();
  CHECK(meter.peak() == meter.current());

  std::vector<std::int64_t> peaks;
  for (int i = 0; i < 10; ++i) {
    torch::manual_seed(1);
    auto x = torch::randn({100, 100}, torch::requires_grad());
    remat::MemoryMeter inner;
    remat::checkpoint([](const Tensor& t) { return t.mm(t).sin().exp().mm(t); }, x).sum().backward();
    peaks.push_back(inner.peak().count);
  }
  for (const auto peak : peaks) CHECK(peak == peaks[0]);
}

}  // namespace memory_test
}  // namespace
