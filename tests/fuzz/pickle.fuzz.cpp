// SPDX-License-Identifier: MIT
//
// Feeds bytes to the pickle reader, without LibTorch: only WeightsError may come out.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/pickle.hpp"
#include "remat/weights/pickled_state_dict.hpp"

namespace {

void find_state_dict(const remat::detail::PickleValues& values, remat::detail::PickleId root) {
  try {
    for (const auto& [name, tensor] : remat::detail::PickledStateDict::find(values, root))
      static_cast<void>(tensor.byte_count());
  } catch (const remat::WeightsError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace remat::detail;
  const MemorySource source("fuzz", {reinterpret_cast<const char*>(data), size});
  PickleValues values(source);
  ByteCursor cursor(source);
  try {
    // A file from before the zip form is five pickles in a row.
    for (int i = 0; i < 5 && cursor.remaining() != 0; ++i)
      find_state_dict(values, Pickle::read(cursor, values));
  } catch (const remat::WeightsError&) {
  }
  return 0;
}
