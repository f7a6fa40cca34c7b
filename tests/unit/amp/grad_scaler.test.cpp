// SPDX-License-Identifier: MIT
#include "remat/amp/grad_scaler.hpp"

#include "tests/support/doctest.hpp"

#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace {
namespace grad_scaler_test {

using remat::amp::GradScaler;
using remat::amp::GradScalerOptions;
using remat::amp::GradScalerState;
using torch::Tensor;

/// One optimizer over one weight of zeros, whose gradient is the input times the scale.
struct Part {
  Tensor weight = torch::zeros({3}, torch::requires_grad());
  torch::optim::SGD sgd{{weight}, torch::optim::SGDOptions(1.0)};

  Tensor loss(double input) { return (weight * input).sum(); }
  bool has_moved() const { return weight.ne(0).any().item<bool>(); }
};

std::string text(const std::function<void()>& misuse) {
  try {
    misuse();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  } catch (const remat::EnvironmentError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define SAYS(code, words, ...)                           \
  do {                                                   \
    const std::string said = text([&] { __VA_ARGS__; }); \
    CAPTURE(said);                                       \
    CHECK(said.find(code) != std::string::npos);         \
    CHECK(said.find(words) != std::string::npos);        \
  } while (false)

double number(std::istream& line) {
  std::string word;
  line >> word;
  return std::strtod(word.c_str(), nullptr);
}

/// One iteration of the table, replayed and compared.
void replay(GradScaler& scaler, std::istream& line) {
  Part first, second;
  const double inputs[] = {number(line), number(line)};
  const bool clips = number(line) != 0;
  const double new_scale = number(line);
  scaler.scale(first.loss(inputs[0]) + second.loss(inputs[1])).backward();
  if (clips) scaler.clip_grad_norm_(first.sgd, 0.5);
  const bool stepped[] = {scaler.step(first.sgd), scaler.step(second.sgd)};
  if (new_scale != 0)
    scaler.update(new_scale);
  else
    scaler.update();
  CHECK(scaler.get_scale() == number(line));
  CHECK(static_cast<double>(scaler.state().growth_tracker) == number(line));
  const bool expected[] = {number(line) != 0, number(line) != 0};
  CHECK(stepped[0] == expected[0]);
  CHECK(stepped[1] == expected[1]);
  CHECK(first.has_moved() == expected[0]);
  CHECK(second.has_moved() == expected[1]);
}

TEST_CASE("scales, trackers and skipped steps of 100 iterations equal Python's") {
  std::ifstream table(REMAT_TEST_DATA "/amp/scales.txt");
  std::optional<GradScaler> scaler;
  int iterations = 0;
  for (std::string row; std::getline(table, row);) {
    CAPTURE(row);
    std::istringstream line(row);
    if (row.rfind("training", 0) != 0) {
      replay(scaler.value(), line);
      ++iterations;
      continue;
    }
    std::string word;
    line >> word >> word;
    GradScalerOptions options;
    options.init_scale = number(line);
    options.growth_factor = number(line);
    options.backoff_factor = number(line);
    options.growth_interval = static_cast<std::int64_t>(number(line));
    scaler.emplace(torch::kCPU, options);
  }
  CHECK(iterations == 600);
}

TEST_CASE("the kernels and the ordinary operations move scale and gradients to the same bits") {
  if (!remat::detail::has_loss_scaling_kernels(torch::kCPU)) return;
  for (const auto type : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf})
    for (const double bad : {0.0, std::numeric_limits<double>::infinity()}) {
      torch::manual_seed(3);
      auto grad = torch::randn({64}).to(type);
      grad[5] = bad;
      const auto inv_scale = torch::full({}, 1.0 / 3);
      std::vector<Tensor> one{grad.clone()}, other{grad.clone()};
      auto found_one = torch::zeros({}), found_other = torch::zeros({});
      remat::detail::check_and_unscale(one, found_one, inv_scale);
      remat::detail::check_and_unscale_by_operations(other, found_other, inv_scale);
      CHECK(torch::equal(one[0], other[0]));
      CHECK(torch::equal(found_one, found_other));
      CHECK(found_one.item<float>() == (bad == 0 ? 0.0f : 1.0f));
    }
}

TEST_CASE("unscale_ restores the gradients and clipping returns their norm before") {
  GradScaler scaler(torch::kCPU);
  Part part;
  scaler.scale(part.loss(4)).backward();
  CHECK(torch::equal(part.weight.grad(), torch::full({3}, 4.0 * 65536)));
  scaler.unscale_(part.sgd);
  CHECK(torch::equal(part.weight.grad(), torch::full({3}, 4.0)));
  CHECK(scaler.clip_grad_norm_(part.sgd, 1.0) == doctest::Approx(4 * std::sqrt(3.0)));
  CHECK(scaler.step(part.sgd));
}

TEST_CASE("several losses are scaled alike and keep their history") {
  GradScaler scaler(torch::kCPU, {.init_scale = 8});
  Part part;
  const auto scaled = scaler.scale(std::vector<Tensor>{part.loss(1), part.loss(2) + 1});
  CHECK(scaled.at(1).item<float>() == 8);
  (scaled[0] + scaled[1]).backward();
  CHECK(torch::equal(part.weight.grad(), torch::full({3}, 24.0)));
}

TEST_CASE("a scaler that is not enabled leaves everything as it is") {
  GradScaler scaler(torch::kCPU, {.init_scale = -1, .enabled = false});
  Part part;
  const auto loss = part.loss(1);
  CHECK(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(part.sgd);
  CHECK(scaler.step(part.sgd));
  scaler.update();
  CHECK(part.has_moved());
  CHECK(scaler.get_scale() == 1);
  CHECK((scaler.state() == GradScalerState{}));
  scaler.load_state({});
}

TEST_CASE("a loaded state goes on as the saved one, before and after the first loss") {
  const auto iterate = [](GradScaler& scaler, double input) {
    Part part;
    scaler.scale(part.loss(input)).backward();
    scaler.step(part.sgd);
    scaler.update();
  };
  GradScaler whole(torch::kCPU, {.growth_interval = 3});
  iterate(whole, 1);
  iterate(whole, 1);
  const GradScalerState saved = whole.state();
  CHECK(saved.growth_tracker == 2);
  GradScaler fresh(torch::kCPU), used(torch::kCPU);
  iterate(used, std::numeric_limits<double>::infinity());
  for (GradScaler* scaler : {&fresh, &used}) {
    scaler->load_state(saved);
    CHECK((scaler->state() == saved));
    iterate(*scaler, 1);
    CHECK(scaler->get_scale() == 131072);
  }
}

TEST_CASE("each misuse of an iteration's order says what is wrong") {
  GradScaler scaler(torch::kCPU);
  Part part;
  SAYS("remat.grad_scaler.not_scaled", "no loss was scaled", scaler.step(part.sgd));
  SAYS("remat.grad_scaler.not_scaled", "unscale_", scaler.unscale_(part.sgd));
  SAYS("remat.grad_scaler.not_scaled", "update", scaler.update());
  auto loss = scaler.scale(part.loss(1));
  SAYS("remat.grad_scaler.no_checks", "GradScaler::update", scaler.update());
  {
    GradScaler other(torch::kCPU);
    other.scale(loss);
    SAYS("remat.grad_scaler.no_checks", "No inf checks were recorded", other.step(part.sgd));
  }
  loss.backward();
  scaler.unscale_(part.sgd);
  SAYS("remat.grad_scaler.unscaled_twice", "unscaled already", scaler.unscale_(part.sgd));
  SAYS("remat.grad_scaler.closure", "closure", scaler.step(part.sgd, [&] { return loss; }));
  scaler.step(part.sgd);
  SAYS("remat.grad_scaler.stepped_twice", "stepped already", scaler.step(part.sgd));
  SAYS("remat.grad_scaler.unscaled_late", "stepped already", scaler.unscale_(part.sgd));
  SAYS("remat.grad_scaler.unscaled_late", "unscale_", scaler.clip_grad_norm_(part.sgd, 1));
  SAYS("remat.grad_scaler.new_scale", "the scale is 0", scaler.update(0));
  SAYS("remat.grad_scaler.new_scale", "a positive float32", scaler.update(1e39));
  scaler.update();
  CHECK(scaler.state().growth_tracker == 1);
}

TEST_CASE("float16 gradients are refused before any gradient is changed") {
  GradScaler scaler(torch::kCPU);
  auto weight = torch::ones({2}, torch::requires_grad());
  auto half = torch::ones({2, 5}, torch::kHalf).set_requires_grad(true);
  torch::optim::SGD sgd({weight, half}, torch::optim::SGDOptions(1.0));
  scaler.scale(torch::ones({}));
  weight.mutable_grad() = torch::ones({2});
  half.mutable_grad() = torch::ones({2, 5}, torch::kHalf);
  SAYS("remat.grad_scaler.half_gradient", "parameter 1 of group 0, [2, 5]", scaler.unscale_(sgd));
  CHECK(torch::equal(weight.grad(), torch::ones({2})));
}

TEST_CASE("options and states that no scaler can have are refused") {
  const auto make = [](const GradScalerOptions& options) {
    const GradScaler made(torch::kCPU, options);
  };
  SAYS("remat.grad_scaler.options", "growth factor is 1", make({.growth_factor = 1}));
  SAYS("remat.grad_scaler.options", "backoff factor is 1", make({.backoff_factor = 1}));
  SAYS("remat.grad_scaler.options", "growth interval is 0", make({.growth_interval = 0}));
  SAYS("remat.grad_scaler.options", "scale is nan", make({.init_scale = std::nan("")}));
  GradScaler scaler(torch::kCPU);
  const GradScalerState before = scaler.state();
  SAYS("remat.grad_scaler.state", "the state is empty", scaler.load_state({}));
  GradScalerState state = before;
  state.growth_tracker = 2000;
  SAYS("remat.grad_scaler.state", "a count below the growth interval", scaler.load_state(state));
  CHECK((scaler.state() == before));
  if (!at::hasCUDA())
    SAYS("remat.grad_scaler.no_device", "LibTorch sees no such device",
         const GradScaler gpu(torch::kCUDA));
}

}  // namespace grad_scaler_test
}  // namespace
