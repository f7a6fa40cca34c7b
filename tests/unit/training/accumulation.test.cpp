// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "examples/train/accumulation.hpp"
#include "remat/checkpoint.hpp"

namespace accumulation_test {

constexpr std::int64_t kCases = 24, kFeatures = 12, kClasses = 5;

/// A gradient is one sum over cases, in parts or at once: the same terms in another order. A sum of
/// n terms of size 1 may differ by n roundings of 2^-53, 24 * 1.1e-16 = 2.7e-15, which the layers
/// above multiply by little; a wrong weight of one case is off by 1e-2.
constexpr double kRounding = 1e-13;

struct Outcome {
  double loss;
  std::vector<torch::Tensor> gradients;
};

/// Runs one step over batches of those sizes, which together are all cases.
Outcome step(const std::vector<std::int64_t>& sizes, bool is_checkpointed) {
  torch::manual_seed(3);
  torch::nn::Sequential network(torch::nn::Linear(kFeatures, 16), torch::nn::GELU(),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                                torch::nn::Linear(16, kClasses));
  network->to(torch::kFloat64);
  const auto inputs = torch::randn({kCases, kFeatures}, torch::kFloat64);
  const auto labels = torch::randint(kClasses, {kCases}, torch::kLong);
  const auto call = [&](const torch::Tensor& x) { return network->forward(x); };

  std::int64_t start = 0;
  std::size_t part = 0;
  const double loss = train::accumulate_gradients(
      std::ssize(sizes), kCases,
      [&] {
        const std::int64_t size = sizes[part++];
        const auto x = inputs.narrow(0, start, size);
        const auto y = is_checkpointed ? remat::checkpoint(call, x) : call(x);
        const auto mean = torch::cross_entropy_loss(y, labels.narrow(0, start, size));
        start += size;
        return std::pair(mean, size);
      },
      [](const torch::Tensor& weighted) { weighted.backward(); });

  Outcome outcome{loss, {}};
  for (const auto& parameter : network->parameters()) outcome.gradients.push_back(parameter.grad());
  return outcome;
}

void check_close(const Outcome& left, const Outcome& right) {
  CHECK(std::abs(left.loss - right.loss) < kRounding);
  REQUIRE(left.gradients.size() == right.gradients.size());
  for (std::size_t i = 0; i < left.gradients.size(); ++i)
    CHECK((left.gradients[i] - right.gradients[i]).abs().max().item<double>() < kRounding);
}

TEST_CASE("accumulated gradients of checkpointed batches equal those of one big batch") {
  check_close(step({8, 8, 8}, true), step({kCases}, false));
}

TEST_CASE("accumulated batches of different sizes count by their cases") {
  check_close(step({10, 10, 4}, true), step({kCases}, false));
}

TEST_CASE("checkpointing changes no bit of accumulated gradients") {
  const Outcome plain = step({10, 10, 4}, false), checkpointed = step({10, 10, 4}, true);
  CHECK(plain.loss == checkpointed.loss);
  for (std::size_t i = 0; i < plain.gradients.size(); ++i)
    CHECK(torch::equal(plain.gradients[i], checkpointed.gradients[i]));
}

}  // namespace accumulation_test
