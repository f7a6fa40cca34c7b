// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/budgeted_toggle.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/chain_plan.hpp"
#include "remat/nn/chain_run.hpp"
#include "remat/nn/chain_units.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/holder.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

/// The module behind `Checkpointed<Sequential>`, as LibTorch's containers see it: with one forward.
///
/// Children are registered under their names or numbers, so that keys are those of
/// `torch::nn::Sequential`.
/// @par Threads  several threads may call forward at once; adding, exempting and switching is for
/// one thread
class CheckpointedChainImpl : public torch::nn::Module,
                              public detail::BudgetedToggle,
                              public detail::ChainStructure {
 public:
  using Iterator = std::vector<ChainLayer>::const_iterator;

  /// Chains the layers: segments of the plan are checkpointed if the chain is switched on, in
  /// training mode, and something requires grad.
  torch::Tensor forward(torch::Tensor x) { return run(std::move(x)); }

  /// Appends a layer, named by its number.
  template <class Source>
    requires ChainLayerSource<Source> || std::same_as<std::remove_cvref_t<Source>, ChainLayer>
  void push_back(Source&& layer) {
    push_back(std::to_string(size()), std::forward<Source>(layer));
  }
  /// Appends a layer with a name.
  template <class Source>
    requires ChainLayerSource<Source> || std::same_as<std::remove_cvref_t<Source>, ChainLayer>
  void push_back(std::string name, Source&& layer) {
    append(std::move(name), ChainLayer(std::forward<Source>(layer)));
  }
  /// Appends a named layer.
  void push_back(const NamedLayer& named) { append(named.name(), named.layer()); }
  /// Appends every layer of a container, such as another chain.
  template <class Container>
  void extend(const Container& container) {
    for (const auto& layer : container) push_back(layer);
  }

  std::size_t size() const noexcept { return layers_.size(); }
  bool is_empty() const noexcept { return layers_.empty(); }
  Iterator begin() const { return layers_.begin(); }
  Iterator end() const { return layers_.end(); }

  /// @throws ArgumentError  if there is no layer of that index
  std::shared_ptr<torch::nn::Module> ptr(std::size_t index) const {
    require(index < size(), [&] {
      return ErrorMessage("remat.chain.index")
          .where(name())
          .what("layer " + std::to_string(index) + " was asked for, and there are " +
                std::to_string(size()));
    });
    return layers_[index].ptr();
  }
  std::shared_ptr<torch::nn::Module> operator[](std::size_t index) const { return ptr(index); }
  /// @throws ArgumentError  if there is no layer of that index, or it is no `Type`
  template <class Type>
  detail::UnitImpl<Type>& at(std::size_t index) const {
    auto* layer = dynamic_cast<detail::UnitImpl<Type>*>(ptr(index).get());
    require(layer != nullptr, [&] {
      return ErrorMessage("remat.chain.type")
          .where(name())
          .what("layer " + std::to_string(index) + " is a " + ptr(index)->name() +
                " and was asked for as another type");
    });
    return *layer;
  }

  void enable_gradient_checkpointing() override { set_segment_count(std::nullopt); }
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    detail::require_segment_count(segment_count, name());
    set_segment_count(segment_count);
  }
  using detail::BudgetedToggle::enable_gradient_checkpointing;
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    const auto units = detail::units_of(*this);
    if (std::ranges::find(units, &unit, &detail::ChainUnit::identity) == units.end()) return false;
    planner_.exempt(unit);
    return true;
  }

  std::string unit_name(const torch::nn::Module* unit) const override {
    const auto units = detail::units_of(*this);
    const auto found = std::ranges::find(units, unit, &detail::ChainUnit::identity);
    if (found == units.end()) return "";
    return unit_names()[static_cast<std::size_t>(found - units.begin())];
  }

  /// Returns what puts the present switch, segment count and measurements back.
  std::function<void()> remember_checkpointing() override {
    return [this, is_on = is_enabled_.get(), put_back = planner_.remember(),
            put_budget_back = budgeted_.remember()] {
      put_back();
      put_budget_back();
      is_enabled_ = is_on;
    };
  }

  /// Returns the plan of the next training forward: by unit count until the units are measured,
  /// then by bytes.
  Plan plan() const {
    const auto units = detail::units_of(*this);
    return is_enabled_.get() ? planner_.plan_for(*this, units)->plan : Plan::keep_all(units.size());
  }
  /// Returns how many segments of that plan have a unit that may be recomputed: those that consist
  /// of units marked as plain, or left alone by the pattern, do not count. 0 while switched off.
  std::size_t segment_count() const {
    return is_enabled_.get() ? planner_.plan_for(*this, detail::units_of(*this))->counted_segments
                             : 0;
  }
  /// Returns what each unit was measured to cost; empty before the first checkpointed forward.
  std::vector<UnitCost> unit_costs() const {
    return planner_.plan_for(*this, detail::units_of(*this))->unit_costs;
  }

  /// Takes over switch, segment count, exemptions and measurements of a chain with the same units.
  void copy_checkpointing_from(const CheckpointedChainImpl& other) {
    is_enabled_ = other.is_enabled_;
    budgeted_ = other.budgeted_;
    planner_.take_over(*other.planner_.plan_for(other, detail::units_of(other)),
                       detail::units_of(*this));
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "remat::Checkpointed<remat::Sequential>";
  }

 protected:
  explicit CheckpointedChainImpl(detail::ChainPolicy policy) : planner_(std::move(policy)) {}

  /// Returns pattern, rule and keep policy as values.
  const detail::ChainPolicy& policy() const { return planner_.policy(); }

  /// Runs the chain; `more` goes to every unit.
  template <class... More>
  torch::Tensor run(torch::Tensor x, const More&... more) {
    const auto units = detail::units_of(*this);
    require(!units.empty(), [&] {
      return ErrorMessage("remat.chain.empty")
          .where(name())
          .what("forward was called on a chain of no layers")
          .cure("Add layers first");
    });
    const bool is_on = should_checkpoint(units, x, more...);
    if (is_on && budgeted_.is_set())
      return budgeted_.run(*this, x, [&](const torch::Tensor& input) {
        torch::nn::AnyValue value(input);
        for (const auto& unit : units) detail::run_unit(unit, value, more...);
        return take_result(value);
      });
    torch::nn::AnyValue value(std::move(x));
    if (is_on) {
      const auto planned = planner_.plan_for(*this, units);
      auto costs = detail::run_segments(*planned, policy().keep, value, more...);
      if (!costs.empty()) planner_.store_costs(*this, *planned, std::move(costs));
    } else {
      for (const auto& unit : units) detail::run_unit(unit, value, more...);
    }
    return take_result(value);
  }

  /// Returns the tensor in `value`, which is what the last unit returned.
  torch::Tensor take_result(torch::nn::AnyValue& value) const {
    auto* result = value.try_get<torch::Tensor>();
    require(result != nullptr, [&] {
      return ErrorMessage("remat.chain.result")
          .where(name())
          .what("the last layer returned " + std::string(c10::demangle(value.type_info().name())) +
                ", a tensor was expected")
          .cure("End the chain with a layer that returns a tensor");
    });
    return std::move(*result);
  }

  /// Takes over clones of another chain's layers, and its switches.
  void become_clone_of(const CheckpointedChainImpl& other, const OptionalDevice& device) {
    for (const auto& child : named_children().keys()) unregister_module(child);
    layers_.clear();
    train(other.is_training());  // before the children, which have their own mode
    std::map<const torch::nn::Module*, ChainLayer>
        clones;  // a layer that appears twice stays one layer
    const auto names = other.named_children().keys();
    for (std::size_t index = 0; index < other.size(); ++index) {
      const ChainLayer& layer = other.layers_[index];
      auto found = clones.find(layer.ptr().get());
      if (found == clones.end())
        found = clones.emplace(layer.ptr().get(), layer.clone(device)).first;
      append(names[index], found->second);
    }
    copy_checkpointing_from(other);
  }

 private:
  // LibTorch calls this when the chain is a child of a module that is cloned.
  void clone_(torch::nn::Module& other, const OptionalDevice& device) final {
    become_clone_of(dynamic_cast<CheckpointedChainImpl&>(other), device);
  }

  void append(std::string layer_name, ChainLayer layer) {
    register_module(std::move(layer_name), layer.ptr());
    layers_.push_back(std::move(layer));
  }

  void set_segment_count(std::optional<std::int64_t> segment_count) {
    is_enabled_ = true;
    budgeted_.clear();
    planner_.set_segment_count(segment_count);
  }

  void add_units(std::vector<detail::ChainUnit>& units, bool is_plain) const override {
    const std::size_t first = units.size();
    for (const ChainLayer& layer : layers_) detail::add_units_of_layer(layer, is_plain, units);
    planner_.mark_exempted(units, first);
  }

  std::vector<std::string> unit_names() const override {
    std::vector<std::string> names;
    const auto keys = named_children().keys();
    for (std::size_t index = 0; index < layers_.size(); ++index)
      detail::add_unit_names_of_layer(layers_[index], keys[index], names);
    return names;
  }

  std::vector<detail::ChainStage> stages() const override {
    std::vector<detail::ChainStage> stages;
    for (const ChainLayer& layer : layers_) {
      const detail::ChainStage stage = detail::stage_of_layer(layer);
      if (stage.unit_count != 0) stages.push_back(stage);
    }
    return stages;
  }

  bool is_switched_on() const override { return is_enabled_.get(); }
  std::string title() const override { return name(); }

  template <class... Inputs>
  bool should_checkpoint(const std::vector<detail::ChainUnit>& units,
                         const Inputs&... inputs) const {
    return is_enabled_.get() && is_training() && detail::autograd_records() &&
           (detail::any_requires_grad(inputs...) ||
            std::ranges::any_of(units, [](const auto& unit) {
              return detail::has_trainable_parameter(*unit.identity);
            }));
  }

  std::vector<ChainLayer> layers_;
  detail::Flag is_enabled_{true};
  detail::ChainPlanner planner_;
};

/// The module behind `Checkpointed<Sequential>`, as its users see it: forward takes extra
/// arguments, too.
class CheckpointedSequentialImpl final : public CheckpointedChainImpl {
 public:
  explicit CheckpointedSequentialImpl(detail::ChainPolicy policy)
      : CheckpointedChainImpl(std::move(policy)) {}

  using CheckpointedChainImpl::forward;
  /// Chains the layers and hands `more`, a mask for example, to every one of them.
  template <class... More>
    requires(sizeof...(More) > 0)
  torch::Tensor forward(torch::Tensor x, More&&... more) {
    return this->run(std::move(x), more...);
  }

  /// Copies the chain with its switches; names stay, and the copy runs its own layers.
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    const auto copy = empty_copy();
    copy->become_clone_of(*this, device);
    return copy;
  }

  /// Returns a chain of no layers with the same pattern, rule and keep policy.
  std::shared_ptr<CheckpointedSequentialImpl> empty_copy() const {
    return std::make_shared<CheckpointedSequentialImpl>(policy());
  }
};

/// Holds a checkpointed chain of any pattern, rule and keep policy: what code takes that is no
/// template. Every `Checkpointed<Pattern, Rule, Keep>` converts to it and shares its module.
class CheckpointedChain
    : public detail::LayeredHolder<CheckpointedChainImpl, CheckpointedSequentialImpl> {
 public:
  using LayeredHolder::LayeredHolder;
};

}  // namespace remat
