// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/concepts.hpp"

namespace remat {

/// Says that `module` is to run outside of any checkpoint; see `plain`.
template <class Module>
struct PlainModule {
  Module module;
};

/// Exempts a module from checkpointing, while a chain is built: `net(conv, remat::plain(norm),
/// head)`.
///
/// What it saves stays, and its name in the chain does not change.
template <class Module>
PlainModule<std::remove_cvref_t<Module>> plain(Module&& module) {
  return {std::forward<Module>(module)};
}

namespace detail {

template <class Type>
inline constexpr bool is_plain_module = false;
template <class Module>
inline constexpr bool is_plain_module<PlainModule<Module>> = true;

/// The exact class: what derives from it has a forward of its own and is a unit.
template <class Type>
concept NestedSequential = std::same_as<UnitImpl<Type>, torch::nn::SequentialImpl>;

template <class Type>
struct Unmarked {
  using type = Type;
};
template <class Module>
struct Unmarked<PlainModule<Module>> {
  using type = Module;
};
/// The module class of a layer, without marks and holders.
template <class Source>
using LayerImpl = UnitImpl<typename Unmarked<std::remove_cvref_t<Source>>::type>;

/// Needs no further look: LibTorch's erased module has had it, its Sequential is opened.
template <class Source>
inline constexpr bool is_checked_layer =
    std::same_as<LayerImpl<Source>, torch::nn::AnyModule> || NestedSequential<LayerImpl<Source>>;

template <class Source>
inline constexpr bool derives_from_module = std::derived_from<LayerImpl<Source>, torch::nn::Module>;

}  // namespace detail

/// What can be a layer of a chain: a module, its holder or shared_ptr, an AnyModule, or a nested
/// chain; each may be marked with `plain`.
template <class Candidate>
concept ChainLayerSource =
    detail::Holds<detail::is_checked_layer<Candidate> || detail::derives_from_module<Candidate>,
                  "a unit of a chain needs to derive from torch::nn::Module"> &&
    detail::Holds<
        detail::is_checked_layer<Candidate> ||
            detail::has_one_forward<detail::LayerImpl<Candidate>>,
        "a unit of a chain needs a forward that is public, not a template and not overloaded"> &&
    detail::Holds<detail::is_checked_layer<Candidate> ||
                      detail::has_storable_forward<detail::LayerImpl<Candidate>>(),
                  "a unit of a chain needs a forward that is not const, returns something and "
                  "takes no reference to write through">;

/// One layer of a chain: a unit, or a nested chain of which the children are units.
class ChainLayer {
 public:
  template <ChainLayerSource Source>
    requires(!std::same_as<std::remove_cvref_t<Source>, ChainLayer>)
  explicit ChainLayer(Source&& source) {
    assign(std::forward<Source>(source));
  }

  /// Returns the module, whose dynamic type is that of the layer.
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  torch::nn::Module* operator->() const { return module_.get(); }
  torch::nn::Module& operator*() const { return *module_; }

  /// Whether the layer was marked with `remat::plain`.
  bool is_plain() const { return is_plain_; }
  /// The layer if it is a nested `torch::nn::Sequential`, else null.
  const std::shared_ptr<torch::nn::SequentialImpl>& sequential() const { return sequential_; }
  /// The layer as LibTorch's erased module; empty for a nested `torch::nn::Sequential`, which
  /// AnyModule does not take.
  torch::nn::AnyModule& unit() const { return unit_; }

  /// Returns a deep copy; names inside a nested chain stay, also where LibTorch 1.13 would number
  /// them anew.
  ChainLayer clone(const OptionalDevice& device) const {
    ChainLayer copy = *this;
    if (sequential_ == nullptr) {
      copy.unit_ = unit_.clone(device);
      copy.module_ = copy.unit_.ptr();
      return copy;
    }
    copy.sequential_ = std::make_shared<torch::nn::SequentialImpl>();
    copy.sequential_->train(
        sequential_->is_training());  // before the children, which have their own mode
    auto child = sequential_->begin();
    for (const auto& named : sequential_->named_children())
      copy.sequential_->push_back(named.key(), (child++)->clone(device));
    copy.module_ = copy.sequential_;
    return copy;
  }

 private:
  template <class Source>
  void assign(Source&& source) {
    using Type = std::remove_cvref_t<Source>;
    if constexpr (detail::is_plain_module<Type>) {
      assign(std::forward<Source>(source).module);
      is_plain_ = true;
    } else if constexpr (detail::NestedSequential<Source>) {
      sequential_ = pointer(std::forward<Source>(source));
      module_ = sequential_;
    } else if constexpr (std::same_as<Type, torch::nn::AnyModule>) {
      require_module(!source.is_empty());
      unit_ = std::forward<Source>(source);
      module_ = unit_.ptr();
    } else {
      unit_ = torch::nn::AnyModule(pointer(std::forward<Source>(source)));
      module_ = unit_.ptr();
    }
  }

  /// Takes the pointer out of a holder; a module by value moves into one.
  template <class Source>
  static std::shared_ptr<detail::UnitImpl<Source>> pointer(Source&& source) {
    using Impl = detail::UnitImpl<Source>;
    std::shared_ptr<Impl> module;
    if constexpr (std::derived_from<std::remove_cvref_t<Source>, torch::nn::Module>) {
      module = std::make_shared<Impl>(std::forward<Source>(source));
    } else if constexpr (std::constructible_from<std::shared_ptr<Impl>, Source>) {
      module = std::forward<Source>(source);
    } else {
      if (!source.is_empty()) module = source.ptr();
    }
    require_module(module != nullptr);
    return module;
  }

  static void require_module(bool is_given) {
    require(is_given, [] {
      return ErrorMessage("remat.chain.layer")
          .where("remat::Checkpointed<Sequential>")
          .what("an empty holder or null pointer was given where a module was expected")
          .cause("The holder was made with nullptr and never filled")
          .cure("Construct the module first");
    });
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<torch::nn::SequentialImpl> sequential_;
  mutable torch::nn::AnyModule unit_;  // its forward is not const although it changes nothing here
  bool is_plain_ = false;
};

/// A layer with its name in the chain: `{"conv1", torch::nn::Conv2d(3, 8, 3)}`.
class NamedLayer {
 public:
  // Not constrained: inside braces a constraint would fail without a word.
  template <class Source>
  NamedLayer(std::string name, Source&& source)  // NOLINT(*-explicit-*): `{name, module}` converts
      : name_(std::move(name)), layer_(std::forward<Source>(source)) {}
  // NOLINTNEXTLINE(*-explicit-*): LibTorch's own pair is as good
  NamedLayer(const torch::nn::NamedAnyModule& named)
      : name_(named.name()), layer_(named.module()) {}

  /// Returns the name that the layer gets in the chain.
  const std::string& name() const { return name_; }
  /// Returns the layer itself.
  const ChainLayer& layer() const { return layer_; }

 private:
  std::string name_;
  ChainLayer layer_;
};

}  // namespace remat
