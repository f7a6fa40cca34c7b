// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <utility>
#include <vector>

#include "remat/libtorch/nn.hpp"
#include "remat/weights/load_comparison.hpp"
#include "remat/weights/load_report.hpp"
#include "remat/weights/open.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat {

namespace detail {

/// A state dict as something to read from.
class StateDictView final : public StateDictReader {
 public:
  explicit StateDictView(const StateDict& state_dict)
      : StateDictReader("a remat::StateDict"), state_dict_(state_dict) {
    std::vector<TensorEntry> entries;
    for (const auto& [name, tensor] : state_dict_)
      entries.push_back({name, tensor.sizes().vec(), tensor.scalar_type(), tensor.nbytes()});
    announce(std::move(entries));
  }

  at::Tensor read(std::size_t index) override {
    return (state_dict_.begin() + static_cast<std::ptrdiff_t>(index))->second;
  }

 private:
  const StateDict& state_dict_;
};

/// Puts back what was there before; a tensor that refuses keeps the others from nothing.
inline void restore(std::span<const Planned> changed) noexcept {
  for (const Planned& planned : changed) {
    try {
      planned.target.copy_(planned.source);
    } catch (...) {
    }
  }
}

/// Everything that a file can cause has happened before. What is left, a device without memory
/// for instance, must not leave half of a module either.
inline void copy_planned(std::vector<Planned>& plan) {
  at::NoGradGuard no_grad;
  std::size_t done = 0;
  try {
    for (Planned& planned : plan) {
      // On the CPU, where the file's numbers are: a device may have no room for a second module.
      at::Tensor before = planned.target.detach().to(at::kCPU, planned.target.scalar_type(),
                                                     /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor source = std::exchange(planned.source, std::move(before));
      ++done;
      planned.target.copy_(source.reshape(planned.target.sizes()));
    }
  } catch (...) {
    restore(std::span(plan).first(done));
    throw;
  }
}

}  // namespace detail

/// Copies the tensors of a weight file into a module: parameters and buffers, by Python's names.
///
/// All is compared and read before anything is changed, so that a file that does not fit, or turns
/// out damaged, leaves the module as it was. Values are converted to the dtype of the module's
/// tensor, whose device and `requires_grad` stay; the tensors themselves stay, too, so that
/// optimizers keep them. Meanwhile the file's tensors are in memory once.
///
/// "module." is taken off the file's names if all of them begin with it and none of the module's
/// does. A `num_batches_tracked` may be missing (then it becomes 0) or be there without need, and a
/// tensor that the module has under two names may be in the file under one.
///
/// @param reader  for one module after the other from the same file
/// @return        what became of each key
/// @throws WeightsError  if keys differ (listing all of them) or the file cannot be read, and, even
///                       when not strict, if no key of the module is in the file
inline LoadReport load_weights(torch::nn::Module& module, StateDictReader& reader,
                               const LoadOptions& options = {}) {
  detail::LoadComparison comparison(module, reader, options);
  for (detail::Planned& planned : comparison.plan())
    if (planned.entry) planned.source = reader.read(*planned.entry);
  detail::copy_planned(comparison.plan());
  return comparison.report();
}

/// As from a reader; opens the file.
inline LoadReport load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                               const LoadOptions& options = {}) {
  return load_weights(module, *open_state_dict(path), options);
}

/// As from a reader; takes tensors that are in memory.
inline LoadReport load_weights(torch::nn::Module& module, const StateDict& state_dict,
                               const LoadOptions& options = {}) {
  detail::StateDictView view(state_dict);
  return load_weights(module, view, options);
}

/// As for a module; takes a holder.
template <class Impl, class Source>
  requires requires(torch::nn::Module& module, Source&& source) {
    load_weights(module, std::forward<Source>(source));
  }
LoadReport load_weights(const torch::nn::ModuleHolder<Impl>& module, Source&& source,
                        const LoadOptions& options = {}) {
  return load_weights(static_cast<torch::nn::Module&>(*module.ptr()), std::forward<Source>(source),
                      options);
}

}  // namespace remat
