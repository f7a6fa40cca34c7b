// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/yaml/keys.hpp"

namespace remat::detail {

/// Returns the key of that full name, or null.
inline const ConfigKey* find_config_key(std::string_view name) {
  const auto& keys = config_keys();
  const auto found = std::find_if(keys.begin(), keys.end(),
                                  [&](const ConfigKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

/// Returns the names of all sections, "training.gradient_checkpointing" among them.
inline std::vector<std::string> config_sections() {
  std::vector<std::string> sections;
  for (const ConfigKey& key : config_keys())
    for (std::size_t dot = key.name.find('.'); dot != std::string_view::npos;
         dot = key.name.find('.', dot + 1)) {
      std::string section(key.name.substr(0, dot));
      if (std::find(sections.begin(), sections.end(), section) == sections.end())
        sections.push_back(std::move(section));
    }
  return sections;
}

/// Returns how far a name is from a key: the key may stand in the wrong section, or go by the name
/// that other programs have for it.
inline std::size_t key_distance(std::string_view name, const ConfigKey& key) {
  const std::string_view last = name.substr(name.rfind('.') + 1);
  std::size_t distance =
      std::min({2 * edit_distance(name, key.name), 2 * edit_distance(last, key.last_name()),
                2 * edit_distance(last, key.synonym)});
  // Of two keys alike, the one of the section that the name stands in.
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || name.substr(0, dot) != key.section()) ++distance;
  return distance;
}

/// Returns the key or section that is meant, most likely.
///
/// @param name        with its sections
/// @param is_section  whether it holds others
inline std::string nearest_key(std::string_view name, bool is_section) {
  if (is_section) return nearest_names(name, config_sections(), 1).front();
  const auto& keys = config_keys();
  const auto nearest = std::min_element(
      keys.begin(), keys.end(), [&](const ConfigKey& left, const ConfigKey& right) {
        return key_distance(name, left) < key_distance(name, right);
      });
  return std::string(nearest->name);
}

}  // namespace remat::detail
