// SPDX-License-Identifier: MIT
//
// Feeds bytes to the safetensors reader, without LibTorch: only WeightsError may come out, and what
// is accepted lies inside the file.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/safetensors_header.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace remat::detail;
  const MemorySource source("fuzz", {reinterpret_cast<const char*>(data), size});
  try {
    const SafetensorsContents contents = read_safetensors_header(source);
    for (const SafetensorsEntry& entry : contents.entries)
      if (entry.begin > entry.end || entry.end > size - contents.data_begin) std::abort();
  } catch (const remat::WeightsError&) {
  }
  return 0;
}
