// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/resnet.hpp"
#include "remat/detail/nearest_names.hpp"
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
  std::shared_ptr<Backbone> (*create)(const BackboneOptions& options);
};

template <int depth>
std::shared_ptr<Backbone> create_resnet(const BackboneOptions& options) {
  return ResNetOfDepth<depth>(options).ptr();
}

inline const std::vector<BackboneEntry>& backbone_entries() {
  static const std::vector<BackboneEntry> entries{
      {{"resnet18", "ResNet", 11'689'512, 512}, create_resnet<18>},
      {{"resnet34", "ResNet", 21'797'672, 512}, create_resnet<34>},
      {{"resnet50", "ResNet", 25'557'032, 2048}, create_resnet<50>},
      {{"resnet101", "ResNet", 44'549'160, 2048}, create_resnet<101>},
      {{"resnet152", "ResNet", 60'192'808, 2048}, create_resnet<152>},
  };
  return entries;
}

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
  std::vector<std::string> names;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) {
    if (entry.info.name == name) return entry.create(options);
    names.push_back(entry.info.name);
  }
  throw ArgumentError(ErrorMessage("remat.backbone.unknown")
                          .where("remat::create_backbone")
                          .what("there is no backbone \"" + std::string(name) +
                                "\"; the nearest names are " +
                                detail::quoted_list(detail::nearest_names(name, names)))
                          .cure("remat::list_backbones() has the full list"));
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
