// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "remat/libtorch/nn.hpp"

namespace remat::detail {

/// Holds a module as `Stored` and calls it as `Direct`, which derives from it.
///
/// AnyModule, and so `torch::nn::Sequential`, takes a module only if its forward is neither a
/// template nor overloaded. People who call it themselves want default and extra arguments. So
/// LibTorch sees `Stored`, with the one forward, and `operator->` shows `Direct`, with the others.
/// Every module in such a holder is made as a `Direct`.
template <class Stored, class Direct>
class LayeredHolder : public torch::nn::ModuleHolder<Stored> {
  using Holder = torch::nn::ModuleHolder<Stored>;

 public:
  using Impl = Direct;

  // NOLINTNEXTLINE(*-explicit-*): as in ModuleHolder
  LayeredHolder(std::nullptr_t) : Holder(nullptr) {}
  // NOLINTNEXTLINE(*-explicit-*): what register_module returns is assigned to a holder
  LayeredHolder(std::shared_ptr<Stored> module) : Holder(std::move(module)) {}

  Direct* get() { return static_cast<Direct*>(Holder::get()); }
  const Direct* get() const { return static_cast<const Direct*>(Holder::get()); }
  Direct* operator->() { return get(); }
  const Direct* operator->() const { return get(); }
  Direct& operator*() { return *get(); }
  const Direct& operator*() const { return *get(); }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments)
      -> decltype(std::declval<Direct&>().forward(std::forward<Arguments>(arguments)...)) {
    return get()->forward(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace remat::detail
