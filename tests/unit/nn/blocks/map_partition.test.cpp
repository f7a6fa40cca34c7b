// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/map_partition.hpp"

#include <vector>

namespace map_partition_test {
namespace {

using namespace remat::blocks;

/// A map that shows at each place its number, row by row.
torch::Tensor numbered(std::int64_t height, std::int64_t width) {
  return torch::arange(height * width).view({1, 1, height, width});
}

std::vector<std::int64_t> group(const torch::Tensor& groups, std::int64_t index) {
  const torch::Tensor members = groups[0][index].flatten().contiguous();
  return {members.data_ptr<std::int64_t>(), members.data_ptr<std::int64_t>() + members.numel()};
}

}  // namespace

TEST_CASE("a window has neighbours") {
  const torch::Tensor windows = partition_windows(numbered(4, 4), 2);

  CHECK(windows.sizes() == torch::IntArrayRef{1, 4, 4, 1});
  CHECK(group(windows, 0) == std::vector<std::int64_t>{0, 1, 4, 5});
  CHECK(group(windows, 1) == std::vector<std::int64_t>{2, 3, 6, 7});
  CHECK(group(windows, 2) == std::vector<std::int64_t>{8, 9, 12, 13});
}

TEST_CASE("a group of the grid has places from all over the map") {
  const torch::Tensor groups = partition_grid(numbered(4, 4), 2);

  CHECK(groups.sizes() == torch::IntArrayRef{1, 4, 4, 1});
  CHECK(group(groups, 0) == std::vector<std::int64_t>{0, 2, 8, 10});
  CHECK(group(groups, 1) == std::vector<std::int64_t>{1, 3, 9, 11});
  CHECK(group(groups, 2) == std::vector<std::int64_t>{4, 6, 12, 14});
}

TEST_CASE("a group has as many places on maps of other sizes, wider than high ones, too") {
  const torch::Tensor groups = partition_grid(numbered(2, 6), 2);

  CHECK(groups.sizes() == torch::IntArrayRef{1, 3, 4, 1});
  CHECK(group(groups, 0) == std::vector<std::int64_t>{0, 3, 6, 9});
  CHECK(group(partition_windows(numbered(2, 6), 2), 1) == std::vector<std::int64_t>{2, 3, 8, 9});
}

TEST_CASE("joining gives the map back") {
  torch::manual_seed(0);
  const torch::Tensor map = torch::randn({2, 3, 6, 9});

  CHECK(torch::equal(join_windows(partition_windows(map, 3), 3, 6, 9), map));
  CHECK(torch::equal(join_grid(partition_grid(map, 3), 3, 6, 9), map));
}

}  // namespace map_partition_test
