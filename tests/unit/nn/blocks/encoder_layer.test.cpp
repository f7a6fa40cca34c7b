// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/encoder_layer.hpp"

#include <string>
#include <tuple>
#include <vector>

namespace encoder_layer_test {

TEST_CASE(
    "a layer is normalise, attend, drop, add; normalise, MLP, add: PyTorch's numbers by seed") {
  torch::manual_seed(0);
  remat::blocks::EncoderLayer layer(remat::blocks::EncoderLayerOptions{.width = 8,
                                                                       .head_count = 2,
                                                                       .hidden = 16,
                                                                       .dropout = 0.4,
                                                                       .attention_dropout = 0.3,
                                                                       .norm_eps = 1e-3});
  torch::nn::MultiheadAttention attention(torch::nn::MultiheadAttentionOptions(8, 2).dropout(0.3));
  layer->to(torch::kFloat64);
  attention->to(torch::kFloat64);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layer->parameters()) parameter.normal_(0, 0.5);
    auto parameters = attention->named_parameters();
    for (const auto& item : layer->self_attention->named_parameters())
      parameters[item.key()].copy_(item.value());
  }
  const auto x = torch::randn({3, 5, 8}, torch::kFloat64);
  const auto normalised = [&](const torch::nn::LayerNorm& norm, const torch::Tensor& tokens) {
    return torch::layer_norm(tokens, {8}, norm->weight, norm->bias, 1e-3);
  };

  torch::manual_seed(1);
  const auto y = layer->forward(x);
  torch::manual_seed(1);
  const auto by_token = normalised(layer->ln_1, x).transpose(0, 1);
  const auto mixed = std::get<0>(attention->forward(by_token, by_token, by_token)).transpose(0, 1);
  const auto middle = torch::dropout(mixed, 0.4, true) + x;
  const auto expected = middle + layer->mlp->forward(normalised(layer->ln_2, middle));

  CHECK(torch::allclose(y, expected, 0, 1e-12));
  CHECK(layer->named_parameters().keys() ==
        std::vector<std::string>{"ln_1.weight", "ln_1.bias", "self_attention.in_proj_weight",
                                 "self_attention.in_proj_bias", "self_attention.out_proj.weight",
                                 "self_attention.out_proj.bias", "ln_2.weight", "ln_2.bias",
                                 "mlp.0.weight", "mlp.0.bias", "mlp.3.weight", "mlp.3.bias"});
}

}  // namespace encoder_layer_test
