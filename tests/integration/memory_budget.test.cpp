// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"
#include "tests/support/training_step.hpp"

#include "remat/amp.hpp"
#include "remat/backbones.hpp"
#include "remat/explain.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/plan/memory_plan_json.hpp"
#include "remat/training.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
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

/// Layers that run as often as it is told, and may do something else in between.
struct BranchingImpl : torch::nn::Module {
  explicit BranchingImpl(int layers) : depth(layers) {
    linear = register_module("linear", torch::nn::Linear(32, 32));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < depth; ++i) {
      x = torch::tanh(linear->forward(x));
      if (i == 0 && meanwhile) std::exchange(meanwhile, nullptr)();
    }
    return x;
  }

  int depth;
  std::function<void()> meanwhile;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Branching);

/// A layer with a second argument.
struct GatedImpl : torch::nn::Module {
  GatedImpl() { linear = register_module("linear", torch::nn::Linear(32, 32)); }
  torch::Tensor forward(torch::Tensor x, torch::Tensor gate) {
    return torch::tanh(linear->forward(x)) * gate;
  }

  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Gated);

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

TEST_CASE("a plan that was saved and loaded gives the same bits and the same measured peak") {
  Trainee made("mobilenet_v2"), loaded("mobilenet_v2");
  for (const torch::Tensor& parameter : made.net->parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
  const remat::MemoryPlan plan =
      remat::plan(*made.net, made.images, loss, MemoryBudget::fraction_of_plain(0.6));
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() /
      ("remat-plan-" + std::to_string(std::random_device{}()) + ".json");
  remat::save_plan(plan, path);
  const remat::MemoryPlan read = remat::load_plan(path);
  std::filesystem::remove(path);

  CHECK(read == plan);
  made.net->enable_gradient_checkpointing(plan);
  loaded.net->enable_gradient_checkpointing(read);
  for (int i = 0; i < 2; ++i) {
    const Step expected = made.step(), step = loaded.step();
    CHECK(is_same(step, expected));
    CHECK(step.peak == expected.peak);
    CHECK(loaded.net->plan_outcome().is_followed);
  }
}

TEST_CASE("a forward that ends before its plan, or goes on behind it, has left it") {
  torch::manual_seed(0);
  Branching net(0);
  const torch::Tensor x = torch::randn({64, 32});
  const auto loss = [](const torch::Tensor& output) { return output.sum(); };
  net->depth = 4;
  const remat::MemoryPlan plan = remat::plan(*net, x, loss, MemoryBudget::fraction_of_plain(1.0));
  const auto outcome_at = [&](int depth) {
    net->depth = depth;
    remat::PlanOutcome outcome;
    remat::checkpoint(plan, &outcome, [&] { return net->forward(x); }).sum().backward();
    return outcome;
  };
  const std::size_t count = plan.operations.size();

  CHECK(outcome_at(4) == remat::PlanOutcome());
  CHECK(outcome_at(3) ==
        remat::PlanOutcome{false, "the plan has " + std::to_string(count) + " operations, " +
                                      std::to_string(count / 4 * 3) + " ran"});
  CHECK(outcome_at(5).deviation.starts_with("operation " + std::to_string(count) + ", aten::"));
  CHECK(outcome_at(5).deviation.ends_with(" ran where the plan ends"));

  remat::PlanOutcome outcome;
  const auto fail = [&]() -> torch::Tensor {
    net->depth = 1;
    const torch::Tensor y = net->forward(x);
    throw std::runtime_error("broken");
    return y;
  };
  CHECK_THROWS_WITH(remat::checkpoint(plan, &outcome, fail), "broken");
  CHECK(outcome == remat::PlanOutcome{false, "forward ended with an exception"});
  const torch::NoGradGuard no_grad;
  remat::checkpoint(plan, &outcome, [&] { return net->forward(x); });
  CHECK(outcome == remat::PlanOutcome());  // nothing was recorded
}

TEST_CASE("a module within a budget that ends before its plan says so and makes a new one") {
  torch::manual_seed(0);
  remat::Checkpointed<Branching> net(4);
  const torch::Tensor x = torch::randn({64, 32});
  net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1.0));
  net->forward(x);
  const auto plan = net->memory_plan();
  REQUIRE(plan != nullptr);
  CHECK(net->plan_outcome().is_followed);

  net->depth = 2;
  net->forward(x);
  CHECK(net->memory_plan() == plan);  // the one that the last forward had
  CHECK(net->plan_outcome().deviation.find(" operations, ") != std::string::npos);
  net->forward(x);
  CHECK(net->memory_plan() != plan);
  CHECK(net->memory_plan()->operations.size() == plan->operations.size() / 2);
  CHECK(net->plan_outcome().is_followed);
}

TEST_CASE("a pass that leaves its plan does not take another thread's plan with it") {
  torch::manual_seed(0);
  remat::Checkpointed<Branching> net(4);
  const torch::Tensor small = torch::randn({8, 32}), large = torch::randn({64, 32});
  net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1.0));
  net->forward(small);
  const auto plan_of_small = net->memory_plan();
  net->forward(large);
  const auto plan_of_large = net->memory_plan();
  REQUIRE(plan_of_small != plan_of_large);

  // While the large batch is on its way, the small one passes in a thread and keeps to its plan.
  net->depth = 5;
  net->meanwhile = [&] {
    std::thread([&] {
      net->depth = 4;
      net->forward(small);
      CHECK(net->plan_outcome().is_followed);
      net->depth = 5;
    }).join();
  };
  net->forward(large);
  CHECK_FALSE(net->plan_outcome().is_followed);
  net->depth = 4;
  net->forward(small);
  CHECK(net->memory_plan() == plan_of_small);
  net->forward(large);
  CHECK(net->memory_plan() != plan_of_large);
}

TEST_CASE("explain says whether a region followed its plan, and where it left it") {
  torch::manual_seed(0);
  Branching net(4);
  const torch::Tensor x = torch::randn({64, 32});
  const auto loss = [](const torch::Tensor& output) { return output.sum(); };
  const remat::MemoryPlan plan = remat::plan(*net, x, loss, MemoryBudget::fraction_of_plain(1.0));
  const auto run = [&] { return net->forward(x); };

  const remat::Graph followed = remat::explain(plan, run);
  CHECK(followed.operations.size() == plan.operations.size());
  REQUIRE(followed.plan_outcome.has_value());
  CHECK(followed.plan_outcome->is_followed);
  CHECK(remat::to_string(followed).ends_with("\nthe plan was followed\n"));
  // A plan for all of plain's memory keeps what autograd saves.
  CHECK(followed.bytes(remat::Graph::Fate::dropped).count == 0);

  net->depth = 2;
  CHECK(remat::to_string(remat::explain(plan, run))
            .ends_with("\nthe plan was left: the plan has " +
                       std::to_string(plan.operations.size()) + " operations, " +
                       std::to_string(plan.operations.size() / 2) + " ran\n"));
  CHECK_FALSE(remat::explain(run).plan_outcome.has_value());
  CHECK(remat::to_string(remat::explain(run)).find("the plan") == std::string::npos);
  const torch::NoGradGuard no_grad;
  CHECK_FALSE(remat::explain(plan, run).plan_outcome.has_value());
}

TEST_CASE("a plan made under autocast is followed from the second step on") {
  torch::manual_seed(0);
  remat::Checkpointed<Branching> net(6);
  net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1.0));
  const torch::Tensor x = torch::randn({64, 32});
  for (int step = 0; step < 3; ++step) {
    CAPTURE(step);
    torch::Tensor y;
    {
      const remat::amp::Autocast autocast(torch::kCPU);
      y = net->forward(x);
    }
    y.to(torch::kFloat32).sum().backward();
    CHECK(net->plan_outcome() == remat::PlanOutcome());
  }
}

TEST_CASE("a frozen backbone with a budget that no plan could meet is a plain call") {
  Trainee trainee("resnet18");
  for (torch::Tensor& parameter : trainee.net->parameters()) parameter.set_requires_grad(false);
  trainee.net->enable_gradient_checkpointing(MemoryBudget::bytes(Bytes{1}));
  CHECK_FALSE(trainee.net->forward(trainee.images).requires_grad());
  CHECK(trainee.net->memory_plan() == nullptr);
}

TEST_CASE("planning a chain leaves the graphs and gradients of its other arguments alone") {
  const auto gradients = [](bool has_budget) {
    torch::manual_seed(0);
    remat::Checkpointed<remat::Sequential> chain;
    for (int i = 0; i < 3; ++i) chain->push_back(Gated());
    if (has_budget) chain->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1.0));
    const torch::Tensor leaf = torch::randn({32}).requires_grad_();
    const torch::Tensor x = torch::randn({64, 32});
    chain->forward(x, leaf).sum().backward();
    chain->forward(x, (leaf * 2).exp()).sum().backward();
    return std::vector<torch::Tensor>{leaf.grad(), chain->parameters()[0].grad()};
  };
  const auto expected = gradients(false), planned = gradients(true);
  CHECK(torch::equal(planned[0], expected[0]));
  CHECK(torch::equal(planned[1], expected[1]));
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
