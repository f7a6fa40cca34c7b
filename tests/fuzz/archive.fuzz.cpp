// SPDX-License-Identifier: MIT
//
// Feeds bytes to the readers of whole files, and reads every tensor that they announce: only
// WeightsError may come out. LibTorch itself is not instrumented.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/weights/open.hpp"
#include "remat/weights/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace remat::detail;
  try {
    const auto reader = open_source(std::make_shared<MemorySource>(
        "fuzz", std::string_view(reinterpret_cast<const char*>(data), size)));
    for (std::size_t i = 0; i < reader->entries().size(); ++i) {
      const at::Tensor tensor = reader->read(i);
      // Touches the first and the last byte that the tensor claims.
      if (tensor.numel() != 0 && !tensor.is_conj() && !tensor.is_neg()) {
        const auto* bytes = static_cast<const volatile char*>(tensor.data_ptr());
        std::int64_t last = 0;
        for (std::int64_t d = 0; d < tensor.dim(); ++d)
          last += (tensor.size(d) - 1) * tensor.stride(d);
        static_cast<void>(bytes[0]);
        static_cast<void>(bytes[last * static_cast<std::int64_t>(tensor.itemsize())]);
      }
    }
  } catch (const remat::WeightsError&) {
  }
  return 0;
}
