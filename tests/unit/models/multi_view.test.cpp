// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/memory.hpp"
#include "remat/models/multi_view.hpp"
#include "remat/nn.hpp"
#include "remat/policies.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace multi_view_test {
namespace {

using remat::MultiViewClassifier;
using remat::ViewAggregation;

constexpr ViewAggregation kAll[] = {ViewAggregation::kAttention, ViewAggregation::kMean,
                                    ViewAggregation::kMax};

/// Batches of different sizes may add up in another order.
constexpr double kRounding = 1e-5;

/// A network with batch normalisation, stochastic depth and six units, quick to run.
constexpr remat::EfficientNetStage kStages[] = {
    {remat::blocks::MBConvKind::kDepthwise, 1, 3, 1, 8, 1},
    {remat::blocks::MBConvKind::kDepthwise, 4, 3, 2, 16, 2},
    {remat::blocks::MBConvKind::kFused, 4, 3, 2, 24, 1},
};
constexpr remat::EfficientNetDesign kDesign{
    "efficientnet_test", kStages, 8, 1.0, 1.0, 32, 0.2, 1e-5};

MultiViewClassifier small_model(ViewAggregation aggregation, std::int64_t num_views = 3) {
  torch::manual_seed(0);
  const remat::EfficientNet<> backbone(kDesign, remat::BackboneOptions{.feature_dim = 16});
  return MultiViewClassifier(backbone.ptr(), 5, num_views, aggregation);
}

bool is_close(const torch::Tensor& left, const torch::Tensor& right) {
  return torch::allclose(left, right, kRounding, kRounding);
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

using Named = std::vector<std::pair<std::string, torch::Tensor>>;

/// Trains for three steps; returns logits, gradients and buffers of each.
Named three_steps(MultiViewClassifier model, const torch::Tensor& is_present) {
  torch::manual_seed(1);
  const torch::Tensor images = torch::randn({2, 3, 3, 32, 32});
  Named found;
  for (int round = 0; round < 3; ++round) {
    model->zero_grad();
    const torch::Tensor logits = model->forward(images, is_present);
    logits.square().sum().backward();
    found.emplace_back("logits", logits.detach());
    const torch::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) {
      found.emplace_back(item.key(), item.value().grad().clone());
      item.value().sub_(item.value().grad(), /*alpha=*/1e-3);
    }
    for (auto& item : model->named_buffers()) found.emplace_back(item.key(), item.value().clone());
  }
  return found;
}

std::string first_difference(const Named& left, const Named& right) {
  if (left.size() != right.size()) return "number of tensors";
  for (std::size_t i = 0; i < left.size(); ++i)
    if (!torch::equal(left[i].second, right[i].second)) return left[i].first;
  return "";
}

}  // namespace

TEST_CASE("views folded into one batch give what a loop over the views gives") {
  for (const ViewAggregation aggregation : kAll) {
    for (const std::int64_t view_count : {1, 2, 3}) {
      CAPTURE(view_count);
      const auto model = small_model(aggregation, view_count);
      model.ptr()->eval();
      const torch::Tensor images = torch::randn({2, view_count, 3, 32, 32});

      std::vector<torch::Tensor> views;
      for (std::int64_t view = 0; view < view_count; ++view)
        views.push_back(model->backbone()->forward(images.select(1, view)));
      const torch::Tensor rows = torch::stack(views, 1);  // (B, V, F)
      torch::Tensor fused = rows.mean(1);
      if (aggregation == ViewAggregation::kMax) fused = std::get<0>(rows.max(1));
      if (aggregation == ViewAggregation::kAttention)
        fused = model->named_modules("")["attention"]->as<remat::blocks::GatedAttention>()->forward(
            rows);

      CHECK(is_close(model.ptr()->fused_features(images), fused));
      CHECK(model.ptr()->forward(images).sizes() == torch::IntArrayRef{2, 5});
    }
  }
}

TEST_CASE("no aggregation depends on the order of the views") {
  for (const ViewAggregation aggregation : kAll) {
    auto model = small_model(aggregation);
    model->eval();
    const torch::Tensor images = torch::randn({2, 3, 3, 32, 32});
    const torch::Tensor turned = images.index_select(1, torch::tensor({2, 0, 1}));

    CHECK(is_close(model->forward(images), model->forward(turned)));
  }
}

TEST_CASE("the maximum of equal views shares their gradient") {
  auto model = small_model(ViewAggregation::kMax);
  model->eval();
  const torch::Tensor view = torch::randn({1, 1, 3, 32, 32});
  const torch::Tensor images = view.repeat({1, 2, 1, 1, 1}).requires_grad_();

  model->forward(images).sum().backward();

  CHECK(is_close(images.grad().select(1, 0), images.grad().select(1, 1)));
  CHECK(images.grad().abs().sum().item<double>() > 0);
}

TEST_CASE("a single view is what every aggregation makes of itself") {
  const torch::Tensor images = torch::randn({2, 1, 3, 32, 32});
  for (const ViewAggregation aggregation : kAll) {
    auto model = small_model(aggregation);
    model->eval();

    CHECK(
        torch::equal(model->fused_features(images), model->backbone()->forward(images.squeeze(1))));
  }
}

TEST_CASE("what is in place of an absent view has no influence, not a number included") {
  const torch::Tensor is_present = torch::tensor({{true, false, true}, {false, true, false}});
  for (const ViewAggregation aggregation : kAll) {
    torch::manual_seed(1);
    torch::Tensor images = torch::randn({2, 3, 3, 32, 32});
    Named results[2];
    for (const bool is_nan : {false, true}) {
      auto model = small_model(aggregation);
      torch::Tensor shown = images.clone();
      const double content = is_nan ? std::numeric_limits<double>::quiet_NaN() : 1e6;
      shown.masked_fill_(is_present.logical_not().view({2, 3, 1, 1, 1}), content);
      shown.requires_grad_();

      const torch::Tensor logits = model->forward(shown, is_present);
      logits.square().sum().backward();

      Named& found = results[is_nan ? 1 : 0];
      found.emplace_back("logits", logits.detach());
      found.emplace_back("images", shown.grad());
      for (const auto& item : model->named_parameters())
        found.emplace_back(item.key(), item.value().grad());
      for (const auto& item : model->named_buffers()) found.emplace_back(item.key(), item.value());
      CHECK(logits.isfinite().all().item<bool>());
      const torch::Tensor is_moved = shown.grad().flatten(2).ne(0).any(2);
      CHECK(torch::equal(is_moved, is_present));
    }
    CHECK(first_difference(results[0], results[1]) == "");
  }
}

TEST_CASE("an object with an absent view is classified as one that has only the others") {
  for (const ViewAggregation aggregation : kAll) {
    auto model = small_model(aggregation);
    model->eval();
    const torch::Tensor images = torch::randn({1, 3, 3, 32, 32});

    const torch::Tensor masked = model->forward(images, torch::tensor({{true, false, true}}));

    CHECK(is_close(masked, model->forward(images.index_select(1, torch::tensor({0, 2})))));
  }
}

TEST_CASE("a mask in which every view is present changes nothing") {
  for (const ViewAggregation aggregation : kAll) {
    const Named without = three_steps(small_model(aggregation), {});
    const Named with = three_steps(small_model(aggregation), torch::ones({2, 3}, torch::kBool));

    CHECK(first_difference(without, with) == "");
  }
}

TEST_CASE("three training steps over several views leave plain's bits when checkpointed") {
  const torch::Tensor some = torch::tensor({{true, false, true}, {true, true, true}});
  for (const ViewAggregation aggregation : kAll) {
    for (const torch::Tensor& is_present : {torch::Tensor(), some}) {
      const Named plain = three_steps(small_model(aggregation), is_present);
      auto model = small_model(aggregation);
      CHECK(remat::enable_gradient_checkpointing(model) == 1);
      CHECK(model->backbone()->segments() == 5);
      const std::int64_t before = remat::statistics().recomputed_operations;

      const Named checkpointed = three_steps(model, is_present);

      CHECK(remat::statistics().recomputed_operations > before);
      CHECK(first_difference(plain, checkpointed) == "");
    }
  }
}

TEST_CASE("the backbone is there once, whatever the number of views") {
  auto model = small_model(ViewAggregation::kMean, 7);
  std::size_t backbone_keys = 0;

  for (const auto& key : model->named_parameters().keys())
    if (key.starts_with("backbone.")) ++backbone_keys;

  CHECK(backbone_keys == model->backbone()->parameters().size());
  CHECK(model->named_parameters().size() == backbone_keys + 2);  // and the linear layer
  CHECK(model->num_views() == 7);
}

TEST_CASE("a multi-view classifier takes a backbone of another policy, and gray images") {
  const auto backbone =
      remat::create_backbone<remat::Checkpointed<remat::Sequential, remat::EachUnit>>(
          "resnet18", {.in_channels = 1});
  MultiViewClassifier model(backbone, 5, 2, ViewAggregation::kMax);

  remat::enable_gradient_checkpointing(model);

  CHECK(model->backbone() == backbone);
  CHECK(backbone->segments() == 9);
  CHECK(model->forward(torch::randn({2, 2, 1, 32, 32})).sizes() == torch::IntArrayRef{2, 5});
}

TEST_CASE("a multi-view classifier is built by the names of its backbone and its aggregation") {
  MultiViewClassifier model("resnet18", 5, 2, "attention",
                            remat::MultiViewOptions{.backbone = {.feature_dim = 16}});

  CHECK(model->aggregation() == ViewAggregation::kAttention);
  CHECK(model->backbone()->name() == "resnet18");
  CHECK(model->forward(torch::randn({2, 2, 3, 32, 32})).sizes() == torch::IntArrayRef{2, 5});
}

TEST_CASE("a multi-view classifier is one module of a LibTorch sequence") {
  torch::nn::Sequential sequence(small_model(ViewAggregation::kAttention));

  CHECK(sequence->forward(torch::randn({2, 2, 3, 32, 32})).sizes() == torch::IntArrayRef{2, 5});
}

TEST_CASE("a clone of a multi-view classifier computes the same and shares nothing") {
  auto model = small_model(ViewAggregation::kAttention);
  remat::enable_gradient_checkpointing(model, 2);
  model->eval();

  const auto copy = std::dynamic_pointer_cast<remat::MultiViewClassifierImpl>(model->clone());

  REQUIRE(copy);
  CHECK(copy->backbone()->segments() == 2);
  CHECK_FALSE(copy->is_training());
  CHECK(copy->backbone() != model->backbone());
  const auto copied = copy->named_parameters();
  CHECK(copied.size() == model->named_parameters().size());
  for (const auto& item : model->named_parameters()) {
    CHECK(torch::equal(item.value(), copied[item.key()]));
    CHECK(item.value().data_ptr() != copied[item.key()].data_ptr());
  }
  const torch::Tensor images = torch::randn({2, 3, 3, 32, 32});
  CHECK(torch::equal(copy->forward(images), model->forward(images)));
}

TEST_CASE("images of another shape, or of too many views, are refused with both shapes") {
  auto model = small_model(ViewAggregation::kMean);

  CHECK(error_of([&] { model->forward(torch::zeros({2, 4, 3, 32, 32})); }) ==
        "[remat.multi_view.images] remat::MultiViewClassifier: the images are of shape (2, 4, 3, "
        "32, 32), (B, V, 3, H, W) with V from 1 to 3 was expected. Stack the views of an object "
        "along dimension 1; a single view is unsqueeze(1).");
  CHECK(error_of([&] {
          model->forward(torch::zeros({2, 3, 32, 32}));
        }).find("of shape (2, 3, 32, 32)") != std::string::npos);
  CHECK(error_of([&] {
          model->forward(torch::zeros({2, 3, 1, 32, 32}));
        }).find("(B, V, 3, H, W)") != std::string::npos);
  CHECK(error_of([&] { model->forward(torch::Tensor()); }).find("undefined") != std::string::npos);
}

TEST_CASE("a mask of another shape or type, or with an object without views, is refused") {
  auto model = small_model(ViewAggregation::kMean);
  const torch::Tensor images = torch::zeros({2, 3, 3, 32, 32});

  CHECK(error_of([&] { model->forward(images, torch::ones({2, 2}, torch::kBool)); }) ==
        "[remat.multi_view.mask] remat::MultiViewClassifier: the mask is of shape (2, 2) and type "
        "Bool, and for images of shape (2, 3, 3, 32, 32) shape (2, 3) and type Bool was expected.");
  CHECK(error_of([&] { model->forward(images, torch::ones({2, 3})); }).find("type Float") !=
        std::string::npos);
  CHECK(error_of([&] {
          model->forward(images, torch::tensor({{true, true, false}, {false, false, false}}));
        }) ==
        "[remat.multi_view.mask] remat::MultiViewClassifier: row 1 of 2 has no view, at least one "
        "of each object was expected. Leave the object out of the batch.");
}

TEST_CASE("a multi-view classifier that cannot be built says why") {
  CHECK(MultiViewClassifier("resnet18", 5, 3, "max")->aggregation() == ViewAggregation::kMax);
  CHECK(error_of([] { MultiViewClassifier("resnet18", 5, 3, "median"); }) ==
        "[remat.multi_view.options] remat::MultiViewClassifier: the aggregation is \"median\", one "
        "of \"attention\", \"mean\", \"max\" was expected.");
  CHECK(error_of([] { MultiViewClassifier("resnet18", 5, 0); }) ==
        "[remat.multi_view.options] remat::MultiViewClassifier: num_views is 0, at least 1 was "
        "expected.");
  CHECK(error_of([] { MultiViewClassifier("resnet18", 0, 3); }).find("num_classes is 0") !=
        std::string::npos);
  CHECK(error_of([] {
          MultiViewClassifier("resnet18", 5, 3, ViewAggregation::kMean,
                              remat::MultiViewOptions{.backbone = {.num_classes = 9}});
        }) ==
        "[remat.multi_view.options] remat::MultiViewClassifier: the backbone has a head for 9 "
        "classes, and one without was expected. Build it with num_classes = 0: classes are counted "
        "here, after the views are one.");
  CHECK(error_of([] { MultiViewClassifier("resnet19", 5, 3); }).find("remat.backbone.unknown") !=
        std::string::npos);
}

}  // namespace multi_view_test
