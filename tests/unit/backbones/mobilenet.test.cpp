// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/unit/backbones/inspection.hpp"

#include "remat/backbones.hpp"

#include <string>
#include <vector>

namespace mobilenet_test {
namespace {

const std::vector<std::string> kNames{"mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large"};

remat::BackboneOptions classes(std::int64_t count) { return {.num_classes = count}; }

torch::Tensor flat_mean(const torch::Tensor& features_nchw) {
  return features_nchw.mean({2, 3});  // (N, C)
}

}  // namespace

TEST_CASE("every normalisation of MobileNetV2 has 1e-5 and 0.1, of MobileNetV3 1e-3 and 0.01") {
  using Constants = std::set<std::pair<double, double>>;
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_backbone(name);
    CHECK(inspection::norm_constants(*model) ==
          (name == "mobilenet_v2" ? Constants{{1e-5, 0.1}} : Constants{{1e-3, 0.01}}));
  }
  CHECK(inspection::modules_of<torch::nn::BatchNorm2dImpl>(*remat::MobileNetV2<>()).size() == 52);
  CHECK(inspection::modules_of<torch::nn::BatchNorm2dImpl>(*remat::MobileNetV3Large()).size() ==
        46);
}

TEST_CASE("MobileNetV3 squeezes to a quarter of the width inside, rounded to a multiple of 8") {
  CHECK(inspection::squeezes(*remat::MobileNetV3Small()) == inspection::Widths{{16, 8},
                                                                               {96, 24},
                                                                               {240, 64},
                                                                               {240, 64},
                                                                               {120, 32},
                                                                               {144, 40},
                                                                               {288, 72},
                                                                               {576, 144},
                                                                               {576, 144}});
  CHECK(inspection::squeezes(*remat::MobileNetV3Large()) == inspection::Widths{{72, 24},
                                                                               {120, 32},
                                                                               {120, 32},
                                                                               {480, 120},
                                                                               {672, 168},
                                                                               {672, 168},
                                                                               {960, 240},
                                                                               {960, 240}});
  CHECK(inspection::squeezes(*remat::MobileNetV2<>()).empty());
}

TEST_CASE("strides of a MobileNet belong to depthwise convolutions, at torchvision's places") {
  CHECK(inspection::strided(*remat::MobileNetV2<>()) ==
        std::vector<std::string>{"features.0.0", "features.2.conv.1.0", "features.4.conv.1.0",
                                 "features.7.conv.1.0", "features.14.conv.1.0"});
  CHECK(inspection::strided(*remat::MobileNetV3Small()) ==
        std::vector<std::string>{"features.0.0", "features.1.block.0.0", "features.2.block.1.0",
                                 "features.4.block.1.0", "features.9.block.1.0"});
  CHECK(inspection::strided(*remat::MobileNetV3Large()) ==
        std::vector<std::string>{"features.0.0", "features.2.block.1.0", "features.4.block.1.0",
                                 "features.7.block.1.0", "features.13.block.1.0"});
}

TEST_CASE("a MobileNet begins with torchvision's distribution of weights") {
  torch::manual_seed(0);
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_classifier(name, 1000);

    CHECK(inspection::first_wrong_initial_value(*model, /*biases_are_zero=*/true) == "");
    for (const auto& [layer, linear] : inspection::modules_of<torch::nn::LinearImpl>(*model)) {
      CAPTURE(layer);
      CHECK(inspection::has_deviation(linear->weight, 0.01));
      CHECK(linear->bias.eq(0).all().item<bool>());
    }
  }
}

TEST_CASE("the features of MobileNetV3 end before the classifier's first layer, as torchvision's") {
  CHECK(remat::create_backbone("mobilenet_v2")->feature_dim() == 1280);
  CHECK(remat::create_backbone("mobilenet_v3_small")->feature_dim() == 576);
  CHECK(remat::create_backbone("mobilenet_v3_large")->feature_dim() == 960);

  const auto model = remat::create_classifier("mobilenet_v3_small", 7);
  model->eval();
  const auto images = torch::randn({2, 3, 32, 32});
  const auto linear = inspection::modules_of<torch::nn::LinearImpl>(*model);
  REQUIRE(linear.size() == 2);
  CHECK(linear[0].first == "classifier.0");
  CHECK(linear[1].first == "classifier.3");
  CHECK(linear[0].second->weight.sizes() == torch::IntArrayRef{1024, 576});

  const auto pooled = flat_mean(model->forward_features(images));
  const auto hidden = torch::hardswish(linear[0].second->forward(pooled));
  CHECK(torch::allclose(model->forward(images), linear[1].second->forward(hidden)));
}

TEST_CASE("a MobileNet drops 0.2 of what its last layer sees, or what the options say") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto usual = remat::create_classifier(name, 7);
    const auto given = remat::create_classifier(name, 7, {.dropout = 0.5});
    const auto dropout = inspection::modules_of<torch::nn::DropoutImpl>(*usual);

    REQUIRE(dropout.size() == 1);
    CHECK(dropout[0].first == (name == "mobilenet_v2" ? "classifier.0" : "classifier.2"));
    CHECK(dropout[0].second->options.p() == 0.2);
    CHECK(inspection::modules_of<torch::nn::DropoutImpl>(*given)[0].second->options.p() == 0.5);
    CHECK(inspection::modules_of<torch::nn::DropoutImpl>(*remat::create_backbone(name)).empty());
  }
}

TEST_CASE("a MobileNet refuses the rates that it has no use for") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    CHECK_THROWS_AS(remat::create_backbone(name, {.attention_dropout = 0.1}), remat::ArgumentError);
    CHECK_THROWS_AS(remat::create_backbone(name, {.stochastic_depth = 0.1}), remat::ArgumentError);
  }
}

TEST_CASE("a MobileNet takes small images that are not square") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_backbone(name);

    // Five strides of 2, each rounding up: 37, 19, 10, 5, 3, 2 and 70, 35, 18, 9, 5, 3.
    const auto features = model->forward_features(torch::randn({2, 3, 37, 70}));
    CHECK(features.sizes() == torch::IntArrayRef{2, model->feature_dim(), 2, 3});
  }
}

TEST_CASE("the units of a MobileNet are its stem, its blocks and its last convolution") {
  const auto units = [](const std::string& name) {
    const auto model = remat::create_backbone(name);
    model->enable_gradient_checkpointing(1000);
    return model->segments();
  };

  CHECK(units("mobilenet_v2") == 1 + 17 + 1);
  CHECK(units("mobilenet_v3_small") == 1 + 11 + 1);
  CHECK(units("mobilenet_v3_large") == 1 + 15 + 1);
}

TEST_CASE("three training steps of a MobileNet with dropout leave plain's bits, unit by unit") {
  torch::manual_seed(1);
  const auto images = torch::randn({2, 3, 40, 33});
  for (const std::string& name : kNames) {
    CAPTURE(name);
    inspection::check_three_steps(name, classes(10), images);
  }
}

}  // namespace mobilenet_test
