// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "remat/plan/budget_text.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/yaml/configuration.hpp"
#include "remat/yaml/keys.hpp"
#include "remat/yaml/value.hpp"

namespace remat {

namespace detail {

inline std::string yaml_text(bool value) { return value ? "true" : "false"; }
inline std::string yaml_text(std::int64_t value) { return std::to_string(value); }
inline std::string yaml_text(double value) { return number_text(value); }
inline std::string yaml_text(const std::optional<MemoryBudget>& value) {
  return value ? to_string(*value) : "none";
}

/// Quotes a text, so that nothing in it means anything to YAML.
inline std::string yaml_text(std::string_view value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "\"";
  for (const char letter : value) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\')
      text += {'\\', letter};
    else if (code < 0x20 || code == 0x7f)
      text += {'\\', 'x', kDigits[code >> 4], kDigits[code & 15]};
    else
      text += letter;
  }
  return text + '"';
}

/// Writes the sections of `name` that `before` does not share; returns how deep its keys stand.
inline std::size_t open_sections(std::string_view name, std::string_view before,
                                 std::string& yaml) {
  std::size_t depth = 0;
  for (std::size_t begin = 0, dot = name.find('.'); dot != std::string_view::npos;
       begin = dot + 1, dot = name.find('.', begin), ++depth)
    if (!before.starts_with(name.substr(0, dot + 1)))
      yaml += std::string(2 * depth, ' ') + std::string(name.substr(begin, dot - begin)) + ":\n";
  return depth;
}

}  // namespace detail

/// Returns the value of a key as YAML has it.
inline std::string config_value(const Config& config, const ConfigKey& key) {
  Config copy = config;  // a field is reached in a Config that may be changed
  return std::visit([&](auto* field) { return detail::yaml_text(field(copy)); }, key.field);
}

/// Writes a configuration as YAML, every key with its description; `read_config` reads it back the
/// same.
inline std::string to_yaml(const Config& config) {
  std::string yaml;
  std::string_view before;
  for (const ConfigKey& key : config_keys()) {
    const std::size_t depth = detail::open_sections(key.name, before, yaml);
    before = key.name;
    const std::string indent(2 * depth, ' ');
    yaml += indent + "# " + std::string(key.description) + "\n" + indent +
            std::string(key.last_name()) + ": " + config_value(config, key) + "\n";
  }
  return yaml;
}

/// Returns a Markdown table of all keys: default, values, meaning.
inline std::string config_reference() {
  std::string table = "| key | default | values | meaning |\n| --- | --- | --- | --- |\n";
  for (const ConfigKey& key : config_keys()) {
    const std::string expected = key.choices.size() > 6 ? "a name" : detail::expected_text(key);
    table += "| `" + std::string(key.name) + "` | `" + config_value(Config(), key) + "` | " +
             expected + " | " + std::string(key.description) + " |\n";
  }
  return table;
}

/// Returns the keys whose values differ.
inline std::vector<const ConfigKey*> differing_keys(const Config& left, const Config& right) {
  std::vector<const ConfigKey*> keys;
  for (const ConfigKey& key : config_keys())
    if (config_value(left, key) != config_value(right, key)) keys.push_back(&key);
  return keys;
}

}  // namespace remat
