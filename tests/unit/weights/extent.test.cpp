// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include <vector>

#include "remat/weights/extent.hpp"

namespace extent_tests {

using remat::detail::checked_product;
using remat::detail::checked_sum;
using remat::detail::element_count;
using remat::detail::end_of_elements;
using remat::detail::kMostCounted;
using Sizes = std::vector<std::int64_t>;

TEST_CASE("products and sums are counts or nothing") {
  CHECK(checked_product(0, ~std::uint64_t{0}) == 0);
  CHECK(checked_product(~std::uint64_t{0}, 0) == 0);
  CHECK(checked_product(kMostCounted, 1) == kMostCounted);
  CHECK(checked_product(kMostCounted / 2 + 1, 2) == std::nullopt);
  CHECK(checked_product(std::uint64_t{1} << 32, std::uint64_t{1} << 32) == std::nullopt);
  CHECK(checked_sum(kMostCounted, 0) == kMostCounted);
  CHECK(checked_sum(kMostCounted, 1) == std::nullopt);
  CHECK(checked_sum(1, ~std::uint64_t{0}) == std::nullopt);
  CHECK(checked_sum(~std::uint64_t{0}, 1) == std::nullopt);
}

TEST_CASE("elements are counted without overflow, beside sizes of 0 as well") {
  CHECK(element_count(Sizes{}) == 1);
  CHECK(element_count(Sizes{2, 3, 4}) == 24);
  CHECK(element_count(Sizes{2, 0, 4}) == 0);
  CHECK(element_count(Sizes{-1}) == std::nullopt);
  CHECK(element_count(Sizes{0, INT64_MAX, INT64_MAX}) == std::nullopt);
  CHECK(element_count(Sizes{INT64_MAX}) == std::nullopt);
}

TEST_CASE("the end of a tensor is after its last element, whatever its strides") {
  CHECK(end_of_elements(0, Sizes{}, Sizes{}) == 1);
  CHECK(end_of_elements(5, Sizes{2, 3}, Sizes{3, 1}) == 11);
  CHECK(end_of_elements(0, Sizes{2, 3}, Sizes{1, 2}) == 6);
  CHECK(end_of_elements(0, Sizes{100, 2}, Sizes{0, 1}) == 2);
  CHECK(end_of_elements(0, Sizes{1, 2}, Sizes{INT64_MAX, 1}) == 2);
  CHECK(end_of_elements(0, Sizes{2}, Sizes{INT64_MAX}) == std::nullopt);
  CHECK(end_of_elements(kMostCounted, Sizes{}, Sizes{}) == std::nullopt);
}

}  // namespace extent_tests
