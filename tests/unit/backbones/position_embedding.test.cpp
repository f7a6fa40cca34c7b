// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones/position_embedding.hpp"

#include <cstdint>
#include <string>

/// huggingface/pytorch-image-models#750, #908, pytorch/vision#5025.
namespace position_embedding_test {
namespace {

std::string error_of(const torch::Tensor& embedding, remat::TokenGrid from, remat::TokenGrid to) {
  try {
    remat::resize_position_embedding(embedding, from, to);
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("position embeddings of the same grid are returned untouched") {
  const auto embedding = torch::randn({1, 197, 8}).to(torch::kHalf);

  CHECK(remat::resize_position_embedding(embedding, {14, 14}, {14, 14}).is_same(embedding));
}

TEST_CASE("position embeddings resized from 14x14 to 16x12 have 193 tokens, the first untouched") {
  torch::manual_seed(0);
  const auto embedding = torch::randn({1, 197, 8});

  const auto resized = remat::resize_position_embedding(embedding, {14, 14}, {16, 12});

  CHECK(resized.sizes() == torch::IntArrayRef({1, 193, 8}));
  CHECK(torch::equal(resized.slice(1, 0, 1), embedding.slice(1, 0, 1)));
}

TEST_CASE("a constant position embedding stays constant") {
  const auto embedding = torch::full({1, 197, 3}, 0.7);

  const auto resized = remat::resize_position_embedding(embedding, {14, 14}, {9, 31});

  CHECK((resized - 0.7).abs().max().item<double>() < 1e-6);
}

TEST_CASE("the corners of a resized position embedding stay where they are") {
  torch::manual_seed(0);
  const auto embedding = torch::randn({1, 1 + 3 * 5, 4}, torch::kFloat64);

  const auto resized = remat::resize_position_embedding(embedding, {3, 5}, {7, 4});

  const auto before = embedding.slice(1, 1).view({3, 5, 4});
  const auto after = resized.slice(1, 1).view({7, 4, 4});
  for (const std::int64_t row : {0, -1})
    for (const std::int64_t column : {0, -1})
      CHECK(torch::allclose(after[row][column], before[row][column], 1e-12, 1e-12));
}

TEST_CASE("position embeddings grow to the numbers that torchvision's function gives") {
  // interpolate_embeddings(image_size=4, patch_size=1) of the embedding 0, 1, 4, 9, 16 at width 1.
  const auto embedding = torch::tensor({0.0, 1.0, 4.0, 9.0, 16.0}, torch::kFloat64).view({1, 5, 1});
  const auto expected = torch::tensor(
      {0.0, 1.0, 1.944444444444445, 3.0555555555555554, 4.0, 3.51851851851852, 4.85939643347051,
       6.436899862825791, 7.77777777777778, 6.481481481481481, 8.288751714677643, 10.41495198902606,
       12.222222222222221, 9.0, 11.203703703703706, 13.796296296296294, 16.0},
      torch::kFloat64);

  const auto resized = remat::resize_position_embedding(embedding, {2, 2}, {4, 4});

  CHECK(torch::allclose(resized.flatten(), expected, 1e-12, 1e-12));
}

TEST_CASE("position embeddings keep their type, and half precision is interpolated in single") {
  torch::manual_seed(0);
  const auto embedding = torch::randn({1, 10, 2}).to(torch::kHalf);

  const auto resized = remat::resize_position_embedding(embedding, {3, 3}, {5, 5});

  CHECK(resized.dtype() == torch::kHalf);
  CHECK(torch::equal(resized,
                     remat::resize_position_embedding(embedding.to(torch::kFloat), {3, 3}, {5, 5})
                         .to(torch::kHalf)));
}

TEST_CASE("a position embedding that is none of the grid is refused with shape and grids") {
  const std::string message = error_of(torch::zeros({1, 197, 8}), {14, 13}, {16, 16});

  CHECK(message.find("[remat.position_embedding.shape]") == 0);
  for (const char* part : {"[1, 197, 8]", "14x13", "16x16"}) {
    CAPTURE(part);
    CHECK(message.find(part) != std::string::npos);
  }
  CHECK(error_of(torch::Tensor(), {2, 2}, {3, 3}).find("undefined") != std::string::npos);
  CHECK(error_of(torch::zeros({1, 5, 8}), {2, 2}, {0, 3}).find("0x3") != std::string::npos);
}

}  // namespace position_embedding_test
