// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <system_error>

#include "remat/errors.hpp"

namespace remat::detail {

[[noreturn]] inline void throw_unwritable(const std::filesystem::path& path, std::string_view what,
                                          std::string_view cure) {
  throw WeightsError(
      ErrorMessage("remat.weights.write").where("\"" + path.string() + "\"").what(what).cure(cure));
}

/// A file that gets its name when it is complete, and is gone if it never is.
class NewFile {
 public:
  /// @throws WeightsError  if it cannot be made beside its future name
  explicit NewFile(const std::filesystem::path& path) : path_(path), part_(path) {
    part_ += "." + std::to_string(std::random_device{}()) + ".part";
    stream_.open(part_, std::ios::binary);
    if (!stream_)
      throw_unwritable(path, "no file can be made there",
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

  /// @throws WeightsError  if not all bytes could be written, or the name cannot be taken
  void complete() {
    stream_.close();
    if (!stream_)
      throw_unwritable(path_, "not all bytes could be written", "Check the space on the disk");
    std::error_code error;
    std::filesystem::rename(part_, path_, error);
    if (error)
      throw_unwritable(path_, "the file cannot get its name: " + error.message(),
                       "Check what has that name now");
    is_complete_ = true;
  }

 private:
  std::filesystem::path path_, part_;
  std::ofstream stream_;
  bool is_complete_ = false;
};

}  // namespace remat::detail
