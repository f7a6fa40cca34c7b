// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "remat/backbones/published.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/yaml/configuration.hpp"

namespace remat {

/// Where a key's value lies in a `Config`, and of which type it is.
using ConfigField =
    std::variant<bool& (*)(Config&), std::int64_t& (*)(Config&), double& (*)(Config&),
                 std::string& (*)(Config&), std::optional<MemoryBudget>& (*)(Config&)>;

/// What is known about one key: the reader, the writer and the documentation all go by this.
struct ConfigKey {
  std::string_view name;         ///< with its sections: "training.lr"
  std::string_view description;  ///< a phrase, as the documentation and `to_yaml` show it
  ConfigField field;
  double least = -std::numeric_limits<double>::infinity();  ///< of a number
  double most = std::numeric_limits<double>::infinity();    ///< likewise
  bool is_least_allowed = true;                             ///< whether `least` itself is
  std::vector<std::string_view> choices{};                  ///< of a text; none: any text
  std::string_view synonym{};  ///< what others call it, for the hint in a message
  /// Whether a run that goes on from a checkpoint may have another value.
  bool may_change = false;

  /// Returns the name without its sections.
  std::string_view last_name() const { return name.substr(name.rfind('.') + 1); }
  /// Returns the sections, without a dot at the end.
  std::string_view section() const { return name.substr(0, name.rfind('.')); }
};

namespace detail {

/// Every backbone's name, and the spellings that `create_backbone` takes besides.
inline std::vector<std::string_view> backbone_names() {
  std::vector<std::string_view> names;
  for (const PublishedModel& model : kPublishedModels) names.push_back(model.name);
  for (const auto& [alias, full_name] : kBackboneAliases) names.push_back(alias);
  return names;
}

// A macro, because a pointer to a member of a member cannot be had, and a lambda for each key is
// all noise.
#define REMAT_CONFIG_FIELD(path) \
  [](Config& config) -> decltype((config.path)) { return config.path; }

inline std::vector<ConfigKey> model_keys() {
  return {
      {.name = "model.backbone.name",
       .description =
           "the network; `remat::list_backbones()` and `train --list-backbones` have all",
       .field = +REMAT_CONFIG_FIELD(model.backbone.name),
       .choices = backbone_names(),
       .synonym = "arch"},
      {.name = "model.backbone.pretrained",
       .description = "begin with torchvision's published weights, from torchvision's cache",
       .field = +REMAT_CONFIG_FIELD(model.backbone.pretrained)},
      {.name = "model.backbone.feature_dim",
       .description = "size of a learned projection of the features; 0: the features as they are",
       .field = +REMAT_CONFIG_FIELD(model.backbone.feature_dim),
       .least = 0},
      {.name = "model.backbone.weights",
       .description = "begin with this file, .pth or .safetensors; empty: none",
       .field = +REMAT_CONFIG_FIELD(model.backbone.weights)},
      {.name = "model.num_classes",
       .description = "classes; 0: as many as the data has",
       .field = +REMAT_CONFIG_FIELD(model.num_classes),
       .least = 0,
       .synonym = "classes"},
      {.name = "model.num_views",
       .description = "the most images of one case; above 1 for data.source views only",
       .field = +REMAT_CONFIG_FIELD(model.num_views),
       .least = 1,
       .synonym = "views"},
      {.name = "model.aggregation",
       .description = "how the features of several views become one",
       .field = +REMAT_CONFIG_FIELD(model.aggregation),
       .choices = {"attention", "mean", "max"},
       .synonym = "fusion"},
  };
}

inline std::vector<ConfigKey> data_keys() {
  return {
      {.name = "data.source",
       .description = "digits: the demo's CSV file; folder: path/CLASS/IMAGE; views: "
                      "path/CLASS/CASE/VIEW",
       .field = +REMAT_CONFIG_FIELD(data.source),
       .choices = {"digits", "folder", "views"},
       .synonym = "type"},
      {.name = "data.path",
       .description = "the folder, or the CSV file; empty for digits: the one in examples/data",
       .field = +REMAT_CONFIG_FIELD(data.path),
       .synonym = "root",
       .may_change = true},
      {.name = "data.validation_path",
       .description = "a folder of its own for validation; empty: a share of data.path",
       .field = +REMAT_CONFIG_FIELD(data.validation_path),
       .synonym = "val_path",
       .may_change = true},
      {.name = "data.validation_share",
       .description = "share of each class that is kept for validation; 0: none",
       .field = +REMAT_CONFIG_FIELD(data.validation_share),
       .least = 0,
       .most = 0.9,
       .synonym = "val_split"},
      {.name = "data.image_size",
       .description = "height and width in pixels that images are brought to",
       .field = +REMAT_CONFIG_FIELD(data.image_size),
       .least = 8,
       .most = 4096,
       .synonym = "resolution"},
      {.name = "data.augment",
       .description =
           "what training images go through: mirrored at random, or cut out and mirrored",
       .field = +REMAT_CONFIG_FIELD(data.augment),
       .choices = {"none", "flip", "crop_and_flip"},
       .synonym = "augmentation"},
      {.name = "data.limit",
       .description = "use that many of the training and of the validation samples; 0: all",
       .field = +REMAT_CONFIG_FIELD(data.limit),
       .least = 0,
       .synonym = "max_samples"},
      {.name = "data.workers",
       .description = "threads that read images ahead",
       .field = +REMAT_CONFIG_FIELD(data.workers),
       .least = 1,
       .most = 256,
       .synonym = "num_workers",
       .may_change = true},
  };
}

inline std::vector<ConfigKey> schedule_keys() {
  return {
      {.name = "training.epochs",
       .description = "passes over the training data",
       .field = +REMAT_CONFIG_FIELD(training.epochs),
       .least = 1,
       .synonym = "num_epochs"},
      {.name = "training.max_steps",
       .description = "stop after that many steps of the optimizer; 0: no such limit",
       .field = +REMAT_CONFIG_FIELD(training.max_steps),
       .least = 0,
       .synonym = "steps",
       .may_change = true},
      {.name = "training.lr",
       .description = "AdamW's learning rate after the warm-up; a cosine leads to min_lr",
       .field = +REMAT_CONFIG_FIELD(training.lr),
       .least = 0,
       .is_least_allowed = false,
       .synonym = "learning_rate"},
      {.name = "training.min_lr",
       .description = "the learning rate at the end",
       .field = +REMAT_CONFIG_FIELD(training.min_lr),
       .least = 0},
      {.name = "training.warmup_epochs",
       .description = "the learning rate rises from 0 for so long; fractions are fine",
       .field = +REMAT_CONFIG_FIELD(training.warmup_epochs),
       .least = 0,
       .synonym = "warmup"},
      {.name = "training.weight_decay",
       .description = "AdamW's, on weights; biases and norms have none",
       .field = +REMAT_CONFIG_FIELD(training.weight_decay),
       .least = 0,
       .synonym = "wd"},
      {.name = "training.clip_norm",
       .description = "gradients are scaled down to this norm; 0: never",
       .field = +REMAT_CONFIG_FIELD(training.clip_norm),
       .least = 0,
       .synonym = "max_grad_norm"},
      {.name = "training.label_smoothing",
       .description = "share of the target that goes to all classes alike",
       .field = +REMAT_CONFIG_FIELD(training.label_smoothing),
       .least = 0,
       .most = 0.9,
       .synonym = "smoothing"},
  };
}

inline std::vector<ConfigKey> training_keys() {
  std::vector<ConfigKey> keys{
      {.name = "training.gradient_checkpointing.enabled",
       .description = "recompute activations in backward instead of keeping them: the same bits",
       .field = +REMAT_CONFIG_FIELD(training.gradient_checkpointing.enabled),
       .may_change = true},
      {.name = "training.gradient_checkpointing.segments",
       .description = "into how many segments the network is cut; 0: the rule of its family",
       .field = +REMAT_CONFIG_FIELD(training.gradient_checkpointing.segments),
       .least = 0,
       .may_change = true},
      {.name = "training.gradient_checkpointing.budget",
       .description = "the memory that the network's part of a step may need, in place of segments",
       .field = +REMAT_CONFIG_FIELD(training.gradient_checkpointing.budget),
       .synonym = "memory_budget",
       .may_change = true},
      {.name = "training.use_amp",
       .description =
           "mixed precision: float16 with a gradient scaler on CUDA, bfloat16 on the CPU",
       .field = +REMAT_CONFIG_FIELD(training.use_amp),
       .synonym = "amp"},
      {.name = "training.batch_size",
       .description = "cases that go through the network at once",
       .field = +REMAT_CONFIG_FIELD(training.batch_size),
       .least = 1,
       .synonym = "batch"},
      {.name = "training.accumulation_steps",
       .description = "batches whose gradients are added up for one step of the optimizer",
       .field = +REMAT_CONFIG_FIELD(training.accumulation_steps),
       .least = 1,
       .synonym = "gradient_accumulation_steps"},
  };
  const std::vector<ConfigKey> schedule = schedule_keys();
  keys.insert(keys.end(), schedule.begin(), schedule.end());
  const std::vector<ConfigKey> process{
      {.name = "training.seed",
       .description = "of weights, order, augmentation and dropout",
       .field = +REMAT_CONFIG_FIELD(training.seed),
       .least = 0,
       .synonym = "random_seed"},
      {.name = "training.device",
       .description = "auto (CUDA where there is one), cpu, cuda",
       .field = +REMAT_CONFIG_FIELD(training.device),
       .choices = {"auto", "cpu", "cuda"}},
      {.name = "training.threads",
       .description = "of LibTorch; 0: its own choice. Another number gives other bits",
       .field = +REMAT_CONFIG_FIELD(training.threads),
       .least = 0,
       .most = 1024},
  };
  keys.insert(keys.end(), process.begin(), process.end());
  return keys;
}

inline std::vector<ConfigKey> output_keys() {
  return {
      {.name = "output.folder",
       .description = "where checkpoint, weights and metrics go",
       .field = +REMAT_CONFIG_FIELD(output.folder),
       .synonym = "output_dir",
       .may_change = true},
      {.name = "output.checkpoint_steps",
       .description = "write a checkpoint every so many steps too; 0: after each epoch only",
       .field = +REMAT_CONFIG_FIELD(output.checkpoint_steps),
       .least = 0,
       .synonym = "save_steps",
       .may_change = true},
  };
}

#undef REMAT_CONFIG_FIELD

}  // namespace detail

/// Returns every key of a configuration, in the order in which files show them.
inline const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = [] {
    std::vector<ConfigKey> all;
    for (const auto& part : {detail::model_keys(), detail::data_keys(), detail::training_keys(),
                             detail::output_keys()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return keys;
}

}  // namespace remat
