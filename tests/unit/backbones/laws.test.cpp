// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones.hpp"
#include "remat/explain.hpp"
#include "remat/memory.hpp"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// The laws, for one small network of each family at its default policy.
namespace backbone_laws_test {
namespace {

struct Case {
  const char* name;
  std::int64_t image_size;
  remat::BackboneOptions rates;  // all that the family has
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"resnet18", 40, {}},
      {"mobilenet_v2", 40, {.dropout = 0.2}},
      {"mobilenet_v3_small", 40, {.dropout = 0.2}},
      {"efficientnet_b0", 40, {.dropout = 0.2, .stochastic_depth = 0.3}},
      {"efficientnet_v2_s", 40, {.dropout = 0.2, .stochastic_depth = 0.3}},
      {"regnet_y_400mf", 40, {}},
      {"vit_b_32", 64, {.image_size = 64, .dropout = 0.1, .attention_dropout = 0.1}},
      {"swin_t", 64, {.dropout = 0.1, .attention_dropout = 0.1, .stochastic_depth = 0.3}},
      {"maxvit_t", 224, {.dropout = 0.1, .attention_dropout = 0.1, .stochastic_depth = 0.3}},
      {"convnext_tiny", 40, {.stochastic_depth = 0.3}},
  };
  return all;
}

std::shared_ptr<remat::Backbone> build(const Case& network) {
  torch::manual_seed(0);
  remat::BackboneOptions options = network.rates;
  options.num_classes = 10;
  return remat::create_backbone(network.name, options);
}

torch::Tensor images_of(const Case& network) {
  torch::manual_seed(1);
  return torch::randn({2, 3, network.image_size, network.image_size});
}

torch::Tensor loss(const torch::Tensor& result) { return result.square().sum(); }

/// Trains for three steps of gradient descent.
std::vector<training::Step> three_steps(remat::Backbone& model, const torch::Tensor& images) {
  torch::manual_seed(2);
  std::vector<training::Step> steps;
  for (int round = 0; round < 3; ++round) {
    steps.push_back(training::step(model, images, loss));
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model.parameters())
      parameter.sub_(parameter.grad(), /*alpha=*/1e-3);
  }
  return steps;
}

/// The units of a backbone's chain, stages opened.
std::vector<torch::nn::AnyModule*> units_of(const remat::ChainBackbone& model) {
  std::vector<torch::nn::AnyModule*> units;
  for (const remat::ChainLayer& layer : *model.chain()) {
    if (layer.sequential() == nullptr)
      units.push_back(&layer.unit());
    else
      for (torch::nn::AnyModule& unit : *layer.sequential()) units.push_back(&unit);
  }
  return units;
}

/// What LibTorch's generator on the CPU needs to start again.
constexpr std::int64_t kRandomStateBytes = 5056;

/// Scalars that a network makes in forward, whose lifetime the graphs do not follow.
constexpr std::int64_t kScalarBytes = 1024;

/// What the graphs of a plan's segments say about one training step.
struct Planned {
  std::int64_t recomputed = 0;  // operations
  std::int64_t dropped = 0;     // bytes that plain would hold
  std::int64_t added = 0;       // bytes that plain would not: cheap to keep, or random state
};

Planned planned(const remat::ChainBackbone& model, torch::Tensor x) {
  const auto units = units_of(model);
  Planned sum;
  for (const remat::Segment& segment : model.plan().segments()) {
    const torch::Tensor input = x;
    const auto run = [&] {
      x = input;
      for (std::size_t unit = segment.first; unit < segment.last; ++unit)
        x = units[unit]->forward<torch::Tensor>(x);
      return x;
    };
    if (segment.is_checkpointed) {
      const remat::Graph graph = remat::explain(run);
      sum.recomputed += static_cast<std::int64_t>(graph.recomputed_count());
      sum.dropped += graph.bytes(remat::Graph::Fate::dropped).count;
      for (const remat::Graph::Value& value : graph.values)
        if (value.fate == remat::Graph::Fate::kept && !value.is_saved && !value.is_result)
          sum.added += value.bytes.count;
      for (const remat::Graph::Operation& operation : graph.operations)
        if (operation.is_random) sum.added += kRandomStateBytes;
    } else {
      run();
    }
  }
  return sum;
}

/// Returns the bytes that a forward pass leaves alive.
std::int64_t kept_bytes(remat::Backbone& model, const torch::Tensor& images) {
  torch::manual_seed(3);
  const torch::Tensor x = images.clone().requires_grad_();
  const remat::MemoryMeter meter;
  const torch::Tensor result = loss(model.forward(x));
  return meter.current().count;
}

}  // namespace

TEST_CASE("three training steps of every family leave plain's bits at the default policy") {
  for (const Case& network : cases()) {
    CAPTURE(std::string(network.name));
    const torch::Tensor images = images_of(network);

    const auto plain = three_steps(*build(network), images);
    const auto model = build(network);
    model->enable_gradient_checkpointing();
    const std::int64_t before = remat::statistics().recomputed_operations;
    const auto checkpointed = three_steps(*model, images);

    CHECK(remat::statistics().recomputed_operations > before);
    for (std::size_t round = 0; round < plain.size(); ++round)
      CHECK(training::first_difference(plain[round], checkpointed[round]) == "");
    // Noise is on: a network without dropout or stochastic depth would leave the generator alone.
    if (network.rates.dropout || network.rates.stochastic_depth)
      CHECK_FALSE(torch::equal(plain[0].random_state, plain[1].random_state));
  }
}

TEST_CASE("every family recomputes and keeps what the graphs of its plan say") {
  for (const Case& network : cases()) {
    CAPTURE(std::string(network.name));
    const torch::Tensor images = images_of(network);
    const auto model = std::dynamic_pointer_cast<remat::ChainBackbone>(build(network));
    REQUIRE(model);
    model->train();
    const std::int64_t plain = kept_bytes(*model, images);
    model->enable_gradient_checkpointing();
    training::step(*model, images, loss);  // measures the units

    torch::manual_seed(3);
    const std::int64_t before = remat::statistics().recomputed_operations;
    training::step(*model, images, loss);
    const std::int64_t recomputed = remat::statistics().recomputed_operations - before;
    const std::int64_t kept = kept_bytes(*model, images);

    torch::manual_seed(3);
    const Planned expected = planned(*model, images.clone().requires_grad_());
    CHECK(recomputed > 0);
    CHECK(recomputed == expected.recomputed);
    CHECK(expected.dropped > 0);
    // What is cheap to keep is let go again where nothing needs it: at most `added` is there.
    CHECK(plain - kept <= expected.dropped + kScalarBytes);
    CHECK(plain - kept >= expected.dropped - expected.added - kScalarBytes);
  }
}

}  // namespace backbone_laws_test
