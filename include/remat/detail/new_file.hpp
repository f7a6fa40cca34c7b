// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <system_error>

namespace remat::detail {

/// A file that gets its name when it is complete, and is gone if it never is.
class NewFile {
 public:
  /// Throws the error of whoever writes the file: what went wrong, and what to do.
  using Fail = void (*)(const std::filesystem::path& path, std::string_view what,
                        std::string_view cure);

  /// Calls `fail` if the file cannot be made beside its future name.
  NewFile(const std::filesystem::path& path, Fail fail) : path_(path), part_(path), fail_(fail) {
    part_ += "." + std::to_string(std::random_device{}()) + ".part";
    stream_.open(part_, std::ios::binary);
    if (!stream_)
      fail_(path, "no file can be made there",
            "Check that the folder exists and that files may be made in it");
  }

  ~NewFile() {
    if (is_complete_) return;
    stream_.close();
    std::error_code ignored;
    std::filesystem::remove(part_, ignored);
  }

  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* bytes, std::size_t count) {
    stream_.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  }

  /// Calls `fail` if not all bytes could be written, or the name cannot be taken.
  void complete() {
    stream_.close();
    if (!stream_) fail_(path_, "not all bytes could be written", "Check the space on the disk");
    std::error_code error;
    std::filesystem::rename(part_, path_, error);
    if (error)
      fail_(path_, "the file cannot get its name: " + error.message(),
            "Check what has that name now");
    is_complete_ = true;
  }

 private:
  std::filesystem::path path_, part_;
  Fail fail_;
  std::ofstream stream_;
  bool is_complete_ = false;
};

}  // namespace remat::detail
