// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

// Each of these fails to count, and so fails the run, when CHECK is LibTorch's: see doctest.hpp.
TEST_CASE("a failing CHECK is counted and does not end the process" * doctest::should_fail()) {
  const bool truth = false;

  CHECK(truth);
}

TEST_CASE("a failing CHECK_EQ is counted and does not end the process" * doctest::should_fail()) {
  const int one = 1;

  CHECK_EQ(one, 2);
}
