// SPDX-License-Identifier: MIT
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/policies/concepts.hpp"
#include "remat/policies/sequential.hpp"

namespace remat {

/// A drop-in `torch::nn::Sequential` that is checkpointed segment by segment.
///
/// ```cpp
/// remat::Checkpointed<remat::Sequential, remat::Segments<4>> net(conv, norm, act, head);
/// remat::Checkpointed<remat::TransformerLayers> encoder(layer1, layer2, layer3);
/// remat::Checkpointed<remat::StagedHybrid> staged(stem, stage1, downsample, stage2);
/// ```
/// Each child is a unit; a nested `torch::nn::Sequential` or checkpointed chain is opened, so that
/// a stage of blocks counts as its blocks; switch, rule and keep policy are then those of the outer
/// chain. `forward(x, more...)` hands extra arguments to every layer.
/// @par Keeps  the tensors between segments, what the keep policy chooses, and all of a plain
/// segment
template <Pattern PatternType, class RuleType, class Keep>
class Checkpointed<PatternType, RuleType, Keep> : public CheckpointedChain {
  static_assert(Rule<RuleType>,
                "remat::Checkpointed<Pattern, Rule, Keep> needs a rule as its second argument");
  static_assert(
      KeepPolicy<Keep>,
      "remat::Checkpointed<Pattern, Rule, Keep> needs a keep policy as its third argument");

 public:
  using CheckpointedChain::CheckpointedChain;

  /// Constructs an empty chain, to be filled with `push_back`.
  Checkpointed()
      : CheckpointedChain(
            std::shared_ptr<CheckpointedChainImpl>(std::make_shared<CheckpointedSequentialImpl>(
                detail::ChainPolicy::of<PatternType, RuleType, Keep>()))) {}

  /// Constructs a chain of modules, numbered from 0.
  template <class First, class... Rest>
    requires ChainLayerSource<First> && (ChainLayerSource<Rest> && ...)
  explicit Checkpointed(First&& first, Rest&&... rest) : Checkpointed() {
    (*this)->push_back(std::forward<First>(first));
    ((*this)->push_back(std::forward<Rest>(rest)), ...);
  }

  /// Constructs a chain of named modules: `net({{"conv1", conv}, {"bn1", norm}})`.
  Checkpointed(std::initializer_list<NamedLayer> layers) : Checkpointed() {
    for (const NamedLayer& layer : layers) (*this)->push_back(layer);
  }

  /// Constructs a chain of named modules, as `torch::nn::Sequential` does.
  explicit Checkpointed(torch::OrderedDict<std::string, torch::nn::AnyModule>&& layers)
      : Checkpointed() {
    for (auto& item : layers) (*this)->push_back(item.key(), std::move(item.value()));
  }
};

}  // namespace remat
