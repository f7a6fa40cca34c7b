// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/checkpoint.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/budgeted_toggle.hpp"
#include "remat/nn/concepts.hpp"
#include "remat/nn/holder.hpp"
#include "remat/nn/toggle.hpp"
#include "remat/nn/unit_mark.hpp"
#include "remat/policies/keep.hpp"

namespace remat {

namespace detail {

template <class What>
struct DefaultPolicy {
  using type = keep::nothing;
};
template <class What>
  requires names_default_rule<What>
struct DefaultPolicy<What> {
  using type = typename What::DefaultRule;
};

template <class Keep>
KeepPredicate make_keep_predicate() {
  if constexpr (std::is_same_v<Keep, keep::nothing>)
    return {};
  else
    return Keep();
}

template <class... Values>
bool any_requires_grad(const Values&... values) {
  bool found = false;
  const auto look = [&](const auto& tensor) {
    found = found || (tensor.defined() && tensor.requires_grad());
  };
  (for_each_tensor_in(values, look), ...);
  return found;
}

/// A forward that takes one tensor, which it does not edit in its caller's hands, and returns one.
template <class Signature>
inline constexpr bool maps_tensor = false;
template <class Argument>
  requires std::same_as<Argument, torch::Tensor> || std::same_as<Argument, const torch::Tensor&>
inline constexpr bool maps_tensor<torch::Tensor(Argument)> = true;
template <class Argument>
  requires std::same_as<Argument, torch::Tensor> || std::same_as<Argument, const torch::Tensor&>
inline constexpr bool maps_tensor<torch::Tensor(Argument) const> = true;

/// Says that a constructor copies an unwrapped clone.
struct FromClone {};

/// The switches that suit the module: only one tensor to one tensor can be planned.
template <class Base>
using ToggleOf =
    std::conditional_t<maps_tensor<ForwardSignature<Base>>, BudgetedToggle, CheckpointToggle>;

/// The module class `Base` with switches, and a way to run its forward as a region.
template <class Base, class Keep>
class CheckpointedModule : public Base, public ToggleOf<Base> {
 public:
  using Base::Base;
  using ToggleOf<Base>::enable_gradient_checkpointing;
  CheckpointedModule() = default;
  CheckpointedModule(FromClone, const Base& clone, const CheckpointedModule& original)
      : Base(clone),
        ToggleOf<Base>(original),
        is_enabled_(original.is_enabled_),
        is_exempt_(original.is_exempt_) {
    // In LibTorch 1.13 Module is a virtual base, which the copy constructor of `Base` leaves to the
    // last class.
    static_cast<torch::nn::Module&>(*this) = clone;
  }

  void enable_gradient_checkpointing() override {
    is_enabled_ = true;
    if constexpr (kCanBePlanned) this->budgeted_.clear();
  }
  /// A module is one unit, so that every number of segments means one.
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    require_segment_count(segment_count, this->name());
    enable_gradient_checkpointing();
  }
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    if (&unit != static_cast<const torch::nn::Module*>(this)) return false;
    is_exempt_ = true;
    return true;
  }

  /// Copies the module as `Base` does; the copy is checkpointed as this one is and runs its own
  /// layers.
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    std::shared_ptr<torch::nn::Module> copy = Base::clone(device);
    if constexpr (std::is_copy_constructible_v<Base>) copy = wrap(dynamic_cast<Base&>(*copy));
    return copy;
  }

 protected:
  /// Makes a module like this one out of an unwrapped clone.
  virtual std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const = 0;

  /// Calls `call()` as a region if there is something to drop.
  template <class Call, class... Arguments>
  decltype(auto) run(Call&& call, const Arguments&... arguments) const {
    const UnitMark mark(*this);
    if (is_exempt_.get()) return call_plain(std::forward<Call>(call));
    if (!should_checkpoint(arguments...)) return std::forward<Call>(call)();
    if constexpr (kCanBePlanned && sizeof...(Arguments) == 1)
      if (this->budgeted_.is_set()) return run_budgeted(arguments...);
    RegionOptions region;
    region.keep = make_keep_predicate<Keep>();
    region.name = this->name();
    return run_region(region, std::forward<Call>(call));
  }

 private:
  template <class... Arguments>
  bool should_checkpoint(const Arguments&... arguments) const {
    return is_enabled_.get() && this->is_training() && autograd_records() &&
           (any_requires_grad(arguments...) || has_trainable_parameter(*this));
  }

  torch::Tensor run_budgeted(const torch::Tensor& x) const {
    // A trace changes the module and puts it back: it stays what it was, as const promises.
    auto& self = const_cast<CheckpointedModule&>(*this);
    return self.budgeted_.run(
        self, x, [&](const torch::Tensor& input) { return self.Base::forward(input); });
  }

  static constexpr bool kCanBePlanned = maps_tensor<ForwardSignature<Base>>;

  Flag is_enabled_{true};
  Flag is_exempt_{false};
};

}  // namespace detail

/// The module behind `Checkpointed<Module>`: `Base` whose forward is a region.
///
/// Use it through the holder. Parameter names, buffers and everything else are those of `Base`. Its
/// forward has the signature of the base, neither template nor overloaded, and is declared in this
/// very class, since AnyModule asks for both. A parent's `clone()` makes its children by its own
/// `reset()`, so that their switches are as there.
template <class Base, class Keep, class Signature = detail::ForwardSignature<Base>>
class CheckpointedImpl;

/// For a forward that is not const.
template <class Base, class Keep, class Result, class... Arguments>
class CheckpointedImpl<Base, Keep, Result(Arguments...)>
    : public detail::CheckpointedModule<Base, Keep> {
 public:
  static constexpr bool kHasDefaultArguments = detail::has_default_arguments<Base, Arguments...>();

  using detail::CheckpointedModule<Base, Keep>::CheckpointedModule;
  CheckpointedImpl() = default;

  Result forward(Arguments... arguments) {
    return this->run(
        [&]() -> Result { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedImpl>(detail::FromClone(), clone, *this);
  }
};

/// For a const forward.
template <class Base, class Keep, class Result, class... Arguments>
class CheckpointedImpl<Base, Keep, Result(Arguments...) const>
    : public detail::CheckpointedModule<Base, Keep> {
 public:
  static constexpr bool kHasDefaultArguments = detail::has_default_arguments<Base, Arguments...>();

  using detail::CheckpointedModule<Base, Keep>::CheckpointedModule;
  CheckpointedImpl() = default;

  Result forward(Arguments... arguments) const {
    return this->run(
        [&]() -> Result { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedImpl>(detail::FromClone(), clone, *this);
  }
};

namespace detail {

/// Adds calls that leave default arguments out, which run as a region, too.
template <class Base, class Keep>
class CheckpointedWithDefaults final : public CheckpointedImpl<Base, Keep> {
 public:
  using CheckpointedImpl<Base, Keep>::CheckpointedImpl;
  CheckpointedWithDefaults() = default;

  using CheckpointedImpl<Base, Keep>::forward;
  template <class... Arguments>
    requires requires(Base& base, Arguments&&... arguments) {
      base.forward(std::forward<Arguments>(arguments)...);
    }
  decltype(auto) forward(Arguments&&... arguments) {
    return this->run(
        [&]() -> decltype(auto) { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedWithDefaults>(FromClone(), clone, *this);
  }
};

}  // namespace detail

/// Makes a module type, or a chain of modules, checkpointed.
///
/// `Checkpointed<MyBlock>` is MyBlock with a checkpointed forward: same constructors, same
/// signature, same keys; a second argument names a keep policy. `Checkpointed<Sequential, Rule,
/// Keep>` is a drop-in `torch::nn::Sequential`. On where a user writes it; a plain call in eval
/// mode, without grad mode, and where nothing requires grad.
///
/// @tparam What    a module type, its holder, or a pattern
/// @tparam Policy  for a module a keep policy, for a pattern a rule
/// @tparam Keep    for a pattern a keep policy
template <class What, class Policy = typename detail::DefaultPolicy<What>::type,
          class Keep = keep::nothing>
class Checkpointed {
  static_assert(CheckpointableModule<What>,
                "remat::Checkpointed<What> needs a module type, or a pattern such as "
                "remat::Sequential with its "
                "header remat/nn/sequential.hpp");
  static_assert(KeepPolicy<Policy>,
                "remat::Checkpointed<Module, Keep> needs a keep policy as its second argument");
};

/// Holds a checkpointed module.
template <CheckpointableModule What, KeepPolicy Keep>
class Checkpointed<What, Keep, keep::nothing>
    : public torch::nn::ModuleHolder<CheckpointedImpl<detail::UnitImpl<What>, Keep>> {
 public:
  using Impl = CheckpointedImpl<detail::UnitImpl<What>, Keep>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

/// Holds a checkpointed module whose forward has default arguments.
template <CheckpointableModule What, KeepPolicy Keep>
  requires(CheckpointedImpl<detail::UnitImpl<What>, Keep>::kHasDefaultArguments)
class Checkpointed<What, Keep, keep::nothing>
    : public detail::LayeredHolder<CheckpointedImpl<detail::UnitImpl<What>, Keep>,
                                   detail::CheckpointedWithDefaults<detail::UnitImpl<What>, Keep>> {
  using Stored = CheckpointedImpl<detail::UnitImpl<What>, Keep>;
  using Direct = detail::CheckpointedWithDefaults<detail::UnitImpl<What>, Keep>;
  using Holder = detail::LayeredHolder<Stored, Direct>;

 public:
  using Holder::Holder;

  /// Constructs the module from what `What` is constructed from.
  template <class... Arguments>
    requires std::constructible_from<Direct, Arguments...>
  explicit Checkpointed(Arguments&&... arguments)
      : Holder(std::shared_ptr<Stored>(
            std::make_shared<Direct>(std::forward<Arguments>(arguments)...))) {}
};

}  // namespace remat
