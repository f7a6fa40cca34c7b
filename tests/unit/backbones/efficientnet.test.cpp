// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/unit/backbones/inspection.hpp"

#include "remat/backbones.hpp"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace efficientnet_test {
namespace {

using remat::EfficientNetImpl;
using remat::blocks::MBConvImpl;

/// Small enough to build in a test; the larger two differ from `v2_s` in numbers of the table only.
const std::vector<std::string> kNames{"efficientnet_b0", "efficientnet_b1", "efficientnet_b2",
                                      "efficientnet_v2_s"};

/// Returns {blocks, channels of the result} of each stage of a network.
std::vector<std::pair<std::int64_t, std::int64_t>> stages(const remat::Backbone& model) {
  std::vector<std::pair<std::int64_t, std::int64_t>> counted;
  std::string stage_before;
  for (const auto& [name, block] : inspection::modules_of<MBConvImpl>(model)) {
    const std::string stage = name.substr(0, name.rfind('.'));
    if (stage != stage_before) counted.emplace_back(0, block->options().out);
    ++counted.back().first;
    stage_before = stage;
  }
  return counted;
}

}  // namespace

TEST_CASE("every normalisation of an EfficientNet has eps 1e-5, of V2 1e-3, and momentum 0.1") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const double eps = name == "efficientnet_v2_s" ? 1e-3 : 1e-5;
    CHECK(inspection::norm_constants(*remat::create_backbone(name)) ==
          std::set<std::pair<double, double>>{{eps, 0.1}});
  }
  for (const auto& design : remat::kEfficientNetDesigns)
    CHECK(design.norm_eps == (design.name.find("v2") == std::string_view::npos ? 1e-5 : 1e-3));
}

TEST_CASE("depth and width factors scale the stages of B0 as in torchvision") {
  using Stages = std::vector<std::pair<std::int64_t, std::int64_t>>;
  CHECK(stages(*remat::create_backbone("efficientnet_b0")) ==
        Stages{{1, 16}, {2, 24}, {2, 40}, {3, 80}, {3, 112}, {4, 192}, {1, 320}});
  CHECK(stages(*remat::create_backbone("efficientnet_b1")) ==
        Stages{{2, 16}, {3, 24}, {3, 40}, {4, 80}, {4, 112}, {5, 192}, {2, 320}});
  CHECK(stages(*remat::create_backbone("efficientnet_b2")) ==
        Stages{{2, 16}, {3, 24}, {3, 48}, {4, 88}, {4, 120}, {5, 208}, {2, 352}});
  CHECK(stages(*remat::create_backbone("efficientnet_v2_s")) ==
        Stages{{2, 24}, {4, 48}, {4, 64}, {6, 128}, {9, 160}, {15, 256}});
}

TEST_CASE("the raw features of an EfficientNet are 1280 wide, of B2 1408") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    CHECK(remat::create_backbone(name)->feature_dim() == (name == "efficientnet_b2" ? 1408 : 1280));
  }
}

TEST_CASE("stochastic depth of an EfficientNet grows as rate times index over count of blocks") {
  for (const std::string name : {"efficientnet_b0", "efficientnet_v2_s"}) {
    CAPTURE(name);
    for (const double rate : {0.2, 0.3}) {  // torchvision's, and one of the options
      const auto model = rate == 0.2 ? remat::create_backbone(name)
                                     : remat::create_backbone(name, {.stochastic_depth = rate});
      const auto blocks = inspection::modules_of<MBConvImpl>(*model);
      CHECK(blocks.size() == (name == "efficientnet_b0" ? 16 : 40));
      for (std::size_t i = 0; i < blocks.size(); ++i)
        CHECK(blocks[i].second->stochastic_depth->rate() ==
              rate * static_cast<double>(i) / static_cast<double>(blocks.size()));
    }
  }
}

TEST_CASE("an EfficientNet squeezes to a quarter of a block's input") {
  const auto b0 = inspection::squeezes(*remat::create_backbone("efficientnet_b0"));
  const auto v2 = inspection::squeezes(*remat::create_backbone("efficientnet_v2_s"));

  CHECK(b0 == inspection::Widths{{32, 8},
                                 {96, 4},
                                 {144, 6},
                                 {144, 6},
                                 {240, 10},
                                 {240, 10},
                                 {480, 20},
                                 {480, 20},
                                 {480, 20},
                                 {672, 28},
                                 {672, 28},
                                 {672, 28},
                                 {1152, 48},
                                 {1152, 48},
                                 {1152, 48},
                                 {1152, 48}});
  CHECK(v2.size() == 6 + 9 + 15);  // fused blocks have none
  CHECK(v2.front() == std::pair<std::int64_t, std::int64_t>{256, 16});
  CHECK(v2.back() == std::pair<std::int64_t, std::int64_t>{1536, 64});
}

TEST_CASE("an EfficientNet begins with torchvision's distribution of weights") {
  torch::manual_seed(0);
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_classifier(name, 100);
    CHECK(inspection::first_wrong_initial_value(*model, /*biases_are_zero=*/true) == "");

    const auto linear = inspection::modules_of<torch::nn::LinearImpl>(*model);
    REQUIRE(linear.size() == 1);
    CHECK(linear[0].first == "classifier.1");
    const double bound = 1 / std::sqrt(100.0);  // the count of classes, not of features
    CHECK(linear[0].second->weight.abs().max().item<double>() <= bound);
    CHECK(inspection::has_deviation(linear[0].second->weight, bound / std::sqrt(3.0)));
    CHECK(linear[0].second->bias.eq(0).all().item<bool>());
  }
}

TEST_CASE("an EfficientNet drops as much in front of its classifier as torchvision's") {
  const auto dropout_of = [](const std::string& name, const remat::BackboneOptions& options) {
    const auto model = remat::create_backbone(name, options);
    const auto found = inspection::modules_of<torch::nn::DropoutImpl>(*model);
    REQUIRE(found.size() == 1);
    return found[0].second->options.p();
  };

  CHECK(dropout_of("efficientnet_b0", {.num_classes = 7}) == 0.2);
  CHECK(dropout_of("efficientnet_b1", {.num_classes = 7}) == 0.2);
  CHECK(dropout_of("efficientnet_b2", {.num_classes = 7}) == 0.3);
  CHECK(dropout_of("efficientnet_v2_s", {.num_classes = 7}) == 0.2);
  CHECK(dropout_of("efficientnet_b0", {.dropout = 0.5, .num_classes = 7}) == 0.5);
  CHECK(EfficientNetImpl::designs()[4].dropout == 0.3);  // v2_m
  CHECK(EfficientNetImpl::designs()[5].dropout == 0.4);  // v2_l
}

TEST_CASE("an EfficientNet refuses attention dropout, which it has no use for") {
  CHECK_THROWS_AS(remat::create_backbone("efficientnet_b0", {.attention_dropout = 0.1}),
                  remat::ArgumentError);
}

TEST_CASE("an EfficientNet takes small images that are not square") {
  for (const std::string name : {"efficientnet_b0", "efficientnet_v2_s"}) {
    CAPTURE(name);
    const auto model = remat::create_backbone(name);

    // Five strides of 2, each rounding up: 37, 19, 10, 5, 3, 2 and 70, 35, 18, 9, 5, 3.
    const auto features = model->forward_features(torch::randn({2, 3, 37, 70}));
    CHECK(features.sizes() == torch::IntArrayRef{2, 1280, 2, 3});
  }
}

TEST_CASE(
    "the units of an EfficientNet are its stem, the blocks of its stages and its last "
    "convolution") {
  const auto model = remat::create_backbone("efficientnet_v2_s");
  model->enable_gradient_checkpointing(1000);
  CHECK(model->segments() == 1 + 40 + 1);
}

TEST_CASE("three training steps of an EfficientNet with noise leave plain's bits, unit by unit") {
  torch::manual_seed(1);
  const auto images = torch::randn({3, 3, 40, 33});
  for (const char* name : {"efficientnet_b0", "efficientnet_v2_s"}) {
    CAPTURE(std::string(name));
    inspection::check_three_steps(name, {.stochastic_depth = 0.5, .num_classes = 10}, images);
  }
}

}  // namespace efficientnet_test
