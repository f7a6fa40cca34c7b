// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "remat/backbones/initial_weights.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/budgeted_toggle.hpp"
#include "remat/nn/toggle.hpp"

namespace remat {

/// Says what to build; meant for designated initialisers: `{.feature_dim = 128, .in_channels = 1}`.
///
/// A rate that is not set is torchvision's for the model.
struct BackboneOptions {
  Pretrained pretrained{};  ///< load the published weights from torchvision's cache
  WeightsFile weights{};    ///< load this file; empty: initialise as torchvision does
  std::int64_t feature_dim =
      0;  ///< 0: the pooled features as they are; else a linear layer named `projection`
  std::int64_t in_channels = 3;  ///< channels of the images
  std::int64_t image_size =
      0;  ///< height and width that layers are made for, where any are; 0: torchvision's
  std::optional<double> dropout{};            ///< rate in front of the head, or in a transformer
  std::optional<double> attention_dropout{};  ///< rate on attention weights
  std::optional<double> stochastic_depth{};   ///< rate of the last residual block
  std::int64_t num_classes =
      0;  ///< 0: no head; else torchvision's own head, under torchvision's name
};

/// Turns images into features, and into class scores if it was built with a head.
///
/// Names, shapes, initialisation and numbers are those of the torchvision model of the same name.
/// A backbone starts with gradient checkpointing off, and uses it in training mode only.
class Backbone : public torch::nn::Module, public detail::BudgetedToggle {
 public:
  /// Computes one row per image.
  ///
  /// @param images_nchw  (N, in_channels, H, W)
  /// @return  (N, feature_dim()), or (N, num_classes()) with a head
  /// @throws ArgumentError  if `images_nchw` has not this shape
  torch::Tensor forward(const torch::Tensor& images_nchw) {
    check_images(images_nchw);
    check_image_size(images_nchw.size(2), images_nchw.size(3));
    const auto run = [this](const torch::Tensor& images) { return forward_checked(images); };
    if (is_training() && is_gradient_checkpointing_enabled() && budgeted_.is_set())
      return budgeted_.run(*this, images_nchw, run);
    return run(images_nchw);
  }

  /// Computes what comes before pooling: for a convolutional network a map (N, C, h, w).
  virtual torch::Tensor forward_features(const torch::Tensor& images_nchw) = 0;

  /// Returns the size of a row of features.
  std::int64_t feature_dim() const {
    return options_.feature_dim == 0 ? raw_feature_dim_ : options_.feature_dim;
  }

  /// Returns the number of classes of the head, 0 without one.
  std::int64_t num_classes() const { return options_.num_classes; }

  /// Returns what this was built from.
  const BackboneOptions& options() const { return options_; }

  /// Returns how many segments are in effect, with those that need not be recomputed, without the
  /// modules that are exempt; 0 while checkpointing is off.
  virtual std::int64_t segments() const = 0;

  /// Returns the key of the convolution that sees the images.
  virtual std::string first_convolution() const = 0;
  /// Returns what the keys of the layers that know the number of classes begin with.
  virtual std::string head() const = 0;

  /// Makes a stored tensor fit a parameter of another shape: the first convolution for another
  /// number of channels; a family may know more.
  ///
  /// Weights for one channel are the sum over the stored channels; for more, the stored channels
  /// are repeated and scaled so that a constant image gives what it gave before.
  ///
  /// @return  a tensor of that shape; undefined if there is no way
  /// @par Source  timm's `adapt_input_conv`
  virtual torch::Tensor fit_weight(const std::string& key, const torch::Tensor& stored,
                                   at::IntArrayRef shape) const {
    const bool is_foldable = key == first_convolution() && stored.dim() == 4 && shape.size() == 4 &&
                             stored.size(0) == shape[0] && stored.size(1) > 0 && shape[1] > 0 &&
                             stored.size(2) == shape[2] && stored.size(3) == shape[3];
    if (!is_foldable) return {};
    const torch::Tensor weight = stored.to(torch::kFloat32);
    if (shape[1] == 1) return weight.sum(1, /*keepdim=*/true);
    const std::int64_t repeats = (shape[1] + stored.size(1) - 1) / stored.size(1);
    return weight.repeat({1, repeats, 1, 1}).slice(1, 0, shape[1]) *
           (static_cast<double>(stored.size(1)) / static_cast<double>(shape[1]));
  }

  /// Copies the whole backbone: weights, buffers, modes, frozen parameters, checkpointing; nothing
  /// is shared.
  ///
  /// @param device  where the copy lives; empty: each tensor where the original is
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    const std::shared_ptr<Backbone> copy = build_again();
    copy->copy_from(*this, device);
    return copy;
  }

 protected:
  Backbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options)
      : torch::nn::Module(std::move(name)), options_(options), raw_feature_dim_(raw_feature_dim) {
    check_options();
  }

  /// Builds another backbone from the same design and options.
  virtual std::shared_ptr<Backbone> build_again() const = 0;
  /// Takes over switches, segment count and exemptions.
  virtual void copy_checkpointing_from(const Backbone& other) = 0;
  /// Makes one row per image of what `forward_features` returned.
  virtual torch::Tensor pool(torch::Tensor features) = 0;
  /// Applies torchvision's head to pooled features; called only if there is one.
  virtual torch::Tensor forward_head(torch::Tensor pooled) = 0;

  /// Refuses images of a size that the network cannot take; any size is fine by default.
  ///
  /// @throws ArgumentError  with the sizes that would do
  virtual void check_image_size(std::int64_t height, std::int64_t width) const {
    static_cast<void>(height), static_cast<void>(width);
  }

  /// Refuses an option that this family has no use for; unset and 0 are fine.
  void refuse_option(const char* option, const std::optional<double>& value) const {
    require(value.value_or(0) == 0, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + number_text(*value) + ", and this network has none")
          .cure("Leave it unset");
    });
  }

  /// Registers `projection` if the options ask for one; called last, so that its keys come last.
  void register_projection() {
    if (options_.feature_dim == 0) return;
    projection_ =
        register_module("projection", torch::nn::Linear(raw_feature_dim_, options_.feature_dim));
  }

 private:
  torch::Tensor forward_checked(const torch::Tensor& images_nchw) {
    torch::Tensor features = pool(forward_features(images_nchw));  // (N, raw_feature_dim)
    if (!projection_.is_empty()) return projection_->forward(features);
    return options_.num_classes == 0 ? features : forward_head(std::move(features));
  }

  void check_options() const {
    require(!options_.pretrained || options_.weights.empty(), [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what("pretrained = true and weights = \"" + options_.weights.path() +
                "\" were both given, and at most one is expected");
    });
    check_not_negative("feature_dim", options_.feature_dim, 0);
    check_not_negative("num_classes", options_.num_classes, 0);
    check_not_negative("in_channels", options_.in_channels, 1);
    check_not_negative("image_size", options_.image_size, 0);
    check_rate("dropout", options_.dropout);
    check_rate("attention_dropout", options_.attention_dropout);
    check_rate("stochastic_depth", options_.stochastic_depth);
    require(options_.feature_dim == 0 || options_.num_classes == 0, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what("feature_dim = " + std::to_string(options_.feature_dim) +
                " and num_classes = " + std::to_string(options_.num_classes) +
                " were both given, and at most one is expected")
          .cause("A classifier's head works on the raw features")
          .cure("Leave one of them at 0");
    });
  }

  void check_not_negative(const char* option, std::int64_t value, std::int64_t least) const {
    require(value >= least, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + std::to_string(value) + ", at least " +
                std::to_string(least) + " was expected");
    });
  }

  void check_rate(const char* option, const std::optional<double>& rate) const {
    require(!rate || (*rate >= 0 && *rate <= 1), [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + number_text(*rate) +
                ", a rate between 0 and 1 was expected");
    });
  }

  static std::string number_text(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    return text;
  }

  void check_images(const torch::Tensor& images_nchw) const {
    const bool is_right = images_nchw.defined() && images_nchw.dim() == 4 &&
                          images_nchw.size(1) == options_.in_channels;
    require(is_right, [&] {
      return ErrorMessage("remat.backbone.images")
          .where(name())
          .what("the images are " +
                (images_nchw.defined() ? "of shape " + shape_text(images_nchw) : "undefined") +
                ", (N, " + std::to_string(options_.in_channels) + ", H, W) was expected")
          .cure(
              "Add the batch dimension with unsqueeze(0), or build the backbone with the "
              "in_channels of your images");
    });
  }

  static std::string shape_text(const torch::Tensor& tensor) {
    std::string text;
    for (const std::int64_t size : tensor.sizes())
      text += (text.empty() ? "(" : ", ") + std::to_string(size);
    return text.empty() ? "()" : text + ")";
  }

  void copy_from(const Backbone& other, const OptionalDevice& device) {
    const torch::NoGradGuard no_grad;
    const auto copied = [&](const torch::Tensor& tensor) {
      return device && tensor.device() != *device ? tensor.to(*device) : tensor.clone();
    };
    auto parameters = named_parameters();
    for (const auto& item : other.named_parameters()) {
      torch::Tensor& mine = parameters[item.key()];
      mine.set_data(copied(item.value()));
      mine.set_requires_grad(item.value().requires_grad());
    }
    auto buffers = named_buffers();
    for (const auto& item : other.named_buffers())
      buffers[item.key()].set_data(copied(item.value()));
    // From the root down, since train() reaches everything below.
    train(other.is_training());
    auto modules = named_modules({}, /*include_self=*/false);
    for (const auto& item : other.named_modules({}, /*include_self=*/false))
      modules[item.key()]->train(item.value()->is_training());
    copy_checkpointing_from(other);
  }

  // LibTorch calls this when the backbone is a child of a module that is cloned.
  void clone_(torch::nn::Module& other, const OptionalDevice& device) final {
    copy_from(dynamic_cast<Backbone&>(other), device);
  }

  BackboneOptions options_;
  std::int64_t raw_feature_dim_;
  torch::nn::Linear projection_{nullptr};
};

}  // namespace remat
