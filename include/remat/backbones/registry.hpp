// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/convnext.hpp"
#include "remat/backbones/efficientnet.hpp"
#include "remat/backbones/family.hpp"
#include "remat/backbones/maxvit.hpp"
#include "remat/backbones/mobilenet_v2.hpp"
#include "remat/backbones/mobilenet_v3.hpp"
#include "remat/backbones/published.hpp"
#include "remat/backbones/regnet.hpp"
#include "remat/backbones/resnet.hpp"
#include "remat/backbones/swin.hpp"
#include "remat/backbones/vision_transformer.hpp"
#include "remat/errors.hpp"
#include "remat/nn/chain.hpp"

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
  CheckpointedChain (*default_chain)();
  std::function<std::shared_ptr<Backbone>(const BackboneOptions&, CheckpointedChain)> create;
};

/// Appends each row of a family's table.
template <class Family>
void add_family(std::vector<BackboneEntry>& entries) {
  using Impl = typename Family::ContainedType;
  for (const auto& design : Impl::designs()) {
    const PublishedModel& facts = published_model(design.name);
    entries.push_back({{std::string(design.name), std::string(Impl::kFamily), facts.parameters,
                        facts.feature_dim},
                       []() -> CheckpointedChain { return typename Family::Policy(); },
                       [&design](const BackboneOptions& options,
                                 CheckpointedChain chain) -> std::shared_ptr<Backbone> {
                         return build_backbone<Impl>(design, options, std::move(chain));
                       }});
  }
}

inline const std::vector<BackboneEntry>& backbone_entries() {
  static const std::vector<BackboneEntry> entries = [] {
    std::vector<BackboneEntry> all;
    add_family<ResNet<>>(all);
    add_family<MobileNetV2<>>(all);
    add_family<MobileNetV3<>>(all);
    add_family<EfficientNet<>>(all);
    add_family<RegNet<>>(all);
    add_family<VisionTransformer<>>(all);
    add_family<SwinTransformer<>>(all);
    add_family<MaxViT<>>(all);
    add_family<ConvNeXt<>>(all);
    return all;
  }();
  return entries;
}

/// Returns the entry of that name or alias.
///
/// @throws ArgumentError  with the nearest names if there is none
inline const BackboneEntry& find_backbone(std::string_view name) {
  for (const auto& [alias, full_name] : kBackboneAliases)
    if (name == alias) name = full_name;
  std::vector<std::string> names;
  for (const BackboneEntry& entry : backbone_entries()) {
    if (entry.info.name == name) return entry;
    names.push_back(entry.info.name);
  }
  refuse_backbone_name("remat::create_backbone", name, names,
                       "remat::list_backbones() has the full list");
}

}  // namespace detail

/// Lists every backbone that `create_backbone` knows, family by family.
inline std::vector<BackboneInfo> list_backbones() {
  std::vector<BackboneInfo> list;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) list.push_back(entry.info);
  return list;
}

/// Builds a backbone by name, checkpointing off, with the default policy of its family.
///
/// @throws ArgumentError  for an unknown name, with the nearest ones, and for options that cannot
/// be
inline std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                                 const BackboneOptions& options = {}) {
  const detail::BackboneEntry& entry = detail::find_backbone(name);
  return entry.create(options, entry.default_chain());
}

/// Builds a backbone by name, checkpointing off, with a policy of one's choice:
/// `create_backbone<Checkpointed<Sequential, EachUnit>>("resnet50")`.
///
/// @throws ArgumentError  as above
template <class Policy>
  requires std::convertible_to<Policy, CheckpointedChain>
std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                          const BackboneOptions& options = {}) {
  return detail::find_backbone(name).create(options, Policy());
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
