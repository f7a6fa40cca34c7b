// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "remat/weights/byte_source.hpp"
#include "remat/weights/element_types.hpp"
#include "remat/weights/extent.hpp"

namespace remat::detail {

/// One tensor of a safetensors file; offsets count from the end of the header.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< as the file spells it
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;
};

/// Understands the header of a safetensors file while nlohmann-json parses it.
///
/// Events instead of a document: a document would hide names that occur twice, and could be nested
/// as deeply as memory allows. The only shape that is accepted is `{"name": {"dtype": text,
/// "shape": [counts], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text", ...}}`.
class SafetensorsHeader {
 public:
  static constexpr std::string_view kMetadata = "__metadata__";

  explicit SafetensorsHeader(const ByteSource& source) : source_(source) {}

  /// @throws WeightsError  if the text is not such a header
  void parse(const std::string& text) { nlohmann::json::sax_parse(text, this); }

  std::vector<SafetensorsEntry>& entries() { return entries_; }
  std::map<std::string, std::string>& metadata() { return metadata_; }

  bool null() { refuse("a null where the format has none"); }
  bool boolean(bool) { refuse("a boolean where the format has none"); }
  bool number_integer(std::int64_t) { refuse("a negative number"); }
  bool number_float(double, const std::string&) { refuse("a number that is no count"); }
  template <class Binary>
  bool binary(Binary&) {
    refuse("bytes where the format has none");
  }

  bool number_unsigned(std::uint64_t number) {
    if (place_ != Place::kArray || number > kMostCounted) refuse("a number in a wrong place");
    if (field_ == Field::kShape) {
      if (entries_.back().shape.size() == kMostDimensions)
        refuse("a tensor of too many dimensions");
      entries_.back().shape.push_back(static_cast<std::int64_t>(number));
    } else {
      if (offset_count_ == 2) refuse("more than two offsets");
      (offset_count_++ == 0 ? entries_.back().begin : entries_.back().end) = number;
    }
    return true;
  }

  bool string(std::string& text) {
    if (place_ == Place::kMetadata)
      metadata_[key_] = text;
    else if (place_ == Place::kTensor && field_ == Field::kDtype)
      entries_.back().dtype = text;
    else
      refuse("a text in a wrong place");
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::kOutside)
      place_ = Place::kTop;
    else if (place_ == Place::kTop && key_ == kMetadata)
      place_ = Place::kMetadata;
    else if (place_ == Place::kTop)
      start_tensor();
    else
      refuse("an object in a wrong place");
    return true;
  }

  bool key(std::string& text) {
    if (place_ == Place::kTensor)
      start_field(text);
    else
      key_ = text;
    return true;
  }

  bool end_object() {
    if (place_ == Place::kTensor && fields_seen_ != kAllFields)
      refuse("a tensor without dtype, shape or data_offsets");
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::kTensor || field_ == Field::kDtype) refuse("a list in a wrong place");
    place_ = Place::kArray;
    return true;
  }

  bool end_array() {
    if (field_ == Field::kOffsets && offset_count_ != 2) refuse("fewer than two offsets");
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) {
    refuse("no JSON at its byte " + std::to_string(position));
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kArray };
  enum class Field { kDtype, kShape, kOffsets };
  static constexpr unsigned kAllFields = 7;
  static constexpr std::size_t kMostDimensions = 64;

  void start_tensor() {
    place_ = Place::kTensor;
    fields_seen_ = 0;
    offset_count_ = 0;
    entries_.emplace_back().name = key_;
  }

  void start_field(std::string_view name) {
    if (name == "dtype")
      field_ = Field::kDtype;
    else if (name == "shape")
      field_ = Field::kShape;
    else if (name == "data_offsets")
      field_ = Field::kOffsets;
    else
      refuse("the unknown field \"" + printable(name) + "\"");
    const unsigned bit = 1U << static_cast<unsigned>(field_);
    if ((fields_seen_ & bit) != 0) refuse("the field \"" + printable(name) + "\" twice");
    fields_seen_ |= bit;
  }

  [[noreturn]] void refuse(const std::string& what) const {
    source_.damaged("its header has " + what +
                    (entries_.empty() ? "" : ", at \"" + printable(entries_.back().name) + "\""));
  }

  const ByteSource& source_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::string key_;
  Place place_ = Place::kOutside;
  Field field_ = Field::kDtype;
  unsigned fields_seen_ = 0;
  int offset_count_ = 0;
};

/// The header of a safetensors file, checked: each tensor has as many bytes as its shape and dtype
/// need, and together they fill the file without holes or overlaps.
struct SafetensorsContents {
  std::vector<SafetensorsEntry> entries;  ///< in the header's order
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

/// Returns how many bytes the tensor needs; nothing if the dtype is unknown or no count results.
inline std::optional<std::uint64_t> bytes_needed(const SafetensorsEntry& entry) {
  const ElementType* type = find_element_type(&ElementType::safetensors, entry.dtype);
  const auto count = element_count(entry.shape);
  return type != nullptr && count ? checked_product(*count, type->byte_count) : std::nullopt;
}

inline void check_safetensors_layout(const ByteSource& source,
                                     const std::vector<SafetensorsEntry>& entries,
                                     std::uint64_t data_size) {
  std::vector<const SafetensorsEntry*> in_file_order;
  for (const SafetensorsEntry& entry : entries) in_file_order.push_back(&entry);
  std::sort(in_file_order.begin(), in_file_order.end(), [](const auto* left, const auto* right) {
    return std::pair(left->begin, left->end) < std::pair(right->begin, right->end);
  });
  std::uint64_t position = 0;
  for (const SafetensorsEntry* entry : in_file_order) {
    const std::string name = "its tensor \"" + printable(entry->name) + "\"";
    if (entry->begin != position || entry->end < entry->begin || entry->end > data_size)
      source.damaged(name + " lies at bytes " + std::to_string(entry->begin) + " to " +
                     std::to_string(entry->end) + ", and byte " + std::to_string(position) +
                     " of " + std::to_string(data_size) + " is the next");
    // An unknown dtype is reported as such later, by a message that names it.
    const bool is_known = find_element_type(&ElementType::safetensors, entry->dtype) != nullptr;
    if (is_known && bytes_needed(*entry) != entry->end - entry->begin)
      source.damaged(name + " has " + std::to_string(entry->end - entry->begin) +
                     " bytes, which its shape and dtype do not need");
    position = entry->end;
  }
  if (position != data_size)
    source.damaged("its tensors have " + std::to_string(position) + " bytes, and the file has " +
                   std::to_string(data_size) + " for them");
}

/// Reads and checks the header.
///
/// @par Source  safetensors, README.md: "Format"
/// @throws WeightsError  if it contradicts itself or the size of the file
inline SafetensorsContents read_safetensors_header(const ByteSource& source) {
  constexpr std::uint64_t kLengthBytes = 8;
  constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
  unsigned char length[kLengthBytes];
  source.read(0, length, kLengthBytes);
  std::uint64_t header_size = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i) header_size |= std::uint64_t{length[i]} << (8 * i);
  if (header_size > kLongestHeader || header_size > source.size() - kLengthBytes)
    source.damaged("its header of " + std::to_string(header_size) + " bytes is longer than " +
                   (header_size > kLongestHeader ? "the format allows" : "the file"));
  std::string text(static_cast<std::size_t>(header_size), '\0');
  source.read(kLengthBytes, text.data(), text.size());
  SafetensorsHeader header(source);
  header.parse(text);
  const std::uint64_t data_begin = kLengthBytes + header_size;
  check_safetensors_layout(source, header.entries(), source.size() - data_begin);
  return {std::move(header.entries()), std::move(header.metadata()), data_begin};
}

}  // namespace remat::detail
