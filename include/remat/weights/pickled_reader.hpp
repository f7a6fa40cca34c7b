// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "remat/libtorch/dtypes.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/pickled_state_dict.hpp"
#include "remat/weights/pickled_tensor.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat::detail {

/// What the two forms of torch.save have in common: a pickle that says how tensors lie in storages,
/// which are elsewhere in the file.
class PickledReader : public StateDictReader {
 public:
  at::Tensor read(std::size_t index) final {
    const PickledTensor& pickled = tensors_.at(index);
    const TensorEntry& entry = entries()[index];
    // Nothing to fetch, and strides of empty tensors may be anything.
    if (pickled.byte_count() == 0) return at::empty(entry.shape, entry.dtype);
    at::Tensor tensor = at::empty({0}, entry.dtype);
    const auto shift =
        static_cast<std::int64_t>(pickled.storage.view_offset / pickled.type->byte_count);
    tensor.set_(storage_of(pickled), pickled.offset + shift, pickled.sizes, pickled.strides);
    if (pickled.is_conjugate) tensor = tensor.conj();
    if (pickled.is_negative) tensor = tensor._neg_view();
    return tensor;
  }

 protected:
  explicit PickledReader(std::shared_ptr<const ByteSource> source)
      : StateDictReader(source->name()), source_(std::move(source)) {}

  const ByteSource& source() const { return *source_; }

  /// Takes over the tensors that the pickle describes.
  void take(std::vector<NamedPickledTensor> tensors) {
    std::vector<TensorEntry> entries;
    std::unordered_set<std::string_view> keys;
    for (const auto& [name, tensor] : tensors)
      if (!keys.insert(tensor.storage.key).second)
        shared_.try_emplace(tensor.storage.key, c10::intrusive_ptr<c10::StorageImpl>());
    for (auto& [name, tensor] : tensors) {
      const at::ScalarType type = supported_type(source().name(), name, tensor.type->dtype);
      entries.push_back({std::move(name), tensor.sizes, type, tensor.byte_count()});
      tensors_.push_back(std::move(tensor));
    }
    announce(std::move(entries));
  }

 private:
  /// Fetches all bytes of a storage.
  virtual c10::Storage fetch(const std::string& key) = 0;

  c10::Storage storage_of(const PickledTensor& pickled) {
    const auto shared = shared_.find(pickled.storage.key);
    auto alive =
        shared == shared_.end() ? c10::intrusive_ptr<c10::StorageImpl>() : shared->second.lock();
    const c10::Storage storage =
        alive ? c10::Storage(std::move(alive)) : fetch(pickled.storage.key);
    const std::uint64_t announced = pickled.storage.view_offset + pickled.storage.byte_count;
    if (storage.nbytes() < announced || pickled.storage.view_offset % pickled.type->byte_count != 0)
      source().damaged("a tensor's bytes are " + std::to_string(storage.nbytes()) +
                       ", and its pickle announces " + std::to_string(announced));
    if (pickled.type->dtype == "bool") require_bools(source(), storage.data(), storage.nbytes());
    if (shared != shared_.end()) shared->second = storage.getWeakStorageImpl();
    return storage;
  }

  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::shared_ptr<const ByteSource> source_;
  std::vector<PickledTensor> tensors_;
  // Of storages that several tensors lie in. The others have no entry: a weak pointer keeps a
  // little memory, and little pieces between freed tensors keep their memory from being used again.
  std::unordered_map<std::string, WeakStorage> shared_;
};

}  // namespace remat::detail
