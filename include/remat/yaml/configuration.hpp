// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "remat/plan/memory_budget.hpp"

namespace remat {

/// Section `model.backbone` of a configuration.
struct BackboneConfig {
  std::string name = "resnet50";
  bool pretrained = false;
  std::int64_t feature_dim = 0;
  std::string weights{};

  bool operator==(const BackboneConfig&) const = default;
};

/// Section `model`.
struct ModelConfig {
  BackboneConfig backbone;
  std::int64_t num_classes = 0;
  std::int64_t num_views = 1;
  std::string aggregation = "attention";

  bool operator==(const ModelConfig&) const = default;
};

/// Section `training.gradient_checkpointing`.
struct GradientCheckpointingConfig {
  bool enabled = false;
  std::int64_t segments = 0;
  std::optional<MemoryBudget> budget{};

  bool operator==(const GradientCheckpointingConfig&) const = default;
};

/// Section `training`.
struct TrainingConfig {
  GradientCheckpointingConfig gradient_checkpointing;
  bool use_amp = false;
  std::int64_t batch_size = 32;
  std::int64_t accumulation_steps = 1;
  std::int64_t epochs = 10;
  std::int64_t max_steps = 0;
  double lr = 1e-4;
  double min_lr = 0;
  double warmup_epochs = 0;
  double weight_decay = 0.01;
  double clip_norm = 1;
  double label_smoothing = 0;
  std::int64_t seed = 0;
  std::string device = "auto";
  std::int64_t threads = 0;

  bool operator==(const TrainingConfig&) const = default;
};

/// Section `data`.
struct DataConfig {
  std::string source = "digits";
  std::string path{};
  std::string validation_path{};
  double validation_share = 0.2;
  std::int64_t image_size = 224;
  std::string augment = "none";
  std::int64_t limit = 0;
  std::int64_t workers = 2;

  bool operator==(const DataConfig&) const = default;
};

/// Section `output`.
struct OutputConfig {
  std::string folder = "runs/train";
  std::int64_t checkpoint_steps = 0;

  bool operator==(const OutputConfig&) const = default;
};

/// What a training run is: the model, its data, and how to train it. A value; the members are the
/// keys of the YAML file, with their defaults.
///
/// `config_keys()` says what each of them means and which values it takes.
struct Config {
  ModelConfig model;
  DataConfig data;
  TrainingConfig training;
  OutputConfig output;

  bool operator==(const Config&) const = default;
};

}  // namespace remat
