// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones/convnext.hpp"
#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace convnext_test {
namespace {

/// A design of one's own, quick to run.
constexpr remat::ConvNeXtDesign kSmall{"convnext_small_test", {8, 12, 16, 24}, {2, 1, 3, 1}, 0.6};

std::vector<double> drop_rates(const torch::nn::Module& model) {
  std::vector<double> rates;
  for (const auto& module : model.modules(/*include_self=*/false))
    if (const auto* block = module->as<remat::blocks::ConvNeXtBlock>())
      rates.push_back(block->stochastic_depth->rate());
  return rates;
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

template <class Policy>
std::vector<training::Step> three_steps(bool is_checkpointed) {
  torch::manual_seed(0);
  remat::ConvNeXt<Policy> model(kSmall, remat::BackboneOptions{.num_classes = 5});
  {
    const torch::NoGradGuard no_grad;  // new blocks are nearly the identity: differences would hide
    for (auto& item : model->named_parameters())
      if (item.key().ends_with("layer_scale")) item.value().fill_(1);
  }
  if (is_checkpointed) model->enable_gradient_checkpointing();
  const torch::Tensor images = torch::randn({3, 3, 64, 40});
  std::vector<training::Step> steps;
  for (int round = 0; round < 3; ++round) {
    steps.push_back(training::step(
        *model, images, [](const torch::Tensor& logits) { return logits.square().sum(); }));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model->parameters())
      parameter.sub_(parameter.grad(), /*alpha=*/1e-3);
  }
  return steps;
}

template <class Policy>
void check_three_steps() {
  const auto plain = three_steps<Policy>(false);
  const std::int64_t before = remat::statistics().recomputed_operations;
  const auto checkpointed = three_steps<Policy>(true);
  CHECK(remat::statistics().recomputed_operations > before);
  for (std::size_t round = 0; round < plain.size(); ++round)
    CHECK(training::first_difference(plain[round], checkpointed[round]) == "");
  // Samples were dropped: the generator has moved.
  CHECK_FALSE(torch::equal(plain[0].random_state, plain[1].random_state));
}

}  // namespace

TEST_CASE("three training steps of a ConvNeXt with stochastic depth leave plain's bits") {
  check_three_steps<remat::Checkpointed<remat::StagedHybrid>>();
  check_three_steps<remat::Checkpointed<remat::Sequential, remat::EachUnit>>();
  check_three_steps<remat::Checkpointed<remat::StagedHybrid, remat::EachUnit,
                                        remat::keep::convolutions_and_matmuls>>();
}

TEST_CASE("rates of stochastic depth grow from 0 to ConvNeXt's full rate in the last block") {
  const remat::ConvNeXtTiny tiny;
  const auto rates = drop_rates(*tiny);

  REQUIRE(rates.size() == 18);
  for (std::size_t block = 0; block < rates.size(); ++block)
    CHECK(rates[block] == doctest::Approx(0.1 * static_cast<double>(block) / 17));
  CHECK(rates.back() == 0.1);
  const remat::ConvNeXt<> other(kSmall, remat::BackboneOptions{.stochastic_depth = 0.3});
  CHECK(drop_rates(*other).back() == 0.3);
}

TEST_CASE("ConvNeXt's default plan has a segment for each block, and plain modules around stages") {
  remat::ConvNeXt<> model(kSmall);
  model->enable_gradient_checkpointing();

  CHECK(model->segments() == 7);
  CHECK(to_string(model->plan()) ==
        "[0,1) plain | [1,2) checkpoint | [2,3) checkpoint | [3,4) plain | [4,5) checkpoint | "
        "[5,6) plain | [6,7) checkpoint | [7,8) checkpoint | [8,9) checkpoint | [9,10) plain | "
        "[10,11) checkpoint");
  model->enable_gradient_checkpointing(4);
  CHECK(to_string(model->plan()) ==
        "[0,1) plain | [1,3) checkpoint | [3,4) plain | [4,5) checkpoint | [5,6) plain | "
        "[6,9) checkpoint | [9,10) plain | [10,11) checkpoint");
}

TEST_CASE("every layer norm of a ConvNeXt has eps 1e-6, and starts at scale 1 and shift 0") {
  const remat::ConvNeXtTiny model(remat::BackboneOptions{.num_classes = 10});
  std::size_t norm_count = 0;
  const auto check = [&](double eps, const torch::Tensor& weight, const torch::Tensor& bias) {
    ++norm_count;
    CHECK(eps == 1e-6);
    CHECK(torch::equal(weight, torch::ones_like(weight)));
    CHECK(torch::equal(bias, torch::zeros_like(bias)));
  };

  for (const auto& module : model->modules()) {
    if (const auto* norm = module->as<torch::nn::LayerNorm>())
      check(norm->options.eps(), norm->weight, norm->bias);
    if (const auto* norm = module->as<remat::blocks::LayerNorm2d>())
      check(norm->eps(), norm->weight, norm->bias);
  }

  CHECK(norm_count == 18 + 5);  // one in each block; stem, three transitions and the last
}

TEST_CASE("convolutions and linear layers of a ConvNeXt start narrow and normal, without bias") {
  torch::manual_seed(0);
  const remat::ConvNeXtTiny model(remat::BackboneOptions{.num_classes = 100});
  const auto parameters = model->named_parameters();

  for (const char* layer : {"features.0.0", "features.1.0.block.0", "features.5.4.block.3",
                            "features.7.2.block.5", "features.6.1", "classifier.2"}) {
    CAPTURE(layer);
    const torch::Tensor weight = parameters[std::string(layer) + ".weight"];
    const torch::Tensor bias = parameters[std::string(layer) + ".bias"];
    CHECK(weight.std().item<double>() == doctest::Approx(0.02).epsilon(0.05));
    CHECK(weight.abs().max().item<double>() < 0.2);
    CHECK(torch::equal(bias, torch::zeros_like(bias)));
  }
  const torch::Tensor scale = parameters["features.5.4.layer_scale"];
  CHECK(torch::equal(scale, torch::full_like(scale, 1e-6)));
}

TEST_CASE("ConvNeXt's features are normalised, with a head and without") {
  torch::manual_seed(0);
  const torch::Tensor images = torch::randn({2, 3, 64, 64});
  remat::ConvNeXt<> features(kSmall);
  remat::ConvNeXt<> classifier(kSmall, remat::BackboneOptions{.num_classes = 3});
  features->eval();
  {
    // Both have the same layers but the head's.
    const torch::NoGradGuard no_grad;
    auto copied = classifier->named_parameters();
    for (const auto& item : features->named_parameters()) copied[item.key()].copy_(item.value());
  }
  classifier->eval();

  const torch::Tensor rows = features->forward(images);

  CHECK(rows.sizes() == torch::IntArrayRef{2, 24});
  CHECK(torch::allclose(rows.mean(1), torch::zeros({2}), 0, 1e-5));
  const auto parameters = classifier->named_parameters();
  CHECK(torch::equal(
      classifier->forward(images),
      torch::linear(rows, parameters["classifier.2.weight"], parameters["classifier.2.bias"])));
}

TEST_CASE("a ConvNeXt takes images of any size from 32 on") {
  remat::ConvNeXt<> model(kSmall, remat::BackboneOptions{.in_channels = 1});

  CHECK(model->forward(torch::randn({1, 1, 32, 75})).sizes() == torch::IntArrayRef{1, 24});
  CHECK(model->forward_features(torch::randn({1, 1, 225, 47})).sizes() ==
        torch::IntArrayRef{1, 24, 7, 1});
  CHECK(error_of([&] { model->forward(torch::randn({1, 1, 31, 224})); }) ==
        "[remat.backbone.image_size] convnext_small_test: the images are 31x224, at least 32x32 "
        "was expected: Five halvings leave nothing of smaller ones. Resize the images.");
}

TEST_CASE("a ConvNeXt refuses rates that it has no use for") {
  CHECK(error_of([] { remat::ConvNeXtTiny(remat::BackboneOptions{.dropout = 0.1}); }) ==
        "[remat.backbone.options] convnext_tiny: dropout is 0.1, and this network has none. Leave "
        "it unset.");
  CHECK(error_of([] {
          remat::ConvNeXtTiny(remat::BackboneOptions{.attention_dropout = 0.1});
        }).find("attention_dropout is 0.1") != std::string::npos);
  CHECK(error_of([] {
          remat::ConvNeXt<> model("convnext_tinny");
        }).find("the nearest names are \"convnext_tiny\"") != std::string::npos);
}

TEST_CASE("a clone of a ConvNeXt computes the same, checkpointed as it is") {
  torch::manual_seed(0);
  remat::ConvNeXt<> model(kSmall, remat::BackboneOptions{.num_classes = 3});
  model->enable_gradient_checkpointing(6);

  const auto copy = std::dynamic_pointer_cast<remat::ConvNeXtImpl>(model->clone());

  REQUIRE(copy);
  CHECK(copy->segments() == 6);
  CHECK(training::state_keys(*copy) == training::state_keys(*model));
  model->eval();
  copy->eval();
  const torch::Tensor images = torch::randn({1, 3, 64, 64});
  CHECK(torch::equal(model->forward(images), copy->forward(images)));
}

}  // namespace convnext_test
