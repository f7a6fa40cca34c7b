// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/rounded_width.hpp"

namespace rounded_width_test {

TEST_CASE("a scaled width becomes the nearest multiple of 8, and 8 at least") {
  CHECK(remat::blocks::rounded_width(32) == 32);
  CHECK(remat::blocks::rounded_width(35.2) == 32);
  CHECK(remat::blocks::rounded_width(36) == 40);  // halves go up
  CHECK(remat::blocks::rounded_width(352.0) == 352);
  CHECK(remat::blocks::rounded_width(1) == 8);
}

TEST_CASE("a width that rounding down would cut by over a tenth is rounded up") {
  CHECK(remat::blocks::rounded_width(18) == 24);  // 16 is less than 16.2
  CHECK(remat::blocks::rounded_width(26.4) == 24);
  CHECK(remat::blocks::rounded_width(19.0, 16) == 32);
}

}  // namespace rounded_width_test
