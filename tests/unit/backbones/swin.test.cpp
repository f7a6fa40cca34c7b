// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones/swin.hpp"
#include "remat/explain.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace swin_test {
namespace {

/// A network of torchvision's shape that is small enough for a test.
constexpr remat::SwinDesign kTiny{"tiny", 8, {1, 2, 2, 1}, {1, 2, 2, 4}, 0.3};

using Tiny = remat::SwinTransformer<>;
using Size = std::pair<std::int64_t, std::int64_t>;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

/// Runs the chain layer by layer; returns the sizes of the maps that stages leave.
std::vector<Size> stage_sizes(const Tiny& model, torch::Tensor x) {
  std::vector<Size> sizes;
  for (const remat::ChainLayer& layer : *model->chain()) {
    if (layer.sequential() == nullptr) {
      x = layer.unit().forward<torch::Tensor>(x);
      continue;
    }
    for (torch::nn::AnyModule& block : *layer.sequential()) x = block.forward<torch::Tensor>(x);
    sizes.emplace_back(x.size(1), x.size(2));
  }
  return sizes;
}

}  // namespace

TEST_CASE("Swin's units are its embedding and its blocks; merging and the last norm are plain") {
  remat::SwinT model;

  model->enable_gradient_checkpointing();

  CHECK(model->segments() == 1 + 12);
  std::string plain, layers;
  const auto names = model->chain()->named_children().keys();
  for (const auto& name : names) layers += name + " ";
  CHECK(layers == "embedding stage1 merging2 stage2 merging3 stage3 merging4 stage4 norm ");
  CHECK(model->plan().unit_count() == 1 + 12 + 3 + 1);
}

// microsoft/Swin-Transformer#332, #202, #96: odd maps at the merging stopped with an error.
TEST_CASE("Swin takes maps that are odd, or no multiple of the window") {
  torch::manual_seed(0);
  Tiny model(kTiny, {.num_classes = 5});
  const torch::NoGradGuard no_grad;
  const auto check = [&](Size image, const std::vector<Size>& expected) {
    const auto images = torch::randn({2, 3, image.first, image.second});
    CHECK(stage_sizes(model, images) == expected);
    const auto logits = model->forward(images);
    CHECK(logits.sizes() == torch::IntArrayRef({2, 5}));
    CHECK(logits.isfinite().all().item<bool>());
    CHECK(model->forward_features(images).sizes() ==
          torch::IntArrayRef({2, 64, expected[3].first, expected[3].second}));
  };

  check({224, 224}, {{56, 56}, {28, 28}, {14, 14}, {7, 7}});
  check({112, 112}, {{28, 28}, {14, 14}, {7, 7}, {4, 4}});
  check({225, 223}, {{56, 55}, {28, 28}, {14, 14}, {7, 7}});
  check({256, 200}, {{64, 50}, {32, 25}, {16, 13}, {8, 7}});
  check({4, 37}, {{1, 9}, {1, 5}, {1, 3}, {1, 2}});
}

TEST_CASE("images below the size of a patch are refused with both sizes") {
  Tiny model(kTiny);

  const auto message = error_of([&] { model->forward(torch::zeros({1, 3, 3, 50})); });

  CHECK(message.find("[remat.backbone.image_size]") == 0);
  for (const char* part : {"tiny", "3x50", "4x4"}) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
}

// kornia/kornia#2786, huggingface/pytorch-image-models#1696
TEST_CASE("every layer normalisation of Swin has torchvision's eps") {
  remat::SwinT model;
  std::size_t norm_count = 0;

  for (const auto& module : model->modules()) {
    const auto* norm = module->as<torch::nn::LayerNorm>();
    if (norm == nullptr) continue;
    ++norm_count;
    CHECK(norm->options.eps() == 1e-5);
  }

  CHECK(norm_count == 1 + 2 * 12 + 3 + 1);
}

// huggingface/pytorch-image-models#2118
TEST_CASE("Swin's rates of stochastic depth grow from 0 to the last block's") {
  const auto rates_of = [](const torch::nn::Module& model) {
    std::vector<double> rates;
    for (const auto& module : model.modules())
      if (const auto* layer = module->as<remat::blocks::StochasticDepth>())
        rates.push_back(layer->rate());
    return rates;
  };
  const auto check = [&](const remat::BackboneOptions& options, double last) {
    remat::SwinT model(options);
    const auto rates = rates_of(*model);
    REQUIRE(rates.size() == 12);
    for (std::size_t block = 0; block < 12; ++block)
      CHECK(rates[block] == doctest::Approx(last * static_cast<double>(block) / 11));
  };

  check({}, 0.2);
  check({.stochastic_depth = 0.5}, 0.5);
  check({.stochastic_depth = 0}, 0);
}

TEST_CASE("every second block of a stage shifts its windows by half of one") {
  remat::SwinT model;
  std::string shifts;

  for (const auto& module : model->modules())
    if (const auto* block = module->as<remat::blocks::SwinBlock>()) {
      const auto& options = block->options().attention;
      CHECK(options.window == remat::blocks::WindowSize{7, 7});
      CHECK(options.shift.height == options.shift.width);
      shifts += std::to_string(options.shift.height);
    }

  CHECK(shifts == "030303030303");
}

TEST_CASE("Swin's linear layers and biases by position start narrow, with no bias of their own") {
  torch::manual_seed(0);
  remat::SwinT model(remat::BackboneOptions{.num_classes = 1000});
  const auto parameters = model->named_parameters();

  for (const char* layer : {"features.1.0.attn.qkv", "features.3.1.attn.proj", "features.5.4.mlp.0",
                            "features.7.1.mlp.3", "head"}) {
    CAPTURE(layer);
    const auto weight = parameters[std::string(layer) + ".weight"];
    const auto bias = parameters[std::string(layer) + ".bias"];
    CHECK(weight.std().item<double>() == doctest::Approx(0.02).epsilon(0.02));
    CHECK(torch::equal(bias, torch::zeros_like(bias)));
  }
  CHECK(parameters["features.2.reduction.weight"].std().item<double>() ==
        doctest::Approx(0.02).epsilon(0.02));
  CHECK(parameters["features.7.0.attn.relative_position_bias_table"].std().item<double>() ==
        doctest::Approx(0.02).epsilon(0.05));
}

TEST_CASE("dropout rates reach Swin's attention and MLPs") {
  Tiny model(kTiny, {.dropout = 0.25, .attention_dropout = 0.5});
  std::size_t dropout_count = 0, attention_count = 0;

  for (const auto& module : model->modules()) {
    if (const auto* dropout = module->as<torch::nn::Dropout>()) {
      ++dropout_count;
      CHECK(dropout->options.p() == 0.25);
    }
    if (const auto* attention = module->as<remat::blocks::ShiftedWindowAttention>()) {
      ++attention_count;
      CHECK(attention->options().dropout == 0.25);
      CHECK(attention->options().attention_dropout == 0.5);
    }
  }

  CHECK(dropout_count == 2 * 6);
  CHECK(attention_count == 6);
}

TEST_CASE("three steps with dropout, attention dropout and stochastic depth leave plain's bits") {
  const auto three_steps = [](bool is_checkpointed) {
    torch::manual_seed(0);
    Tiny model(kTiny, {.dropout = 0.1, .attention_dropout = 0.1, .num_classes = 5});
    if (is_checkpointed) model->enable_gradient_checkpointing();
    const auto images = torch::randn({4, 3, 61, 83});
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
}

TEST_CASE("a copy of Swin in half precision finds the biases of the original") {
  torch::manual_seed(0);
  Tiny model(kTiny);
  const auto images = torch::randn({1, 3, 64, 64});
  model->eval();
  const auto expected = model->forward(images);

  model->to(torch::kBFloat16);  // the index of positions, too
  const auto rounded = model->forward(images.to(torch::kBFloat16));

  CHECK(torch::allclose(rounded.to(torch::kFloat), expected, 0.1, 0.1));
  CHECK(rounded.dtype() == torch::kBFloat16);
}

}  // namespace swin_test
