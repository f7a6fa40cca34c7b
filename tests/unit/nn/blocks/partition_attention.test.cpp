// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/partition_attention.hpp"

#include <cmath>
#include <memory>
#include <string>
#include <vector>

namespace partition_attention_test {
namespace {

using namespace remat::blocks;

/// Returns which places of the result change when the first place of the input does.
std::vector<std::int64_t> reached_from_first(Partition partition) {
  torch::manual_seed(0);
  PartitionAttention layer(PartitionAttentionOptions{
      .partition = partition, .channels = 4, .head_width = 2, .partition_size = 2});
  torch::Tensor x = torch::randn({1, 4, 4, 4}, torch::kFloat64);
  layer->to(torch::kFloat64);
  const torch::Tensor before = layer->forward(x);
  x = x.clone();
  x[0][0][0][0] += 1;
  const torch::Tensor is_changed = (layer->forward(x) != before).any(1).flatten();
  std::vector<std::int64_t> places;
  for (std::int64_t place = 0; place < is_changed.numel(); ++place)
    if (is_changed[place].item<bool>()) places.push_back(place);
  return places;
}

}  // namespace

TEST_CASE("window attention reaches the neighbours, grid attention the places of the grid") {
  CHECK(reached_from_first(Partition::kWindow) == std::vector<std::int64_t>{0, 1, 4, 5});
  CHECK(reached_from_first(Partition::kGrid) == std::vector<std::int64_t>{0, 2, 8, 10});
}

TEST_CASE("group attention is the softmax of scaled products and a bias for each distance") {
  torch::manual_seed(0);
  GroupAttention attention(/*channels=*/4, /*head_width=*/4, /*group_size=*/2);
  attention->to(torch::kFloat64);
  const torch::Tensor x = torch::randn({1, 1, 4, 4}, torch::kFloat64);
  const torch::Tensor qkv = attention->to_qkv->forward(x)[0][0];  // (4, 12)

  // One head; the distance (dy, dx) of two places has row (dy + 1) * 3 + dx + 1 of the table.
  torch::Tensor scores = qkv.slice(1, 0, 4).mm(qkv.slice(1, 4, 8).t()) / 2;
  for (std::int64_t i = 0; i < 4; ++i)
    for (std::int64_t j = 0; j < 4; ++j)
      scores[i][j] +=
          attention->relative_position_bias_table[(i / 2 - j / 2 + 1) * 3 + i % 2 - j % 2 + 1][0];
  const torch::Tensor expected =
      attention->merge->forward(scores.softmax(-1).mm(qkv.slice(1, 8, 12)));

  CHECK(torch::allclose(attention->forward(x)[0][0], expected, /*rtol=*/1e-12, /*atol=*/1e-14));
}

TEST_CASE(
    "the table of biases starts narrow and normal, a row for each distance, a column a head") {
  torch::manual_seed(0);
  const GroupAttention attention(64, 4, 7);

  CHECK(attention->relative_position_bias_table.sizes() == torch::IntArrayRef{169, 16});
  CHECK(attention->relative_position_index.sizes() == torch::IntArrayRef{49, 49});
  CHECK(attention->relative_position_bias_table.std().item<double>() ==
        doctest::Approx(0.02).epsilon(0.05));
}

TEST_CASE("partition attention has torchvision's keys, and layer norms with LibTorch's eps") {
  PartitionAttention layer(
      PartitionAttentionOptions{.channels = 4, .head_width = 2, .partition_size = 2});

  CHECK(layer->named_parameters().keys() ==
        std::vector<std::string>{
            "attn_layer.0.weight", "attn_layer.0.bias", "attn_layer.1.relative_position_bias_table",
            "attn_layer.1.to_qkv.weight", "attn_layer.1.to_qkv.bias", "attn_layer.1.merge.weight",
            "attn_layer.1.merge.bias", "mlp_layer.0.weight", "mlp_layer.0.bias",
            "mlp_layer.1.weight", "mlp_layer.1.bias", "mlp_layer.3.weight", "mlp_layer.3.bias"});
  CHECK(layer->attn_layer[0]->as<torch::nn::LayerNorm>()->options.eps() == 1e-5);
  CHECK(layer->mlp_layer[0]->as<torch::nn::LayerNorm>()->options.eps() == 1e-5);
}

TEST_CASE("stochastic depth of rate 1 leaves partition attention the identity in training") {
  torch::manual_seed(0);
  PartitionAttention layer(PartitionAttentionOptions{.partition = Partition::kGrid,
                                                     .channels = 4,
                                                     .head_width = 2,
                                                     .partition_size = 2,
                                                     .drop_rate = 1});
  const torch::Tensor x = torch::randn({2, 4, 6, 4});

  CHECK(torch::equal(layer->forward(x), x));
  layer->eval();
  CHECK_FALSE(torch::equal(layer->forward(x), x));
}

TEST_CASE("heads that do not fill the channels are refused with both numbers") {
  std::string text;
  try {
    GroupAttention(48, 32, 7);
  } catch (const remat::ArgumentError& error) {
    text = error.what();
  }

  CHECK(text ==
        "[remat.attention.heads] remat::blocks::GroupAttention: there are 48 channels for heads of "
        "32, a multiple of that was expected.");
}

}  // namespace partition_attention_test
