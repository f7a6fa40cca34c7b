// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/explain.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/plan/keep_moves.hpp"
#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/training/plan.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

/// Plans that recompute some values more than once, against the plain program and the simulator.
namespace transient_values_test {
namespace {

using remat::Bytes;
using remat::StepPoint;

torch::Tensor loss(const torch::Tensor& output) { return output.square().mean(); }

struct Step {
  Bytes peak;
  std::int64_t recomputed = 0;
  std::vector<torch::Tensor> results;  // loss, gradients, buffers, what is drawn next
};

/// A network that starts every step from the same parameters, buffers and random state.
struct Trainee {
  std::shared_ptr<remat::Backbone> net;
  torch::Tensor images;

  explicit Trainee(const std::string& name) {
    torch::manual_seed(0);
    net = remat::create_backbone(name, {.num_classes = 10});
    images = torch::randn({2, 3, 64, 64});
    for (const torch::Tensor& parameter : net->parameters())
      parameter.mutable_grad() = torch::zeros_like(parameter);
  }

  remat::StepTrace trace() { return remat::detail::trace_training_step(*net, images, loss); }

  Step step() {
    for (const torch::Tensor& parameter : net->parameters()) parameter.mutable_grad().zero_();
    std::vector<torch::Tensor> before;
    for (const torch::Tensor& buffer : net->buffers()) before.push_back(buffer.clone());
    torch::manual_seed(5);
    remat::reset_statistics();
    Step result;
    const remat::MemoryMeter meter;
    const torch::Tensor value = loss(net->forward(images));
    value.backward();
    result.peak = meter.peak();
    result.recomputed = remat::statistics().recomputed_operations;
    result.results.push_back(value.detach());
    for (const torch::Tensor& parameter : net->parameters())
      result.results.push_back(parameter.grad().clone());
    std::size_t i = 0;
    for (const torch::Tensor& buffer : net->buffers()) {
      result.results.push_back(buffer.clone());
      buffer.detach().copy_(before[i++]);
    }
    result.results.push_back(torch::rand({4}));
    return result;
  }

  Step step_by(const remat::StepTrace& trace, const StepPoint& point) {
    net->enable_gradient_checkpointing(
        remat::make_memory_plan(trace, point, point.cost.peak, point.cost.peak));
    return step();
  }
};

bool is_same(const Step& a, const Step& b) {
  bool same = a.results.size() == b.results.size();
  for (std::size_t i = 0; same && i < a.results.size(); ++i)
    same = torch::equal(a.results[i], b.results[i]);
  return same;
}

/// Something random becomes of every value.
StepPoint random_point(const remat::StepTrace& trace, remat::StepSimulation& simulation,
                       std::uint32_t seed) {
  std::mt19937 random(seed);
  const remat::KeepMoves moves(trace);
  StepPoint point;
  point.kept.resize(trace.values.size());
  point.transient.resize(trace.values.size());
  for (const std::int32_t id : moves.candidates()) {
    const std::uint32_t fate = random() % 8;
    moves.set(point, id, fate < 2, fate > 4);
  }
  point.cost = simulation.run(point.kept, point.transient);
  return point;
}

}  // namespace

TEST_CASE(
    "a step whose values are kept, stay, or are transient at random needs what was predicted") {
  for (const std::string name : {"mobilenet_v2", "resnet18", "convnext_tiny"}) {
    CAPTURE(name);
    Trainee trainee(name);
    const Step plain = trainee.step();
    const remat::StepTrace trace = trainee.trace();
    remat::StepSimulation simulation(trace);
    const auto all = static_cast<std::int64_t>(trace.operations.size());
    bool runs_twice = false;
    for (std::uint32_t seed = 0; seed < 6; ++seed) {
      CAPTURE(seed);
      const StepPoint point = random_point(trace, simulation, seed);
      const Step step = trainee.step_by(trace, point);
      CHECK(trainee.net->plan_outcome().is_followed);
      CHECK(is_same(step, plain));
      CHECK(step.recomputed == point.cost.recomputed_count);
      CHECK(static_cast<double>(step.peak.count) ==
            doctest::Approx(static_cast<double>(point.cost.peak.count)).epsilon(0.001));
      runs_twice = runs_twice || step.recomputed > all;
    }
    CHECK(runs_twice);
  }
}

TEST_CASE("the least memory of a network takes transient values, and has plain's bits") {
  Trainee trainee("regnet_y_400mf");
  const Step plain = trainee.step();
  const remat::StepTrace trace = trainee.trace();
  const StepPoint least = remat::KeepSearch(trace).run().least();
  CHECK(least.cost.peak < remat::StepSimulation(trace).run(least.kept).peak);
  const Step step = trainee.step_by(trace, least);
  CHECK(is_same(step, plain));
  CHECK(step.recomputed == least.cost.recomputed_count);
  CHECK(static_cast<double>(step.peak.count) ==
        doctest::Approx(static_cast<double>(least.cost.peak.count)).epsilon(0.001));
}

TEST_CASE("a graph that is kept gives the same gradients twice, whatever is transient") {
  Trainee trainee("resnet18");
  const remat::StepTrace trace = trainee.trace();
  remat::StepSimulation simulation(trace);
  const StepPoint point = random_point(trace, simulation, 1);
  const auto gradients_of_two = [&] {
    for (const torch::Tensor& parameter : trainee.net->parameters())
      parameter.mutable_grad().zero_();
    const torch::Tensor value = loss(trainee.net->forward(trainee.images));
    value.backward({}, /*retain_graph=*/true);
    value.backward();
    std::vector<torch::Tensor> gradients;
    for (const torch::Tensor& parameter : trainee.net->parameters())
      gradients.push_back(parameter.grad().clone());
    return gradients;
  };
  trainee.net->disable_gradient_checkpointing();
  const auto plain = gradients_of_two();
  trainee.net->enable_gradient_checkpointing(
      remat::make_memory_plan(trace, point, point.cost.peak, point.cost.peak));
  const auto planned = gradients_of_two();
  REQUIRE(planned.size() == plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) CHECK(torch::equal(planned[i], plain[i]));
}

TEST_CASE("where a forward leaves its plan nothing is transient") {
  torch::manual_seed(0);
  torch::nn::Linear linear(32, 32);
  int depth = 6;
  const auto forward = [&](torch::Tensor x) {
    for (int i = 0; i < depth; ++i) x = torch::tanh(linear->forward(x));
    return x;
  };
  const torch::Tensor x = torch::randn({64, 32}, torch::requires_grad());
  remat::MemoryPlan plan;
  plan.saved_count = 1000;
  for (int i = 0; i < depth; ++i) {
    plan.operations.push_back({"aten::addmm", {{Bytes{64 * 32 * 4}, false, true}}});
    plan.operations.push_back({"aten::tanh", {{Bytes{64 * 32 * 4}, false, true}}});
  }
  const auto recomputed = [&] {
    remat::reset_statistics();
    linear->zero_grad();
    remat::checkpoint(plan, forward, x).sum().backward();
    return remat::statistics().recomputed_operations;
  };
  CHECK(recomputed() > 12);
  depth = 7;
  CHECK(recomputed() <= 14);
}

}  // namespace transient_values_test
