// SPDX-License-Identifier: MIT
#pragma once

#include "tests/support/doctest.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define REMAT_TEST_LEAKS_ARE_COUNTED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define REMAT_TEST_LEAKS_ARE_COUNTED
#endif
#endif
#ifdef REMAT_TEST_LEAKS_ARE_COUNTED
#include <sanitizer/lsan_interface.h>
#endif

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "remat/errors.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/open.hpp"

namespace weight_files {

/// A file that tests/data/weights/make_files.py wrote.
inline std::filesystem::path data_file(const std::string& name) {
  return std::filesystem::path(REMAT_TEST_DATA) / "weights" / name;
}

/// start, start + 1/4, ...: what make_files.py fills tensors with.
inline torch::Tensor ramp(double start, std::vector<std::int64_t> shape) {
  const std::int64_t count = torch::empty(shape).numel();
  return (start + torch::arange(count, torch::kFloat64) / 4).reshape(shape).to(torch::kFloat32);
}

/// The module whose state dict lies in most of the files.
inline torch::nn::Sequential tiny_module() {
  return torch::nn::Sequential(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
}

/// Whether a state dict is exactly the one of make_files.py's `tiny_module`.
inline bool is_tiny(const remat::StateDict& state_dict) {
  const std::vector<std::string> names{"0.weight",
                                       "0.bias",
                                       "1.weight",
                                       "1.bias",
                                       "1.running_mean",
                                       "1.running_var",
                                       "1.num_batches_tracked"};
  if (state_dict.names() != names) return false;
  for (std::size_t i = 0; i + 1 < names.size(); ++i) {
    const torch::Tensor& tensor = state_dict.at(names[i]);
    if (!torch::equal(tensor, ramp(double(i), tensor.sizes().vec()))) return false;
  }
  return torch::equal(state_dict.at(names.back()), torch::tensor(7, torch::kInt64));
}

/// The text of the WeightsError that `call` throws, with the folder of the files cut out.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const remat::WeightsError& error) {
    std::string text = error.what();
    const std::string folder = data_file("").string();
    if (const auto at = text.find(folder); at != std::string::npos) text.erase(at, folder.size());
    return text;
  }
  return "nothing was thrown";
}

inline std::string error_of_reading(const std::string& name) {
  return error_of([&] { remat::read_state_dict(data_file(name)); });
}

/// Opens bytes as if they were a file called "bytes".
inline std::unique_ptr<remat::StateDictReader> open_bytes(std::string_view bytes) {
  return remat::detail::open_source(std::make_shared<remat::detail::MemorySource>("bytes", bytes));
}

inline std::string error_of_bytes(std::string_view bytes) {
  return error_of([&] {
    const auto reader = open_bytes(bytes);
    for (std::size_t i = 0; i < reader->entries().size(); ++i) reader->read(i);
  });
}

inline std::string contents_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// LibTorch's zip reader forgets its directory when its constructor throws: while this lives, leaks
/// are not counted.
class LibTorchMayLeak {
 public:
#ifdef REMAT_TEST_LEAKS_ARE_COUNTED
  LibTorchMayLeak() { __lsan_disable(); }
  ~LibTorchMayLeak() { __lsan_enable(); }
#else
  LibTorchMayLeak() = default;
  ~LibTorchMayLeak() {}
#endif
  LibTorchMayLeak(const LibTorchMayLeak&) = delete;
  LibTorchMayLeak& operator=(const LibTorchMayLeak&) = delete;
};

/// A folder that is empty at first and gone at the end.
class Folder {
 public:
  Folder() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("remat_weights_" + std::to_string(torch::randint(1 << 30, {1}).item<int>()) + "_" +
             std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::size_t file_count() const {
    return std::size_t(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

}  // namespace weight_files
