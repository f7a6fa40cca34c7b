// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "remat/libtorch/dtypes.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/element_types.hpp"
#include "remat/weights/new_file.hpp"
#include "remat/weights/safetensors_header.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat::detail {

/// Writes one safetensors file.
class SafetensorsWriter {
 public:
  /// Decides where each tensor lies.
  ///
  /// @throws WeightsError  if one has no place in the format
  SafetensorsWriter(const StateDict& state_dict, const std::filesystem::path& path) : path_(path) {
    for (const auto& [name, tensor] : state_dict) {
      const ElementType& type = type_of(name, tensor);
      const auto count = static_cast<std::uint64_t>(tensor.numel());
      items_.push_back({name, tensor, &type, count * type.byte_count});
    }
    for (Item& item : items_) in_file_order_.push_back(&item);
    // The largest elements first, so that each tensor begins at a multiple of its element's size:
    // Python's reader needs that.
    std::stable_sort(
        in_file_order_.begin(), in_file_order_.end(),
        [](const auto* a, const auto* b) { return a->type->byte_count > b->type->byte_count; });
    std::uint64_t position = 0;
    for (Item* item : in_file_order_) item->begin = std::exchange(position, position + item->size);
  }

  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void write(const std::map<std::string, std::string>& metadata) const {
    const std::string header = header_text(metadata);
    NewFile file(path_, &throw_unwritable);
    std::string length;
    for (unsigned i = 0; i < 8; ++i)
      length += static_cast<char>(std::uint64_t{header.size()} >> (8 * i) & 0xff);
    file.write(length.data(), length.size());
    file.write(header.data(), header.size());
    for (const Item* item : in_file_order_) {
      const at::Tensor dense =
          item->tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
      file.write(dense.data_ptr(), static_cast<std::size_t>(item->size));
    }
    file.complete();
  }

 private:
  struct Item {
    std::string name;
    at::Tensor tensor;
    const ElementType* type;
    std::uint64_t size;
    std::uint64_t begin = 0;
  };

  const ElementType& type_of(const std::string& name, const at::Tensor& tensor) const {
    const bool is_dense = tensor.defined() && tensor.layout() == c10::kStrided;
    const ElementType* type =
        is_dense ? find_element_type(&ElementType::dtype, dtype_name(tensor.scalar_type()))
                 : nullptr;
    if (type == nullptr || type->safetensors.empty())
      throw_unwritable(path_,
                       "the tensor \"" + printable(name) + "\" is " + kind_of(tensor) +
                           ", for which safetensors has no name",
                       "Convert it, or leave it out");
    if (name == SafetensorsHeader::kMetadata)
      throw_unwritable(path_, "a tensor is called __metadata__, a name that safetensors keeps",
                       "Give it another name");
    return *type;
  }

  static std::string kind_of(const at::Tensor& tensor) {
    if (!tensor.defined()) return "undefined";
    const std::string dtype(dtype_name(tensor.scalar_type()));
    return tensor.layout() == c10::kStrided ? dtype : "sparse " + dtype;
  }

  std::string header_text(const std::map<std::string, std::string>& metadata) const {
    auto header = nlohmann::ordered_json::object();
    if (!metadata.empty()) header[std::string(SafetensorsHeader::kMetadata)] = metadata;
    for (const Item& item : items_)
      header[item.name] = {{"dtype", item.type->safetensors},
                           {"shape", item.tensor.sizes().vec()},
                           {"data_offsets", {item.begin, item.begin + item.size}}};
    try {
      std::string text = header.dump();
      text.resize((text.size() + 7) / 8 * 8, ' ');
      return text;
    } catch (const nlohmann::json::exception&) {
      throw_unwritable(path_, "a name or the metadata is no UTF-8", "Name tensors in UTF-8");
    }
  }

  std::filesystem::path path_;
  std::vector<Item> items_;
  std::vector<Item*> in_file_order_;
};

}  // namespace remat::detail
