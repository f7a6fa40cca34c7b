// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/maxvit_layer.hpp"

#include <memory>

namespace maxvit_layer_test {
namespace {

using namespace remat::blocks;

MaxViTLayerOptions narrow(std::int64_t in, std::int64_t out, std::int64_t stride) {
  return {.in = in, .out = out, .stride = stride, .head_width = 4, .partition_size = 2};
}

}  // namespace

TEST_CASE("MaxViT's inverted residual squeezes to a quarter of its result's width") {
  const MaxViTMBConv block(narrow(8, 16, 2));
  const auto parameters = block->named_parameters();

  CHECK(parameters["layers.squeeze_excitation.fc1.weight"].sizes() ==
        torch::IntArrayRef{4, 64, 1, 1});
  CHECK(parameters["layers.conv_a.0.weight"].sizes() == torch::IntArrayRef{64, 8, 1, 1});
  CHECK(parameters["layers.conv_b.0.weight"].sizes() == torch::IntArrayRef{64, 1, 3, 3});
  CHECK(parameters.contains("layers.conv_c.bias"));
  CHECK_FALSE(parameters.contains("layers.conv_a.0.bias"));
}

TEST_CASE("MaxViT's shortcut is projected where the shape changes, and pooled where it shrinks") {
  CHECK(MaxViTMBConv(narrow(8, 8, 2))->named_parameters().contains("proj.1.weight"));
  CHECK(MaxViTMBConv(narrow(8, 16, 1))->named_parameters().contains("proj.0.weight"));
  CHECK(MaxViTMBConv(narrow(8, 8, 1))->proj.is_empty());
}

TEST_CASE("MaxViT's inverted residual is its shortcut where stochastic depth drops the branch") {
  torch::manual_seed(0);
  MaxViTLayerOptions options = narrow(8, 8, 1);
  options.drop_rate = 1;
  MaxViTMBConv block(options);
  const torch::Tensor x = torch::randn({2, 8, 4, 4});

  CHECK(torch::equal(block->forward(x), x));
  block->eval();
  CHECK_FALSE(torch::equal(block->forward(x), x));
}

TEST_CASE("a MaxViT layer of stride 2 halves the map, rounding up") {
  MaxViTLayer layer(narrow(4, 8, 2));

  CHECK(layer->forward(torch::randn({2, 4, 8, 15})).sizes() == torch::IntArrayRef{2, 8, 4, 8});
  CHECK(layer->forward(torch::randn({2, 4, 7, 8})).sizes() == torch::IntArrayRef{2, 8, 4, 4});
}

TEST_CASE("a clone of a MaxViT layer computes the same with its own parameters") {
  torch::manual_seed(0);
  MaxViTLayer layer(narrow(4, 8, 2));
  layer->eval();

  const auto copy = std::dynamic_pointer_cast<MaxViTLayerImpl>(layer->clone());

  REQUIRE(copy);
  copy->eval();
  const torch::Tensor x = torch::randn({1, 4, 8, 8});
  CHECK(torch::equal(copy->forward(x), layer->forward(x)));
  CHECK(copy->parameters()[0].data_ptr() != layer->parameters()[0].data_ptr());
}

}  // namespace maxvit_layer_test
