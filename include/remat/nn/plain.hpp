// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/toggle.hpp"

namespace remat {

namespace detail {

/// Exempts `part` and everything below it, wherever something inside `root` checkpoints it.
inline bool exempt_part(torch::nn::Module& root, torch::nn::Module& part) {
  std::vector<const torch::nn::Module*> units = {&part};
  for (const auto& below : part.modules(/*include_self=*/false)) units.push_back(below.get());
  bool is_found = false;
  for_each_toggle(root, [&](CheckpointToggle& toggle) {
    for (const torch::nn::Module* unit : units) is_found = toggle.exempt_unit(*unit) || is_found;
  });
  return is_found;
}

}  // namespace detail

/// Exempts a part of `root` from checkpointing by its name: a unit of a chain, a checkpointed
/// module, or a module that contains such, of which all are exempted.
///
/// What it saves stays in memory from now on. Names do not change.
///
/// @param name  as in `root.named_modules()`: "layer1.0"
/// @throws ArgumentError  if there is no such module, or it is only a part of something that is
/// recomputed as one
inline void plain(torch::nn::Module& root, std::string_view name) {
  const auto modules = root.named_modules(/*name_prefix=*/{}, /*include_self=*/false);
  const auto* part = modules.find(std::string(name));
  require(part != nullptr, [&] {
    const auto nearest = detail::nearest_names(name, modules.keys());
    return ErrorMessage("remat.plain.name")
        .where("remat::plain")
        .what("\"" + std::string(name) + "\" was given, and " + root.name() +
              " has no module of that name")
        .cure(nearest.empty() ? "It contains no modules"
                              : "The nearest names are " + detail::quoted_list(nearest));
  });
  require(detail::exempt_part(root, **part), [&] {
    return ErrorMessage("remat.plain.unit")
        .where("remat::plain")
        .what("\"" + std::string(name) +
              "\" was given, and a unit of a checkpointed chain or a checkpointed module was "
              "expected")
        .cause(
            "It is a part of a unit, which is recomputed as one, or nothing here is checkpointed")
        .cure("Exempt the unit around it");
  });
}

/// As for a module; takes a holder.
template <class Impl>
void plain(const torch::nn::ModuleHolder<Impl>& root, std::string_view name) {
  plain(static_cast<torch::nn::Module&>(*root.ptr()), name);
}

}  // namespace remat
