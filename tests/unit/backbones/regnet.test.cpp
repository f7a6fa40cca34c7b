// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/unit/backbones/inspection.hpp"

#include "remat/backbones.hpp"

#include <array>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace regnet_test {
namespace {

/// Small enough to build in a test.
const std::vector<std::string> kNames{"regnet_y_400mf", "regnet_y_800mf", "regnet_y_1_6gf"};

/// The paper's parameters of a network.
struct LinearRule {
  std::string_view name;
  std::int64_t depth, initial_width;
  double slope, step;
  std::int64_t group_width;
};

constexpr std::array kRules{
    LinearRule{"regnet_y_400mf", 16, 48, 27.89, 2.09, 8},
    LinearRule{"regnet_y_800mf", 14, 56, 38.84, 2.4, 16},
    LinearRule{"regnet_y_1_6gf", 27, 48, 20.71, 2.65, 24},
    LinearRule{"regnet_y_3_2gf", 21, 80, 42.63, 2.66, 24},
    LinearRule{"regnet_y_8gf", 17, 192, 76.82, 2.19, 56},
    LinearRule{"regnet_y_16gf", 18, 200, 106.23, 2.48, 112},
    LinearRule{"regnet_y_32gf", 20, 232, 115.89, 2.53, 232},
};

/// Returns {blocks, width} of each stage: widths on a line, rounded to powers of the step, then to
/// multiples of 8, and at last to multiples of the group width.
std::vector<std::pair<std::int64_t, std::int64_t>> stages_of(const LinearRule& rule) {
  std::vector<std::pair<std::int64_t, std::int64_t>> stages;
  const auto initial = static_cast<double>(rule.initial_width);
  double width_before = 0;
  for (std::int64_t block = 0; block < rule.depth; ++block) {
    const double on_line = initial + rule.slope * static_cast<double>(block);
    const double power = std::nearbyint(std::log(on_line / initial) / std::log(rule.step));
    const double width = std::nearbyint(initial * std::pow(rule.step, power) / 8) * 8;
    if (width != width_before)
      stages.emplace_back(0,
                          remat::blocks::rounded_width(
                              width, std::min(rule.group_width, static_cast<std::int64_t>(width))));
    ++stages.back().first;
    width_before = width;
  }
  return stages;
}

}  // namespace

TEST_CASE("the table of RegNetY is what the paper's linear rule gives") {
  REQUIRE(kRules.size() == remat::kRegNetYDesigns.size());
  for (std::size_t i = 0; i < kRules.size(); ++i) {
    const remat::RegNetDesign& design = remat::kRegNetYDesigns[i];
    CAPTURE(std::string(design.name));
    CHECK(kRules[i].name == design.name);
    CHECK(kRules[i].group_width == design.group_width);
    const auto stages = stages_of(kRules[i]);
    REQUIRE(stages.size() == design.width.size());
    for (std::size_t stage = 0; stage < stages.size(); ++stage)
      CHECK(stages[stage] == std::pair{design.block_count[stage], design.width[stage]});
  }
}

TEST_CASE("the group width fixes how many channels a group has, not how many groups there are") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_backbone(name);
    std::set<std::int64_t> group_widths;
    for (const auto& [layer, convolution] : inspection::modules_of<torch::nn::Conv2dImpl>(*model))
      if (convolution->options.groups() > 1)
        group_widths.insert(convolution->options.out_channels() / convolution->options.groups());
    const auto expected = name == "regnet_y_400mf" ? 8 : name == "regnet_y_800mf" ? 16 : 24;
    CHECK(group_widths == std::set<std::int64_t>{expected});
  }
  CHECK(remat::RegNetY400MF()
            ->named_parameters()["trunk_output.block4.block4-0.f.b.0.weight"]
            .sizes() == torch::IntArrayRef{440, 8, 3, 3});
}

TEST_CASE(
    "a RegNetY squeezes to a quarter of a block's input, which the first of a stage has less of") {
  CHECK(inspection::squeezes(*remat::RegNetY400MF()) == inspection::Widths{{48, 8},
                                                                           {104, 12},
                                                                           {104, 26},
                                                                           {104, 26},
                                                                           {208, 26},
                                                                           {208, 52},
                                                                           {208, 52},
                                                                           {208, 52},
                                                                           {208, 52},
                                                                           {208, 52},
                                                                           {440, 52},
                                                                           {440, 110},
                                                                           {440, 110},
                                                                           {440, 110},
                                                                           {440, 110},
                                                                           {440, 110}});
}

TEST_CASE("every normalisation of a RegNetY has 1e-5 and 0.1") {
  for (const std::string& name : kNames) {
    CAPTURE(name);
    CHECK(inspection::norm_constants(*remat::create_backbone(name)) ==
          std::set<std::pair<double, double>>{{1e-5, 0.1}});
  }
}

TEST_CASE(
    "the first block of each stage has the strides, in its 3x3 convolution and its shortcut") {
  std::vector<std::string> expected{"stem.0"};
  for (const std::string stage : {"block1", "block2", "block3", "block4"}) {
    expected.push_back("trunk_output." + stage + "." + stage + "-0.proj.0");
    expected.push_back("trunk_output." + stage + "." + stage + "-0.f.b.0");
  }
  CHECK(inspection::strided(*remat::RegNetY800MF()) == expected);
}

TEST_CASE("a RegNetY begins with torchvision's distribution of weights") {
  torch::manual_seed(0);
  for (const std::string& name : kNames) {
    CAPTURE(name);
    const auto model = remat::create_classifier(name, 1000);

    // Unlike the other families' biases, those of squeeze-and-excitation are drawn.
    CHECK(inspection::first_wrong_initial_value(*model, /*biases_are_zero=*/false) == "");
    const auto linear = inspection::modules_of<torch::nn::LinearImpl>(*model);
    REQUIRE(linear.size() == 1);
    CHECK(linear[0].first == "fc");
    CHECK(inspection::has_deviation(linear[0].second->weight, 0.01));
    CHECK(linear[0].second->bias.eq(0).all().item<bool>());
  }
}

TEST_CASE("the raw features of a RegNetY are as wide as its last stage") {
  for (const std::string& name : kNames)
    CHECK(remat::create_backbone(name)->feature_dim() == (name == "regnet_y_400mf"   ? 440
                                                          : name == "regnet_y_800mf" ? 784
                                                                                     : 888));
}

TEST_CASE("a RegNetY refuses rates: it has no noise") {
  CHECK_THROWS_AS(remat::create_backbone("regnet_y_400mf", {.dropout = 0.1}), remat::ArgumentError);
  CHECK_THROWS_AS(remat::create_backbone("regnet_y_400mf", {.attention_dropout = 0.1}),
                  remat::ArgumentError);
  CHECK_THROWS_AS(remat::create_backbone("regnet_y_400mf", {.stochastic_depth = 0.1}),
                  remat::ArgumentError);
}

TEST_CASE("a RegNetY takes small images that are not square") {
  // Five strides of 2, each rounding up: 37, 19, 10, 5, 3, 2 and 70, 35, 18, 9, 5, 3.
  CHECK(remat::RegNetY400MF()->forward_features(torch::randn({2, 3, 37, 70})).sizes() ==
        torch::IntArrayRef{2, 440, 2, 3});
}

TEST_CASE("the units of a RegNetY are its stem and the blocks of its stages") {
  remat::RegNetY400MF model;
  model->enable_gradient_checkpointing(1000);
  CHECK(model->segments() == 1 + 16);
}

TEST_CASE("three training steps of a RegNetY leave plain's bits, unit by unit") {
  torch::manual_seed(1);
  inspection::check_three_steps("regnet_y_400mf", {.num_classes = 10},
                                torch::randn({2, 3, 40, 33}));
}

}  // namespace regnet_test
