// SPDX-License-Identifier: MIT
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>

#include "remat/weights/safetensors.hpp"
#include "train/user_error.hpp"

namespace train {

/// Waits until a file or a folder is on the disk.
inline void sync_to_disk(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_synced = file >= 0 && ::fsync(file) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  if (!is_synced)
    throw std::runtime_error(path.string() +
                             ": cannot be brought to the disk: " + std::strerror(error));
}

/// Writes tensors so that at any moment, the power going off included, the name stands for the
/// whole old file or the whole new one.
inline void save_durably(const remat::StateDict& tensors, const std::filesystem::path& path,
                         const std::map<std::string, std::string>& metadata) {
  std::filesystem::path unfinished = path;
  unfinished += ".new";
  remat::save_safetensors(tensors, unfinished, metadata);
  sync_to_disk(unfinished);
  std::filesystem::rename(unfinished, path);
  sync_to_disk(path.parent_path());
}

/// The folder of a run, held by one process at a time.
class OutputFolder {
 public:
  /// Makes the folder, and clears away what an earlier process left unfinished.
  ///
  /// @throws UserError  if it cannot be made, or another process writes there
  explicit OutputFolder(const std::filesystem::path& path) {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (!std::filesystem::is_directory(path))
      throw UserError("output.folder is " + path.string() + ", which cannot be made: " +
                      (error ? error.message() : "a file has that name"));
    path_ = std::filesystem::canonical(path);
    lock_ = ::open((path_ / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock_ < 0)
      throw UserError("output.folder is " + path.string() +
                      ", where no file can be made: " + std::strerror(errno));
    // The lock goes with the process, however that ends.
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      ::close(lock_);
      throw UserError("output.folder is " + path.string() +
                      ", where another process is training: wait for it, or give another folder");
    }
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      if (is_unfinished(entry.path())) std::filesystem::remove(entry.path());
  }
  ~OutputFolder() { ::close(lock_); }
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  std::filesystem::path checkpoint() const { return path_ / "checkpoint.safetensors"; }
  std::filesystem::path best() const { return path_ / "best.safetensors"; }
  std::filesystem::path last() const { return path_ / "last.safetensors"; }
  std::filesystem::path metrics() const { return path_ / "metrics.jsonl"; }
  std::filesystem::path config() const { return path_ / "config.yaml"; }

  /// Removes an earlier run.
  void clear() const {
    for (const auto& file : {checkpoint(), best(), last(), metrics(), config()})
      std::filesystem::remove(file);
  }

 private:
  /// Names that `save_durably` and `remat::save_safetensors` give while they write.
  static bool is_unfinished(const std::filesystem::path& file) {
    const std::string name = file.filename().string();
    return name.ends_with(".safetensors.new") ||
           (name.find(".safetensors.new.") != std::string::npos && name.ends_with(".part"));
  }

  std::filesystem::path path_;
  int lock_ = -1;
};

}  // namespace train
