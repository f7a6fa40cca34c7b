// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/chain_backbone.hpp"
#include "remat/backbones/pretrained.hpp"
#include "remat/detail/literal.hpp"
#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"

namespace remat {

/// A backbone that is built from one row of its family's table.
///
/// @tparam Impl        the class that derives from this, constructible from a design, options and
/// an empty chain; `Impl::kFamily` names the family, `Impl::designs()` is the table
/// @tparam DesignType  a row: the network's `name` and its numbers
template <class Impl, class DesignType>
class FamilyBackbone : public ChainBackbone {
 public:
  using Design = DesignType;

  /// Returns the numbers that this was built from.
  const Design& design() const { return design_; }

 protected:
  FamilyBackbone(const Design& design, std::int64_t raw_feature_dim, const BackboneOptions& options,
                 CheckpointedChain chain)
      : ChainBackbone(std::string(design.name), raw_feature_dim, options, std::move(chain)),
        design_(design) {}

 private:
  std::shared_ptr<Backbone> build_again() const final {
    return std::make_shared<Impl>(design_, options(), CheckpointedChain(chain()->empty_copy()));
  }

  Design design_;
};

namespace detail {

[[noreturn]] inline void refuse_backbone_name(std::string_view where, std::string_view given,
                                              const std::vector<std::string>& names,
                                              std::string_view cure) {
  throw ArgumentError(ErrorMessage("remat.backbone.unknown")
                          .where(where)
                          .what("there is no backbone \"" + std::string(given) +
                                "\"; the nearest names are " +
                                quoted_list(nearest_names(given, names)))
                          .cure(cure));
}

/// Returns the row of the family's table.
///
/// @throws ArgumentError  with the nearest names if there is none
template <class Impl>
const typename Impl::Design& find_design(std::string_view name) {
  std::vector<std::string> names;
  for (const typename Impl::Design& design : Impl::designs()) {
    if (design.name == name) return design;
    names.emplace_back(design.name);
  }
  refuse_backbone_name("remat::" + std::string(Impl::kFamily), name, names,
                       "remat::create_backbone builds those of the other families");
}

/// Builds a network and gives it the weights that its options ask for.
template <class Impl>
std::shared_ptr<Impl> build_backbone(const typename Impl::Design& design,
                                     const BackboneOptions& options, CheckpointedChain chain) {
  const auto backbone = std::make_shared<Impl>(design, options, std::move(chain));
  load_initial_weights(*backbone);
  return backbone;
}

}  // namespace detail

/// Holds a backbone of one family whose features are checkpointed by `PolicyType`.
///
/// The policy's pattern, rule and keep policy are values from here on: the modules behind are no
/// templates.
template <class Impl, class PolicyType>
class BackboneHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using Design = typename Impl::Design;
  using Policy = PolicyType;

  /// Makes a holder of nothing, to be assigned later.
  BackboneHolder(std::nullptr_t)  // NOLINT(*-explicit-*): as LibTorch's holders
      : torch::nn::ModuleHolder<Impl>(nullptr) {}
  /// Holds what is there, as `register_module` returns it.
  BackboneHolder(std::shared_ptr<Impl> module)  // NOLINT(*-explicit-*): as LibTorch's holders
      : torch::nn::ModuleHolder<Impl>(std::move(module)) {}
  /// Builds the network of that name.
  ///
  /// @throws ArgumentError  for a name that the family has not, and for options that cannot be
  explicit BackboneHolder(std::string_view name, const BackboneOptions& options = {})
      : BackboneHolder(detail::find_design<Impl>(name), options) {}
  /// Builds a network by a design of one's own.
  explicit BackboneHolder(const Design& design, const BackboneOptions& options = {})
      : torch::nn::ModuleHolder<Impl>(detail::build_backbone<Impl>(design, options, Policy())) {}
};

/// A network whose name is in the type.
template <class Family, detail::Literal name>
class NamedBackbone : public Family {
  static_assert(std::ranges::any_of(Family::ContainedType::designs(),
                                    [](const auto& design) { return design.name == name.view(); }),
                "remat::NamedBackbone<Family, name> needs a name from the family's table");

 public:
  NamedBackbone(std::nullptr_t) : Family(nullptr) {}  // NOLINT(*-explicit-*): as LibTorch's holders
  NamedBackbone(
      std::shared_ptr<typename Family::ContainedType> module)  // NOLINT(*-explicit-*): likewise
      : Family(std::move(module)) {}
  explicit NamedBackbone(const BackboneOptions& options = {}) : Family(name.view(), options) {}
};

}  // namespace remat
