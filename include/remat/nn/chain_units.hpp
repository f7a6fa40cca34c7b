// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_layer.hpp"

namespace remat::detail {

/// A unit of a chain whose nested chains are opened.
struct ChainUnit {
  torch::nn::AnyModule* module;
  const torch::nn::Module* identity;
  bool is_plain;

  friend bool operator==(const ChainUnit& left, const ChainUnit& right) {
    return left.identity == right.identity && left.is_plain == right.is_plain;
  }
};

/// A layer of a chain, counted: a nested chain is a stage of units, anything else a unit alone.
struct ChainStage {
  std::size_t unit_count;
  bool is_nested;
};

/// A checkpointed chain as the chain around it sees it, and as its planner does.
class ChainStructure {
 public:
  virtual ~ChainStructure() = default;

  /// Appends the chain's units; all are plain if `is_plain`.
  virtual void add_units(std::vector<ChainUnit>& units, bool is_plain) const = 0;
  /// Returns the units' names, as `named_modules()` has them below the chain.
  virtual std::vector<std::string> unit_names() const = 0;
  /// Returns the layers that have units.
  virtual std::vector<ChainStage> stages() const = 0;
  /// Returns whether the chain is switched on; one that is not is plain in the chain around it.
  virtual bool is_switched_on() const = 0;
  /// Returns the chain's name for messages.
  virtual std::string title() const = 0;

 protected:
  ChainStructure() = default;
  ChainStructure(const ChainStructure&) = default;
  ChainStructure& operator=(const ChainStructure&) = default;
};

/// Returns the units of the outermost chain.
inline std::vector<ChainUnit> units_of(const ChainStructure& chain) {
  std::vector<ChainUnit> units;
  chain.add_units(units, /*is_plain=*/false);
  return units;
}

inline void add_units_of_module(torch::nn::AnyModule& module, bool is_plain,
                                std::vector<ChainUnit>& units) {
  const auto pointer = module.ptr();
  if (const auto* chain = dynamic_cast<const ChainStructure*>(pointer.get()))
    chain->add_units(units, is_plain || !chain->is_switched_on());
  else
    units.push_back({&module, pointer.get(), is_plain});
}

/// Appends the units of a layer: itself, or those of the chain that it is.
inline void add_units_of_layer(const ChainLayer& layer, bool is_plain,
                               std::vector<ChainUnit>& units) {
  is_plain = is_plain || layer.is_plain();
  if (layer.sequential() == nullptr) return add_units_of_module(layer.unit(), is_plain, units);
  for (auto& module : *layer.sequential()) add_units_of_module(module, is_plain, units);
}

/// Returns the layer as a stage.
inline ChainStage stage_of_layer(const ChainLayer& layer) {
  std::vector<ChainUnit> units;
  add_units_of_layer(layer, /*is_plain=*/false, units);
  const bool is_nested = layer.sequential() != nullptr ||
                         dynamic_cast<const ChainStructure*>(layer.ptr().get()) != nullptr;
  return {units.size(), is_nested};
}

inline void add_unit_names_of_module(const torch::nn::Module& module, const std::string& path,
                                     std::vector<std::string>& names) {
  const auto* chain = dynamic_cast<const ChainStructure*>(&module);
  if (chain == nullptr) return names.push_back(path);
  for (const auto& below : chain->unit_names()) names.push_back(path + "." + below);
}

/// Appends the names of a layer's units, in the order of `add_units_of_layer`.
inline void add_unit_names_of_layer(const ChainLayer& layer, const std::string& path,
                                    std::vector<std::string>& names) {
  if (layer.sequential() == nullptr) return add_unit_names_of_module(*layer.ptr(), path, names);
  for (const auto& child : layer.sequential()->named_children())
    add_unit_names_of_module(*child.value(), path + "." + child.key(), names);
}

}  // namespace remat::detail
