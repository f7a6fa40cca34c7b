// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/nn/blocks/gated_attention.hpp"

#include <memory>
#include <string>
#include <vector>

namespace gated_attention_test {
namespace {

using remat::blocks::GatedAttention;
using remat::blocks::GatedAttentionImpl;

}  // namespace

TEST_CASE("gated attention is the paper's formula, row by row") {
  torch::manual_seed(0);
  GatedAttention attention(3, 5);
  attention->to(torch::kFloat64);
  const torch::Tensor rows = torch::randn({1, 4, 3}, torch::kFloat64);

  std::vector<torch::Tensor> scores;
  for (std::int64_t row = 0; row < 4; ++row) {
    const torch::Tensor h = rows[0][row];
    const torch::Tensor v = attention->content->weight.mv(h) + attention->content->bias;
    const torch::Tensor u = attention->gate->weight.mv(h) + attention->gate->bias;
    scores.push_back(attention->score->weight[0].dot(v.tanh() * u.sigmoid()));
  }
  const torch::Tensor expected = torch::stack(scores).softmax(0);

  CHECK(torch::allclose(attention->weights(rows)[0], expected, 1e-12));
  CHECK(torch::allclose(attention->forward(rows)[0], expected.matmul(rows[0]), 1e-12));
}

TEST_CASE("weights of gated attention sum up to 1, and absent rows have none") {
  torch::manual_seed(0);
  GatedAttention attention(3);
  const torch::Tensor rows = torch::randn({2, 4, 3});
  const torch::Tensor is_present =
      torch::tensor({{true, false, true, true}, {false, true, false, false}});

  const torch::Tensor weights = attention->weights(rows, is_present);

  CHECK(torch::allclose(weights.sum(1), torch::ones({2})));
  CHECK(torch::equal(weights.ne(0), is_present));
  CHECK(torch::equal(attention->forward(rows, is_present)[1], rows[1][1]));
  CHECK(attention->named_parameters().keys() ==
        std::vector<std::string>{"content.weight", "content.bias", "gate.weight", "gate.bias",
                                 "score.weight"});
}

TEST_CASE("gated attention can end a LibTorch sequence, without a mask") {
  torch::manual_seed(0);
  torch::nn::Sequential sequence(torch::nn::Linear(2, 3), GatedAttention(3));

  CHECK(sequence->forward(torch::randn({2, 5, 2})).sizes() == torch::IntArrayRef{2, 3});
}

TEST_CASE("a clone of gated attention computes the same") {
  torch::manual_seed(0);
  GatedAttention attention(3, 7);

  const auto copy = std::dynamic_pointer_cast<GatedAttentionImpl>(attention->clone());

  REQUIRE(copy);
  const torch::Tensor rows = torch::randn({2, 4, 3});
  CHECK(torch::equal(copy->forward(rows), attention->forward(rows)));
}

}  // namespace gated_attention_test
