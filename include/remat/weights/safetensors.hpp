// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/element_types.hpp"
#include "remat/weights/file_kind.hpp"
#include "remat/weights/module_tensors.hpp"
#include "remat/weights/open.hpp"
#include "remat/weights/safetensors_header.hpp"
#include "remat/weights/safetensors_writer.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat {

namespace detail {

class SafetensorsReader final : public StateDictReader {
 public:
  explicit SafetensorsReader(std::shared_ptr<const ByteSource> source)
      : StateDictReader(source->name()),
        source_(std::move(source)),
        contents_(read_safetensors_header(*source_)) {
    std::vector<TensorEntry> entries;
    for (const SafetensorsEntry& entry : contents_.entries) {
      const ElementType* type = find_element_type(&ElementType::safetensors, entry.dtype);
      const at::ScalarType known =
          supported_type(source_->name(), entry.name, type == nullptr ? entry.dtype : type->dtype);
      entries.push_back({entry.name, entry.shape, known, entry.end - entry.begin});
    }
    announce(std::move(entries));
  }

  /// Fills a tensor of LibTorch's own, which is aligned although the file may not be.
  at::Tensor read(std::size_t index) override {
    const TensorEntry& entry = entries().at(index);
    at::Tensor tensor = at::empty(entry.shape, entry.dtype);
    source_->read(contents_.data_begin + contents_.entries[index].begin, tensor.data_ptr(),
                  static_cast<std::size_t>(entry.bytes));
    if (entry.dtype == at::ScalarType::Bool)
      require_bools(*source_, tensor.data_ptr(), static_cast<std::size_t>(entry.bytes));
    return tensor;
  }

 private:
  std::shared_ptr<const ByteSource> source_;
  SafetensorsContents contents_;
};

inline WeightFormat safetensors_format{
    &looks_like_safetensors, [](std::shared_ptr<const ByteSource> source) {
      return std::unique_ptr<StateDictReader>(
          std::make_unique<SafetensorsReader>(std::move(source)));
    }};
// Including this header in one source is enough for the whole program.
inline const bool safetensors_is_registered = register_format(safetensors_format);

}  // namespace detail

/// Writes tensors as safetensors, which Python's package of that name reads.
///
/// The file appears under its name when it is complete; until then, and if anything fails, a file
/// that was there stays. Tensors are written one at a time, in the state dict's order by name;
/// tensors that share numbers are written once for each name.
///
/// @param metadata  kept in the file's header; the default is what Hugging Face's tools ask for
/// @throws WeightsError  if the file cannot be written, or a tensor's dtype has no place in one
inline void save_safetensors(const StateDict& state_dict, const std::filesystem::path& path,
                             const std::map<std::string, std::string>& metadata = {
                                 {"format", "pt"}}) {
  detail::SafetensorsWriter(state_dict, path).write(metadata);
}

/// As for a state dict; writes the module's parameters and buffers under Python's names.
inline void save_safetensors(const torch::nn::Module& module, const std::filesystem::path& path,
                             const std::map<std::string, std::string>& metadata = {
                                 {"format", "pt"}}) {
  save_safetensors(state_dict(module), path, metadata);
}

/// As for a module; takes a holder.
template <class Impl>
void save_safetensors(const torch::nn::ModuleHolder<Impl>& module,
                      const std::filesystem::path& path,
                      const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  save_safetensors(state_dict(module), path, metadata);
}

/// Returns what the header of a safetensors file says beside its tensors.
///
/// @throws WeightsError  if the file cannot be read
inline std::map<std::string, std::string> safetensors_metadata(const std::filesystem::path& path) {
  return detail::read_safetensors_header(detail::FileSource(path)).metadata;
}

}  // namespace remat
