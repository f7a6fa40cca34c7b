// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/reference.hpp"

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

using Keys = std::vector<std::pair<std::string, std::vector<std::int64_t>>>;

Keys state_keys(const torch::nn::Module& module) {
  Keys keys;
  for (const auto& item : module.named_parameters())
    keys.emplace_back(item.key(), item.value().sizes().vec());
  for (const auto& item : module.named_buffers())
    keys.emplace_back(item.key(), item.value().sizes().vec());
  std::sort(keys.begin(), keys.end());
  return keys;
}

/// What one training step leaves: everything that checkpointing must not change.
struct Step {
  torch::Tensor logits;
  torch::Tensor input_gradient;
  std::vector<std::pair<std::string, torch::Tensor>> gradients;
  std::vector<std::pair<std::string, torch::Tensor>> buffers;
};

Step training_step(remat::Backbone& model, const torch::Tensor& images) {
  model.train();
  model.zero_grad();
  const torch::Tensor x = images.clone().requires_grad_();
  Step step;
  step.logits = model.forward(x);
  reference::loss(step.logits).backward();
  step.input_gradient = x.grad();
  for (const auto& item : model.named_parameters())
    step.gradients.emplace_back(item.key(), item.value().grad().clone());
  for (const auto& item : model.named_buffers())
    step.buffers.emplace_back(item.key(), item.value().clone());
  return step;
}

/// Returns the first name whose tensors differ in a bit, "" if none does.
std::string first_difference(const Step& left, const Step& right) {
  if (!torch::equal(left.logits, right.logits)) return "logits";
  if (!torch::equal(left.input_gradient, right.input_gradient)) return "input gradient";
  for (std::size_t i = 0; i < left.gradients.size(); ++i)
    if (!torch::equal(left.gradients[i].second, right.gradients[i].second))
      return left.gradients[i].first;
  for (std::size_t i = 0; i < left.buffers.size(); ++i)
    if (!torch::equal(left.buffers[i].second, right.buffers[i].second))
      return left.buffers[i].first;
  return "";
}

double relative_difference(const std::vector<double>& value,
                           const nlohmann::ordered_json& expected) {
  double worst = 0;
  const double scale = std::max(std::abs(expected[0].get<double>()), 1e-12);
  for (std::size_t i = 0; i < value.size(); ++i)
    worst = std::max(worst, std::abs(value[i] - expected[i].get<double>()) / scale);
  return worst;
}

std::vector<double> first_logits(const torch::Tensor& logits, std::int64_t row) {
  const torch::Tensor start = logits.detach().select(0, row).slice(0, 0, 8).contiguous();
  return {start.data_ptr<double>(), start.data_ptr<double>() + start.numel()};
}

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

TEST_CASE(
    "every ResNet reproduces torchvision's keys, numbers and gradients, checkpointed and not") {
  for (const remat::BackboneInfo& info : remat::list_backbones()) {
    CAPTURE(info.name);
    const auto expected = reference::load(info.name);
    const auto images = reference::image(expected["input"]);
    const auto model = remat::create_classifier(info.name, 1000);
    reference::fill(*model);

    // Names, shapes, counts.
    Keys expected_keys;
    for (const auto& entry : expected["state_dict"])
      expected_keys.emplace_back(entry[0].get<std::string>(),
                                 entry[1].get<std::vector<std::int64_t>>());
    std::sort(expected_keys.begin(), expected_keys.end());
    CHECK(state_keys(*model) == expected_keys);
    std::int64_t count = 0;
    for (const auto& parameter : model->parameters()) count += parameter.numel();
    CHECK(count == expected["parameters"].get<std::int64_t>());
    CHECK(count == info.parameters);
    CHECK(model->feature_dim() == info.feature_dim);

    // Evaluation.
    model->eval();
    {
      const torch::NoGradGuard no_grad;
      const auto logits = model->forward(images);
      CHECK(relative_difference(reference::probe(logits, "logits"), expected["eval"]["probe"]) <
            reference::kTolerance);
      for (std::int64_t row = 0; row < logits.size(0); ++row) {
        const auto values = first_logits(logits, row);
        for (std::size_t i = 0; i < values.size(); ++i)
          CHECK(values[i] ==
                doctest::Approx(
                    expected["eval"]["logits"][static_cast<std::size_t>(row)][i].get<double>())
                    .epsilon(reference::kTolerance));
      }
    }

    // A training step.
    const auto& train = expected["train"];
    const Step plain = training_step(*model, images);
    CHECK(relative_difference(reference::probe(plain.logits, "logits"), train["probe"]) <
          reference::kTolerance);
    CHECK(reference::loss(plain.logits).item<double>() ==
          doctest::Approx(train["loss"].get<double>()).epsilon(reference::kTolerance));
    CHECK(relative_difference(reference::probe(plain.input_gradient, "input_grad"),
                              train["input_grad"]) < reference::kTolerance);
    std::size_t index = 0;
    double worst_gradient = 0;
    for (const auto& [key, value] : train["grads"].items()) {
      REQUIRE(index < plain.gradients.size());
      CHECK(plain.gradients[index].first == key);
      worst_gradient = std::max(
          worst_gradient,
          relative_difference(reference::probe(plain.gradients[index].second, key), value));
      ++index;
    }
    CHECK(index == plain.gradients.size());
    CHECK(worst_gradient < reference::kTolerance);
    for (const auto& [key, tensor] : plain.buffers)
      if (train["buffers"].contains(key))
        CHECK(relative_difference(reference::probe(tensor, key), train["buffers"][key]) <
              reference::kTolerance);

    // The same step, checkpointed: the same bits.
    reference::fill(*model);
    for (auto& item : model->named_buffers())
      if (!item.value().is_floating_point()) item.value().zero_();
    model->enable_gradient_checkpointing();
    const Step checkpointed = training_step(*model, images);
    CHECK(first_difference(plain, checkpointed) == "");
    CHECK(state_keys(*model) == expected_keys);
    model->enable_gradient_checkpointing(8);
    CHECK(state_keys(*model) == expected_keys);
  }
}

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
  CHECK(state_keys(*copy) == state_keys(*model));
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

  REQUIRE(list.size() == 5);
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
  CHECK(error_of([] { remat::create_backbone("resnet50", {.pretrained = true}); }) ==
        "[remat.backbone.pretrained] resnet50: pretrained = true was given, and this version of "
        "remat cannot read "
        "weight files yet. Build it with pretrained = false, and load the weights with your own "
        "code: the names are "
        "torchvision's.");
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
