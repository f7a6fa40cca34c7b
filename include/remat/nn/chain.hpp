// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/plan/balance.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat {

namespace detail {

/// A pattern, a rule and a keep policy as values: templates end here.
struct ChainPolicy {
  std::function<Plan(const Chain&)> rule;
  std::function<Plan(const Plan&, const Chain&)> pattern;
  KeepPredicate keep;

  template <class PatternType, class RuleType, class Keep>
  static ChainPolicy of() {
    return {RuleType(), PatternType(), make_keep_predicate<Keep>()};
  }
};

/// A unit of a chain whose nested chains are opened.
struct ChainUnit {
  torch::nn::AnyModule* module;
  const torch::nn::Module* identity;
  bool is_plain;

  friend bool operator==(const ChainUnit& left, const ChainUnit& right) {
    return left.identity == right.identity && left.is_plain == right.is_plain;
  }
};

/// The plan for one structure of a chain, and what it came from; never changed once it is shared.
struct ChainState {
  std::vector<ChainUnit> units;
  std::optional<std::int64_t> segment_count;  // as asked for at run time; empty: the rule's
  std::vector<UnitCost> unit_costs;           // empty: not measured yet
  Plan plan;
  std::vector<std::string> segment_names;
  bool is_to_measure = false;
};

}  // namespace detail

/// The module behind `Checkpointed<Sequential>`, as LibTorch's containers see it: with one forward.
///
/// Children are registered under their names or numbers, so that keys are those of
/// `torch::nn::Sequential`.
/// @par Threads  several threads may call forward at once; adding, exempting and switching is for
/// one thread
class CheckpointedChainImpl : public torch::nn::Module, public CheckpointToggle {
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
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    const auto units = open();
    if (std::ranges::find(units, &unit, &detail::ChainUnit::identity) == units.end()) return false;
    const std::lock_guard lock(mutex_);
    exempted_.push_back(&unit);
    return true;
  }

  /// Returns the plan of the next training forward: by unit count until the units are measured,
  /// then by bytes.
  Plan plan() const {
    const auto units = open();
    return is_enabled_.get() ? state_for(units)->plan : Plan::keep_all(units.size());
  }
  /// Returns what each unit was measured to cost; empty before the first checkpointed forward.
  std::vector<UnitCost> unit_costs() const { return state_for(open())->unit_costs; }

  /// Takes over switch, segment count, exemptions and measurements of a chain with the same units.
  void copy_checkpointing_from(const CheckpointedChainImpl& other) {
    const auto mine = open();
    const auto theirs = other.open();
    const auto state = other.state_for(theirs);
    is_enabled_ = other.is_enabled_;
    const std::lock_guard lock(mutex_);
    segment_count_ = state->segment_count;
    exempted_.clear();
    state_ = nullptr;
    if (mine.size() != theirs.size()) return;
    for (std::size_t index = 0; index < mine.size(); ++index)
      if (theirs[index].is_plain) exempted_.push_back(mine[index].identity);
    auto copy = std::make_shared<detail::ChainState>(*state);
    copy->units = mine;
    for (std::size_t index = 0; index < mine.size(); ++index)
      copy->units[index].is_plain = theirs[index].is_plain;
    state_ = std::move(copy);
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "remat::Checkpointed<remat::Sequential>";
  }

 protected:
  explicit CheckpointedChainImpl(detail::ChainPolicy policy)
      : policy_(std::make_shared<const detail::ChainPolicy>(std::move(policy))) {}

  const detail::ChainPolicy& policy() const { return *policy_; }

  /// Runs the chain; `more` goes to every unit.
  template <class... More>
  torch::Tensor run(torch::Tensor x, const More&... more) {
    const auto units = open();
    require(!units.empty(), [&] {
      return ErrorMessage("remat.chain.empty")
          .where(name())
          .what("forward was called on a chain of no layers")
          .cure("Add layers first");
    });
    const bool is_on = should_checkpoint(units, x, more...);
    torch::nn::AnyValue value(std::move(x));
    if (is_on) {
      run_segments(*state_for(units), value, more...);
    } else {
      for (const auto& unit : units) run_unit(unit, value, more...);
    }
    auto* result = value.template try_get<torch::Tensor>();
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
  using State = std::shared_ptr<const detail::ChainState>;

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
    const std::lock_guard lock(mutex_);
    segment_count_ = segment_count;
  }

  // Units --------------------------------------------------------------------------------------

  std::vector<detail::ChainUnit> open() const {
    std::vector<detail::ChainUnit> units;
    open(units, /*is_plain=*/false);
    return units;
  }

  void open(std::vector<detail::ChainUnit>& units, bool is_plain) const {
    for (const ChainLayer& layer : layers_) open_layer(layer, units, is_plain);
    const std::lock_guard lock(mutex_);
    for (auto& unit : units)
      unit.is_plain =
          unit.is_plain || std::ranges::find(exempted_, unit.identity) != exempted_.end();
  }

  static void open_layer(const ChainLayer& layer, std::vector<detail::ChainUnit>& units,
                         bool is_plain) {
    is_plain = is_plain || layer.is_plain();
    if (layer.sequential() == nullptr) return open_module(layer.unit(), units, is_plain);
    for (auto& module : *layer.sequential()) open_module(module, units, is_plain);
  }

  static void open_module(torch::nn::AnyModule& module, std::vector<detail::ChainUnit>& units,
                          bool is_plain) {
    const auto pointer = module.ptr();
    if (const auto* chain = dynamic_cast<const CheckpointedChainImpl*>(pointer.get()))
      chain->open(units, is_plain || !chain->is_gradient_checkpointing_enabled());
    else
      units.push_back({&module, pointer.get(), is_plain});
  }

  std::vector<std::string> unit_names() const {
    std::vector<std::string> names;
    const auto keys = named_children().keys();
    for (std::size_t index = 0; index < layers_.size(); ++index) {
      const auto& sequential = layers_[index].sequential();
      if (sequential == nullptr) {
        add_unit_names(*layers_[index].ptr(), keys[index], names);
      } else {
        for (const auto& child : sequential->named_children())
          add_unit_names(*child.value(), keys[index] + "." + child.key(), names);
      }
    }
    return names;
  }

  static void add_unit_names(const torch::nn::Module& module, const std::string& path,
                             std::vector<std::string>& names) {
    const auto* chain = dynamic_cast<const CheckpointedChainImpl*>(&module);
    if (chain == nullptr) return names.push_back(path);
    for (const auto& below : chain->unit_names()) names.push_back(path + "." + below);
  }

  std::vector<std::size_t> stage_sizes() const {
    std::vector<std::size_t> sizes;
    for (const ChainLayer& layer : layers_) {
      std::vector<detail::ChainUnit> units;
      open_layer(layer, units, false);
      if (!units.empty()) sizes.push_back(units.size());
    }
    return sizes;
  }

  // Plans --------------------------------------------------------------------------------------

  State state_for(const std::vector<detail::ChainUnit>& units) const {
    const std::lock_guard lock(mutex_);
    if (state_ == nullptr || state_->segment_count != segment_count_ || state_->units != units) {
      // Costs depend on the units and on which of them are plain, not on the number of segments.
      const bool are_costs_valid = state_ != nullptr && state_->units == units;
      state_ = make_state(units, are_costs_valid ? state_->unit_costs : std::vector<UnitCost>());
    }
    return state_;
  }

  State make_state(const std::vector<detail::ChainUnit>& units, std::vector<UnitCost> costs) const {
    auto state = std::make_shared<detail::ChainState>();
    state->units = units;
    state->segment_count = segment_count_;
    state->unit_costs = costs;
    const Chain chain{units.size(), std::move(costs), stage_sizes()};
    Plan plan = segment_count_ ? balanced_plan(chain, static_cast<std::size_t>(*segment_count_))
                               : policy_->rule(chain);
    require_all_units(plan, units.size());
    if (chain.is_measured()) {
      plan = policy_->pattern(plan, chain);
      require_all_units(plan, units.size());
    } else if (plan.checkpointed_count() > 0) {
      // Plain segments are not measured, so the first forward has none.
      state->is_to_measure = true;
      std::vector<Segment> segments = plan.segments();
      for (Segment& segment : segments) segment.is_checkpointed = true;
      plan = Plan(std::move(segments));
    }
    std::vector<std::size_t> plain_units;
    for (std::size_t index = 0; index < units.size(); ++index)
      if (units[index].is_plain) plain_units.push_back(index);
    state->plan = plan.with_plain_units(plain_units);
    state->segment_names = segment_names(state->plan);
    return state;
  }

  void require_all_units(const Plan& plan, std::size_t unit_count) const {
    require(plan.unit_count() == unit_count, [&] {
      return ErrorMessage("remat.plan.units")
          .where(name())
          .what("the rule planned for " + std::to_string(plan.unit_count()) +
                " units and the chain has " + std::to_string(unit_count))
          .cure("Let the rule return segments that cover Chain::unit_count units");
    });
  }

  std::vector<std::string> segment_names(const Plan& plan) const {
    const auto names = unit_names();
    std::vector<std::string> texts;
    for (const Segment& segment : plan.segments()) {
      const std::string range = segment.unit_count() == 1 ? "unit " + names[segment.first]
                                                          : "units " + names[segment.first] +
                                                                " to " + names[segment.last - 1];
      texts.push_back("segment " + std::to_string(texts.size() + 1) + " of " +
                      std::to_string(plan.segment_count()) + " (" + range + ")");
    }
    return texts;
  }

  void store_costs(const detail::ChainState& measured, std::vector<UnitCost> costs) {
    const std::lock_guard lock(mutex_);
    // Another thread, or a change in between, may have been first.
    if (state_.get() == &measured) state_ = make_state(measured.units, std::move(costs));
  }

  // Forward ------------------------------------------------------------------------------------

  template <class... Inputs>
  bool should_checkpoint(const std::vector<detail::ChainUnit>& units,
                         const Inputs&... inputs) const {
    return is_enabled_.get() && is_training() && detail::autograd_records() &&
           (detail::any_requires_grad(inputs...) ||
            std::ranges::any_of(units, [](const auto& unit) {
              return detail::has_trainable_parameter(*unit.identity);
            }));
  }

  template <class... More>
  static void run_unit(const detail::ChainUnit& unit, torch::nn::AnyValue& value,
                       const More&... more) {
    const auto call = [&] { value = unit.module->any_forward(std::move(value), more...); };
    if (unit.is_plain)
      call_plain(call);
    else
      call();
  }

  template <class... More>
  void run_segments(const detail::ChainState& state, torch::nn::AnyValue& value,
                    const More&... more) {
    std::vector<UnitCost> costs(state.is_to_measure ? state.units.size() : 0);
    bool is_measured = state.is_to_measure;
    for (std::size_t index = 0; index < state.plan.segment_count(); ++index) {
      const Segment& segment = state.plan.segments()[index];
      std::vector<UnitCost> saved;
      const auto run_units = [&]() -> torch::Tensor {
        for (std::size_t unit = segment.first; unit < segment.last; ++unit) {
          if (state.is_to_measure && segment.is_checkpointed) detail::begin_unit();
          run_unit(state.units[unit], value, more...);
          if (state.is_to_measure) costs[unit].output = bytes_of(value);
        }
        // Shown to the region as its result, which it keeps. Other types are carried in `value`
        // alone.
        auto* tensor = value.template try_get<torch::Tensor>();
        return tensor == nullptr ? torch::Tensor() : *tensor;
      };
      if (!segment.is_checkpointed) {
        run_units();
        continue;
      }
      detail::RegionOptions options;
      options.keep = policy_->keep;
      options.name = state.segment_names[index];
      if (state.is_to_measure) options.unit_costs = &saved;
      detail::run_region(options, run_units);
      is_measured = is_measured &&
                    saved.size() == segment.unit_count();  // it is not where the engine is missing
      for (std::size_t unit = 0; is_measured && unit < saved.size(); ++unit)
        costs[segment.first + unit].saved = saved[unit].saved;
    }
    if (is_measured) store_costs(state, std::move(costs));
  }

  static Bytes bytes_of(torch::nn::AnyValue& value) {
    auto* tensor = value.try_get<torch::Tensor>();
    if (tensor == nullptr || !tensor->defined() || !detail::has_plain_storage(*tensor)) return {};
    return {tensor->numel() * static_cast<std::int64_t>(tensor->dtype().itemsize())};
  }

  std::shared_ptr<const detail::ChainPolicy> policy_;
  std::vector<ChainLayer> layers_;
  detail::Flag is_enabled_{true};

  mutable std::mutex mutex_;  // guards what follows
  std::optional<std::int64_t> segment_count_;
  std::vector<const torch::nn::Module*> exempted_;
  mutable State state_;
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
    auto copy = std::make_shared<CheckpointedSequentialImpl>(policy());
    copy->become_clone_of(*this, device);
    return copy;
  }
};

}  // namespace remat
