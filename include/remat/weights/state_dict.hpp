// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/dtypes.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_source.hpp"

namespace remat {

/// Named tensors in an order, as Python's state dict: what a weight file holds.
///
/// A value; its tensors are handles, so that a copy refers to the same numbers.
class StateDict {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  /// Appends a tensor.
  ///
  /// @throws WeightsError  if there is one of that name
  void add(std::string name, at::Tensor tensor) {
    if (!indices_.emplace(name, items_.size()).second)
      detail::throw_duplicate("remat::StateDict", name);
    items_.emplace_back(std::move(name), std::move(tensor));
  }

  /// Returns the tensor of that name, or null.
  const at::Tensor* find(const std::string& name) const {
    const auto found = indices_.find(name);
    return found == indices_.end() ? nullptr : &items_[found->second].second;
  }

  /// Returns the tensor of that name.
  ///
  /// @throws ArgumentError  if there is none; the message lists the nearest names
  const at::Tensor& at(const std::string& name) const {
    const at::Tensor* tensor = find(name);
    require(tensor != nullptr, [&] {
      ErrorMessage message("remat.weights.name");
      message.where("remat::StateDict")
          .what("none of its " + std::to_string(size()) + " tensors is called \"" +
                detail::printable(name) + "\"");
      if (!items_.empty())
        message.cure("The nearest names are " +
                     detail::quoted_list(detail::nearest_names(name, names())));
      return message;
    });
    return *tensor;
  }

  /// Returns whether there is a tensor of that name.
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

  /// Returns all names, in their order.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : items_) result.push_back(name);
    return result;
  }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, std::size_t> indices_;
};

/// What a file says about one of its tensors before it is read.
struct TensorEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::uint64_t bytes = 0;  ///< of its elements
};

/// Reads the tensors of a weight file one at a time, so that no more of them than wanted are in
/// memory. For one thread.
class StateDictReader {
 public:
  virtual ~StateDictReader() = default;
  StateDictReader(const StateDictReader&) = delete;
  StateDictReader& operator=(const StateDictReader&) = delete;

  /// Returns what there is, in the file's order; names are as in the file and occur once.
  const std::vector<TensorEntry>& entries() const { return entries_; }
  /// Returns what the file is called in messages.
  const std::string& source_name() const { return source_name_; }

  /// Reads one tensor to the CPU. Tensors that shared their numbers when they were saved share them
  /// again, as long as one of them is alive.
  ///
  /// @param index  into `entries()`
  /// @throws WeightsError  if the file does not give what it announced
  virtual at::Tensor read(std::size_t index) = 0;

 protected:
  explicit StateDictReader(std::string source_name) : source_name_(std::move(source_name)) {}

  /// Takes over what the file announces.
  ///
  /// @throws WeightsError  if a name occurs twice
  void announce(std::vector<TensorEntry> entries) {
    std::vector<std::string_view> names;
    for (const TensorEntry& entry : entries) names.push_back(entry.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) detail::throw_duplicate("\"" + source_name_ + "\"", *twice);
    entries_ = std::move(entries);
  }

 private:
  std::string source_name_;
  std::vector<TensorEntry> entries_;
};

namespace detail {

/// Returns the type that LibTorch has for a dtype of a file.
///
/// @throws WeightsError  if tensors cannot have it here
inline at::ScalarType supported_type(const std::string& source_name, std::string_view tensor_name,
                                     std::string_view dtype) {
  const auto type = scalar_type(dtype);
  if (!type)
    throw WeightsError(
        ErrorMessage("remat.weights.dtype")
            .where("\"" + source_name + "\"")
            .what("its tensor \"" + printable(tensor_name) + "\" has the dtype " +
                  printable(dtype) + ", which tensors of this LibTorch cannot have")
            .cure("In Python, convert it before saving, for example with tensor.float()"));
  return *type;
}

/// Bools are bytes 0 and 1; with any other in it, a tensor would break the compiler's assumptions.
///
/// @throws WeightsError  if there is another one
inline void require_bools(const ByteSource& source, const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const unsigned char*>(bytes);
  if (std::any_of(begin, begin + count, [](unsigned char byte) { return byte > 1; }))
    source.damaged("one of its tensors of bools has a byte that is neither 0 nor 1");
}

}  // namespace detail

}  // namespace remat
