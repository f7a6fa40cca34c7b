// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/registry.hpp"
#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/gated_attention.hpp"

namespace remat {

/// How the features of several views become those of one object. None depends on the order of the
/// views.
enum class ViewAggregation {
  kAttention,  ///< a mean with learned weights, `blocks::GatedAttention`
  kMean,       ///< every view counts alike
  kMax,        ///< each feature from the view where it is strongest
};

namespace detail {

inline constexpr std::array<std::pair<std::string_view, ViewAggregation>, 3> kViewAggregations{{
    {"attention", ViewAggregation::kAttention},
    {"mean", ViewAggregation::kMean},
    {"max", ViewAggregation::kMax},
}};

}  // namespace detail

/// Returns the aggregation of that name: `attention`, `mean` or `max`.
///
/// @throws ArgumentError  for another name
inline ViewAggregation view_aggregation(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& [known, aggregation] : detail::kViewAggregations) {
    if (known == name) return aggregation;
    names.emplace_back(known);
  }
  throw ArgumentError(ErrorMessage("remat.multi_view.options")
                          .where("remat::MultiViewClassifier")
                          .what("the aggregation is \"" + std::string(name) + "\", one of " +
                                detail::quoted_list(names) + " was expected"));
}

/// What a `MultiViewClassifier` can be told besides; meant for designated initialisers.
struct MultiViewOptions {
  BackboneOptions backbone;            ///< the head is not the backbone's: `num_classes` stays 0
  std::int64_t attention_width = 128;  ///< between features and the weight of a view
};

/// The module behind `MultiViewClassifier`.
class MultiViewClassifierImpl : public torch::nn::Cloneable<MultiViewClassifierImpl> {
 public:
  /// @param backbone_name  as for `create_backbone`
  /// @param num_views      the most views that an object has
  /// @throws ArgumentError  as `create_backbone`, and for counts below 1
  MultiViewClassifierImpl(std::string_view backbone_name, std::int64_t num_classes,
                          std::int64_t num_views,
                          ViewAggregation aggregation = ViewAggregation::kAttention,
                          const MultiViewOptions& options = {})
      : MultiViewClassifierImpl(create_backbone(backbone_name, options.backbone), num_classes,
                                num_views, aggregation, options.attention_width) {}
  /// As above, the aggregation by name.
  MultiViewClassifierImpl(std::string_view backbone_name, std::int64_t num_classes,
                          std::int64_t num_views, std::string_view aggregation,
                          const MultiViewOptions& options = {})
      : MultiViewClassifierImpl(backbone_name, num_classes, num_views,
                                view_aggregation(aggregation), options) {}
  /// Takes a backbone that is there already, with a policy of one's own, for example.
  MultiViewClassifierImpl(std::shared_ptr<Backbone> backbone, std::int64_t num_classes,
                          std::int64_t num_views, ViewAggregation aggregation,
                          std::int64_t attention_width = 128)
      : num_classes_(num_classes),
        num_views_(num_views),
        attention_width_(attention_width),
        aggregation_(aggregation),
        backbone_(std::move(backbone)) {
    check_options();
    register_layers();
  }

  /// Makes the head anew, on a copy of the backbone: LibTorch calls this on what is to be a clone.
  void reset() override {
    backbone_ = std::dynamic_pointer_cast<Backbone>(backbone_->clone());
    register_layers();
  }

  /// Classifies objects by their views.
  ///
  /// All views go through the backbone as one batch, so that its batch statistics are those of all
  /// views. Views that are absent do not: whatever their place in `images` holds, not a number
  /// included, has no influence on result, gradients or buffers.
  ///
  /// @param images_bvchw   (B, V, C, H, W); V may be less than `num_views()`, since no aggregation
  /// depends on it
  /// @param is_present_bv  (B, V), boolean: which views there are, at least one of each object;
  /// undefined: all
  /// @return  (B, num_classes())
  /// @throws ArgumentError  for other shapes, and for an object without a view
  torch::Tensor forward(const torch::Tensor& images_bvchw,
                        const torch::Tensor& is_present_bv = {}) {
    return classifier_->forward(fused_features(images_bvchw, is_present_bv));
  }

  /// Returns one row of features per object, (B, feature size); arguments as for `forward`.
  torch::Tensor fused_features(const torch::Tensor& images_bvchw,
                               const torch::Tensor& is_present_bv = {}) {
    check_images(images_bvchw);
    if (!is_present_bv.defined()) return aggregate(features_of_all(images_bvchw), {});
    check_mask(images_bvchw, is_present_bv);
    const torch::Tensor is_present = is_present_bv.to(images_bvchw.device());
    return aggregate(features_of_present(images_bvchw, is_present), is_present);
  }

  /// Returns the network that all views share.
  const std::shared_ptr<Backbone>& backbone() const { return backbone_; }
  /// Returns the size of a row that `forward` gives.
  std::int64_t num_classes() const { return num_classes_; }
  /// Returns the most views that an object may have.
  std::int64_t num_views() const { return num_views_; }
  /// Returns how the features of the views become one.
  ViewAggregation aggregation() const { return aggregation_; }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  void register_layers() {
    register_module("backbone", backbone_);
    if (aggregation_ == ViewAggregation::kAttention)
      attention_ = register_module(
          "attention", blocks::GatedAttention(backbone_->feature_dim(), attention_width_));
    classifier_ =
        register_module("classifier", torch::nn::Linear(backbone_->feature_dim(), num_classes_));
  }

  torch::Tensor features_of_all(const torch::Tensor& images_bvchw) {
    return backbone_->forward(images_bvchw.flatten(0, 1))
        .view({images_bvchw.size(0), images_bvchw.size(1), backbone_->feature_dim()});
  }

  /// Returns (B, V, F), zero where there is no view.
  torch::Tensor features_of_present(const torch::Tensor& images_bvchw,
                                    const torch::Tensor& is_present_bv) {
    const std::int64_t batch = images_bvchw.size(0);
    const std::int64_t views = images_bvchw.size(1);
    const torch::Tensor places = is_present_bv.flatten().nonzero().squeeze(1);  // (present)
    const torch::Tensor features =
        backbone_->forward(images_bvchw.flatten(0, 1).index_select(0, places));  // (present, F)
    return features.new_zeros({batch * views, backbone_->feature_dim()})
        .index_copy(0, places, features)
        .view({batch, views, backbone_->feature_dim()});
  }

  /// @param features_bvf  zero where there is no view
  torch::Tensor aggregate(const torch::Tensor& features_bvf, const torch::Tensor& is_present_bv) {
    switch (aggregation_) {
      case ViewAggregation::kAttention:
        return attention_->forward(features_bvf, is_present_bv);
      case ViewAggregation::kMean: {
        const torch::Tensor sum = features_bvf.sum(/*dim=*/1);
        if (!is_present_bv.defined()) return sum / features_bvf.size(1);
        return sum / is_present_bv.sum(/*dim=*/1, /*keepdim=*/true);
      }
      case ViewAggregation::kMax:
        break;
    }
    // amax and not max: views that are equal share the gradient, whatever their order.
    if (!is_present_bv.defined()) return features_bvf.amax(/*dim=*/1);
    return features_bvf
        .masked_fill(is_present_bv.logical_not().unsqueeze(-1),
                     -std::numeric_limits<double>::infinity())
        .amax(/*dim=*/1);
  }

  void check_options() const {
    check_at_least_one("num_classes", num_classes_);
    check_at_least_one("num_views", num_views_);
    check_at_least_one("attention_width", attention_width_);
    require(backbone_ != nullptr && backbone_->num_classes() == 0, [&] {
      return ErrorMessage("remat.multi_view.options")
          .where("remat::MultiViewClassifier")
          .what(backbone_ == nullptr
                    ? std::string("the backbone is null, and one is needed")
                    : "the backbone has a head for " + std::to_string(backbone_->num_classes()) +
                          " classes, and one without was expected")
          .cure("Build it with num_classes = 0: classes are counted here, after the views are one");
    });
  }

  static void check_at_least_one(const char* option, std::int64_t value) {
    require(value >= 1, [&] {
      return ErrorMessage("remat.multi_view.options")
          .where("remat::MultiViewClassifier")
          .what(std::string(option) + " is " + std::to_string(value) + ", at least 1 was expected");
    });
  }

  void check_images(const torch::Tensor& images_bvchw) const {
    const std::int64_t channels = backbone_->options().in_channels;
    const bool is_right = images_bvchw.defined() && images_bvchw.dim() == 5 &&
                          images_bvchw.size(1) >= 1 && images_bvchw.size(1) <= num_views_ &&
                          images_bvchw.size(2) == channels;
    require(is_right, [&] {
      return ErrorMessage("remat.multi_view.images")
          .where("remat::MultiViewClassifier")
          .what("the images are " +
                (images_bvchw.defined() ? "of shape " + shape_text(images_bvchw) : "undefined") +
                ", (B, V, " + std::to_string(channels) + ", H, W) with V from 1 to " +
                std::to_string(num_views_) + " was expected")
          .cure("Stack the views of an object along dimension 1; a single view is unsqueeze(1)");
    });
  }

  static void check_mask(const torch::Tensor& images_bvchw, const torch::Tensor& is_present_bv) {
    const bool is_right = is_present_bv.scalar_type() == torch::kBool &&
                          is_present_bv.sizes() == images_bvchw.sizes().slice(0, 2);
    require(is_right, [&] {
      return ErrorMessage("remat.multi_view.mask")
          .where("remat::MultiViewClassifier")
          .what("the mask is of shape " + shape_text(is_present_bv) + " and type " +
                c10::toString(is_present_bv.scalar_type()) + ", and for images of shape " +
                shape_text(images_bvchw) + " shape (" + std::to_string(images_bvchw.size(0)) +
                ", " + std::to_string(images_bvchw.size(1)) + ") and type Bool was expected");
    });
    const torch::Tensor empty_rows = is_present_bv.any(1).logical_not().nonzero();
    require(empty_rows.numel() == 0, [&] {
      return ErrorMessage("remat.multi_view.mask")
          .where("remat::MultiViewClassifier")
          .what("row " + std::to_string(empty_rows[0].item<std::int64_t>()) + " of " +
                std::to_string(is_present_bv.size(0)) +
                " has no view, at least one of each object was expected")
          .cure("Leave the object out of the batch");
    });
  }

  static std::string shape_text(const torch::Tensor& tensor) {
    std::string text;
    for (const std::int64_t size : tensor.sizes())
      text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + ")";
  }

  std::int64_t num_classes_, num_views_, attention_width_;
  ViewAggregation aggregation_;
  std::shared_ptr<Backbone> backbone_;
  blocks::GatedAttention attention_{nullptr};
  torch::nn::Linear classifier_{nullptr};
};

/// Classifies objects that are seen from several sides: one backbone for all views, whose features
/// become one row by attention, mean or maximum, and a linear layer on it.
///
/// Checkpointing is the backbone's: `remat::enable_gradient_checkpointing(model)` or
/// `model->backbone()->enable_gradient_checkpointing(...)` with a number of segments or a
/// `MemoryBudget`, which is for all views at once.
///
/// ```cpp
/// remat::MultiViewClassifier model("resnet18", /*num_classes=*/10, /*num_views=*/3, "max");
/// remat::enable_gradient_checkpointing(model);
/// torch::Tensor logits = model->forward(images);  // (B, 3, 3, H, W) -> (B, 10)
/// ```
/// @par Source  Su et al., Multi-view Convolutional Neural Networks for 3D Shape Recognition (2015)
/// for `max` behind one shared network; `blocks::GatedAttention` for `attention`
TORCH_MODULE(MultiViewClassifier);

}  // namespace remat
