// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/family.hpp"
#include "remat/backbones/published.hpp"
#include "remat/backbones/resnet.hpp"
#include "remat/errors.hpp"

namespace remat {

/// One line of the list of backbones.
struct BackboneInfo {
  std::string name;          ///< what `create_backbone` takes
  std::string family;        ///< "ResNet"
  std::int64_t parameters;   ///< with torchvision's head for 1,000 classes
  std::int64_t feature_dim;  ///< size of the pooled features
};

namespace detail {

struct BackboneEntry {
  BackboneInfo info;
  std::function<std::shared_ptr<Backbone>(const BackboneOptions& options)> create;
};

/// Appends each row of a family's table.
template <class Family>
void add_family(std::vector<BackboneEntry>& entries) {
  using Impl = typename Family::ContainedType;
  for (const auto& design : Impl::designs()) {
    const PublishedModel& facts = published_model(design.name);
    entries.push_back({{std::string(design.name), std::string(Impl::kFamily), facts.parameters,
                        facts.feature_dim},
                       [&design](const BackboneOptions& options) -> std::shared_ptr<Backbone> {
                         return Family(design, options).ptr();
                       }});
  }
}

inline const std::vector<BackboneEntry>& backbone_entries() {
  static const std::vector<BackboneEntry> entries = [] {
    std::vector<BackboneEntry> all;
    add_family<ResNet<>>(all);
    return all;
  }();
  return entries;
}

/// Spellings without an underscore that people use as well.
inline constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kBackboneAliases{{
    {"mobilenetv2", "mobilenet_v2"},
    {"mobilenetv3_small", "mobilenet_v3_small"},
    {"mobilenetv3_large", "mobilenet_v3_large"},
}};

}  // namespace detail

/// Lists every backbone that `create_backbone` knows, family by family.
inline std::vector<BackboneInfo> list_backbones() {
  std::vector<BackboneInfo> list;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) list.push_back(entry.info);
  return list;
}

/// Builds a backbone by name, checkpointing off.
///
/// @throws ArgumentError  for an unknown name, with the nearest ones, and for options that cannot
/// be
inline std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                                 const BackboneOptions& options = {}) {
  for (const auto& [alias, full_name] : detail::kBackboneAliases)
    if (name == alias) name = full_name;
  std::vector<std::string> names;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) {
    if (entry.info.name == name) return entry.create(options);
    names.push_back(entry.info.name);
  }
  detail::refuse_backbone_name("remat::create_backbone", name, names,
                               "remat::list_backbones() has the full list");
}

/// Builds a backbone with torchvision's own head for `num_classes` classes: its keys are
/// torchvision's, key for key.
///
/// @return  a backbone whose forward gives (N, num_classes)
/// @throws ArgumentError  as `create_backbone`, and if `num_classes` is below 1
inline std::shared_ptr<Backbone> create_classifier(std::string_view name, std::int64_t num_classes,
                                                   BackboneOptions options = {}) {
  require(num_classes >= 1, [&] {
    return ErrorMessage("remat.backbone.options")
        .where("remat::create_classifier")
        .what("num_classes is " + std::to_string(num_classes) + ", at least 1 was expected");
  });
  options.num_classes = num_classes;
  return create_backbone(name, options);
}

}  // namespace remat
