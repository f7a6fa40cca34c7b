// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace remat::detail {

/// Fetches contents from a zip file through LibTorch's own reader, one at a time.
class Archive {
 public:
  /// Fills `count` bytes at `into` from `offset`, or throws.
  using ReadBytes = std::function<void(std::uint64_t offset, void* into, std::size_t count)>;

  Archive(std::uint64_t size, ReadBytes read)
      : adapter_(std::make_shared<Adapter>(size, std::move(read))) {
    reader_ = guarded([&] { return std::make_unique<Reader>(adapter_); });
  }

  /// Returns the content of one entry, as bytes aligned as LibTorch aligns those of tensors.
  ///
  /// @param name  without the folder around all entries
  /// @throws std::runtime_error  if LibTorch's reader cannot make sense of the file
  c10::Storage fetch(const std::string& name) {
    auto [bytes, size] = guarded([&] { return reader_->getRecord(name); });
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(bytes),
                        c10::GetCPUAllocator(), /*resizable=*/false);
  }

 private:
  using Reader = caffe2::serialize::PyTorchStreamReader;

  /// C code calls this: an exception waits here until it is past.
  class Adapter final : public caffe2::serialize::ReadAdapterInterface {
   public:
    Adapter(std::uint64_t size, ReadBytes read) : size_(size), read_(std::move(read)) {}

    std::size_t size() const override { return static_cast<std::size_t>(size_); }

    std::size_t read(std::uint64_t offset, void* into, std::size_t count,
                     const char*) const override {
      try {
        read_(offset, into, count);
        return count;
      } catch (...) {
        failure_ = std::current_exception();
        return 0;
      }
    }

    void rethrow_failure() const {
      if (auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
    }

   private:
    std::uint64_t size_;
    ReadBytes read_;
    mutable std::exception_ptr failure_;
  };

  /// Lets exceptions of `read` through, and turns LibTorch's into their first line.
  template <class Call>
  std::invoke_result_t<Call> guarded(Call call) {
    try {
      return call();
    } catch (const c10::Error& error) {
      adapter_->rethrow_failure();
      const std::string text = error.what_without_backtrace();
      throw std::runtime_error(text.substr(0, text.find('\n')));
    }
  }

  std::shared_ptr<Adapter> adapter_;
  std::unique_ptr<Reader> reader_;
};

}  // namespace remat::detail
