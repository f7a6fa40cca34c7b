// SPDX-License-Identifier: MIT
#include "remat/units.hpp"

#include <sstream>

#include <doctest/doctest.h>

using namespace remat::literals;

TEST_CASE("bytes add, subtract, scale and compare") {
  CHECK(1_KiB + 24_B == remat::Bytes{1048});
  CHECK(2_MiB - 3_MiB == -1_MiB);
  CHECK(3 * 1_KiB == 3_KiB);
  CHECK(1_GiB > 1023_MiB);
}

TEST_CASE("bytes print with the largest unit that leaves at least one") {
  CHECK(to_string(0_B) == "0 B");
  CHECK(to_string(1023_B) == "1023 B");
  CHECK(to_string(1536_B) == "1.5 KiB");
  CHECK(to_string(-2_MiB) == "-2.0 MiB");
  CHECK(to_string(3_GiB) == "3.0 GiB");
  std::ostringstream stream;
  stream << 1_MiB;
  CHECK(stream.str() == "1.0 MiB");
}

TEST_CASE("milliseconds add and print") {
  CHECK(to_string(remat::Milliseconds{1} + remat::Milliseconds{0.25}) == "1.2 ms");
}
