// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "remat/yaml.hpp"
#include "train/user_error.hpp"

namespace train {

/// What the program was asked to do.
struct Command {
  std::string config_file;
  /// Key, value, and the argument that said so.
  struct Override {
    std::string key, value, place;
  };
  std::vector<Override> overrides;
  bool is_resumed = false, is_overwriting = false;
  bool prints_config = false, prints_keys = false, prints_backbones = false;

  /// Puts defaults, file and arguments together.
  ///
  /// @throws remat::ConfigError  with all that is wrong
  remat::Config config() const {
    remat::ConfigReader reader;
    if (!config_file.empty()) reader.read_file(config_file);
    for (const Override& given : overrides) reader.set(given.key, given.value, given.place);
    return reader.finish();
  }
};

inline constexpr const char* kFooter = R"(
Exit codes: 0 done, or training.max_steps reached; 1 training failed; 2 a mistake in arguments,
configuration or data; 130 and 143 stopped by SIGINT or SIGTERM, after a checkpoint (a second
signal kills).)";

/// An argument that stands for keys.
struct Shorthand {
  const char* flag;
  const char* description;
  std::vector<std::pair<std::string, std::string>> fixed;  // keys and values besides
  std::string key;                                         // that gets the argument's value
  std::optional<std::string> value{};
};

inline std::vector<Shorthand> shorthands() {
  return {
      {"--data",
       "a folder with a folder of images for each class",
       {{"data.source", "folder"}},
       "data.path"},
      {"--views", "a folder PATH/CLASS/CASE/VIEW", {{"data.source", "views"}}, "data.path"},
      {"--backbone", "the network", {}, "model.backbone.name"},
      {"--image-size", "height and width in pixels", {}, "data.image_size"},
      {"--epochs", "passes over the data", {}, "training.epochs"},
      {"--batch-size", "cases that go through the network at once", {}, "training.batch_size"},
      {"--lr", "the learning rate", {}, "training.lr"},
      {"--budget",
       "memory that the network's part of a step may need, as 2GiB, or 0.33 of plain",
       {{"training.gradient_checkpointing.enabled", "true"}},
       "training.gradient_checkpointing.budget"},
      {"--seed", "of everything random", {}, "training.seed"},
      {"--output", "the folder for checkpoint, weights and metrics", {}, "output.folder"},
  };
}

/// Reads the command line.
///
/// @return  nothing if all is said already, as after --help
/// @throws UserError  for what it does not know
inline std::optional<Command> parse_command_line(int count, char** values) {
  Command command;
  std::vector<std::string> assignments;
  std::vector<Shorthand> short_forms = shorthands();
  CLI::App app("Trains an image classifier, with gradient checkpointing where it is switched on.",
               "train");
  app.footer(kFooter);
  app.add_option("--config", command.config_file,
                 "a YAML file; docs/configuration.md has its keys");
  app.add_option("--set", assignments, "one key, as training.lr=3e-4; may be repeated")
      ->allow_extra_args(false)
      ->type_name("KEY=VALUE");
  for (Shorthand& form : short_forms)
    app.add_option(form.flag, form.value, std::string(form.description) + ": " + form.key);
  auto* resume = app.add_flag("--resume", command.is_resumed,
                              "go on from the checkpoint in output.folder, if there is one");
  app.add_flag("--overwrite", command.is_overwriting, "replace an earlier run in output.folder")
      ->excludes(resume);
  app.add_flag("--print-config", command.prints_config,
               "print the whole configuration as YAML, and stop");
  app.add_flag("--keys", command.prints_keys, "print all keys, and stop");
  app.add_flag("--list-backbones", command.prints_backbones, "print all networks, and stop");

  try {
    app.parse(count, values);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) throw UserError(std::string(error.what()) + "; see --help");
    app.exit(error);
    return {};
  }

  for (const Shorthand& form : short_forms) {
    if (!form.value) continue;
    for (const auto& [key, value] : form.fixed)
      command.overrides.push_back({key, value, form.flag});
    command.overrides.push_back({form.key, *form.value, form.flag});
  }
  for (const std::string& assignment : assignments) {
    const std::size_t equals = assignment.find('=');
    if (equals == std::string::npos)
      throw UserError("--set " + assignment + ": KEY=VALUE was expected, as training.lr=3e-4");
    command.overrides.push_back(
        {assignment.substr(0, equals), assignment.substr(equals + 1), "--set " + assignment});
  }
  return command;
}

}  // namespace train
