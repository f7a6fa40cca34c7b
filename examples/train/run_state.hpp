// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "remat/remat.hpp"
#include "remat/weights/safetensors.hpp"
#include "remat/yaml.hpp"
#include "train/durable_file.hpp"
#include "train/user_error.hpp"
#include "train/optimizer.hpp"

namespace train {

/// How far a run is; the order of the data, the learning rate and the augmentation follow from it.
struct Progress {
  std::int64_t epoch = 0;          // whole epochs behind us
  std::int64_t step_in_epoch = 0;  // steps of the optimizer in this one
  std::int64_t step = 0;           // in all
  double loss_sum = 0;             // of this epoch, over its cases so far
  std::int64_t loss_count = 0;
  double best_score = -1;  // accuracy; -1: none yet
  double best_loss = 0;    // validation's, of that epoch
  std::int64_t best_epoch = 0;
  std::uint64_t metrics_bytes = 0;    // of the metrics file, what belongs to the steps so far
  std::int64_t training_cases = 0;    // of the data, to notice that it is another
  std::int64_t validation_cases = 0;  // likewise

  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Progress, epoch, step_in_epoch, step, loss_sum, loss_count,
                                 best_score, best_loss, best_epoch, metrics_bytes, training_cases,
                                 validation_cases)
};

inline nlohmann::json to_json(const remat::amp::GradScalerState& state) {
  return {{"scale", state.scale},
          {"growth_factor", state.growth_factor},
          {"backoff_factor", state.backoff_factor},
          {"growth_interval", state.growth_interval},
          {"growth_tracker", state.growth_tracker}};
}

inline remat::amp::GradScalerState scaler_state_of(const nlohmann::json& json) {
  return {json.at("scale"), json.at("growth_factor"), json.at("backoff_factor"),
          json.at("growth_interval"), json.at("growth_tracker")};
}

/// Everything that a run is made of; a checkpoint file holds it whole, and Python can read it.
class RunState {
 public:
  static constexpr const char* kProgress = "remat.progress";
  static constexpr const char* kConfig = "remat.config";
  static constexpr const char* kScaler = "remat.grad_scaler";
  static constexpr const char* kClasses = "remat.classes";

  RunState(torch::nn::Module& module, torch::optim::AdamW& optimizer,
           remat::amp::GradScaler& scaler, c10::Device device)
      : module_(module), optimizer_(optimizer), scaler_(scaler), device_(device) {}

  /// Writes weights, buffers, optimizer, scaler, random states and progress.
  void save(const std::filesystem::path& path, const Progress& progress,
            const remat::Config& config) const {
    remat::StateDict tensors;
    for (const auto& [name, tensor] : remat::state_dict(module_))
      tensors.add("model." + name, tensor);
    OptimizerState(optimizer_, module_).save(tensors);
    for (const auto& [name, device] : generators())
      tensors.add(name, generator_on(device).get_state());
    save_durably(tensors, path,
                 {{kProgress, nlohmann::json(progress).dump()},
                  {kConfig, remat::to_yaml(config)},
                  {kScaler, to_json(scaler_.state()).dump()}});
  }

  /// Reads back what `save` wrote.
  ///
  /// @throws UserError  if the configuration is another one
  Progress load(const std::filesystem::path& path, const remat::Config& config) {
    const auto metadata = remat::safetensors_metadata(path);
    const auto part = [&](const char* name) {
      const auto found = metadata.find(name);
      if (found == metadata.end())
        throw UserError(path.string() + ": this is no checkpoint of the trainer: it has no " +
                        name);
      return found->second;
    };
    check_config(path, remat::parse_config(part(kConfig), path.string()), config);

    const remat::StateDict tensors = remat::read_state_dict(path);
    remat::StateDict weights;
    for (const auto& [name, tensor] : tensors)
      if (name.starts_with("model.")) weights.add(name.substr(6), tensor);
    remat::load_weights(module_, weights);
    OptimizerState(optimizer_, module_).load(tensors);
    scaler_.load_state(scaler_state_of(nlohmann::json::parse(part(kScaler))));
    for (const auto& [name, device] : generators())
      generator_on(device).set_state(tensors.at(name));
    return nlohmann::json::parse(part(kProgress)).get<Progress>();
  }

 private:
  std::map<std::string, c10::Device> generators() const {
    std::map<std::string, c10::Device> generators{{"random.cpu", c10::Device(c10::kCPU)}};
    if (!device_.is_cpu()) generators.emplace("random.device", device_);
    return generators;
  }

  static at::Generator generator_on(c10::Device device) {
    return at::globalContext().defaultGenerator(device);
  }

  static void check_config(const std::filesystem::path& path, const remat::Config& before,
                           const remat::Config& now) {
    std::string text;
    for (const remat::ConfigKey* key : remat::differing_keys(before, now))
      if (!key->may_change)
        text += "\n  " + std::string(key->name) + " was " + remat::config_value(before, *key) +
                ", is " + remat::config_value(now, *key);
    if (!text.empty())
      throw UserError(path.string() +
                      ": the run was begun with another configuration, and going on with this "
                      "one would be neither:" +
                      text + "\nGive the old values, or another output.folder");
  }

  torch::nn::Module& module_;
  torch::optim::AdamW& optimizer_;
  remat::amp::GradScaler& scaler_;
  c10::Device device_;
};

}  // namespace train
