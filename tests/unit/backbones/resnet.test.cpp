// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones.hpp"
#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace resnet_test {
namespace {

/// A user's module with a backbone in it.
struct HostImpl : torch::nn::Cloneable<HostImpl> {
  HostImpl() { reset(); }
  void reset() override {
    backbone = register_module("backbone", remat::create_backbone("resnet18"));
  }

  std::shared_ptr<remat::Backbone> backbone;
};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a backbone starts with checkpointing off, and the switches say what is in effect") {
  const auto model = remat::create_backbone("resnet18");

  CHECK_FALSE(model->is_gradient_checkpointing_enabled());
  CHECK(model->segments() == 0);
  model->enable_gradient_checkpointing();
  CHECK(model->is_gradient_checkpointing_enabled());
  CHECK(model->segments() == 4);
  model->enable_gradient_checkpointing(2);
  CHECK(model->segments() == 2);
  model->enable_gradient_checkpointing(1000);
  CHECK(model->segments() == 9);  // the stem and eight blocks
  model->disable_gradient_checkpointing();
  CHECK_FALSE(model->is_gradient_checkpointing_enabled());
  CHECK_THROWS_AS(model->enable_gradient_checkpointing(0), remat::ArgumentError);
}

TEST_CASE("the stride of a bottleneck belongs to its 3x3 convolution") {
  const auto model = remat::create_backbone("resnet50");
  const auto modules = model->named_modules("");
  const auto stride = [&](const std::string& name) {
    return (*modules[name]->as<torch::nn::Conv2d>()->options.stride())[0];
  };

  CHECK(stride("layer2.0.conv1") == 1);
  CHECK(stride("layer2.0.conv2") == 2);
  CHECK(stride("layer2.0.downsample.0") == 2);
  CHECK(stride("layer1.0.conv2") == 1);
}

TEST_CASE("every normalisation has torchvision's constants, and starts at scale 1 and shift 0") {
  const auto model = remat::create_backbone("resnet50");
  std::size_t norm_count = 0;

  for (const auto& module : model->modules()) {
    const auto* norm = module->as<torch::nn::BatchNorm2d>();
    if (norm == nullptr) continue;
    ++norm_count;
    CHECK(norm->options.eps() == 1e-5);
    CHECK(norm->options.momentum().value() == 0.1);
    CHECK(torch::equal(norm->weight, torch::ones_like(norm->weight)));
    CHECK(torch::equal(norm->bias, torch::zeros_like(norm->bias)));
  }

  CHECK(norm_count == 53);
}

TEST_CASE("convolutions start with He's normal distribution by the fan out") {
  torch::manual_seed(0);
  const auto model = remat::create_backbone("resnet18");

  const auto weight = model->named_parameters()["layer4.1.conv2.weight"];

  const double expected = std::sqrt(2.0 / (512 * 9));
  CHECK(weight.std().item<double>() == doctest::Approx(expected).epsilon(0.01));
  CHECK(std::abs(weight.mean().item<double>()) < 0.01 * expected);
}

TEST_CASE("options give a projection, other channels, another head") {
  const auto images = torch::randn({2, 1, 64, 48});

  const auto projected = remat::create_backbone("resnet18", {.feature_dim = 7, .in_channels = 1});
  CHECK(projected->feature_dim() == 7);
  CHECK(projected->forward(images).sizes() == torch::IntArrayRef({2, 7}));
  CHECK(projected->named_parameters().contains("projection.weight"));

  const auto raw = remat::create_backbone("resnet18", {.in_channels = 1});
  CHECK(raw->feature_dim() == 512);
  CHECK(raw->forward(images).sizes() == torch::IntArrayRef({2, 512}));
  CHECK(raw->forward_features(images).sizes() == torch::IntArrayRef({2, 512, 2, 2}));

  const auto classifier = remat::create_classifier("resnet18", 10, {.in_channels = 1});
  CHECK(classifier->num_classes() == 10);
  CHECK(classifier->forward(images).sizes() == torch::IntArrayRef({2, 10}));
}

TEST_CASE("a clone has the same numbers, its own storage, and trains on its own") {
  torch::manual_seed(0);
  const auto model = remat::create_classifier("resnet18", 10);
  model->enable_gradient_checkpointing(3);
  model->named_parameters()["conv1.weight"].set_requires_grad(false);
  model->named_modules("")["layer1"]->eval();

  const auto copy = std::dynamic_pointer_cast<remat::Backbone>(model->clone());

  REQUIRE(copy);
  CHECK(copy->is_gradient_checkpointing_enabled());
  CHECK(copy->segments() == 3);
  CHECK_FALSE(copy->named_parameters()["conv1.weight"].requires_grad());
  CHECK_FALSE(copy->named_modules("")["layer1.0"]->is_training());
  CHECK(copy->named_modules("")["layer2.0"]->is_training());
  CHECK(training::state_keys(*copy) == training::state_keys(*model));
  const auto copied = copy->named_parameters();
  for (const auto& item : model->named_parameters()) {
    CHECK(torch::equal(item.value(), copied[item.key()]));
    CHECK(item.value().data_ptr() != copied[item.key()].data_ptr());
  }
  const auto images = torch::randn({2, 3, 32, 32});
  CHECK(torch::equal(model->forward(images), copy->forward(images)));

  // What the copy learns, the original does not.
  const auto before = model->named_parameters()["layer2.0.conv1.weight"].clone();
  copy->forward(images).sum().backward();
  CHECK(copied["layer2.0.conv1.weight"].grad().defined());
  CHECK_FALSE(model->named_parameters()["layer2.0.conv1.weight"].grad().defined());
  CHECK(torch::equal(before, model->named_parameters()["layer2.0.conv1.weight"]));
}

TEST_CASE("to() and train() reach every unit, and a clone of the result is like it") {
  const auto model = remat::create_backbone("resnet18");

  model->to(torch::kFloat64);
  model->eval();
  const auto copy = std::dynamic_pointer_cast<remat::Backbone>(model->clone());

  CHECK(copy->parameters()[0].dtype() == torch::kFloat64);
  const auto images = torch::randn({1, 3, 32, 32}, torch::kFloat64);
  CHECK(torch::equal(model->forward(images), copy->forward(images)));
  for (const auto& module : copy->modules()) CHECK_FALSE(module->is_training());
}

TEST_CASE("a backbone inside a module that is cloned keeps its weights and its switch") {
  const auto host = std::make_shared<HostImpl>();
  host->backbone->enable_gradient_checkpointing(2);

  const auto copy = std::dynamic_pointer_cast<HostImpl>(host->clone());

  REQUIRE(copy);
  CHECK(copy->backbone->segments() == 2);
  const auto copied = copy->named_parameters();
  for (const auto& item : host->named_parameters()) {
    CHECK(torch::equal(item.value(), copied[item.key()]));
    CHECK(item.value().data_ptr() != copied[item.key()].data_ptr());
  }
}

TEST_CASE("a block is exempted by its name, and stays so in a clone") {
  const auto model = remat::create_backbone("resnet18");
  model->enable_gradient_checkpointing(2);

  remat::plain(*model, "layer1.0");
  const auto copy = std::dynamic_pointer_cast<remat::Backbone>(model->clone());

  for (const auto& backbone : {model, copy}) {
    const auto& net = dynamic_cast<const remat::ResNet18::ContainedType&>(*backbone);
    CHECK(to_string(net.plan()) ==
          "[0,1) checkpoint | [1,2) plain | [2,5) checkpoint | [5,9) checkpoint");
  }
}

TEST_CASE("each ResNet is also a type, with the policy of one's choice") {
  const auto images = torch::randn({2, 3, 32, 32});
  remat::ResNet34 typed(remat::BackboneOptions{.feature_dim = 5});
  remat::ResNet<remat::Checkpointed<remat::Sequential, remat::EachUnit>> each(18);

  CHECK(typed->forward(images).sizes() == torch::IntArrayRef({2, 5}));
  each->enable_gradient_checkpointing();
  CHECK(each->segments() == 9);
  CHECK(each->forward(images).sizes() == torch::IntArrayRef({2, 512}));
}

TEST_CASE("the list of backbones names family, parameters and feature size") {
  const auto list = remat::list_backbones();

  REQUIRE(list.size() == 33);
  CHECK(list[2].name == "resnet50");
  CHECK(list[2].family == "ResNet");
  CHECK(list[2].parameters == 25'557'032);
  CHECK(list[2].feature_dim == 2048);
}

TEST_CASE("what cannot be built is refused, with the values and the cure") {
  CHECK(error_of([] { remat::create_backbone("resnet51"); }) ==
        "[remat.backbone.unknown] remat::create_backbone: there is no backbone \"resnet51\"; the "
        "nearest names are "
        "\"resnet50\", \"resnet18\", \"resnet34\". remat::list_backbones() has the full list.");
  CHECK(error_of([] {
          remat::create_backbone("resnet50", {.pretrained = true, .weights = "file.pth"});
        }) ==
        "[remat.backbone.options] resnet50: pretrained = true and weights = \"file.pth\" were both "
        "given, and at most one is expected.");
  CHECK(error_of([] { remat::create_backbone("resnet50", {.dropout = 0.5}); }) ==
        "[remat.backbone.options] resnet50: dropout is 0.5, and this network has none. Leave it "
        "unset.");
  CHECK(error_of([] { remat::create_backbone("resnet50", {.stochastic_depth = 1.5}); }) ==
        "[remat.backbone.options] resnet50: stochastic_depth is 1.5, a rate between 0 and 1 was "
        "expected.");
  CHECK(error_of([] { remat::ResNet<>("resnet19"); }) ==
        "[remat.backbone.unknown] remat::ResNet: there is no backbone \"resnet19\"; the nearest "
        "names are \"resnet18\", \"resnet34\", \"resnet50\". remat::create_backbone builds "
        "those of the other families.");
  CHECK(error_of([] { remat::create_backbone("resnet50", {.feature_dim = -1}); }) ==
        "[remat.backbone.options] resnet50: feature_dim is -1, at least 0 was expected.");
  CHECK(error_of([] { remat::create_backbone("resnet50", {.in_channels = 0}); }) ==
        "[remat.backbone.options] resnet50: in_channels is 0, at least 1 was expected.");
  CHECK(error_of([] { remat::create_classifier("resnet50", 0); }) ==
        "[remat.backbone.options] remat::create_classifier: num_classes is 0, at least 1 was "
        "expected.");
  CHECK(error_of([] { remat::create_classifier("resnet50", 10, {.feature_dim = 4}); }) ==
        "[remat.backbone.options] resnet50: feature_dim = 4 and num_classes = 10 were both given, "
        "and at most one is "
        "expected: A classifier's head works on the raw features. Leave one of them at 0.");
  CHECK(error_of([] { remat::ResNet<> net(19); }) ==
        "[remat.backbone.depth] remat::ResNet: the depth is 19, one of 18, 34, 50, 101, 152 was "
        "expected.");
}

TEST_CASE("images of a wrong shape are refused at the entrance") {
  const auto model = remat::create_backbone("resnet18");

  CHECK(error_of([&] { model->forward(torch::zeros({3, 32, 32})); }) ==
        "[remat.backbone.images] resnet18: the images are of shape (3, 32, 32), (N, 3, H, W) was "
        "expected. Add the "
        "batch dimension with unsqueeze(0), or build the backbone with the in_channels of your "
        "images.");
  CHECK(error_of([&] { model->forward(torch::zeros({1, 1, 32, 32})); }).find("(1, 1, 32, 32)") !=
        std::string::npos);
  CHECK(error_of([&] { model->forward(torch::Tensor()); }).find("undefined") != std::string::npos);
}

}  // namespace resnet_test
