// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "remat/remat.hpp"
#include "remat/yaml.hpp"
#include "train/loader.hpp"
#include "train/user_error.hpp"

namespace train {

/// The network that a configuration describes: torchvision's classifier, or a backbone whose
/// features pass a projection or come from several views.
class Network {
 public:
  Network(const remat::Config& config, std::int64_t num_classes) {
    const remat::BackboneConfig& wanted = config.model.backbone;
    remat::BackboneOptions options;
    options.pretrained = wanted.pretrained;
    options.weights = wanted.weights;
    options.image_size = config.data.image_size;
    has_views_ = config.data.source == "views";
    if (has_views_ || wanted.feature_dim > 0) {
      options.feature_dim = wanted.feature_dim;
      multi_view_ = remat::MultiViewClassifier(wanted.name, num_classes, config.model.num_views,
                                               config.model.aggregation,
                                               remat::MultiViewOptions{.backbone = options});
      backbone_ = multi_view_->backbone();
    } else {
      backbone_ = remat::create_classifier(wanted.name, num_classes, options);
    }

    const auto& checkpointing = config.training.gradient_checkpointing;
    if (checkpointing.enabled) budget_ = checkpointing.budget;
    if (budget_)
      // Of several views, too: they pass the backbone as one batch, and what is behind it is small.
      backbone_->enable_gradient_checkpointing(*budget_);
    else if (checkpointing.enabled && checkpointing.segments > 0)
      remat::enable_gradient_checkpointing(module(), checkpointing.segments);
    else if (checkpointing.enabled)
      remat::enable_gradient_checkpointing(module());
  }

  /// Computes (B, classes).
  ///
  /// @throws UserError  if the network cannot keep to its memory budget, with the least one
  torch::Tensor forward(const Batch& batch) {
    try {
      return logits_of(batch);
    } catch (const remat::ArgumentError& error) {
      if (error.code() != "remat.budget.infeasible") throw;
      throw UserError("training.gradient_checkpointing.budget is " + remat::to_string(*budget_) +
                      ", and the batch has " + std::to_string(batch.size()) +
                      " cases: " + std::string(error.message()));
    }
  }

  torch::nn::Module& module() {
    if (multi_view_.is_empty()) return *backbone_;
    return *multi_view_;
  }
  const remat::Backbone& backbone() const { return *backbone_; }
  const std::optional<remat::MemoryBudget>& budget() const { return budget_; }

  std::int64_t parameter_count() {
    std::int64_t count = 0;
    for (const auto& parameter : module().parameters()) count += parameter.numel();
    return count;
  }

 private:
  torch::Tensor logits_of(const Batch& batch) {
    if (multi_view_.is_empty()) return backbone_->forward(batch.images);
    return multi_view_->forward(has_views_ ? batch.images : batch.images.unsqueeze(1),
                                batch.is_present);
  }

  bool has_views_ = false;
  remat::MultiViewClassifier multi_view_{nullptr};
  std::shared_ptr<remat::Backbone> backbone_;
  std::optional<remat::MemoryBudget> budget_;
};

}  // namespace train
