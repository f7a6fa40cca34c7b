// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/reference.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// Every network against torchvision's numbers.
namespace reference_test {
namespace {

using Json = nlohmann::ordered_json;

#ifdef REMAT_TEST_SMALL_NETWORKS
constexpr bool kHasGiants = false;
#else
constexpr bool kHasGiants = true;
#endif
constexpr std::int64_t kGiant = 30'000'000;  // parameters

/// @param least  what the difference is relative to at least; the first number of a probe is a norm
double relative_difference(const std::vector<double>& value, const Json& expected,
                           double least = 1e-12) {
  double worst = 0;
  const double scale = std::max(std::abs(expected[0].get<double>()), least);
  for (std::size_t i = 0; i < value.size(); ++i)
    worst = std::max(worst, std::abs(value[i] - expected[i].get<double>()) / scale);
  return worst;
}

void prepare(remat::Backbone& model) {
  reference::fill(model);
  const torch::NoGradGuard no_grad;
  for (auto& item : model.named_buffers())
    if (item.key().ends_with("num_batches_tracked")) item.value().zero_();
}

void check_keys(const remat::Backbone& model, const remat::BackboneInfo& info,
                const Json& expected) {
  training::Keys expected_keys;
  for (const auto& entry : expected["state_dict"])
    expected_keys.emplace_back(entry[0].get<std::string>(),
                               entry[1].get<std::vector<std::int64_t>>());
  std::sort(expected_keys.begin(), expected_keys.end());
  CHECK(training::state_keys(model) == expected_keys);
  std::int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  CHECK(count == expected["parameters"].get<std::int64_t>());
  CHECK(count == info.parameters);
  CHECK(model.feature_dim() == info.feature_dim);
}

void check_evaluation(remat::Backbone& model, const torch::Tensor& images, const Json& expected) {
  const torch::NoGradGuard no_grad;
  model.eval();
  const torch::Tensor logits = model.forward(images);
  CHECK(relative_difference(reference::probe(logits, "logits"), expected["probe"]) <
        reference::kTolerance);
  for (std::int64_t row = 0; row < logits.size(0); ++row) {
    const Json& first = expected["logits"][static_cast<std::size_t>(row)];
    for (std::size_t i = 0; i < first.size(); ++i)
      CHECK(logits[row][static_cast<std::int64_t>(i)].item<double>() ==
            doctest::Approx(first[i].get<double>()).epsilon(reference::kTolerance));
  }
}

void check_training(const training::Step& step, const Json& expected) {
  CHECK(relative_difference(reference::probe(step.result, "logits"), expected["probe"]) <
        reference::kTolerance);
  CHECK(reference::loss(step.result).item<double>() ==
        doctest::Approx(expected["loss"].get<double>()).epsilon(reference::kTolerance));
  CHECK(relative_difference(reference::probe(step.input_gradient, "input_grad"),
                            expected["input_grad"]) < reference::kTolerance);
  if (!expected.contains("grads")) return;
  REQUIRE(expected["grads"].size() == step.gradients.size());
  // In front of a normalisation the gradient of a shift is zero, and rounding is all there is of
  // it.
  double largest = 0;
  for (const auto& [key, value] : expected["grads"].items())
    largest = std::max(largest, value[0].get<double>());
  double worst = 0;
  std::size_t index = 0;
  for (const auto& [key, value] : expected["grads"].items()) {
    const auto& [name, gradient] = step.gradients[index++];
    CHECK(name == key);
    worst = std::max(worst, relative_difference(reference::probe(gradient, name), value,
                                                /*least=*/1e-6 * largest));
  }
  CHECK(worst < reference::kTolerance);
  for (const auto& [key, tensor] : step.buffers)
    if (expected["buffers"].contains(key))
      CHECK(relative_difference(reference::probe(tensor, key), expected["buffers"][key]) <
            reference::kTolerance);
}

/// Checks evaluation and a training step; then the same step, checkpointed: the same bits.
void check_numbers(remat::Backbone& model, const Json& expected) {
  const torch::Tensor images = reference::image(expected["input"]);
  prepare(model);
  check_evaluation(model, images, expected["eval"]);
  const training::Step plain = training::step(model, images, reference::loss);
  check_training(plain, expected["train"]);

  prepare(model);
  model.enable_gradient_checkpointing();
  CHECK(training::first_difference(plain, training::step(model, images, reference::loss)) == "");
}

/// In torchvision 0.14, which made the numbers; later versions call it a mistake and have 0.01, as
/// we do.
constexpr double kOldMaxVitMomentum = 0.99;

void set_momentum(remat::Backbone& model, double momentum) {
  for (const auto& module : model.modules())
    if (auto* norm = module->as<torch::nn::BatchNorm2d>()) norm->options.momentum(momentum);
}

std::shared_ptr<remat::Backbone> build(const std::string& name) {
  return remat::create_classifier(name, 1000,
                                  {.dropout = 0, .attention_dropout = 0, .stochastic_depth = 0});
}

}  // namespace

TEST_CASE("every network reproduces torchvision's keys, numbers and gradients, checkpointed too") {
  for (const remat::BackboneInfo& info : remat::list_backbones()) {
    if (!kHasGiants && info.parameters > kGiant) continue;
    CAPTURE(info.name);
    const Json expected = reference::load(info.name);
    const auto model = build(info.name);
    if (info.name == "maxvit_t") set_momentum(*model, kOldMaxVitMomentum);

    check_keys(*model, info, expected);
    check_numbers(*model, expected);
    check_keys(*model, info, expected);
    model->enable_gradient_checkpointing(8);
    check_keys(*model, info, expected);
  }
}

TEST_CASE(
    "images that are not square or no multiple of strides and windows give torchvision's "
    "numbers") {
  const Json sizes = reference::load("sizes");
  REQUIRE(sizes["cases"].size() >= 10);

  for (const Json& expected : sizes["cases"]) {
    CAPTURE(expected["model"].get<std::string>());
    CAPTURE(expected["input"].dump());
    check_numbers(*build(expected["model"]), expected);
  }
}

}  // namespace reference_test
