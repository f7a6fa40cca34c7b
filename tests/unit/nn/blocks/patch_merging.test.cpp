// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/patch_merging.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace patch_merging_test {

TEST_CASE("merging normalises and reduces the four tokens of a square, column by column") {
  torch::manual_seed(0);
  remat::blocks::PatchMerging merging(3, /*norm_eps=*/1e-5);
  const auto map = torch::randn({2, 4, 6, 3});

  const auto y = merging->forward(map);

  CHECK(y.sizes() == torch::IntArrayRef({2, 2, 3, 6}));
  const auto square = torch::cat({map[1][2][4], map[1][3][4], map[1][2][5], map[1][3][5]});
  const auto expected = merging->reduction->forward(merging->norm->forward(square));
  CHECK(torch::allclose(y[1][1][2], expected, 1e-5, 1e-6));
  CHECK(merging->named_parameters().keys() ==
        std::vector<std::string>{"reduction.weight", "norm.weight", "norm.bias"});
}

// microsoft/Swin-Transformer#332, #202, #96: maps of odd height or width stopped with an error.
TEST_CASE("merging pads a map of odd height or width with zeros at the bottom and on the right") {
  torch::manual_seed(0);
  remat::blocks::PatchMerging merging(4, 1e-5);
  for (const auto& [height, width] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{7, 6}, {6, 7}, {7, 7}, {1, 1}}) {
    CAPTURE(height);
    CAPTURE(width);
    const auto map = torch::randn({1, height, width, 4});
    const auto padded = torch::zeros({1, height + height % 2, width + width % 2, 4});
    padded.slice(1, 0, height).slice(2, 0, width).copy_(map);

    CHECK(torch::equal(merging->forward(map), merging->forward(padded)));
  }
}

}  // namespace patch_merging_test
