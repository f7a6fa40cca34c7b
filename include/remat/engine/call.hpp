// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/value.hpp"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>

namespace remat::detail {

/// An operation that is about to run: its arguments on the stack, and what the recorder has to know
/// of the tensors among them.
class Call {
 public:
  /// A tensor that the operation will write.
  struct Written {
    at::Tensor tensor;
    std::uint16_t argument;
    std::int32_t position;
    bool is_read;      // its old content matters
    bool is_external;  // nobody recorded how its old content came about
    std::int64_t nbytes;
  };

  Call(const OperatorHandle& handle, const OperatorTraits& traits, c10::DispatchKeySet keys,
       Stack& stack)
      : traits_(traits),
        handle_(handle),
        keys_(keys),
        stack_(stack),
        first_(stack.size() - traits.argument_count) {
    inspect_arguments();
  }

  c10::IValue& argument(std::size_t index) { return stack_[first_ + index]; }
  c10::IValue& returned(std::size_t index) {
    return stack_[stack_.size() - traits_.returns.size() + index];
  }

  /// Passes the operation on to its kernel; returns take the place of arguments.
  void run() { handle_.redispatchBoxed(below_recorder(keys_), &stack_); }

  /// Calls `visit(tensor, position)` for each defined tensor in an argument or return.
  template <class Visit>
  static void for_each_tensor(const c10::IValue& value, OperatorTraits::Kind kind, Visit visit) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined()) visit(tensor, std::int32_t{none});
    } else if (kind == OperatorTraits::Kind::tensor_list && value.isTensorList()) {
      std::int32_t position = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor, position);
        ++position;
      }
    } else if (kind == OperatorTraits::Kind::optional_tensor_list && value.isOptionalTensorList()) {
      std::int32_t position = 0;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) visit(*tensor, position);
        ++position;
      }
    }
  }

  const Written* find_written(std::uint16_t argument, std::int32_t position) const {
    for (const Written& one : written)
      if (one.argument == argument && one.position == position) return &one;
    return nullptr;
  }

  bool is_source(const c10::StorageImpl* storage) const {
    return std::find(sources.begin(), sources.end(), storage) != sources.end();
  }

  bool has_tensor = false;
  bool has_opaque = false;            // a tensor without a plain storage
  std::int64_t largest = 0;           // bytes of the largest tensor among the arguments
  std::optional<c10::Device> device;  // of the first tensor
  c10::SmallVector<const c10::StorageImpl*, 8> sources;
  c10::SmallVector<const c10::StorageImpl*, 2> borrowed;  // those that do not own their memory
  c10::SmallVector<Written, 2> written;

 private:
  /// A tensor over memory that it does not own, such as from_blob's: it may be gone before
  /// backward, unless plain holds it as well.
  static bool is_borrowed(const at::Tensor& tensor) {
    return tensor.storage().data_ptr().get_context() == nullptr && tensor.storage().nbytes() > 0 &&
           tensor.is_cpu() && !tensor.requires_grad();
  }

  bool writes_hidden(const OperatorTraits::Argument& traits) {
    return traits.hidden_write_if == -1 ||
           (traits.hidden_write_if >= 0 &&
            argument(static_cast<std::size_t>(traits.hidden_write_if)).toBool());
  }

  void inspect_arguments() {
    for (const auto& traits : traits_.arguments) {
      const bool is_hidden = traits.hidden_write_if != -2 && writes_hidden(traits);
      for_each_tensor(argument(traits.index), traits.kind,
                      [&](const at::Tensor& tensor, std::int32_t position) {
                        has_tensor = true;
                        if (!has_plain_storage(tensor)) {
                          has_opaque = true;
                          return;
                        }
                        largest = std::max(largest, static_cast<std::int64_t>(tensor.nbytes()));
                        if (position == none && !device) device = tensor.device();
                        sources.push_back(storage_of(tensor));
                        if (is_borrowed(tensor)) borrowed.push_back(storage_of(tensor));
                        if (!traits.is_written && !is_hidden) return;
                        const bool covers = tensor.is_non_overlapping_and_dense() &&
                                            tensor.nbytes() == tensor.storage().nbytes();
                        const bool is_read = is_hidden ? traits.hidden_write_reads
                                                       : !(traits.is_overwritten && covers);
                        written.push_back({tensor, traits.index, position, is_read, true,
                                           static_cast<std::int64_t>(tensor.storage().nbytes())});
                      });
    }
    // An argument that shares the written one's memory reads it after all.
    for (Written& one : written)
      one.is_read =
          one.is_read || std::count(sources.begin(), sources.end(), storage_of(one.tensor)) > 1;
  }

  const OperatorTraits& traits_;
  const OperatorHandle& handle_;
  c10::DispatchKeySet keys_;
  Stack& stack_;
  std::size_t first_;
};

}  // namespace remat::detail
