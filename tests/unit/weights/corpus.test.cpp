// SPDX-License-Identifier: MIT
//
// Feeds the readers all that the fuzzers of tests/fuzz found worth keeping: whatever it is, nothing
// but WeightsError comes out.
#include "tests/unit/weights/weight_files.hpp"

#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/pickle.hpp"
#include "remat/weights/pickled_state_dict.hpp"
#include "remat/weights/safetensors.hpp"

namespace corpus_tests {

using namespace weight_files;

/// A corpus is one file: each input after its length in 32 bits, least significant byte first.
std::vector<std::string> inputs_of(const std::string& target) {
  const std::string packed =
      contents_of(std::filesystem::path(REMAT_TEST_DATA) / "fuzz" / (target + ".corpus"));
  std::vector<std::string> inputs;
  for (std::size_t at = 0; at + 4 <= packed.size();) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < 4; ++i)
      size |= std::size_t{static_cast<unsigned char>(packed[at + i])} << (8 * i);
    inputs.push_back(packed.substr(at + 4, size));
    at += 4 + size;
  }
  return inputs;
}

/// Reads as many pickles as there are, and looks for a state dict in each.
void read_pickles(const std::string& bytes) {
  const remat::detail::MemorySource source("bytes", bytes);
  remat::detail::PickleValues values(source);
  remat::detail::ByteCursor cursor(source);
  while (cursor.remaining() != 0) {
    const auto root = remat::detail::Pickle::read(cursor, values);
    error_of([&] { remat::detail::PickledStateDict::find(values, root); });
  }
}

TEST_CASE("pickles that a fuzzer found are read or refused") {
  const auto inputs = inputs_of("pickle");

  CHECK(inputs.size() > 50);
  for (const std::string& bytes : inputs) CHECK_NOTHROW(error_of([&] { read_pickles(bytes); }));
}

TEST_CASE("headers of safetensors that a fuzzer found are read or refused") {
  const auto inputs = inputs_of("safetensors");

  CHECK(inputs.size() > 50);
  for (const std::string& bytes : inputs) {
    const remat::detail::MemorySource source("bytes", bytes);
    CHECK_NOTHROW(error_of([&] { remat::detail::read_safetensors_header(source); }));
  }
}

TEST_CASE("whole files that a fuzzer found are read or refused") {
  const auto inputs = inputs_of("archive");
  const LibTorchMayLeak in_constructors;

  CHECK(inputs.size() > 50);
  for (const std::string& bytes : inputs) CHECK_NOTHROW(error_of_bytes(bytes));
}

}  // namespace corpus_tests
