// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "remat/backbones/backbone.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// A backbone whose features come out of one chain of units.
///
/// The chain holds the units but is no registered child: the units are registered by the backbone
/// under torchvision's names, and a second registration would give each weight a second name.
///
/// @tparam Policy  how the chain is checkpointed, for example `Checkpointed<Sequential,
/// Segments<4>>`
template <class Policy>
class ChainBackbone : public Backbone {
 public:
  /// Runs the chain, segment by segment if checkpointing is on.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return chain_->forward(images_nchw);
  }

  /// Switches checkpointing on with the policy's own rule.
  void enable_gradient_checkpointing() override { chain_->enable_gradient_checkpointing(); }
  /// Switches checkpointing on with `segment_count` segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    chain_->enable_gradient_checkpointing(segment_count);
  }
  void disable_gradient_checkpointing() override { chain_->disable_gradient_checkpointing(); }
  bool is_gradient_checkpointing_enabled() const override {
    return chain_->is_gradient_checkpointing_enabled();
  }

  std::int64_t segments() const override {
    return is_gradient_checkpointing_enabled() ? static_cast<std::int64_t>(plan().segment_count())
                                               : 0;
  }

  /// Returns the plan of the next forward pass.
  Plan plan() const { return chain_->plan(); }

  /// Returns the chain: its units, and what they were measured to cost.
  const Policy& chain() const { return chain_; }

  bool exempt_unit(const torch::nn::Module& unit) override { return chain_->exempt_unit(unit); }

  void train(bool on = true) override {
    Backbone::train(on);
    chain_->train(on);
  }

 protected:
  ChainBackbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options)
      : Backbone(std::move(name), raw_feature_dim, options) {
    chain_->disable_gradient_checkpointing();
  }

  /// Appends a unit, a module that is registered elsewhere in this backbone.
  ///
  /// @param name  for messages and plans; without dots, which LibTorch refuses
  template <class Unit>
  void append_unit(std::string name, const Unit& unit) {
    chain_->push_back(std::move(name), unit);
  }

 private:
  void copy_checkpointing_from(const Backbone& other) override {
    chain_->copy_checkpointing_from(*dynamic_cast<const ChainBackbone&>(other).chain_);
  }

  Policy chain_;
};

}  // namespace remat
