// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/pickle.hpp"
#include "remat/weights/pickled_reader.hpp"
#include "remat/weights/pickled_state_dict.hpp"
#include "remat/weights/pickled_tensor.hpp"

namespace remat::detail {

/// Reads what torch.save wrote before PyTorch 1.6, and still does when asked to: five pickles (a
/// magic number, the version, facts about the machine, the object, the keys of the storages) and
/// then the storages, each after its number of elements.
///
/// @par Source  torch/serialization.py: `_legacy_save`
class LegacyReader final : public PickledReader {
 public:
  /// The magic number with the opcode before it; later protocols put a frame before that.
  static bool recognises(std::string_view head) {
    constexpr std::string_view kMagic{"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 12};
    return head.starts_with('\x80') && head.substr(0, 24).find(kMagic) != std::string_view::npos;
  }

  explicit LegacyReader(std::shared_ptr<const ByteSource> bytes) : PickledReader(std::move(bytes)) {
    PickleValues values(source());
    ByteCursor cursor(source());
    Pickle::read(cursor, values);
    require_version(values, Pickle::read(cursor, values));
    Pickle::read(cursor, values);
    const PickleId root = Pickle::read(cursor, values);
    const PickleId keys = Pickle::read(cursor, values);
    locate_storages(values, keys, cursor);
    take(PickledStateDict::find(values, root));
  }

 private:
  struct Extent {
    std::uint64_t begin, size;
  };

  void require_version(const PickleValues& values, PickleId version) const {
    constexpr std::int64_t kVersion = 1001;
    if (!values.is(version, PickleKind::kInteger) || values.number(version) != kVersion)
      source().damaged("it has another protocol version than 1001");
  }

  /// The file gives elements, and only the pickle says how large they are.
  std::unordered_map<std::string, std::uint64_t> element_sizes(const PickleValues& values) const {
    std::unordered_map<std::string, std::uint64_t> sizes;
    for (PickleId id = 0; id < values.size(); ++id) {
      if (!values.is(id, PickleKind::kStorage)) continue;
      const PickledStorage storage = PickledTensorReader(values, "").read_storage(id);
      sizes.emplace(storage.key, storage.type == nullptr ? 1 : storage.type->byte_count);
    }
    return sizes;
  }

  void locate_storages(const PickleValues& values, PickleId keys, ByteCursor& cursor) {
    if (!values.is(keys, PickleKind::kSequence)) source().damaged("it has no list of storages");
    const auto sizes = element_sizes(values);
    for (const PickleId id : values.items(keys)) {
      const auto known =
          values.is(id, PickleKind::kText) ? sizes.find(std::string(values.text(id))) : sizes.end();
      if (known == sizes.end()) source().damaged("it lists a storage that nothing refers to");
      const auto size = checked_product(cursor.number<8>(), known->second);
      if (!size) source().damaged("it has a storage of more bytes than can be counted");
      extents_[known->first] = {cursor.position(), *size};
      cursor.skip(*size);
    }
  }

  c10::Storage fetch(const std::string& key) override {
    const auto found = extents_.find(key);
    if (found == extents_.end())
      source().damaged("it lacks the storage \"" + printable(key) + "\"");
    const auto [begin, size] = found->second;
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(size)}, at::ScalarType::Byte);
    source().read(begin, bytes.data_ptr(), static_cast<std::size_t>(size));
    return bytes.storage();
  }

  std::unordered_map<std::string, Extent> extents_;
};

}  // namespace remat::detail
