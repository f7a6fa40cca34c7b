// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/toggle.hpp"

namespace remat {

/// Says what to build; meant for designated initialisers: `{.feature_dim = 128, .in_channels = 1}`.
struct BackboneOptions {
  bool pretrained =
      false;  ///< load published weights; not available in this version: true is an error
  std::int64_t feature_dim =
      0;  ///< 0: the pooled features as they are; else a linear layer named `projection`
  std::int64_t in_channels = 3;  ///< channels of the images
  std::int64_t num_classes =
      0;  ///< 0: no head; else torchvision's own head, under torchvision's name
};

/// Turns images into features, and into class scores if it was built with a head.
///
/// Names, shapes, initialisation and numbers are those of the torchvision model of the same name.
/// A backbone starts with gradient checkpointing off, and uses it in training mode only.
class Backbone : public torch::nn::Module, public CheckpointToggle {
 public:
  /// Computes one row per image.
  ///
  /// @param images_nchw  (N, in_channels, H, W)
  /// @return  (N, feature_dim()), or (N, num_classes()) with a head
  /// @throws ArgumentError  if `images_nchw` has not this shape
  torch::Tensor forward(const torch::Tensor& images_nchw) {
    check_images(images_nchw);
    torch::Tensor features = pool(forward_features(images_nchw));  // (N, raw_feature_dim)
    if (!projection_.is_empty()) return projection_->forward(features);
    return options_.num_classes == 0 ? features : forward_head(std::move(features));
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

  /// Returns how many segments are in effect, plain ones included; 0 while checkpointing is off.
  virtual std::int64_t segments() const = 0;

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

  /// Registers `projection` if the options ask for one; called last, so that its keys come last.
  void register_projection() {
    if (options_.feature_dim == 0) return;
    projection_ =
        register_module("projection", torch::nn::Linear(raw_feature_dim_, options_.feature_dim));
  }

 private:
  void check_options() const {
    require(!options_.pretrained, [&] {
      return ErrorMessage("remat.backbone.pretrained")
          .where(name())
          .what(
              "pretrained = true was given, and this version of remat cannot read weight files yet")
          .cure(
              "Build it with pretrained = false, and load the weights with your own code: the "
              "names are torchvision's");
    });
    check_not_negative("feature_dim", options_.feature_dim, 0);
    check_not_negative("num_classes", options_.num_classes, 0);
    check_not_negative("in_channels", options_.in_channels, 1);
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
