// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <yaml-cpp/yaml.h>

#include "remat/errors.hpp"
#include "remat/yaml/check.hpp"
#include "remat/yaml/configuration.hpp"
#include "remat/yaml/keys.hpp"
#include "remat/yaml/unknown_key.hpp"
#include "remat/yaml/value.hpp"

namespace remat {

/// Puts a configuration together from defaults, files and single values, the later over the
/// earlier, and reports everything that is wrong at once.
///
/// ```cpp
/// remat::ConfigReader reader;
/// reader.read_file("train.yaml");
/// reader.set("training.lr", "3e-4", "--set training.lr=3e-4");
/// const remat::Config config = reader.finish();
/// ```
class ConfigReader {
 public:
  /// Reads a file; a file without content leaves the defaults.
  void read_file(const std::filesystem::path& path) {
    std::error_code ignored;
    std::ifstream file(path, std::ios::binary);
    if (file && !std::filesystem::is_directory(path, ignored)) {
      read_text({std::istreambuf_iterator<char>(file), {}}, path.string());
      return;
    }
    add(ErrorMessage("remat.config.file")
            .where(path.string())
            .what(std::filesystem::exists(path, ignored) ? "the configuration cannot be read"
                                                         : "there is no such configuration file")
            .cure("Check the path"));
  }

  /// Reads YAML.
  ///
  /// @param name  what messages call the text
  void read_text(const std::string& text, const std::string& name) {
    source_ = name;
    try {
      const std::vector<YAML::Node> documents = YAML::LoadAll(text);
      if (documents.size() > 1)
        add(message("remat.config.syntax", documents[1].Mark())
                .what("a second document begins, and one was expected")
                .cure("Take the line --- out"));
      if (!documents.empty()) read_section(documents[0], "");
    } catch (const YAML::Exception& error) {
      add(message("remat.config.syntax", error.mark).what("this is no YAML: " + error.msg));
    }
  }

  /// Gives one key a value, as a command line does.
  ///
  /// @param key    with its sections
  /// @param place  what messages call the origin
  void set(const std::string& key, const std::string& text, const std::string& place) {
    if (const ConfigKey* known = detail::find_config_key(key)) {
      note(*known, place, detail::assign_value(config_, *known, text, /*is_quoted=*/false));
    } else {
      add_unknown(ErrorMessage("remat.config.unknown").where(place), key, /*is_section=*/false);
    }
  }

  /// Checks what concerns several keys, and returns the configuration.
  ///
  /// @throws ConfigError  with all that was wrong, each with its file, line and column
  Config finish() const {
    std::vector<ErrorMessage> problems = problems_;
    // With wrong values in it, what several keys say together means nothing.
    if (problems.empty())
      for (const detail::Conflict& conflict : detail::find_conflicts(config_))
        problems.push_back(ErrorMessage("remat.config.conflict")
                               .where(place_of(conflict.key))
                               .what(conflict.what)
                               .cure(conflict.cure));
    if (!problems.empty()) throw ConfigError(problems.front().code(), joined(problems));
    return config_;
  }

 private:
  static std::string joined(const std::vector<ErrorMessage>& problems) {
    if (problems.size() == 1) return problems.front().text();
    std::string text = std::to_string(problems.size()) + " problems:";
    for (const ErrorMessage& problem : problems) text += "\n  " + problem.text();
    return text;
  }

  void add(const ErrorMessage& problem) { problems_.push_back(problem); }

  std::string place(const YAML::Mark& mark) const {
    if (mark.is_null()) return source_;
    return source_ + ":" + std::to_string(mark.line + 1) + ":" + std::to_string(mark.column + 1);
  }
  ErrorMessage message(std::string_view code, const YAML::Mark& mark) const {
    return ErrorMessage(code).where(place(mark));
  }
  /// Returns where a key got its value; the key itself if nobody gave it one.
  std::string place_of(const std::string& key) const {
    const auto found = places_.find(key);
    return found == places_.end() ? key : found->second;
  }

  void add_unknown(ErrorMessage start, const std::string& name, bool is_section) {
    const std::string kind = is_section ? "section" : "key";
    add(start.what("there is no " + kind + " \"" + name + "\"")
            .cure("The nearest " + kind + " is \"" + detail::nearest_key(name, is_section) + "\""));
  }

  void note(const ConfigKey& key, const std::string& place,
            const std::optional<detail::ValueProblem>& problem) {
    places_[std::string(key.name)] = place;
    if (problem)
      add(ErrorMessage(problem->code).where(place).what(problem->what).cure(problem->cure));
  }

  /// @param section  the name with a dot at the end; empty for the whole file
  void read_section(const YAML::Node& node, const std::string& section) {
    if (!node.IsDefined() || node.IsNull()) return;  // a section whose keys are commented out
    if (!node.IsMap()) {
      const std::string name =
          section.empty() ? "the file" : "\"" + section.substr(0, section.size() - 1) + "\"";
      add(message("remat.config.type", node.Mark())
              .what(name + " is " + kind_of(node) + ", a section with keys was expected"));
      return;
    }
    std::map<std::string, YAML::Mark> seen;
    for (const auto& item : node) {
      if (!item.first.IsScalar()) {
        add(message("remat.config.syntax", item.first.Mark())
                .what("a key is " + kind_of(item.first) + ", a word was expected"));
        continue;
      }
      const std::string name = section + item.first.Scalar();
      const auto [first, is_new] = seen.emplace(item.first.Scalar(), item.first.Mark());
      if (is_new)
        read_item(name, item.first, item.second);
      else
        add(message("remat.config.duplicate", item.first.Mark())
                .what("\"" + name + "\" is there twice, first in line " +
                      std::to_string(first->second.line + 1))
                .cure("Take one of them out"));
    }
  }

  void read_item(const std::string& name, const YAML::Node& key, const YAML::Node& value) {
    // A flat "training.lr" has the name of a key, and is none.
    const bool is_flat = key.Scalar().find('.') != std::string::npos;
    const ConfigKey* known = detail::find_config_key(name);
    if (is_flat && known != nullptr) {
      add(message("remat.config.unknown", key.Mark())
              .what("there is no key \"" + key.Scalar() + "\" with a dot")
              .cure("Write " + std::string(known->last_name()) + ": below the section " +
                    std::string(known->section())));
    } else if (known != nullptr) {
      read_value(*known, key, value);
    } else if (!is_flat && is_section(name)) {
      read_section(value, name + ".");
    } else {
      add_unknown(message("remat.config.unknown", key.Mark()), name, value.IsMap());
    }
  }

  static bool is_section(const std::string& name) {
    for (const std::string& section : detail::config_sections())
      if (section == name) return true;
    return false;
  }

  void read_value(const ConfigKey& key, const YAML::Node& name, const YAML::Node& value) {
    if (value.IsScalar()) {
      const bool is_quoted = value.Tag() == "!";
      note(key, place(value.Mark()), detail::assign_value(config_, key, value.Scalar(), is_quoted));
      return;
    }
    const YAML::Mark& mark = value.IsNull() ? name.Mark() : value.Mark();
    note(key, place(mark),
         detail::wrong_type(key, kind_of(value),
                            value.IsNull() ? "Give it a value, or take the line out" : ""));
  }

  static std::string kind_of(const YAML::Node& node) {
    if (node.IsNull()) return "empty";
    if (node.IsMap()) return "a section";
    if (node.IsSequence()) return "a list";
    return "\"" + node.Scalar() + "\"";
  }

  Config config_;
  std::string source_;
  std::map<std::string, std::string> places_;
  std::vector<ErrorMessage> problems_;
};

/// Reads a configuration from a file.
///
/// @throws ConfigError  if the file cannot be read, has a key that there is not, one twice, a value
/// of
///                      another type or out of range, or values that contradict each other
inline Config read_config(const std::filesystem::path& path) {
  ConfigReader reader;
  reader.read_file(path);
  return reader.finish();
}

/// Reads a configuration from a text in YAML.
///
/// @param name  what messages call the text
/// @throws ConfigError  as `read_config`
inline Config parse_config(const std::string& text, const std::string& name = "configuration") {
  ConfigReader reader;
  reader.read_text(text, name);
  return reader.finish();
}

}  // namespace remat
