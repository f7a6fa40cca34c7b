// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/operator_traits.hpp"
#include "remat/engine/value.hpp"
#include "tests/support/doctest.hpp"

#include <set>
#include <string>
#include <vector>

/// Watches every operation that runs and finds arguments that it writes although neither its schema
/// nor the library's table says so.
class WriteObserver {
 public:
  WriteObserver() : include_(c10::DispatchKeySet(kKey)) {
    static const bool registered = [] {
      auto* library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
      library->fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
      return true;
    }();
    static_cast<void>(registered);
  }

  /// "aten::native_batch_norm argument 3", since the program began.
  static std::set<std::string>& undeclared() {
    static std::set<std::string> found;
    return found;
  }

  /// Operations that were watched, since the program began.
  static std::set<std::string>& seen() {
    static std::set<std::string> names;
    return names;
  }

 private:
  // A key that no backend uses, right above the kernels.
  static constexpr c10::DispatchKey kKey = c10::DispatchKey::CustomRNGKeyId;

  static void observe(const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
    using namespace remat::detail;
    c10::impl::ExcludeDispatchKeyGuard once(kKey);
    const OperatorTraits& traits = traits_of(handle);
    const std::size_t first = stack->size() - traits.argument_count;

    struct Watched {
      c10::Storage storage;
      std::uint64_t digest;
      std::uint16_t argument;
    };
    std::vector<Watched> watched;
    for (const auto& argument : traits.arguments) {
      const c10::IValue& value = (*stack)[first + argument.index];
      if (argument.is_written || !value.isTensor() || !value.toTensor().defined() ||
          !has_plain_storage(value.toTensor()))
        continue;
      if (argument.hidden_write_if == -1 ||
          (argument.hidden_write_if >= 0 &&
           (*stack)[first + static_cast<std::size_t>(argument.hidden_write_if)].toBool()))
        continue;
      const c10::Storage& storage = value.toTensor().storage();
      watched.push_back({storage, digest_of(storage, true), argument.index});
    }
    // Memory that a declared argument shares is declared too.
    for (const auto& argument : traits.arguments) {
      const c10::IValue& value = (*stack)[first + argument.index];
      if (!argument.is_written || !value.isTensor() || !value.toTensor().defined() ||
          !value.toTensor().has_storage())
        continue;
      std::erase_if(watched, [&](const Watched& w) {
        return w.storage.is_alias_of(value.toTensor().storage());
      });
    }
    handle.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey),
                           stack);
    seen().insert(traits.name);
    for (const Watched& w : watched)
      if (digest_of(w.storage, true) != w.digest)
        undeclared().insert(traits.name + " argument " + std::to_string(w.argument));
  }

  c10::impl::IncludeDispatchKeyGuard include_;
};
