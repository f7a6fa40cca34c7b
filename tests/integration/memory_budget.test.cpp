// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/backbones.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/training.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// Plans within a budget against the plain program: the same bits, and the bytes that were
/// promised.
namespace memory_budget_test {
namespace {

using remat::Bytes;
using remat::MemoryBudget;

struct Step {
  Bytes peak;
  std::vector<torch::Tensor> gradients, buffers;
  torch::Tensor loss;
};

struct Trainee {
  std::shared_ptr<remat::Backbone> net;
  torch::Tensor images;

  explicit Trainee(const std::string& name, std::int64_t batch = 2, std::int64_t size = 64) {
    torch::manual_seed(0);
    net = remat::create_backbone(name, {.num_classes = 10});
    images = torch::randn({batch, 3, size, size});
  }

  /// One step from the same random state; gradients are there before it, as after zero_grad(false).
  Step step() {
    for (const torch::Tensor& parameter : net->parameters())
      parameter.mutable_grad() = torch::zeros_like(parameter);
    torch::manual_seed(5);
    Step result;
    const remat::MemoryMeter meter;
    result.loss = net->forward(images).square().mean();
    result.loss.backward();
    result.peak = meter.peak();
    for (const torch::Tensor& parameter : net->parameters())
      result.gradients.push_back(parameter.grad().clone());
    for (const torch::Tensor& buffer : net->buffers()) result.buffers.push_back(buffer.clone());
    return result;
  }
};

bool is_same(const Step& a, const Step& b) {
  bool same = torch::equal(a.loss, b.loss);
  for (std::size_t i = 0; i < a.gradients.size(); ++i)
    same = same && torch::equal(a.gradients[i], b.gradients[i]);
  for (std::size_t i = 0; i < a.buffers.size(); ++i)
    same = same && torch::equal(a.buffers[i], b.buffers[i]);
  return same;
}

/// Fractions of plain that are feasible at the tests' small sizes.
const std::vector<double> kFractions{1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55,
                                     0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05};

}  // namespace

TEST_CASE(
    "a step within a budget has plain's bits, needs what was predicted, and never more than with a "
    "larger budget") {
  for (const std::string name : {"mobilenet_v2", "regnet_y_400mf", "convnext_tiny"}) {
    CAPTURE(name);
    Trainee plain(name), planned(name);
    for (const torch::Tensor& parameter : planned.net->parameters())
      parameter.mutable_grad() = torch::zeros_like(parameter);
    const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
    const remat::StepTrace trace =
        remat::detail::trace_training_step(*planned.net, planned.images, loss);
    const remat::StepPoints points = remat::KeepSearch(trace).run();
    Bytes before{std::int64_t{1} << 40};
    int feasible = 0;
    for (const double fraction : kFractions) {
      CAPTURE(fraction);
      const auto budget = MemoryBudget::fraction_of_plain(fraction);
      if (points.fastest_within(budget.resolve(points.most().cost.peak)) == nullptr) continue;
      ++feasible;
      const remat::MemoryPlan plan = remat::plan_within(trace, points, budget, {}, name);
      planned.net->enable_gradient_checkpointing(plan);
      const Step step = planned.step();
      CHECK(is_same(step, plain.step()));  // as many steps of each: batch norms go on
      CHECK(planned.net->plan_outcome().is_followed);
      CHECK(static_cast<double>(step.peak.count) ==
            doctest::Approx(static_cast<double>(plan.peak.count)).epsilon(0.001));
      CHECK(step.peak <= plan.budget);
      CHECK(step.peak <= before);
      before = step.peak;
    }
    CHECK(feasible >= 5);
  }
}

TEST_CASE("a backbone that is given a budget plans by itself and stays within it") {
  Trainee plain("mobilenet_v2"), planned("mobilenet_v2");
  planned.net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(0.7));
  CHECK(is_same(planned.step(), plain.step()));
  const Step expected = plain.step(), step = planned.step();
  CHECK(is_same(step, expected));
  const auto plan = planned.net->memory_plan();
  REQUIRE(plan != nullptr);
  CHECK(planned.net->plan_outcome().is_followed);
  CHECK(step.peak <= plan->budget);
  CHECK(step.peak < expected.peak);
  // The prediction has a stand-in for the loss in it, and nothing else that is not exact.
  CHECK(static_cast<double>(step.peak.count) ==
        doctest::Approx(static_cast<double>(plan->peak.count)).epsilon(0.01));
}

TEST_CASE("an infeasible budget says the least that is feasible, and that one works") {
  Trainee trainee("resnet18");
  trainee.net->enable_gradient_checkpointing(MemoryBudget::bytes(Bytes{1000}));
  std::string text;
  try {
    trainee.step();
  } catch (const remat::ArgumentError& error) {
    text = error.what();
  }
  const auto from = text.find("the least that was found is ");
  REQUIRE(from != std::string::npos);
  const std::int64_t least = std::stoll(text.substr(text.find('(', from) + 1));

  // Each trace measures times of its own, and the search goes by those: the next least may differ.
  const Bytes budget{least + least / 50};
  trainee.net->enable_gradient_checkpointing(MemoryBudget::bytes(budget));
  trainee.step();  // makes the plan, which takes more
  CHECK(trainee.step().peak <= budget);
}

TEST_CASE("planning leaves a module as it was") {
  Trainee plain("mobilenet_v2"), planned("mobilenet_v2");
  planned.net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(0.8));
  torch::manual_seed(11);
  const torch::Tensor expected = plain.net->forward(plain.images);
  const torch::Tensor next = torch::rand({4});
  torch::manual_seed(11);
  CHECK(torch::equal(planned.net->forward(planned.images), expected));
  CHECK(torch::equal(torch::rand({4}), next));
  for (const torch::Tensor& parameter : planned.net->parameters())
    CHECK(!parameter.grad().defined());
}

TEST_CASE("another shape of input gets a plan of its own, and fewer samples keep the plan") {
  Trainee trainee("resnet18", 4);
  trainee.net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(0.95));
  trainee.step();
  const auto plan = trainee.net->memory_plan();
  trainee.images = trainee.images.narrow(0, 0, 2).clone();
  trainee.step();
  CHECK(trainee.net->memory_plan() == plan);
  trainee.images = torch::randn({4, 3, 96, 96});
  trainee.step();
  CHECK(trainee.net->memory_plan() != plan);
  CHECK(trainee.net->plan_outcome().is_followed);
}

TEST_CASE("a chain takes a budget, and a rule again afterwards") {
  const auto make = [] {
    torch::manual_seed(0);
    remat::Checkpointed<remat::Sequential> chain;
    for (int i = 0; i < 20; ++i) {
      chain->push_back(torch::nn::Linear(64, 64));
      chain->push_back(torch::nn::Tanh());
    }
    return chain;
  };
  auto plain = make(), planned = make();
  plain->disable_gradient_checkpointing();
  planned->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(0.7));
  const torch::Tensor x = torch::randn({4096, 64});
  const auto backward = [&](auto& chain) {
    const remat::MemoryMeter meter;
    chain->forward(x).sum().backward();
    return meter.peak();
  };
  backward(plain), backward(planned);
  for (const auto& parameter : plain->parameters()) parameter.mutable_grad().zero_();
  for (const auto& parameter : planned->parameters()) parameter.mutable_grad().zero_();
  const Bytes plain_peak = backward(plain);
  CHECK(backward(planned) < plain_peak);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i)
    CHECK(torch::equal(plain->parameters()[i].grad(), planned->parameters()[i].grad()));
  REQUIRE(planned->memory_plan() != nullptr);

  planned->enable_gradient_checkpointing(3);
  CHECK(planned->memory_plan() == nullptr);
  CHECK(planned->segment_count() == 3);
}

TEST_CASE("a plan made with the real loss can be given to a backbone or a region") {
  Trainee plain("resnet18"), planned("resnet18");
  const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
  for (const torch::Tensor& parameter : planned.net->parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  const remat::MemoryPlan plan =
      remat::plan(*planned.net, planned.images, loss, MemoryBudget::fraction_of_plain(0.9));
  CHECK(plan.peak <= plan.budget);
  CHECK(plan.recomputed_count > 0);
  CHECK(remat::to_string(plan).find("aten::convolution") != std::string::npos);

  const Step expected = plain.step();
  planned.net->enable_gradient_checkpointing(plan);
  const Step step = planned.step();
  CHECK(is_same(step, expected));
  CHECK(static_cast<double>(step.peak.count) ==
        doctest::Approx(static_cast<double>(plan.peak.count)).epsilon(0.001));

  Trainee wrapped("resnet18");
  remat::PlanOutcome outcome;
  const auto result =
      remat::checkpoint(plan, &outcome, [&] { return wrapped.net->forward(wrapped.images); });
  CHECK(outcome.is_followed);
  torch::manual_seed(5);
  result.square().mean().backward();
  for (std::size_t i = 0; i < expected.gradients.size(); ++i)
    CHECK(torch::equal(wrapped.net->parameters()[i].grad(), expected.gradients[i]));
}

TEST_CASE("a step that leaves its plan is right, and says where it left") {
  Trainee planned("resnet18"), other("mobilenet_v2"), plain("mobilenet_v2");
  const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
  const remat::MemoryPlan plan =
      remat::plan(*planned.net, planned.images, loss, MemoryBudget::fraction_of_plain(1.0));
  other.net->enable_gradient_checkpointing(plan);
  CHECK(is_same(other.step(), plain.step()));
  CHECK(!other.net->plan_outcome().is_followed);
  CHECK(other.net->plan_outcome().deviation.find("was planned") != std::string::npos);
}

TEST_CASE("what cannot be planned says so") {
  Trainee trainee("resnet18");
  const auto budget = MemoryBudget::fraction_of_plain(0.9);
  CHECK_THROWS_WITH_AS(
      remat::plan(
          *trainee.net, trainee.images, [](const torch::Tensor& y) { return y; }, budget),
      doctest::Contains("remat.plan.loss"), remat::ArgumentError);
  trainee.net->eval();
  CHECK_THROWS_WITH_AS(
      remat::plan(
          *trainee.net, trainee.images, [](const torch::Tensor& y) { return y.sum(); }, budget),
      doctest::Contains("remat.plan.mode"), remat::ArgumentError);
  remat::Checkpointed<torch::nn::Bilinear> bilinear(4, 4, 4);
  CHECK_THROWS_WITH_AS(bilinear->enable_gradient_checkpointing(budget),
                       doctest::Contains("remat.budget.module"), remat::ArgumentError);
}

}  // namespace memory_budget_test
