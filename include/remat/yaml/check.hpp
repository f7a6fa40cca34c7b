// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <vector>

#include "remat/plan/budget_text.hpp"
#include "remat/yaml/configuration.hpp"
#include "remat/yaml/value.hpp"

namespace remat::detail {

/// Two keys whose values do not go together.
struct Conflict {
  std::string key;  ///< the one to change, most likely
  std::string what, cure{};
};

inline void find_model_conflicts(const Config& config, std::vector<Conflict>& conflicts) {
  const ModelConfig& model = config.model;
  if (model.backbone.pretrained && !model.backbone.weights.empty())
    conflicts.push_back({"model.backbone.weights",
                         "\"model.backbone.pretrained\" is true and \"model.backbone.weights\" is "
                         "\"" +
                             model.backbone.weights + "\", and only one of them can be",
                         "Set pretrained to false, or take the file out"});
  if (model.num_views > 1 && config.data.source != "views")
    conflicts.push_back({"model.num_views",
                         "\"model.num_views\" is " + std::to_string(model.num_views) +
                             " and \"data.source\" is \"" + config.data.source +
                             "\", which has one image per case",
                         "Set data.source to views, or num_views to 1"});
}

inline void find_data_conflicts(const Config& config, std::vector<Conflict>& conflicts) {
  const DataConfig& data = config.data;
  if (data.source != "digits" && data.path.empty())
    conflicts.push_back({"data.path",
                         "\"data.source\" is \"" + data.source +
                             "\", and \"data.path\" is empty: a folder was expected",
                         "Give the folder that has one folder for each class"});
  if (data.source == "digits" && !data.validation_path.empty())
    conflicts.push_back({"data.validation_path",
                         "\"data.source\" is \"digits\", which is one file, and "
                         "\"data.validation_path\" is \"" +
                             data.validation_path + "\"",
                         "Use validation_share"});
  if (data.source == "digits" && data.augment != "none")
    conflicts.push_back({"data.augment",
                         "\"data.source\" is \"digits\" and \"data.augment\" is \"" + data.augment +
                             "\", and a mirrored digit is none",
                         "Set augment to none"});
}

inline void find_training_conflicts(const Config& config, std::vector<Conflict>& conflicts) {
  const TrainingConfig& training = config.training;
  if (training.min_lr > training.lr)
    conflicts.push_back({"training.min_lr",
                         "\"training.min_lr\" is " + number_text(training.min_lr) +
                             ", more than \"training.lr\", " + number_text(training.lr),
                         "The learning rate falls from lr to min_lr"});
  if (training.warmup_epochs > static_cast<double>(training.epochs))
    conflicts.push_back({"training.warmup_epochs", "\"training.warmup_epochs\" is " +
                                                       number_text(training.warmup_epochs) +
                                                       ", more than \"training.epochs\", " +
                                                       std::to_string(training.epochs)});
  if (config.output.folder.empty())
    conflicts.push_back({"output.folder", "\"output.folder\" is empty, a folder was expected"});
}

inline void find_checkpointing_conflicts(const Config& config, std::vector<Conflict>& conflicts) {
  const GradientCheckpointingConfig& checkpointing = config.training.gradient_checkpointing;
  if (!checkpointing.budget) return;
  const std::string key = "training.gradient_checkpointing.budget";
  const std::string given = "\"" + key + "\" is " + to_string(*checkpointing.budget);
  if (checkpointing.segments > 0)
    conflicts.push_back({key,
                         given + " and \"training.gradient_checkpointing.segments\" is " +
                             std::to_string(checkpointing.segments) +
                             ", and only one of them can decide what is recomputed",
                         "Set segments to 0, or budget to none"});
  if (!checkpointing.enabled)
    conflicts.push_back({key,
                         given + " and \"training.gradient_checkpointing.enabled\" is false, so "
                                 "that nothing would keep to it",
                         "Set enabled to true, or budget to none"});
}

/// Returns what does not go together.
inline std::vector<Conflict> find_conflicts(const Config& config) {
  std::vector<Conflict> conflicts;
  find_model_conflicts(config, conflicts);
  find_data_conflicts(config, conflicts);
  find_training_conflicts(config, conflicts);
  find_checkpointing_conflicts(config, conflicts);
  return conflicts;
}

}  // namespace remat::detail
