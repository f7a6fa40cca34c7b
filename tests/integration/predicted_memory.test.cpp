// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/plan/chain_search.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/policies.hpp"
#include "remat/training/plan.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// The simulator against the memory meter: every family at eight budgets, every rule.
namespace predicted_memory_test {
namespace {

using remat::Bytes;

torch::Tensor loss(const torch::Tensor& output) { return output.square().mean(); }

/// Gradients are there before a step, as after zero_grad(false).
void make_gradients(const torch::nn::Module& net) {
  for (const torch::Tensor& parameter : net.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
}

template <class Net>
Bytes metered_peak(Net& net, const torch::Tensor& images) {
  make_gradients(net);
  const remat::MemoryMeter meter;
  loss(net.forward(images)).backward();
  return meter.peak();
}

bool is_close(Bytes predicted, Bytes metered) {
  return std::abs(static_cast<double>((predicted - metered).count)) <=
         0.01 * static_cast<double>(metered.count);
}

struct Network {
  std::string name;
  std::int64_t size, batch = 2;
};

/// Sets of kept values for eight budgets, from plain's down to the least that the chain's program
/// finds.
std::vector<remat::KeptValues> eight_sets(const remat::StepTrace& trace) {
  remat::StepSimulation simulation(trace);
  const remat::ChainSearch search(trace, simulation);
  const auto plain =
      static_cast<double>(simulation.run(remat::KeptValues(trace.values.size(), true)).peak.count);
  std::vector<remat::KeptValues> sets;
  for (double part = 1;; part *= 0.985) {
    remat::KeptValues kept = search.run(static_cast<std::int64_t>(part * plain));
    if (kept.empty()) break;
    sets.push_back(std::move(kept));
  }
  REQUIRE(sets.size() >= 8);
  std::vector<remat::KeptValues> chosen;
  for (std::size_t i = 0; i < 8; ++i) chosen.push_back(sets[i * (sets.size() - 1) / 7]);
  return chosen;
}

/// What the simulator says of a network that runs by `plan`, against what it needs.
template <class Net, class PlanOf>
void check_plan(Net& net, const torch::Tensor& images, PlanOf plan_of) {
  metered_peak(net, images);  // chains plan by bytes from the second step on
  const remat::Plan plan = plan_of();
  const Bytes metered = metered_peak(net, images);
  make_gradients(net);
  const remat::StepTrace trace = remat::detail::trace_training_step(net, images, loss);
  const remat::KeptValues kept = remat::detail::TracedLayers(trace).keeps(plan);
  const Bytes predicted = remat::StepSimulation(trace).run(kept).peak;
  CAPTURE(predicted.count);
  CAPTURE(metered.count);
  CHECK(is_close(predicted, metered));
}

template <class Rule>
void check_rule(const std::string& name) {
  CAPTURE(name);
  torch::manual_seed(0);
  remat::Checkpointed<remat::Sequential, Rule> chain;
  for (std::int64_t width = 8; width <= 64; width *= 2) {
    chain->push_back(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(width == 8 ? 3 : width / 2, width, 3)));
    chain->push_back(torch::nn::BatchNorm2d(width));
    chain->push_back(torch::nn::ReLU());
  }
  check_plan(*chain, torch::randn({4, 3, 48, 48}), [&] { return chain->plan(); });
}

void check_default_rule(const std::string& name) {
  CAPTURE(name);
  torch::manual_seed(0);
  const auto net = remat::create_backbone(name, {.num_classes = 10});
  net->enable_gradient_checkpointing();
  check_plan(*net, torch::randn({2, 3, 64, 64}),
             [&] { return dynamic_cast<remat::ChainBackbone&>(*net).plan(); });
}

}  // namespace

TEST_CASE("every family's step needs at eight budgets what was predicted, within one percent") {
  for (const Network& network : std::vector<Network>{{"resnet18", 64},
                                                     
                                                     {"mobilenet_v2", 64},
                                                     {"mobilenet_v3_small", 64},
                                                     {"efficientnet_b0", 64},
                                                     {"efficientnet_v2_s", 64},
                                                     {"regnet_y_400mf", 64},
                                                     {"vit_b_32", 224},
                                                     {"swin_t", 64},
                                                     {"maxvit_t", 224, 1},
                                                     {"convnext_tiny", 64}}) {
    CAPTURE(network.name);
    torch::manual_seed(0);
    const auto net = remat::create_backbone(network.name, {.num_classes = 10});
    const torch::Tensor images = torch::randn({network.batch, 3, network.size, network.size});
    make_gradients(*net);
    const remat::StepTrace trace = remat::detail::trace_training_step(*net, images, loss);
    remat::StepSimulation simulation(trace);
    for (const remat::KeptValues& kept : eight_sets(trace)) {
      const remat::StepPoint point{kept, simulation.run(kept)};
      net->enable_gradient_checkpointing(
          remat::make_memory_plan(trace, point, point.cost.peak, point.cost.peak));
      const Bytes metered = metered_peak(*net, images);
      CAPTURE(point.cost.peak.count);
      CAPTURE(metered.count);
      CHECK(net->plan_outcome().is_followed);
      CHECK(is_close(point.cost.peak, metered));
    }
  }
}

TEST_CASE("a network needs under every rule what was predicted, within one percent") {
  check_rule<remat::KeepAll>("KeepAll");
  check_rule<remat::EachUnit>("EachUnit");
  check_rule<remat::EveryNth<2>>("EveryNth<2>");
  check_rule<remat::Segments<3>>("Segments<3>");
  check_rule<remat::SquareRoot>("SquareRoot");
  check_default_rule("resnet18");
  check_default_rule("convnext_tiny");
}

}  // namespace predicted_memory_test
