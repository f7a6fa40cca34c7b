// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "remat/weights/element_types.hpp"
#include "remat/weights/extent.hpp"
#include "remat/weights/pickle_values.hpp"

namespace remat::detail {

/// Bytes that one or more tensors of a pickle lie in.
struct PickledStorage {
  std::string key;
  std::uint64_t byte_count = 0;       ///< what the pickle says it has
  const ElementType* type = nullptr;  ///< null if it is only bytes
  std::uint64_t view_offset = 0;      ///< in bytes: the old form had storages that begin in others
};

/// A tensor of a pickle: which bytes, and how it lies in them. All of it has been checked: the last
/// element lies inside the storage, and no product overflows.
struct PickledTensor {
  PickledStorage storage;
  const ElementType* type = nullptr;
  std::int64_t offset = 0;  ///< in elements
  std::vector<std::int64_t> sizes, strides;
  bool is_conjugate = false;
  bool is_negative = false;

  /// Bytes of its elements, each counted once.
  std::uint64_t byte_count() const { return *element_count(sizes) * type->byte_count; }
};

/// Understands the arguments from which Python would make a tensor.
///
/// @par Source  torch/_utils.py: `_rebuild_tensor`, `_rebuild_tensor_v2`, `_rebuild_tensor_v3`
class PickledTensorReader {
 public:
  /// @param name  what the tensor is called in messages
  PickledTensorReader(const PickleValues& values, std::string_view name)
      : values_(values), name_(name) {}

  /// @throws WeightsError  if the arguments do not describe a tensor inside its storage
  PickledTensor read(PickleId id) const {
    const auto arguments = values_.items(id);
    if (arguments.size() < 4) refuse("is made from too few arguments");
    PickledTensor tensor;
    tensor.storage = read_storage(arguments[0]);
    tensor.type = tensor.storage.type;
    tensor.offset = read_integer(arguments[1]);
    tensor.sizes = read_integers(arguments[2]);
    tensor.strides = read_integers(arguments[3]);
    // Beyond requires_grad and hooks: the dtype of the third form, and marks of the second.
    for (const PickleId extra : arguments.subspan(std::min<std::size_t>(arguments.size(), 6))) {
      if (is_dtype(extra))
        tensor.type = find_element_type(&ElementType::dtype, values_.text(extra));
      if (values_.is(extra, PickleKind::kDictionary)) read_marks(extra, tensor);
    }
    if (tensor.type == nullptr) refuse("has no dtype");
    check_layout(tensor);
    return tensor;
  }

  PickledStorage read_storage(PickleId id) const {
    if (!values_.is(id, PickleKind::kStorage)) refuse("has no storage");
    const auto items = values_.items(id);  // "storage", class, key, device, element count, view
    const bool is_known = values_.is(items[1], PickleKind::kGlobal) &&
                          values_.role(items[1]) == PickleRole::kStorage &&
                          values_.is(items[2], PickleKind::kText) &&
                          values_.text(items[2]).size() <= kLongestKey;
    if (!is_known) refuse("has a storage without class or key");
    PickledStorage storage;
    storage.key = values_.text(items[2]);
    storage.type = find_element_type(&ElementType::storage_class, values_.text(items[1]));
    const std::uint64_t element_bytes = storage.type == nullptr ? 1 : storage.type->byte_count;
    storage.byte_count = checked_bytes(items[4], element_bytes);
    if (items.size() > 5 && values_.is(items[5], PickleKind::kSequence))
      narrow(storage, values_.items(items[5]), element_bytes);
    return storage;
  }

 private:
  static constexpr std::size_t kMostDimensions = 64;
  static constexpr std::size_t kLongestKey = 256;

  /// A view of a storage: its own key, offset and size, in elements.
  void narrow(PickledStorage& storage, std::span<const PickleId> view,
              std::uint64_t element_bytes) const {
    if (view.size() != 3) refuse("has a storage that is an incomplete view of another");
    const std::uint64_t offset = checked_bytes(view[1], element_bytes);
    const std::uint64_t count = checked_bytes(view[2], element_bytes);
    if (offset > storage.byte_count || count > storage.byte_count - offset)
      refuse("has a storage that reaches past the one it lies in");
    storage.view_offset = offset;
    storage.byte_count = count;
  }

  void check_layout(const PickledTensor& tensor) const {
    if (tensor.sizes.size() != tensor.strides.size()) refuse("has not one stride for each size");
    const auto count = element_count(tensor.sizes);
    if (!count || !checked_product(*count, tensor.type->byte_count))
      refuse("has more elements than can be counted");
    const auto end =
        end_of_elements(static_cast<std::uint64_t>(tensor.offset), tensor.sizes, tensor.strides);
    const auto end_byte = end ? checked_product(*end, tensor.type->byte_count) : std::nullopt;
    if (!end_byte || (*count != 0 && *end_byte > tensor.storage.byte_count))
      refuse("reaches past the end of its storage of " + std::to_string(tensor.storage.byte_count) +
             " bytes");
  }

  /// `{"conj": True}` and `{"neg": True}`.
  void read_marks(PickleId dictionary, PickledTensor& tensor) const {
    const auto items = values_.items(dictionary);
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!values_.is(items[i], PickleKind::kText)) continue;
      const bool is_set =
          values_.is(items[i + 1], PickleKind::kBool) && values_.number(items[i + 1]);
      if (values_.text(items[i]) == "conj") tensor.is_conjugate = is_set;
      if (values_.text(items[i]) == "neg") tensor.is_negative = is_set;
    }
  }

  bool is_dtype(PickleId id) const {
    return values_.is(id, PickleKind::kGlobal) && values_.role(id) == PickleRole::kDtype;
  }

  std::uint64_t checked_bytes(PickleId count, std::uint64_t element_bytes) const {
    const auto bytes =
        checked_product(static_cast<std::uint64_t>(read_integer(count)), element_bytes);
    if (!bytes) refuse("has a storage of more bytes than can be counted");
    return *bytes;
  }

  std::int64_t read_integer(PickleId id) const {
    if (!values_.is(id, PickleKind::kInteger) || values_.number(id) < 0)
      refuse("has a size, stride or offset that is no count");
    return values_.number(id);
  }

  std::vector<std::int64_t> read_integers(PickleId id) const {
    if (!values_.is(id, PickleKind::kSequence) || values_.items(id).size() > kMostDimensions)
      refuse("has sizes or strides that are no short list");
    std::vector<std::int64_t> integers;
    for (const PickleId item : values_.items(id)) integers.push_back(read_integer(item));
    return integers;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    values_.source().damaged("its tensor \"" + printable(name_) + "\" " + std::string(what));
  }

  const PickleValues& values_;
  std::string_view name_;
};

}  // namespace remat::detail
