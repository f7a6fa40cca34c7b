// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/yaml.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <variant>

#ifdef REMAT_TEST_WITH_LIBTORCH
#include "remat/backbones/registry.hpp"
#include "remat/models/multi_view.hpp"
#endif

namespace configuration_test {

/// Returns the message of the error, or "".
std::string error_of(const std::string& yaml) {
  try {
    remat::parse_config(yaml, "train.yaml");
  } catch (const remat::ConfigError& error) {
    return error.what();
  }
  return "";
}

std::string error_of_value(const std::string& key, const std::string& text) {
  remat::ConfigReader reader;
  reader.set(key, text, "--set");
  try {
    reader.finish();
  } catch (const remat::ConfigError& error) {
    return error.what();
  }
  return "";
}

/// Gives a key a value that is not its default, and that it takes.
void change(remat::Config& config, const remat::ConfigKey& key) {
  if (const auto* field = std::get_if<bool& (*)(remat::Config&)>(&key.field))
    (*field)(config) = !(*field)(config);
  else if (const auto* whole = std::get_if<std::int64_t& (*)(remat::Config&)>(&key.field))
    (*whole)(config) += 1;
  else if (const auto* number = std::get_if<double& (*)(remat::Config&)>(&key.field))
    (*number)(config) = (*number)(config) / 3 + 0.1;
  else if (const auto* budget = std::get_if<4>(&key.field))
    (*budget)(config) = remat::MemoryBudget::fraction_of_plain(1.0 / 3);
  else if (key.choices.empty())
    std::get<3>(key.field)(config) = "a: \"b\" # c\\d\n\t\x7f 'ü";
  else
    std::get<3>(key.field)(config) = key.choices.back();
}

std::string as_text(const remat::Config& config) { return remat::to_yaml(config); }

TEST_CASE("an empty configuration is the defaults, which are written and read back the same") {
  CHECK(remat::parse_config("") == remat::Config());
  CHECK(remat::parse_config("# nothing\nmodel:\ntraining:\n  # lr: 1\n") == remat::Config());
  CHECK(remat::parse_config(as_text(remat::Config())) == remat::Config());
}

TEST_CASE("every key acts: written and read back, it alone differs") {
  for (const remat::ConfigKey& key : remat::config_keys()) {
    CAPTURE(key.name);
    remat::Config config;
    config.data.source = key.name == "data.source" ? "digits" : "views";
    config.data.path = "images";
    config.training.lr = 0.5;
    config.training.gradient_checkpointing.enabled = true;
    const remat::Config before = config;

    change(config, key);
    const auto changed = remat::differing_keys(before, config);
    const remat::Config read = remat::parse_config(as_text(config));

    CHECK_FALSE(config == before);
    REQUIRE(changed.size() == 1);
    CHECK(changed[0]->name == key.name);
    CHECK(read == config);
  }
}

TEST_CASE("keys have names of their own, a description, and defaults that they take") {
  std::set<std::string_view> names;
  const remat::Config defaults;
  for (const remat::ConfigKey& key : remat::config_keys()) {
    CAPTURE(key.name);
    CHECK(names.insert(key.name).second);
    CHECK(key.description.size() > 5);
    CHECK(key.description.find('\n') == std::string_view::npos);
    std::string text = remat::config_value(defaults, key);
    if (key.field.index() == 3) text = text.substr(1, text.size() - 2);
    CHECK(error_of_value(std::string(key.name), text) == "");
  }
}

TEST_CASE("a file's values arrive, whatever YAML's notation") {
  const remat::Config config = remat::parse_config(
      "model: {backbone: {name: 'vit_b_16', feature_dim: +128}, num_classes: 7}\n"
      "training:\n  lr: 1e-4\n  weight_decay: 0\n  use_amp: true\n  seed: 9007199254740993\n"
      "  gradient_checkpointing: {enabled: true, segments: 8}\n"
      "data:\n  path: \"2024\"\n  limit: 12\n");

  CHECK(config.model.backbone.name == "vit_b_16");
  CHECK(config.model.backbone.feature_dim == 128);
  CHECK(config.model.num_classes == 7);
  CHECK(config.training.lr == 0.0001);
  CHECK(config.training.weight_decay == 0);
  CHECK(config.training.use_amp);
  CHECK(config.training.seed == 9007199254740993);
  CHECK(config.training.gradient_checkpointing.enabled);
  CHECK(config.training.gradient_checkpointing.segments == 8);
  CHECK(config.data.path == "2024");
}

TEST_CASE("an unknown key is named with its line and column, and the nearest key") {
  CHECK(error_of("training:\n  learning_rate: 0.1\n") ==
        "[remat.config.unknown] train.yaml:2:3: there is no key \"training.learning_rate\". The "
        "nearest key is \"training.lr\".");
  CHECK(error_of("learning_rate: 0.1\n").find("nearest key is \"training.lr\"") !=
        std::string::npos);
  CHECK(error_of("training:\n  num-epochs: 3\n").find("nearest key is \"training.epochs\"") !=
        std::string::npos);
  CHECK(error_of("data:\n  weights: a\n").find("nearest key is \"model.backbone.weights\"") !=
        std::string::npos);
  CHECK(error_of("trainin:\n  lr: 1\n") ==
        "[remat.config.unknown] train.yaml:1:1: there is no section \"trainin\". The nearest "
        "section is \"training\".");
  CHECK(error_of("training.lr: 0.1\n") ==
        "[remat.config.unknown] train.yaml:1:1: there is no key \"training.lr\" with a dot. Write "
        "lr: below the section training.");
  CHECK(error_of_value("training.epoch", "3") ==
        "[remat.config.unknown] --set: there is no key \"training.epoch\". The nearest key is "
        "\"training.epochs\".");
}

TEST_CASE("a key that is there twice is refused") {
  CHECK(error_of("training:\n  lr: 0.1\n  seed: 1\n  lr: 0.2\n") ==
        "[remat.config.duplicate] train.yaml:4:3: \"training.lr\" is there twice, first in line 2. "
        "Take one of them out.");
  CHECK(error_of("data:\n  limit: 1\ndata:\n  limit: 1\n").find("train.yaml:3:1: \"data\"") !=
        std::string::npos);
}

TEST_CASE("a value of another type is refused with what was expected") {
  CHECK(error_of("training:\n  epochs: many\n") ==
        "[remat.config.type] train.yaml:2:11: \"training.epochs\" is \"many\", a whole number of "
        "at least 1 was expected.");
  CHECK(error_of("training:\n  epochs: \"3\"\n") ==
        "[remat.config.type] train.yaml:2:11: \"training.epochs\" is the text \"3\", a whole "
        "number of at least 1 was expected. Take the quotes off.");
  CHECK(error_of("training:\n  use_amp: yes\n") ==
        "[remat.config.type] train.yaml:2:12: \"training.use_amp\" is \"yes\", true or false was "
        "expected.");
  CHECK(error_of("training:\n  lr:\n") ==
        "[remat.config.type] train.yaml:2:3: \"training.lr\" is empty, a number of more than 0 was "
        "expected. Give it a value, or take the line out.");
  CHECK(error_of("training:\n  lr: [1]\n").find("\"training.lr\" is a list") != std::string::npos);
  CHECK(error_of("training: 5\n") ==
        "[remat.config.type] train.yaml:1:11: \"training\" is \"5\", a section with keys was "
        "expected.");
  CHECK(error_of("- a\n").find("the file is a list, a section with keys") != std::string::npos);
}

TEST_CASE("numbers that parsers read differently are read in one way or refused") {
  CHECK(error_of("training:\n  epochs: 1e3\n").find("Write 1000.") != std::string::npos);
  for (const std::string number : {"010", "0x10", "1_000", "1.5", "0b1", "1e999", "", "- 1"})
    CHECK(error_of_value("training.epochs", number) != "");
  for (const std::string number : {"010", "0x1p3", ".inf", ".nan", "inf", "nan", "1e999", "1,5"})
    CHECK(error_of_value("training.lr", number) != "");
  for (const std::string number : {"1e-4", "1E-4", "+0.0001", "1.e-4", ".0001"}) {
    remat::ConfigReader reader;
    reader.set("training.lr", number, "");
    CHECK(reader.finish().training.lr == 0.0001);
  }
}

TEST_CASE("a value out of range is refused with the range") {
  CHECK(error_of("training:\n  lr: 0\n") ==
        "[remat.config.range] train.yaml:2:7: \"training.lr\" is 0, a number of more than 0 was "
        "expected.");
  CHECK(error_of("data:\n  validation_share: 1.5\n").find("at least 0 and at most 0.9") !=
        std::string::npos);
  CHECK(error_of("model:\n  aggregation: median\n") ==
        "[remat.config.range] train.yaml:2:16: \"model.aggregation\" is \"median\", one of "
        "attention, mean, max was expected.");
  CHECK(error_of("model:\n  backbone:\n    name: resnet51\n") ==
        "[remat.config.range] train.yaml:3:11: \"model.backbone.name\" is \"resnet51\", one of 36 "
        "names was expected. The nearest names are \"resnet50\", \"resnet18\", \"resnet34\".");
  CHECK(error_of("training:\n  epochs: 99999999999999999999\n") != "");
}

TEST_CASE("values that contradict each other are refused where they stand") {
  CHECK(error_of("model:\n  num_views: 3\n") ==
        "[remat.config.conflict] train.yaml:2:14: \"model.num_views\" is 3 and \"data.source\" is "
        "\"digits\", which has one image per case. Set data.source to views, or num_views to 1.");
  CHECK(error_of("data:\n  source: folder\n").find("\"data.path\" is empty") != std::string::npos);
  CHECK(error_of("model:\n  backbone: {pretrained: true, weights: a.pth}\n") != "");
  CHECK(error_of("training:\n  lr: 0.1\n  min_lr: 0.2\n").find("train.yaml:3:11") !=
        std::string::npos);
  CHECK(error_of("training:\n  epochs: 1\n  warmup_epochs: 2\n") != "");
  CHECK(error_of("data:\n  validation_path: a\n") != "");
  CHECK(error_of("data:\n  augment: flip\n") != "");
  CHECK(error_of("output:\n  folder: ''\n") != "");
}

TEST_CASE("a memory budget is bytes or a part of plain, and none by default") {
  const auto budget = [](const std::string& text) {
    return remat::parse_config(
               "training:\n  gradient_checkpointing: {enabled: true, budget: " + text + "}\n")
        .training.gradient_checkpointing.budget;
  };
  using remat::MemoryBudget;
  const auto two_gibibytes = MemoryBudget::bytes({std::int64_t{2} << 30});
  CHECK(budget("2GiB") == two_gibibytes);
  CHECK(budget("\"2 GiB\"") == two_gibibytes);
  CHECK(budget("2147483648") == two_gibibytes);
  CHECK(budget("0.33") == MemoryBudget::fraction_of_plain(0.33));
  CHECK(budget("none") == std::nullopt);
  CHECK(remat::Config().training.gradient_checkpointing.budget == std::nullopt);
}

TEST_CASE("a memory budget is refused with its place where it is no budget, or does not act") {
  const std::string begin = "training:\n  gradient_checkpointing:\n    enabled: true\n    budget: ";
  CHECK(error_of(begin + "2GB\n") ==
        "[remat.config.type] train.yaml:4:13: \"training.gradient_checkpointing.budget\" is "
        "\"2GB\", none, bytes (2147483648, 512MiB, 1.5GiB) or a part of what plain needs (0.33) "
        "was expected. GB is a power of 1000 to some and of 1024 to others: write 2GiB, or count "
        "the bytes.");
  CHECK(error_of(begin + "0\n").starts_with("[remat.config.range] train.yaml:4:13: "));
  CHECK(error_of(begin + "-0.5\n").find("A budget is above 0.") != std::string::npos);
  CHECK(error_of(begin + "99999999999999999999\n").starts_with("[remat.config.range]"));
  CHECK(error_of(begin + "[1]\n").find("is a list, none, bytes") != std::string::npos);
  CHECK(error_of(begin + "\n").find("is empty, none, bytes") != std::string::npos);

  CHECK(error_of(begin + "1.5GiB\n    segments: 4\n") ==
        "[remat.config.conflict] train.yaml:4:13: \"training.gradient_checkpointing.budget\" is "
        "1536MiB and \"training.gradient_checkpointing.segments\" is 4, and only one of them can "
        "decide what is recomputed. Set segments to 0, or budget to none.");
  CHECK(error_of("training:\n  gradient_checkpointing: {budget: 0.5}\n") ==
        "[remat.config.conflict] train.yaml:2:36: \"training.gradient_checkpointing.budget\" is "
        "0.5 and \"training.gradient_checkpointing.enabled\" is false, so that nothing would keep "
        "to it. Set enabled to true, or budget to none.");
}

TEST_CASE("all problems of a file come at once") {
  const std::string error =
      error_of("model:\n  classes: 3\ntraining:\n  lr: -1\n  epochs: x\n  seed: 1\n");

  CHECK(error.starts_with("[remat.config.unknown] 3 problems:\n  train.yaml:2:3: "));
  CHECK(error.find("\n  train.yaml:4:7: ") != std::string::npos);
  CHECK(error.find("\n  train.yaml:5:11: ") != std::string::npos);
}

TEST_CASE("what is no YAML is refused with its place") {
  CHECK(error_of("training:\n\tlr: 1\n").starts_with("[remat.config.syntax] train.yaml:2:"));
  CHECK(error_of("training: {lr: 1\n").starts_with("[remat.config.syntax] train.yaml:"));
  CHECK(error_of("data:\n---\ndata:\n").starts_with("[remat.config.syntax] train.yaml:"));
  CHECK(error_of("? [a]\n: 1\n").find("a key is a list") != std::string::npos);
  CHECK(error_of("<<: {training: 1}\n") != "");
}

TEST_CASE("a file that is not there is named, and so is a folder") {
  const auto error = [](const std::string& path) -> std::string {
    try {
      remat::read_config(path);
    } catch (const remat::ConfigError& caught) {
      return caught.what();
    }
    return "";
  };
  CHECK(error("no-such.yaml") ==
        "[remat.config.file] no-such.yaml: there is no such configuration file. Check the path.");
  CHECK(error(".").find("cannot be read") != std::string::npos);
}

TEST_CASE("a later value wins over an earlier one, and a file over the defaults") {
  remat::ConfigReader reader;
  reader.read_text("training: {lr: 0.5, seed: 3}", "a");
  reader.set("training.lr", "0.25", "--set");

  CHECK(reader.finish().training.lr == 0.25);
  CHECK(reader.finish().training.seed == 3);
}

TEST_CASE("the documentation lists the keys as they are") {
  const std::filesystem::path page =
      std::filesystem::path(REMAT_TEST_DATA) / ".." / ".." / "docs" / "configuration.md";
  std::ifstream file(page);
  const std::string text{std::istreambuf_iterator<char>(file), {}};

  // Mended by putting what `train --keys` prints into the page.
  CHECK(text.find(remat::config_reference()) != std::string::npos);
}

#ifdef REMAT_TEST_WITH_LIBTORCH
TEST_CASE("names that a file may give are those that the library knows") {
  std::set<std::string> names;
  for (const auto& info : remat::list_backbones()) names.insert(info.name);
  for (const auto& [alias, name] : remat::detail::kBackboneAliases) names.emplace(alias);

  const auto choices = remat::detail::find_config_key("model.backbone.name")->choices;

  CHECK(std::set<std::string>(choices.begin(), choices.end()) == names);
  const auto aggregations = remat::detail::find_config_key("model.aggregation")->choices;
  CHECK(aggregations.size() == remat::detail::kViewAggregations.size());
  for (const auto choice : aggregations) CHECK_NOTHROW(remat::view_aggregation(choice));
}
#endif

}  // namespace configuration_test
