// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones/vision_transformer.hpp"
#include "remat/explain.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace vision_transformer_test {
namespace {

/// A network of torchvision's shape that is small enough for a test.
constexpr remat::VisionTransformerDesign kTiny{"tiny", 4, 3, 2, 8, 16};

using Tiny = remat::VisionTransformer<>;

torch::Tensor random_state() {
  return remat::detail::state_of(remat::detail::default_generator(torch::kCPU)).clone();
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a vision transformer's units are its layers: ViT-B has 12 segments") {
  remat::ViTB32 model;
  CHECK(model->segments() == 0);

  model->enable_gradient_checkpointing();

  CHECK(model->segments() == 12);
  const remat::Plan plan = model->plan();
  CHECK(plan.unit_count() == 14);  // the embedding and the last normalisation are plain
  std::size_t checkpointed = 0;
  for (const remat::Segment& segment : plan.segments()) {
    if (!segment.is_checkpointed) continue;
    ++checkpointed;
    CHECK(segment.unit_count() == 1);
  }
  CHECK(checkpointed == 12);
}

// kornia/kornia#2786, huggingface/pytorch-image-models#1696
TEST_CASE("every layer normalisation of a vision transformer has torchvision's eps") {
  remat::ViTB32 model;
  std::size_t norm_count = 0;

  for (const auto& module : model->modules()) {
    const auto* norm = module->as<torch::nn::LayerNorm>();
    if (norm == nullptr) continue;
    ++norm_count;
    CHECK(norm->options.eps() == 1e-6);
  }

  CHECK(norm_count == 25);
}

TEST_CASE("a vision transformer starts as torchvision's: patches by the fan in, the head at zero") {
  torch::manual_seed(0);
  remat::ViTB32 model(remat::BackboneOptions{.num_classes = 10});
  const auto parameters = model->named_parameters();
  const auto deviation = [&](const char* key) { return parameters[key].std().item<double>(); };
  const auto is_zero = [&](const char* key) {
    return torch::equal(parameters[key], torch::zeros_like(parameters[key]));
  };

  CHECK(deviation("conv_proj.weight") ==
        doctest::Approx(std::sqrt(1.0 / (3 * 32 * 32))).epsilon(0.01));
  CHECK(deviation("encoder.pos_embedding") == doctest::Approx(0.02).epsilon(0.01));
  CHECK(deviation("encoder.layers.encoder_layer_0.mlp.0.weight") ==
        doctest::Approx(std::sqrt(2.0 / (768 + 3072))).epsilon(0.01));
  CHECK(deviation("encoder.layers.encoder_layer_11.mlp.3.bias") ==
        doctest::Approx(1e-6).epsilon(0.1));
  for (const char* key : {"class_token", "conv_proj.bias", "heads.head.weight", "heads.head.bias",
                          "encoder.layers.encoder_layer_3.self_attention.in_proj_bias"}) {
    CAPTURE(key);
    CHECK(is_zero(key));
  }
}

TEST_CASE("features are all tokens, and the class token's stand for the image") {
  torch::manual_seed(0);
  Tiny model(kTiny, {.in_channels = 2, .image_size = 16});
  const auto images = torch::randn({3, 2, 16, 16});

  const auto tokens = model->forward_features(images);

  CHECK(tokens.sizes() == torch::IntArrayRef({3, 17, 8}));
  CHECK(torch::equal(model->forward(images), tokens.select(1, 0)));
  CHECK(model->feature_dim() == 8);
}

TEST_CASE("without image_size a vision transformer is made for 224 pixels") {
  Tiny model(kTiny);

  CHECK(model->image_size() == 224);
  CHECK(model->grid() == remat::TokenGrid{56, 56});
  CHECK(model->named_parameters()["encoder.pos_embedding"].size(1) == 1 + 56 * 56);
}

// huggingface/pytorch-image-models#750
TEST_CASE("images of another size are refused with both sizes and what would help") {
  remat::ViTB32 model;

  const auto message = error_of([&] { model->forward(torch::zeros({1, 3, 250, 224})); });

  CHECK(message.find("[remat.backbone.image_size]") == 0);
  for (const char* part : {"vit_b_32", "250x224", "224x224", ".image_size = 256",
                           "remat::resize_position_embedding"}) {
    CAPTURE(part);
    CHECK(contains(message, part));
  }
}

TEST_CASE("an image_size that patches do not divide is refused with the nearest that they do") {
  const auto message = error_of([] { remat::ViTB16 model({.image_size = 250}); });
  CHECK(message.find("[remat.backbone.image_size]") == 0);
  for (const char* part : {"250", "16", "240 and 256"}) CHECK(contains(message, part));

  const auto too_small = error_of([] { remat::ViTB16 model({.image_size = 7}); });
  CHECK(contains(too_small, "16"));
  CHECK_FALSE(contains(too_small, "0 and"));
}

TEST_CASE("a vision transformer has no stochastic depth to set") {
  CHECK(
      contains(error_of([] { Tiny model(kTiny, {.stochastic_depth = 0.1}); }), "stochastic_depth"));
}

// huggingface/pytorch-image-models#908, pytorch/vision#5025
TEST_CASE("stored position embeddings of another square grid are resized to fit") {
  torch::manual_seed(0);
  Tiny model(kTiny, {.image_size = 24});
  const auto stored = torch::randn({1, 17, 8});
  const std::string key = "encoder.pos_embedding";

  const auto fitted = model->fit_weight(key, stored, {1, 37, 8});

  CHECK(torch::equal(fitted, remat::resize_position_embedding(stored, {4, 4}, {6, 6})));
  CHECK_FALSE(model->fit_weight(key, torch::randn({1, 18, 8}), {1, 37, 8}).defined());  // no square
  CHECK_FALSE(model->fit_weight(key, torch::randn({1, 17, 9}), {1, 37, 8}).defined());
  CHECK_FALSE(model->fit_weight(key, torch::randn({17, 8}), {1, 37, 8}).defined());
  CHECK_FALSE(model->fit_weight("class_token", torch::randn({1, 2, 8}), {1, 1, 8}).defined());
  const auto folded =
      model->fit_weight("conv_proj.weight", torch::ones({8, 3, 4, 4}), {8, 1, 4, 4});
  CHECK(torch::equal(folded, torch::full({8, 1, 4, 4}, 3.0)));
}

TEST_CASE("dropout reaches the embedding, the attention's results and the MLPs, in training only") {
  Tiny model(kTiny, {.image_size = 8, .dropout = 0.25, .attention_dropout = 0.5});
  std::size_t dropout_count = 0, attention_count = 0;
  for (const auto& module : model->modules()) {
    if (const auto* dropout = module->as<torch::nn::Dropout>()) {
      ++dropout_count;
      CHECK(dropout->options.p() == 0.25);
    }
    if (const auto* attention = module->as<remat::blocks::SelfAttention>()) {
      ++attention_count;
      CHECK(attention->dropout() == 0.5);
    }
  }
  CHECK(dropout_count == 1 + 3 * 3);
  CHECK(attention_count == 3);

  const auto images = torch::randn({2, 3, 8, 8});
  const auto before = random_state();
  model->eval();
  CHECK(torch::equal(model->forward(images), model->forward(images)));
  CHECK(torch::equal(random_state(), before));
  model->train();
  CHECK_FALSE(torch::equal(model->forward(images), model->forward(images)));
  model->named_modules("")["encoder.layers"]->eval();
  CHECK_FALSE(torch::equal(model->forward(images), model->forward(images)));  // the embedding's
  model->named_modules("")["encoder.dropout"]->eval();
  CHECK(torch::equal(model->forward(images), model->forward(images)));
}

TEST_CASE("three steps with every dropout on leave plain's bits") {
  const auto three_steps = [](bool is_checkpointed) {
    torch::manual_seed(0);
    Tiny model(
        kTiny, {.image_size = 16, .dropout = 0.1, .attention_dropout = 0.1, .num_classes = 5});
    torch::nn::init::normal_(model->named_parameters()["heads.head.weight"]);
    if (is_checkpointed) model->enable_gradient_checkpointing();
    const auto images = torch::randn({4, 3, 16, 16});
    std::vector<training::Step> steps;
    for (int round = 0; round < 3; ++round) {
      steps.push_back(
          training::step(*model, images, [](const torch::Tensor& y) { return y.square().sum(); }));
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad(), 1e-2);
    }
    return steps;
  };

  const auto plain = three_steps(false);
  const std::int64_t before = remat::statistics().recomputed_operations;
  const auto checkpointed = three_steps(true);

  CHECK(remat::statistics().recomputed_operations > before);
  for (std::size_t round = 0; round < plain.size(); ++round)
    CHECK(training::first_difference(plain[round], checkpointed[round]) == "");
  CHECK_FALSE(torch::equal(plain[0].result, plain[1].result));
  CHECK(plain[2].gradients[0].second.abs().max().item<double>() > 0);
}

TEST_CASE("the registered class token and position embeddings are those that forward reads") {
  torch::manual_seed(0);
  Tiny model(kTiny, {.image_size = 8});
  model->to(torch::kFloat64);
  const auto images = torch::randn({2, 3, 8, 8}, torch::kFloat64);
  const auto before = model->forward(images);
  const auto copy = std::dynamic_pointer_cast<remat::VisionTransformerImpl>(model->clone());
  REQUIRE(copy);

  for (const char* key : {"class_token", "encoder.pos_embedding", "conv_proj.weight"}) {
    CAPTURE(key);
    const auto unchanged = copy->forward(images);
    const torch::NoGradGuard no_grad;
    copy->named_parameters()[key].add_(torch::randn_like(copy->named_parameters()[key]));
    CHECK_FALSE(torch::allclose(copy->forward(images), unchanged));
    CHECK(torch::equal(model->forward(images), before));
  }
}

}  // namespace vision_transformer_test
