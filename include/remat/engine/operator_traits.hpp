// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/operator_facts.hpp"
#include "remat/libtorch/dispatch.hpp"

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace remat::detail {

/// What the recorder needs to know of an operator, read once from its schema and from
/// `operator_facts.hpp`.
struct OperatorTraits {
  enum class Kind : std::uint8_t { tensor, tensor_list, optional_tensor_list };

  struct Argument {
    std::uint16_t index;
    Kind kind;
    bool is_written = false;        // by the schema
    bool is_geometry_only = false;  // the content does not matter
    bool is_overwritten = false;    // written without being read
    int hidden_write_if =
        -2;  // -2: no hidden write; -1: always; else the boolean argument that decides
    bool hidden_write_reads = false;
  };

  struct Return {
    Kind kind;
    bool is_tensor = false;
    bool is_alias = false;
  };

  std::string name;  // "aten::convolution"
  std::string overload;
  std::vector<Argument> arguments;  // those that hold tensors
  std::vector<Return> returns;
  int generator_argument = -1;
  std::uint16_t argument_count = 0;
  bool is_view =
      false;  // returns an alias that it does not write: unrecorded, uses carry the geometry
  bool writes = false;         // by the schema or hidden
  bool makes_tensors = false;  // some return is a tensor that is not an alias
  bool is_aten = true;
  bool repoints = false;  // may give a tensor another storage or size
  bool is_factory = false;
  bool is_random = false;
  bool is_nondeterministic = false;

  explicit OperatorTraits(const OperatorHandle& handle);

  /// Whether the operation may be recorded and run again at all.
  bool is_recordable() const;
};

/// Operators outside `aten` that the user declared to be pure, so that they may be recomputed.
class RecomputableOperators {
 public:
  void allow(std::string name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.insert(std::move(name));
  }
  bool contains(const std::string& name) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_.count(name) != 0;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> names_;
};

inline RecomputableOperators& recomputable_operators() {
  static auto* operators = new RecomputableOperators;
  return *operators;
}

inline bool OperatorTraits::is_recordable() const {
  return !repoints && (is_aten || recomputable_operators().contains(name));
}

inline OperatorTraits::OperatorTraits(const OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  name = schema.name();
  overload = schema.overload_name();
  argument_count = static_cast<std::uint16_t>(schema.arguments().size());

  const auto tensor_kind = [](c10::TypePtr type, Kind& kind) {
    using c10::TypeKind;
    bool is_list = false, is_optional_element = false;
    if (type->kind() == TypeKind::OptionalType)
      type = type->castRaw<c10::OptionalType>()->getElementType();
    if (type->kind() == TypeKind::ListType) {
      is_list = true;
      type = type->castRaw<c10::ListType>()->getElementType();
      if (type->kind() == TypeKind::OptionalType) {
        is_optional_element = true;
        type = type->castRaw<c10::OptionalType>()->getElementType();
      }
    }
    kind = !is_list              ? Kind::tensor
           : is_optional_element ? Kind::optional_tensor_list
                                 : Kind::tensor_list;
    return type->kind() == TypeKind::TensorType;
  };

  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    Argument traits{static_cast<std::uint16_t>(i), Kind::tensor};
    if (tensor_kind(argument.type(), traits.kind)) {
      traits.is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      for (const HiddenWrite& write : hidden_writes)
        if (write.operation == name && write.argument == static_cast<int>(i) &&
            !traits.is_written) {
          traits.hidden_write_if = write.only_if;
          traits.hidden_write_reads = write.reads;
        }
      if (arguments.empty()) {
        traits.is_geometry_only = reads_geometry_only(name, overload);
        traits.is_overwritten = traits.is_written && overwrites_first_argument(name);
      }
      writes = writes || traits.is_written || traits.hidden_write_if != -2;
      arguments.push_back(traits);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      generator_argument = static_cast<int>(i);
    }
  }

  for (const c10::Argument& result : schema.returns()) {
    Return traits{Kind::tensor};
    traits.is_tensor = tensor_kind(result.type(), traits.kind);
    traits.is_alias = result.alias_info() != nullptr;
    is_view = is_view || (traits.is_alias && !result.alias_info()->isWrite());
    makes_tensors = makes_tensors || (traits.is_tensor && !traits.is_alias);
    returns.push_back(traits);
  }

  is_aten = name.starts_with("aten::");
  repoints = remat::detail::repoints(name);
  is_factory = arguments.empty() || remat::detail::is_factory(name);
  is_random = handle.hasTag(at::Tag::nondeterministic_seeded) || generator_argument >= 0;
  is_nondeterministic = is_nondeterministic_on_accelerators(name);
}

/// The traits of an operator. They live as long as the process, since tapes refer to them from any
/// thread.
inline const OperatorTraits& traits_of(const OperatorHandle& handle) {
  struct Table {
    std::mutex mutex;
    std::map<std::pair<std::string, std::string>, std::unique_ptr<const OperatorTraits>> entries;
  };
  static auto* table = new Table;
  static thread_local ska::flat_hash_map<const void*, const OperatorTraits*>
      cache;  // spares the lock

  const c10::FunctionSchema& schema = handle.schema();
  const OperatorTraits*& entry = cache[&schema];
  // A library that was unloaded may have left its schema's address to another one.
  if (entry == nullptr || entry->name != schema.name() ||
      entry->overload != schema.overload_name()) {
    std::lock_guard<std::mutex> lock(table->mutex);
    auto& shared = table->entries[{schema.name(), schema.overload_name()}];
    if (!shared) shared = std::make_unique<const OperatorTraits>(handle);
    entry = shared.get();
  }
  return *entry;
}

}  // namespace remat::detail
