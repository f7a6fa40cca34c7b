// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "remat/backbones/backbone.hpp"
#include "remat/nn/chain.hpp"
#include "remat/nn/plain.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// A backbone whose features come out of one chain of units.
///
/// The chain holds the units but is no registered child: the units are registered by the backbone
/// under torchvision's names, and a second registration would give each weight a second name.
class ChainBackbone : public Backbone {
 public:
  /// Runs the chain, segment by segment if checkpointing is on.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return chain_->forward(images_nchw);
  }

  /// Switches checkpointing on with the policy's own rule.
  void enable_gradient_checkpointing() override {
    budgeted_.clear();
    chain_->enable_gradient_checkpointing();
  }
  /// Switches checkpointing on with `segment_count` segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    budgeted_.clear();
    chain_->enable_gradient_checkpointing(segment_count);
  }
  using Backbone::enable_gradient_checkpointing;
  void disable_gradient_checkpointing() override { chain_->disable_gradient_checkpointing(); }
  bool is_gradient_checkpointing_enabled() const override {
    return chain_->is_gradient_checkpointing_enabled();
  }

  std::int64_t segments() const override {
    return static_cast<std::int64_t>(chain_->segment_count());
  }

  /// Returns the plan of the next forward pass.
  Plan plan() const { return chain_->plan(); }

  /// Returns the chain: its units, and what they were measured to cost.
  const CheckpointedChain& chain() const { return chain_; }

  bool exempt_unit(const torch::nn::Module& unit) override { return chain_->exempt_unit(unit); }
  std::string unit_name(const torch::nn::Module* unit) const override {
    return chain_->unit_name(unit);
  }

  std::function<void()> remember_checkpointing() override {
    return [chain = chain_->remember_checkpointing(), budget = budgeted_.remember()] {
      chain();
      budget();
    };
  }

  void train(bool on = true) override {
    Backbone::train(on);
    chain_->train(on);
  }

 protected:
  /// @param chain  without layers; says by its type how the features are checkpointed
  ChainBackbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options,
                CheckpointedChain chain)
      : Backbone(std::move(name), raw_feature_dim, options), chain_(std::move(chain)) {
    chain_->disable_gradient_checkpointing();
  }

  /// Appends a layer that is registered elsewhere in this backbone: a unit, a
  /// `torch::nn::Sequential` of units, which is a stage, or either marked with `plain`.
  ///
  /// @param name  for messages and plans; without dots, which LibTorch refuses
  template <ChainLayerSource Layer>
  void append(std::string name, Layer&& layer) {
    chain_->push_back(std::move(name), std::forward<Layer>(layer));
  }

 private:
  void copy_checkpointing_from(const Backbone& other) override {
    const auto& original = dynamic_cast<const ChainBackbone&>(other);
    budgeted_ = original.budgeted_;
    chain_->copy_checkpointing_from(*original.chain_);
  }

  CheckpointedChain chain_;
};

}  // namespace remat
