// SPDX-License-Identifier: MIT
//
// Trains an image classifier as a YAML file says, and can be stopped, killed and resumed without a
// bit of difference.

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>

#include "remat/remat.hpp"
#include "remat/yaml.hpp"
#include "train/command_line.hpp"
#include "train/data.hpp"
#include "train/durable_file.hpp"
#include "train/stop_signal.hpp"
#include "train/trainer.hpp"
#include "train/user_error.hpp"

namespace {

void print_backbones() {
  for (const auto& info : remat::list_backbones())
    std::printf("%-20s %-18s %6.1f million parameters, %ld features\n", info.name.c_str(),
                info.family.c_str(), static_cast<double>(info.parameters) / 1e6,
                long(info.feature_dim));
}

c10::Device device_of(const remat::TrainingConfig& training) {
  const bool has_cuda = torch::cuda::is_available();
  if (training.device == "cuda" && !has_cuda)
    throw train::UserError(
        "training.device is cuda, and LibTorch sees no such device: set it to cpu or auto");
  return has_cuda && training.device != "cpu" ? torch::Device(torch::kCUDA, 0)
                                              : torch::Device(torch::kCPU);
}

/// The same numbers from the same seed.
void make_deterministic(const remat::TrainingConfig& training) {
  if (training.threads > 0) at::set_num_threads(static_cast<int>(training.threads));
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
  torch::manual_seed(static_cast<std::uint64_t>(training.seed));
}

int run(const train::Command& command) {
  const remat::Config config = command.config();
  if (command.prints_config) return std::printf("%s", remat::to_yaml(config).c_str()), 0;
  const train::StopSignal stop_signal;
  const c10::Device device = device_of(config.training);
  make_deterministic(config.training);

  const train::SplitCases data = train::find_data(config);
  const train::OutputFolder folder(config.output.folder);
  if (command.is_overwriting) folder.clear();
  const bool has_checkpoint = std::filesystem::exists(folder.checkpoint());
  if (has_checkpoint && !command.is_resumed)
    throw train::UserError("output.folder is " + config.output.folder +
                           ", where there is a run already: go on with it by --resume, replace it "
                           "by --overwrite, or give another folder");
  train::Trainer trainer(config, data, folder, device);
  if (has_checkpoint)
    trainer.resume();
  else if (command.is_resumed)
    std::printf("there is no checkpoint in %s yet: beginning a new run\n",
                config.output.folder.c_str());
  std::ofstream(folder.config()) << remat::to_yaml(config);
  return trainer.run();
}

}  // namespace

int main(int count, char** values) {
  try {
    const std::optional<train::Command> command = train::parse_command_line(count, values);
    if (!command) return 0;
    if (command->prints_keys) return std::printf("%s", remat::config_reference().c_str()), 0;
    if (command->prints_backbones) return print_backbones(), 0;
    return run(*command);
  } catch (const train::UserError& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 2;
  } catch (const remat::ConfigError& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
}
