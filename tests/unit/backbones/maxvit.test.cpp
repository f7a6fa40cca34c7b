// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones/maxvit.hpp"
#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace maxvit_test {
namespace {

/// A design of one's own, quick to run: maps of 64x64 images are 16, 8, 4 and 2 places a side.
constexpr remat::MaxViTDesign kSmall{
    "maxvit_small_test", 8, {8, 12, 16, 24}, {1, 1, 2, 1}, 4, 2, 0.4};

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
  remat::MaxViT<Policy> model(
      kSmall, remat::BackboneOptions{.dropout = 0.2, .attention_dropout = 0.3, .num_classes = 5});
  if (is_checkpointed) model->enable_gradient_checkpointing();
  const torch::Tensor images = torch::randn({3, 3, 64, 128});
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
  // Dropout and stochastic depth were on: the generator has moved.
  CHECK_FALSE(torch::equal(plain[0].random_state, plain[1].random_state));
}

}  // namespace

TEST_CASE("three training steps of a MaxViT with every kind of dropout leave plain's bits") {
  check_three_steps<remat::Checkpointed<remat::TransformerLayers>>();
  check_three_steps<remat::Checkpointed<remat::Sequential, remat::Segments<2>>>();
  check_three_steps<
      remat::Checkpointed<remat::TransformerLayers, remat::EachUnit, remat::keep::attention>>();
}

TEST_CASE("MaxViT's rates of stochastic depth grow from 0 to the full rate, alike within a layer") {
  remat::MaxViTT model(remat::BackboneOptions{.dropout = 0.3, .attention_dropout = 0.4});
  std::vector<double> rates;

  for (const auto& module : model->modules()) {
    if (auto* layer = module->as<remat::blocks::MaxViTLayer>()) {
      rates.push_back(layer->options().drop_rate);
    } else if (auto* block = module->as<remat::blocks::MaxViTMBConv>()) {
      CHECK(block->stochastic_depth->rate() == rates.back());
    } else if (auto* part = module->as<remat::blocks::PartitionAttention>()) {
      CHECK(part->stochastic_dropout->rate() == rates.back());
      CHECK(part->attn_layer[2]->as<torch::nn::Dropout>()->options.p() == 0.4);
      CHECK(part->mlp_layer[4]->as<torch::nn::Dropout>()->options.p() == 0.3);
    }
  }

  REQUIRE(rates.size() == 11);
  for (std::size_t layer = 0; layer < rates.size(); ++layer)
    CHECK(rates[layer] == doctest::Approx(0.2 * static_cast<double>(layer) / 10));
  CHECK(rates.back() == 0.2);
}

TEST_CASE("MaxViT's units are the stem and each layer, all of them recomputed by default") {
  remat::MaxViTT model;
  CHECK(model->segments() == 0);

  model->enable_gradient_checkpointing();

  CHECK(model->segments() == 12);
  CHECK(model->plan().checkpointed_count() == 12);
}

TEST_CASE("every normalisation of a MaxViT has torchvision's constants") {
  const remat::MaxViTT model(remat::BackboneOptions{.num_classes = 10});
  std::size_t batch_norm_count = 0, layer_norm_count = 0;

  for (const auto& module : model->modules()) {
    if (const auto* norm = module->as<torch::nn::BatchNorm2d>()) {
      ++batch_norm_count;
      CHECK(norm->options.eps() == 1e-3);
      CHECK(norm->options.momentum().value() == 0.01);
      CHECK(torch::equal(norm->weight, torch::ones_like(norm->weight)));
      CHECK(torch::equal(norm->bias, torch::zeros_like(norm->bias)));
    } else if (const auto* layer_norm = module->as<torch::nn::LayerNorm>()) {
      ++layer_norm_count;
      CHECK(layer_norm->options.eps() == 1e-5);
    }
  }

  CHECK(batch_norm_count == 1 + 3 * 11);
  CHECK(layer_norm_count == 4 * 11 + 1);
}

TEST_CASE("convolutions and linear layers of a MaxViT start narrow and normal, without bias") {
  torch::manual_seed(0);
  const remat::MaxViTT model(remat::BackboneOptions{.num_classes = 100});
  const auto parameters = model->named_parameters();

  for (const auto& item : parameters) {
    const std::string& key = item.key();
    const bool is_narrow = key.ends_with(".weight") && item.value().dim() > 1;
    if (is_narrow && item.value().numel() > 4000) {
      CAPTURE(key);
      CHECK(item.value().std().item<double>() == doctest::Approx(0.02).epsilon(0.06));
    }
    if (key.ends_with(".bias")) CHECK(torch::equal(item.value(), torch::zeros_like(item.value())));
  }
  CHECK_FALSE(parameters.contains("classifier.5.bias"));
}

TEST_CASE("MaxViT takes the sizes whose maps the windows tile, and names them otherwise") {
  remat::MaxViT<> small(kSmall);  // 32 * 2 is the step
  CHECK(small->forward(torch::randn({2, 3, 64, 64})).sizes() == torch::IntArrayRef{2, 24});
  CHECK(small->forward(torch::randn({2, 3, 192, 64})).sizes() == torch::IntArrayRef{2, 24});
  // Maps round up, as torchvision's do.
  CHECK(small->forward_features(torch::randn({2, 3, 61, 64})).sizes() ==
        torch::IntArrayRef{2, 24, 2, 2});
  CHECK(error_of([&] { small->forward(torch::randn({2, 3, 64, 100})); }) ==
        "[remat.backbone.image_size] maxvit_small_test: the images are 64x100, and windows of 2x2 "
        "must tile the map of every block: these are 16x25, 8x13, 4x7, 2x4. The nearest heights "
        "that do are 64, the nearest widths 64 and 128; another partition_size in the design goes "
        "with other sizes.");

  remat::MaxViTT model;
  const std::string error = error_of([&] { model->forward(torch::zeros({1, 3, 256, 256})); });
  CHECK(error ==
        "[remat.backbone.image_size] maxvit_t: the images are 256x256, and windows of 7x7 must "
        "tile the map of every block: these are 64x64, 32x32, 16x16, 8x8. The nearest heights that "
        "do are 224 and 448, the nearest widths 224 and 448; another partition_size in the design "
        "goes with other sizes.");
  CHECK(error_of([] {
          remat::MaxViTT wrong(remat::BackboneOptions{.image_size = 200});
        }).find("The nearest heights that do are 224, the nearest widths 224") !=
        std::string::npos);
}

TEST_CASE("a MaxViT with windows of 8 takes images of 256") {
  remat::MaxViTDesign design = remat::kMaxViTDesigns[0];
  design.partition_size = 8;
  remat::MaxViT<> model(design, remat::BackboneOptions{.image_size = 256, .num_classes = 3});
  model->eval();
  const torch::NoGradGuard no_grad;

  CHECK(model->forward(torch::randn({1, 3, 256, 256})).sizes() == torch::IntArrayRef{1, 3});
  CHECK(error_of([&] {
          model->forward(torch::randn({1, 3, 224, 224}));
        }).find("The nearest heights that do are 256") != std::string::npos);
}

TEST_CASE("MaxViT's head is a normalisation, a linear layer with tanh, and one without bias") {
  torch::manual_seed(0);
  remat::MaxViT<> model(kSmall, remat::BackboneOptions{.num_classes = 3});
  model->eval();
  const torch::Tensor images = torch::randn({2, 3, 64, 64});
  const auto parameters = model->named_parameters();

  const torch::Tensor pooled = model->forward_features(images).mean({2, 3});
  const torch::Tensor hidden =
      torch::linear(torch::layer_norm(pooled, {24}, parameters["classifier.2.weight"],
                                      parameters["classifier.2.bias"]),
                    parameters["classifier.3.weight"], parameters["classifier.3.bias"])
          .tanh();

  CHECK(torch::allclose(model->forward(images),
                        torch::linear(hidden, parameters["classifier.5.weight"])));
  CHECK_FALSE(remat::MaxViT<>(kSmall)->named_parameters().contains("classifier.2.weight"));
  CHECK(remat::MaxViTT(nullptr).is_empty());
}

TEST_CASE("a clone of a MaxViT computes the same, checkpointed as it is") {
  torch::manual_seed(0);
  remat::MaxViT<> model(kSmall, remat::BackboneOptions{.num_classes = 3});
  model->enable_gradient_checkpointing();

  const auto copy = std::dynamic_pointer_cast<remat::MaxViTImpl>(model->clone());

  REQUIRE(copy);
  CHECK(copy->segments() == 6);
  CHECK(training::state_keys(*copy) == training::state_keys(*model));
  model->eval();
  copy->eval();
  const torch::Tensor images = torch::randn({1, 3, 64, 64});
  CHECK(torch::equal(model->forward(images), copy->forward(images)));
}

}  // namespace maxvit_test
