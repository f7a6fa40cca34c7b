// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>

#include "train/durable_file.hpp"

namespace train {

/// Writes one JSON object a line.
class Metrics {
 public:
  /// @param keep  how many bytes of an earlier process stay; what it wrote after its last
  ///              checkpoint will be written again
  Metrics(const std::filesystem::path& path, std::uint64_t keep) : path_(path) {
    if (std::filesystem::exists(path) && std::filesystem::file_size(path) > keep)
      std::filesystem::resize_file(path, keep);
    file_.open(path, std::ios::app);
    check();
  }

  void write(const nlohmann::ordered_json& line) {
    file_ << line.dump() << '\n' << std::flush;
    check();
  }

  /// Brings the lines to the disk; returns how many bytes they have.
  std::uint64_t sync() {
    sync_to_disk(path_);
    return std::filesystem::file_size(path_);
  }

 private:
  void check() const {
    if (!file_) throw std::runtime_error(path_.string() + ": cannot be written");
  }

  std::filesystem::path path_;
  std::ofstream file_;
};

}  // namespace train
