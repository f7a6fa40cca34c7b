// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "remat/weights/byte_source.hpp"

namespace remat::detail {

/// What the directory of a zip file says about one entry.
struct ZipEntry {
  std::uint64_t size = 0;         ///< of the content
  std::uint64_t packed_size = 0;  ///< in the file
  bool is_packed = false;
};

/// The directory of a zip file, checked against the size of the file.
///
/// LibTorch's reader, which fetches the contents, asks for the memory that an entry claims before
/// it looks whether the file has that much, and its older versions do not tell the size. So the
/// claims are read and checked here first.
///
/// @par Source  PKWARE's APPNOTE.TXT, sections 4.3.12 to 4.3.16 and 4.5.3
class ZipDirectory {
 public:
  /// @throws WeightsError  if it is no directory, or claims what the file cannot hold
  explicit ZipDirectory(const ByteSource& source) : source_(source) { read(find_directory()); }

  /// Entries by name; the folder around all of them, which torch.save makes, is left out.
  const std::map<std::string, ZipEntry, std::less<>>& entries() const { return entries_; }

  const ZipEntry* find(std::string_view name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
  }

 private:
  struct Extent {
    std::uint64_t begin, size, count;
  };

  static constexpr std::uint64_t kEndBytes = 22;
  static constexpr std::uint64_t kLocatorBytes = 20;
  static constexpr std::uint64_t kBigEndBytes = 56;
  static constexpr std::uint64_t kEntryBytes = 46;
  static constexpr std::uint64_t kLocalBytes = 30;
  static constexpr std::uint64_t kMostEntries = 1 << 20;

  static std::uint64_t number(std::string_view bytes, std::size_t begin, std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(bytes[begin + i])} << (8 * i);
    return value;
  }

  std::string fetch(std::uint64_t begin, std::uint64_t count) const {
    std::string bytes(static_cast<std::size_t>(count), '\0');
    source_.read(begin, bytes.data(), bytes.size());
    return bytes;
  }

  /// The end record is the last thing in the file, before a comment of at most 64 KiB.
  Extent find_directory() const {
    const std::uint64_t tail_size = std::min(source_.size(), kEndBytes + 0xffff);
    const std::uint64_t tail_begin = source_.size() - tail_size;
    const std::string tail = fetch(tail_begin, tail_size);
    const std::size_t at = tail_size < kEndBytes
                               ? std::string::npos
                               : tail.rfind("PK\x05\x06", tail.size() - kEndBytes);
    if (at == std::string::npos) refuse("is a zip file without its directory, which ends the file");
    Extent extent{number(tail, at + 16, 4), number(tail, at + 12, 4), number(tail, at + 10, 2)};
    const std::uint64_t end = tail_begin + at;
    if (end >= kLocatorBytes)
      if (const auto locator = fetch(end - kLocatorBytes, kLocatorBytes);
          locator.starts_with("PK\x06\x07"))
        extent = big_directory(number(locator, 8, 8), end);
    if (extent.size > end || extent.begin > end - extent.size ||
        extent.count > extent.size / kEntryBytes || extent.count > kMostEntries)
      refuse("has a zip directory that does not fit into the file");
    return extent;
  }

  Extent big_directory(std::uint64_t begin, std::uint64_t end) const {
    if (end < kBigEndBytes || begin > end - kBigEndBytes)
      refuse("has a zip directory that lies outside of the file");
    const std::string record = fetch(begin, kBigEndBytes);
    if (!record.starts_with("PK\x06\x06")) refuse("has a damaged zip directory");
    return {number(record, 48, 8), number(record, 40, 8), number(record, 32, 8)};
  }

  void read(const Extent& extent) {
    const std::string bytes = fetch(extent.begin, extent.size);
    std::string_view rest = bytes;
    std::string folder;
    for (std::uint64_t i = 0; i < extent.count; ++i) {
      if (rest.size() < kEntryBytes || !rest.starts_with("PK\x01\x02"))
        refuse("has a damaged zip directory");
      const std::size_t name_size = number(rest, 28, 2);
      const std::size_t extra_size = number(rest, 30, 2);
      const std::size_t total = kEntryBytes + name_size + extra_size + number(rest, 32, 2);
      if (rest.size() < total) refuse("has a zip directory that is cut short");
      const std::string_view name = rest.substr(kEntryBytes, name_size);
      // LibTorch's reader takes the first entry's folder for that of all.
      if (i == 0) folder = name.substr(0, name.find('/') + 1);
      if (!name.starts_with(folder)) refuse("has zip entries that are not in one folder");
      add(std::string(name.substr(folder.size())), rest.substr(0, kEntryBytes),
          rest.substr(kEntryBytes + name_size, extra_size), extent.begin);
      rest.remove_prefix(total);
    }
  }

  void add(std::string name, std::string_view fixed, std::string_view extra, std::uint64_t limit) {
    constexpr std::uint64_t kElsewhere = 0xffffffff;
    ZipEntry entry{number(fixed, 24, 4), number(fixed, 20, 4), number(fixed, 10, 2) != 0};
    std::uint64_t local = number(fixed, 42, 4);
    std::string_view big = big_numbers(extra);
    for (std::uint64_t* value : {&entry.size, &entry.packed_size, &local}) {
      if (*value != kElsewhere) continue;
      if (big.size() < 8) refuse("has a zip entry without its size");
      *value = number(big, 0, 8);
      big.remove_prefix(8);
    }
    check(name, entry, local, limit, number(fixed, 8, 2));
    if (!entries_.emplace(name, entry).second)
      refuse("has two zip entries of the name \"" + printable(name) + "\"");
  }

  void check(std::string_view name, const ZipEntry& entry, std::uint64_t local, std::uint64_t limit,
             std::uint64_t flags) {
    // What deflate can make of one byte at the very best.
    constexpr std::uint64_t kBestRatio = 1032;
    const bool is_inside = local < limit && limit - local >= kLocalBytes &&
                           entry.packed_size <= limit - local - kLocalBytes;
    const bool is_possible = entry.is_packed ? entry.size / kBestRatio <= entry.packed_size
                                             : entry.size == entry.packed_size;
    // Entries that share their bytes would let a small file fill any memory.
    total_packed_ += entry.packed_size;
    if (!is_inside || !is_possible || total_packed_ > limit)
      refuse("has the zip entry \"" + printable(name) + "\" of " + std::to_string(entry.size) +
             " bytes, which the file cannot hold");
    if ((flags & 1) != 0) refuse("has encrypted zip entries");
  }

  /// The content of the extra field that holds numbers of 64 bits, or nothing.
  static std::string_view big_numbers(std::string_view extra) {
    while (extra.size() >= 4) {
      const std::size_t size = number(extra, 2, 2);
      if (size > extra.size() - 4) break;
      if (number(extra, 0, 2) == 1) return extra.substr(4, size);
      extra.remove_prefix(4 + size);
    }
    return {};
  }

  [[noreturn]] void refuse(std::string_view what) const {
    source_.damaged("it " + std::string(what));
  }

  const ByteSource& source_;
  std::map<std::string, ZipEntry, std::less<>> entries_;
  std::uint64_t total_packed_ = 0;
};

}  // namespace remat::detail
