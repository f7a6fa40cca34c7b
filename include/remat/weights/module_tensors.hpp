// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "remat/libtorch/nn.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat {

namespace detail {

using NamedTensor = std::pair<std::string, at::Tensor>;

/// Appends the module's parameters, its buffers, and then what its children have.
inline void append_tensors(const torch::nn::Module& module, const std::string& prefix,
                           std::vector<NamedTensor>& tensors) {
  for (const auto& own : module.named_parameters(/*recurse=*/false))
    tensors.emplace_back(prefix + own.key(), own.value());
  for (const auto& own : module.named_buffers(/*recurse=*/false))
    tensors.emplace_back(prefix + own.key(), own.value());
  for (const auto& child : module.named_children())
    append_tensors(*child.value(), prefix + child.key() + ".", tensors);
}

/// Returns parameters and buffers in the order of Python's `state_dict()`; a module that is
/// registered twice comes twice, as there.
inline std::vector<NamedTensor> module_tensors(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  append_tensors(module, "", tensors);
  return tensors;
}

}  // namespace detail

/// Returns the module's parameters and buffers under Python's names, in the order of Python's
/// `state_dict()`: views of the module's own numbers, without gradients.
inline StateDict state_dict(const torch::nn::Module& module) {
  StateDict result;
  for (auto& [name, tensor] : detail::module_tensors(module)) result.add(name, tensor.detach());
  return result;
}

/// As for a module; takes a holder.
template <class Impl>
StateDict state_dict(const torch::nn::ModuleHolder<Impl>& module) {
  return state_dict(static_cast<const torch::nn::Module&>(*module.ptr()));
}

}  // namespace remat
