// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "remat/weights/byte_source.hpp"
#include "remat/weights/pickle_globals.hpp"

namespace remat::detail {

using PickleId = std::uint32_t;

enum class PickleKind : std::uint8_t {
  kNone,
  kBool,
  kInteger,
  kBigInteger,  ///< more than 64 bits: its bytes are the text
  kReal,        ///< no state dict needs the value of one
  kText,
  kSequence,    ///< a list, tuple or set
  kDictionary,  ///< the items are key, value, key, value, ...
  kGlobal,      ///< a name from the table
  kStorage,     ///< a reference to bytes elsewhere in the file; the items say which
  kTensor,      ///< the items are the arguments of its making
  kOpaque,      ///< something without weights
};

/// The values of a pickle, in one list; they refer to each other by index.
///
/// A hostile pickle may make a value contain itself. So nothing here owns anything else, and nobody
/// may walk the values without a limit of depth.
class PickleValues {
 public:
  explicit PickleValues(const ByteSource& source) : source_(source) {}

  PickleKind kind(PickleId id) const { return values_[id].kind; }
  bool is(PickleId id, PickleKind kind) const { return values_[id].kind == kind; }
  /// The number of an integer or bool.
  std::int64_t number(PickleId id) const { return values_[id].number; }
  /// The role of a global.
  PickleRole role(PickleId id) const { return static_cast<PickleRole>(values_[id].number); }
  /// The text of a text, the bytes of a big integer, the name of a global; valid until a value is
  /// added.
  std::string_view text(PickleId id) const {
    const Slice& slice = slices_[values_[id].index];
    return std::string_view(letters_).substr(slice.begin, slice.size);
  }
  /// The items of a sequence, dictionary, storage or tensor; valid until a value is added.
  std::span<const PickleId> items(PickleId id) const { return lists_[values_[id].index]; }
  PickleId size() const { return static_cast<PickleId>(values_.size()); }
  const ByteSource& source() const { return source_; }

  PickleId add(PickleKind kind, std::int64_t number = 0) {
    charge(1);
    values_.push_back({kind, 0, number});
    return size() - 1;
  }

  /// Adds a value whose text is what has been appended to `letters()` since it had `begin` letters.
  PickleId add_text(PickleKind kind, std::size_t begin, std::int64_t number = 0) {
    const PickleId id = add(kind, number);
    values_[id].index = static_cast<std::uint32_t>(slices_.size());
    slices_.push_back({begin, letters_.size() - begin});
    return id;
  }
  std::string& letters() { return letters_; }

  PickleId add_list(PickleKind kind, std::vector<PickleId> items = {}) {
    charge(items.size());
    const PickleId id = add(kind);
    values_[id].index = static_cast<std::uint32_t>(lists_.size());
    lists_.push_back(std::move(items));
    return id;
  }

  void append(PickleId list, std::span<const PickleId> items) {
    charge(items.size());
    auto& to = lists_[values_[list].index];
    to.insert(to.end(), items.begin(), items.end());
  }

 private:
  struct Value {
    PickleKind kind;
    std::uint32_t index;
    std::int64_t number;
  };
  struct Slice {
    std::size_t begin, size;
  };

  // Far above any state dict (10,000 tensors need 400,000), far below what fills a memory.
  static constexpr std::size_t kMostValues = std::size_t{1} << 23;

  void charge(std::size_t count) {
    charged_ += count;
    if (charged_ > kMostValues)
      source_.damaged("its pickle has more than " + std::to_string(kMostValues) + " values");
  }

  const ByteSource& source_;
  std::vector<Value> values_;
  std::vector<std::vector<PickleId>> lists_;
  std::vector<Slice> slices_;
  std::string letters_;
  std::size_t charged_ = 0;
};

}  // namespace remat::detail
