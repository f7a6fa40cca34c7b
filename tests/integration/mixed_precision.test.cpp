// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include "remat/amp.hpp"
#include "remat/backbones.hpp"
#include "remat/nn.hpp"

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <future>
#include <limits>
#include <optional>
#include <vector>

namespace {
namespace mixed_precision_test {

namespace nn = torch::nn;
using compare::expect_same;
using compare::Run;
using remat::amp::Autocast;
using torch::Tensor;

/// What a training leaves behind, to be compared bit by bit.
using Left = std::vector<Tensor>;

void expect_equal(const Left& plain, const Left& checkpointed) {
  REQUIRE(plain.size() == checkpointed.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(plain[i], checkpointed[i]));
  }
}

void note(Left& left, const nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    left.push_back(parameter.detach().clone());
    if (parameter.grad().defined()) left.push_back(parameter.grad().clone());
  }
  for (const auto& buffer : module.buffers()) left.push_back(buffer.clone());
}

TEST_CASE("backward inside another scope recomputes in the precision of forward") {
  for (const bool enabled : {true, false}) {
    CAPTURE(enabled);
    expect_same([&](Run& run) {
      nn::Linear first(8, 8), second(8, 8);
      auto x = torch::randn({4, 8}, torch::requires_grad());
      Tensor y;
      {
        const Autocast autocast(torch::kCPU);
        y = run.wrap(
            [&](const Tensor& t) {
              const auto h = run.wrap([&](const Tensor& s) { return first(s).tanh(); }, t);
              const Autocast off(torch::kCPU, {.enabled = false});
              return second(h.to(torch::kFloat)).sin();
            },
            x);
      }
      const Autocast other(torch::kCPU, {.enabled = enabled, .cache_enabled = false});
      y.sum().backward();
      CHECK(remat::amp::is_autocast_enabled(torch::kCPU) == enabled);
      run.gradient("x", x);
      run.module("first", *first);
      run.module("second", *second);
    });
  }
}

TEST_CASE("backward on another thread recomputes in the precision of forward") {
  enum class Around { nothing, on, off };
  for (const bool is_forward_mixed : {true, false}) {
    for (const Around around : {Around::nothing, Around::on, Around::off}) {
      CAPTURE(is_forward_mixed);
      CAPTURE(static_cast<int>(around));
      expect_same([&](Run& run) {
        nn::Linear first(8, 8), second(8, 8);
        auto x = torch::randn({4, 8}, torch::requires_grad());
        Tensor y;
        {
          const Autocast autocast(torch::kCPU, {.enabled = is_forward_mixed});
          y = run.wrap([&](const Tensor& t) { return second(first(t).tanh()).sin(); }, x);
        }
        bool was_on = true, is_on = true;
        // Its get() hands on what backward throws.
        std::async(std::launch::async, [&] {
          std::optional<Autocast> scope;
          if (around != Around::nothing)
            scope.emplace(torch::kCPU,
                          remat::amp::AutocastOptions{.enabled = around == Around::on});
          was_on = remat::amp::is_autocast_enabled(torch::kCPU);
          y.sum().backward();
          is_on = remat::amp::is_autocast_enabled(torch::kCPU);
        }).get();
        CHECK(was_on == (around == Around::on));
        CHECK(is_on == was_on);
        CHECK_FALSE(remat::amp::is_autocast_enabled(torch::kCPU));
        run.gradient("x", x);
        run.module("first", *first);
        run.module("second", *second);
      });
    }
  }
}

Left train_sequential(bool is_checkpointed) {
  torch::manual_seed(5);
  remat::Checkpointed<remat::Sequential, remat::Segments<3>> net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(nn::Linear(16, 16));
    net->push_back(nn::BatchNorm1d(16));
    net->push_back(nn::GELU());
    net->push_back(nn::Dropout(0.2));
  }
  if (!is_checkpointed) remat::disable_gradient_checkpointing(*net);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  remat::amp::GradScaler scaler(torch::kCPU, {.init_scale = 256, .growth_interval = 2});
  Left left;
  for (int step = 0; step < 6; ++step) {
    sgd.zero_grad();
    Tensor loss;
    {
      const Autocast autocast(torch::kCPU);
      loss = net->forward(torch::randn({8, 16})).to(torch::kFloat).pow(2).mean();
    }
    // One step overflows, and is skipped.
    if (step == 3) loss = loss * std::numeric_limits<double>::infinity();
    scaler.scale(loss).backward();
    scaler.clip_grad_norm_(sgd, 1.0);
    CHECK(scaler.step(sgd) == (step != 3));
    scaler.update();
    left.push_back(loss.detach());
    left.push_back(torch::tensor(scaler.get_scale()));
  }
  note(left, *net);
  return left;
}

TEST_CASE(
    "training a Checkpointed<Sequential> by a scaler leaves plain's weights, scales and buffers") {
  expect_equal(train_sequential(false), train_sequential(true));
}

Left step_resnet(bool is_checkpointed, bool is_warm) {
  torch::manual_seed(7);
  const auto model = remat::create_backbone("resnet18", {.num_classes = 4});
  if (is_checkpointed) model->enable_gradient_checkpointing();
  model->train();
  auto images = torch::randn({2, 3, 64, 64}).requires_grad_();
  Tensor loss;
  {
    const Autocast autocast(torch::kCPU);
    loss = model->forward(images).to(torch::kFloat).pow(2).mean();
    if (is_warm) loss = loss + model->forward(images.sin()).to(torch::kFloat).mean();
  }
  loss.backward();
  Left left{loss.detach(), images.grad()};
  note(left, *model);
  return left;
}

TEST_CASE("resnet18 of 64 pixels under autocast equals plain, once and with a warm cache") {
  for (const bool is_warm : {false, true}) {
    CAPTURE(is_warm);
    expect_equal(step_resnet(false, is_warm), step_resnet(true, is_warm));
  }
}

/// Bytes alive between the end of the scope and backward.
std::int64_t kept_bytes(bool is_checkpointed, bool is_warm) {
  constexpr std::int64_t kWidth = 256;
  torch::manual_seed(9);
  nn::Sequential net(nn::Linear(kWidth, kWidth), nn::Tanh(), nn::Linear(kWidth, kWidth), nn::Tanh(),
                     nn::Linear(kWidth, kWidth), nn::Tanh());
  const auto x = torch::randn({16, kWidth}, torch::requires_grad());
  const compare::DropEverything drop;
  const remat::MemoryMeter meter;
  Tensor y;
  {
    const Autocast autocast(torch::kCPU);
    if (is_warm) net->forward(x);
    const auto call = [&](const Tensor& t) { return net->forward(t); };
    y = is_checkpointed ? remat::checkpoint(call, x) : call(x);
  }
  return meter.current().count;
}

TEST_CASE(
    "after the scope a region keeps its result alone, and casts of a warm cache no more than "
    "plain") {
  constexpr std::int64_t kCast = 256 * 256 * 2, kResult = 16 * 256 * 2;
  CHECK(kept_bytes(false, false) >= 3 * kCast);
  CHECK(kept_bytes(true, false) == kResult);
  CHECK(kept_bytes(true, true) < kept_bytes(false, true));
}

}  // namespace mixed_precision_test
}  // namespace
