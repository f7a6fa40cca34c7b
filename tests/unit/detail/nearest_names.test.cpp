// SPDX-License-Identifier: MIT
#include "remat/detail/nearest_names.hpp"

#include "tests/support/doctest.hpp"

TEST_CASE("the nearest names come first, and no more than asked for") {
  using Names = std::vector<std::string>;

  CHECK(remat::detail::nearest_names("resnet5", {"vgg", "resnet50", "resnet18"}, 2) ==
        Names{"resnet50", "resnet18"});
  CHECK(remat::detail::nearest_names("x", {}, 2).empty());
  CHECK(remat::detail::edit_distance("kitten", "sitting") == 3);
  CHECK(remat::detail::edit_distance("", "abc") == 3);
  CHECK(remat::detail::quoted_list({"a", "b"}) == "\"a\", \"b\"");
}
