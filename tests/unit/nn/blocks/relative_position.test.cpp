// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/relative_position.hpp"

#include <cstdint>

namespace relative_position_test {

TEST_CASE("each pair of tokens at one distance shares a row of the table, and no other pair does") {
  const remat::blocks::WindowSize window = {3, 4};
  const auto index = remat::blocks::relative_position_index(window);

  CHECK(index.sizes() == torch::IntArrayRef({12, 12}));
  CHECK(index.dtype() == torch::kLong);
  CHECK(window.distance_count() == 35);
  for (std::int64_t from = 0; from < window.area(); ++from)
    for (std::int64_t to = 0; to < window.area(); ++to) {
      const std::int64_t down = from / 4 - to / 4, right = from % 4 - to % 4;
      CHECK(index[from][to].item<std::int64_t>() == (down + 2) * 7 + (right + 3));
    }
}

TEST_CASE("a bias is the table's row for the distance, one for each head") {
  const remat::blocks::WindowSize window = {2, 2};
  const auto index = remat::blocks::relative_position_index(window);
  const auto table = torch::rand({9, 3});

  const auto bias = remat::blocks::relative_position_bias(table, index.flatten(), window);

  CHECK(bias.sizes() == torch::IntArrayRef({1, 3, 4, 4}));
  CHECK(bias.is_contiguous());
  for (std::int64_t head = 0; head < 3; ++head)
    for (std::int64_t from = 0; from < 4; ++from)
      for (std::int64_t to = 0; to < 4; ++to)
        CHECK(torch::equal(bias[0][head][from][to],
                           table[index[from][to].item<std::int64_t>()][head]));
}

TEST_CASE("biases are found by an index that a conversion of the module has rounded") {
  // LibTorch's Module::to(dtype) converts buffers of integers, too.
  const remat::blocks::WindowSize window = {24, 24};
  const auto index = remat::blocks::relative_position_index(window);
  const auto table = torch::rand({window.distance_count(), 1});
  const auto rounded = index.to(torch::kBFloat16);
  REQUIRE_FALSE(torch::equal(rounded.to(torch::kLong), index));

  CHECK(torch::equal(remat::blocks::relative_position_bias(table, rounded, window),
                     remat::blocks::relative_position_bias(table, index, window)));
}

}  // namespace relative_position_test
