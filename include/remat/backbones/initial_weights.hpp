// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <string>
#include <type_traits>

namespace remat {

class Backbone;

/// Whether a backbone begins with published weights; false unless it is made from true.
///
/// The reader of weight files is a fifth of what a program with a network would have to compile.
/// So the wish for weights brings the reader with it, and a program without that wish compiles none
/// of it.
class Pretrained {
 public:
  Pretrained() = default;
  // NOLINTNEXTLINE(*-explicit-*): `{.pretrained = true}`
  Pretrained(bool is_wanted);

  /// Returns whether they are wanted.
  operator bool() const { return load_ != nullptr; }  // NOLINT(*-explicit-*): likewise
  /// Loads the weights if they are wanted.
  void load_into(Backbone& backbone) const {
    if (load_ != nullptr) load_(backbone);
  }

 private:
  void (*load_)(Backbone&) = nullptr;
};

/// The file with whose weights a backbone begins; empty: none. It brings the reader with it, as
/// `Pretrained` does.
class WeightsFile {
 public:
  WeightsFile() = default;
  template <std::convertible_to<std::string> Path>
    requires(!std::same_as<std::remove_cvref_t<Path>, WeightsFile>)
  WeightsFile(Path&& path);  // NOLINT(*-explicit-*): `{.weights = "net.pth"}`

  /// Returns the file's path.
  operator const std::string&() const { return path_; }  // NOLINT(*-explicit-*): likewise
  /// Returns the file's path.
  const std::string& path() const { return path_; }
  /// Returns whether there is no file.
  bool empty() const { return path_.empty(); }
  /// Loads the weights if there is a file.
  void load_into(Backbone& backbone) const {
    if (!empty()) load_(backbone, path_);
  }

 private:
  std::string path_;
  void (*load_)(Backbone&, const std::string&) = nullptr;
};

}  // namespace remat
