// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "remat/errors.hpp"

namespace remat::detail {

// Weight files hold little-endian numbers, and tensors are filled with the bytes as they are.
static_assert(std::endian::native == std::endian::little,
              "remat reads weight files on little-endian machines only");

/// Returns a text from a file so that it can stand in a message: one line, printable, not too long.
inline std::string printable(std::string_view text, std::size_t longest = 120) {
  std::string result;
  for (const char letter : text.substr(0, longest)) {
    const auto code = static_cast<unsigned char>(letter);
    result += code < 0x20 || code == 0x7f ? '?' : letter;
  }
  return text.size() > longest ? result + "..." : result;
}

/// Reports that a name, which a state dict has once, is there twice.
///
/// @param where  the file or value, as a message shows it
[[noreturn]] inline void throw_duplicate(std::string_view where, std::string_view name) {
  throw WeightsError(
      ErrorMessage("remat.weights.duplicate")
          .where(where)
          .what("two tensors are called \"" + printable(name) + "\", and a name occurs once")
          .cure("Give each tensor a name of its own"));
}

/// The bytes of a weight file, wherever they are, and the name to call them by in messages.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  std::uint64_t size() const { return size_; }
  const std::string& name() const { return name_; }

  /// Fills `count` bytes at `into`.
  ///
  /// @throws WeightsError  if they are not all there
  void read(std::uint64_t offset, void* into, std::size_t count) const {
    if (count > size_ || offset > size_ - count)
      damaged("it ends at byte " + std::to_string(size_) + ", and " + std::to_string(count) +
              " bytes at " + std::to_string(offset) + " are needed");
    if (count != 0) read_inside(offset, into, count);
  }

  /// Reports that the content contradicts itself or its format.
  [[noreturn]] void damaged(std::string_view what) const {
    throw WeightsError(
        ErrorMessage("remat.weights.damaged")
            .where("\"" + name_ + "\"")
            .what(what)
            .cause("the file is damaged, or was cut short when it was fetched or copied")
            .cure("Fetch it again or write it anew"));
  }

 protected:
  ByteSource(std::string name, std::uint64_t size) : name_(std::move(name)), size_(size) {}

 private:
  virtual void read_inside(std::uint64_t offset, void* into, std::size_t count) const = 0;

  std::string name_;
  std::uint64_t size_;
};

/// Bytes that somebody else holds in memory, for as long as this lives.
class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string name, std::string_view bytes)
      : ByteSource(std::move(name), bytes.size()), bytes_(bytes) {}

 private:
  void read_inside(std::uint64_t offset, void* into, std::size_t count) const override {
    std::memcpy(into, bytes_.data() + offset, count);
  }

  std::string_view bytes_;
};

/// A file that stays open, so that replacing it by another one while it is read does no harm.
class FileSource final : public ByteSource {
 public:
  /// @throws WeightsError  if it is no file or may not be read
  explicit FileSource(const std::filesystem::path& path)
      : ByteSource(path.string(), size_of(path)), stream_(path, std::ios::binary) {
    if (!stream_) refuse(name(), "the file cannot be opened for reading", "Check its permissions");
  }

 private:
  [[noreturn]] static void refuse(const std::string& path, std::string_view what,
                                  std::string_view cure) {
    throw WeightsError(
        ErrorMessage("remat.weights.file").where("\"" + path + "\"").what(what).cure(cure));
  }

  static std::uint64_t size_of(const std::filesystem::path& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status))
      refuse(path.string(), "there is no such file", "Check the path");
    if (!std::filesystem::is_regular_file(status))
      refuse(path.string(), "a file was expected, and this is a directory or a device",
             "Give the path of the file itself");
    const std::uintmax_t size = std::filesystem::file_size(path, error);
    if (error) refuse(path.string(), error.message(), "Check the path");
    return size;
  }

  void read_inside(std::uint64_t offset, void* into, std::size_t count) const override {
    stream_.clear();
    stream_.seekg(static_cast<std::streamoff>(offset));
    stream_.read(static_cast<char*>(into), static_cast<std::streamsize>(count));
    if (!stream_)
      refuse(name(),
             std::to_string(count) + " bytes at " + std::to_string(offset) +
                 " cannot be read although the file had them when it was opened",
             "Check the disk, and that nothing else writes the file");
  }

  mutable std::ifstream stream_;
};

}  // namespace remat::detail
