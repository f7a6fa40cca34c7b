// SPDX-License-Identifier: MIT
#include "remat/units.hpp"

#include <sstream>
#include <string>

#include "tests/support/doctest.hpp"

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

TEST_CASE("bytes are read as people write them, and as they print") {
  CHECK(remat::parse_bytes("2147483648") == 2_GiB);
  CHECK(remat::parse_bytes("0") == 0_B);
  CHECK(remat::parse_bytes("2GiB") == 2_GiB);
  CHECK(remat::parse_bytes("1.5 GiB") == 1536_MiB);
  CHECK(remat::parse_bytes(".5KiB") == 512_B);
  CHECK(remat::parse_bytes("0.3KiB") == 307_B);  // and a part of a byte
  CHECK(remat::parse_bytes("9007199254740993 B") == remat::Bytes{9007199254740993});
  CHECK(remat::parse_bytes("8589934590.5GiB").has_value());
  for (const remat::Bytes bytes : {0_B, 1_B, 1023_B, 1_KiB, 1536_B, 7_MiB, 3_GiB, 5000_GiB})
    CHECK(remat::parse_bytes(to_string(bytes)).has_value());
  CHECK(remat::parse_bytes(to_string(1536_MiB)) == 1536_MiB);
}

TEST_CASE("what is no number of bytes is none") {
  for (const char* text : {"",
                           " ",
                           "GiB",
                           "2GB",
                           "2gib",
                           "2 K",
                           "2M",
                           "-1",
                           "-2 MiB",
                           "+1",
                           "1e9",
                           "1.5",
                           "1.5B",
                           "010",
                           "0x10",
                           "1_000",
                           "1,5GiB",
                           "1.2.3GiB",
                           ".",
                           ".GiB",
                           "1  GiB",
                           " 1GiB",
                           "1GiB ",
                           "1 ",
                           "inf",
                           "nan",
                           "9223372036854775808",
                           "8589934592GiB",
                           "8589934592.5GiB",
                           "99999999999999999999TiB"}) {
    CAPTURE(text);
    CHECK_FALSE(remat::parse_bytes(text).has_value());
  }
  CHECK_FALSE(remat::parse_bytes(std::string(400, '9') + ".0GiB").has_value());
}

TEST_CASE("milliseconds add and print") {
  CHECK(to_string(remat::Milliseconds{1} + remat::Milliseconds{0.25}) == "1.2 ms");
}
