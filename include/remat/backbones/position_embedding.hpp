// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"

namespace remat {

/// How many tokens an image is cut into, in a column and in a row.
struct TokenGrid {
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  /// Returns how many there are.
  std::int64_t area() const { return rows * columns; }

  friend bool operator==(const TokenGrid&, const TokenGrid&) = default;
};

/// Makes position embeddings of one grid of patches fit another, by bicubic interpolation whose
/// corners stay where they are.
///
/// The class token's embedding, which comes first, is not touched; nor is anything if the grids are
/// equal.
///
/// @param embedding  (1, 1 + from.area(), width)
/// @return           (1, 1 + to.area(), width), of the same type
/// @throws ArgumentError  if the embedding is not one of the grid `from`, or a grid is empty
/// @par Source  torchvision's `interpolate_embeddings`, which knows square grids only
inline torch::Tensor resize_position_embedding(const torch::Tensor& embedding, TokenGrid from,
                                               TokenGrid to) {
  const auto text = [](TokenGrid grid) {
    return std::to_string(grid.rows) + "x" + std::to_string(grid.columns);
  };
  const bool is_right = embedding.defined() && embedding.dim() == 3 && embedding.size(0) == 1 &&
                        from.rows > 0 && from.columns > 0 && to.rows > 0 && to.columns > 0 &&
                        embedding.size(1) == 1 + from.area();
  require(is_right, [&] {
    return ErrorMessage("remat.position_embedding.shape")
        .where("remat::resize_position_embedding")
        .what("the embedding is " +
              (embedding.defined()
                   ? detail::describe(detail::Geometry::of(embedding), embedding.device())
                   : "undefined") +
              " and is to go from a grid of " + text(from) + " to one of " + text(to) +
              ", an embedding (1, 1 + rows * columns, width) of the first grid was expected");
  });
  if (from == to) return embedding;
  const std::int64_t width = embedding.size(2);
  const torch::Tensor map =
      embedding.slice(1, 1).transpose(1, 2).reshape({1, width, from.rows, from.columns});
  // Some devices interpolate no half precision, and where they do they round each step.
  const torch::Tensor precise = map.scalar_type() == at::kDouble ? map : map.to(at::kFloat);
  const torch::Tensor resized =
      at::upsample_bicubic2d(precise, {to.rows, to.columns}, /*align_corners=*/true)
          .to(embedding.scalar_type())
          .flatten(2)
          .transpose(1, 2);  // (1, to.area(), width)
  return at::cat({embedding.slice(1, 0, 1), resized}, 1);
}

}  // namespace remat
