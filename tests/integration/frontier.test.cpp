// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/training/frontier.hpp"
#include "remat/training/frontier_json.hpp"
#include "remat/training/frontier_svg.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// What a frontier predicts against the memory meter, and what it leaves behind.
namespace frontier_test {
namespace {

using remat::Bytes;
using remat::Frontier;
using remat::FrontierPoint;
using Kind = remat::FrontierPoint::Kind;

torch::Tensor loss(const torch::Tensor& output) { return output.square().mean(); }

struct Trainee {
  std::shared_ptr<remat::Backbone> net;
  torch::Tensor images;

  explicit Trainee(const std::string& name) {
    torch::manual_seed(0);
    net = remat::create_backbone(name, {.num_classes = 10});
    images = torch::randn({2, 3, 64, 64});
    make_gradients();
  }

  /// Gradients are there before a step, as after zero_grad(false).
  void make_gradients() const {
    for (const torch::Tensor& parameter : net->parameters())
      parameter.mutable_grad() = torch::zeros_like(parameter);
  }

  struct Measured {
    Bytes peak;
    std::int64_t recomputed_count;
  };
  /// The second step: in the first, chains measure their units and kernels set themselves up.
  Measured step() const {
    Measured measured{};
    for (int i = 0; i < 2; ++i) {
      make_gradients();
      const std::int64_t before = remat::statistics().recomputed_operations;
      const remat::MemoryMeter meter;
      loss(net->forward(images)).backward();
      measured = {meter.peak(), remat::statistics().recomputed_operations - before};
    }
    return measured;
  }
};

/// Made once: a search takes seconds without optimisation.
const Frontier& frontier_of(const std::string& name) {
  static std::map<std::string, Frontier> known;
  if (known.find(name) == known.end()) {
    const Trainee trainee(name);
    known.emplace(name, remat::frontier(*trainee.net, trainee.images, loss));
  }
  return known.at(name);
}

const FrontierPoint& find(const Frontier& frontier, const std::string& name) {
  const auto found = std::ranges::find_if(frontier.points, [&](const FrontierPoint& point) {
    return point.name == name || point.name.starts_with(name + ", sqrt");
  });
  CAPTURE(name);
  REQUIRE(found != frontier.points.end());
  return *found;
}

void check_close(Bytes predicted, Bytes metered, double tolerance) {
  const auto difference = static_cast<double>((predicted - metered).count);
  CHECK(std::abs(difference) <= tolerance * static_cast<double>(metered.count));
}

}  // namespace

TEST_CASE("the points are plain, schedules, and plans of which each needs less and takes longer") {
  const Frontier& frontier = frontier_of("resnet18");

  CHECK(frontier.plain().kind == Kind::plain);
  CHECK(frontier.plain().recomputed_count == 0);
  CHECK(frontier.plain().fraction_of_plain == 1);
  for (const std::string name :
       {"2 segments", "3 segments, sqrt(9)", "4 segments", "8 segments", "one region per layer"})
    CHECK(find(frontier, name).is_common);
  std::vector<FrontierPoint> plans = frontier.of(Kind::budget);
  REQUIRE(plans.size() > 5);
  plans.insert(plans.begin(), frontier.plain());
  for (std::size_t i = 1; i < plans.size(); ++i) {
    CHECK(plans[i].peak < plans[i - 1].peak);
    // A plan that costs nothing may need less than plain.
    if (i > 1) CHECK(plans[i].recomputed_seconds > plans[i - 1].recomputed_seconds);
    CHECK(plans[i].share_of_forward ==
          doctest::Approx(plans[i].recomputed_seconds / frontier.forward_seconds));
    CHECK(frontier.fastest_within(plans[i].peak)->peak == plans[i].peak);
  }
  CHECK(frontier.fastest_within(plans.back().peak - Bytes{1}) == nullptr);
}

TEST_CASE("the plain point has the peak that the meter shows") {
  for (const std::string name : {"resnet18", "mobilenet_v2", "regnet_y_400mf"}) {
    CAPTURE(name);
    // A region holds the state of the random generator before dropout, 5 KiB; plain does not.
    check_close(frontier_of(name).plain().peak, Trainee(name).step().peak, 0.001);
  }
}

TEST_CASE("a schedule's point has the peak that the meter shows when the network runs by it") {
  for (const std::string name : {"resnet18", "mobilenet_v2", "regnet_y_400mf"}) {
    CAPTURE(name);
    for (const std::int64_t segments : {2, 4, 8, 1000}) {
      CAPTURE(segments);
      const bool is_each = segments == 1000;
      const FrontierPoint& point =
          find(frontier_of(name),
               is_each ? "one region per layer" : std::to_string(segments) + " segments");
      const Trainee trainee(name);
      trainee.net->enable_gradient_checkpointing(segments);
      const auto measured = trainee.step();
      // Equal but for dropout's 5 KiB in MobileNet's head, which is outside of its segments.
      check_close(point.peak, measured.peak, name == "mobilenet_v2" ? 0.002 : 0);
      // A Sequential leaves the last layer plain where that costs no memory.
      CHECK(point.recomputed_count >= measured.recomputed_count);
      if (!is_each) CHECK(point.recomputed_count == measured.recomputed_count);
    }
  }
}

TEST_CASE(
    "a region for each layer of a transformer with plain transitions is on paper as metered") {
  const Trainee trainee("swin_t");
  const remat::StepTrace trace =
      remat::detail::trace_training_step(*trainee.net, trainee.images, loss);
  const auto schedules = remat::segment_keeps(trace);
  REQUIRE(schedules.front().name == "one region per layer");
  const remat::StepCost cost = remat::StepSimulation(trace).run(schedules.front().kept);

  const Trainee checkpointed("swin_t");
  checkpointed.net->enable_gradient_checkpointing();
  const auto measured = checkpointed.step();
  CHECK(schedules.front().plan.unit_count() == 13);  // the stem and 12 blocks
  CHECK(cost.recomputed_count == measured.recomputed_count);
  check_close(cost.peak, measured.peak, 0.01);
}

TEST_CASE("the frontier leaves a module as it was") {
  const Trainee untouched("mobilenet_v2"), used("mobilenet_v2");
  used.net->enable_gradient_checkpointing(3);
  used.net->parameters()[0].mutable_grad().fill_(2);
  torch::manual_seed(11);
  remat::frontier(*used.net, used.images, loss);
  const torch::Tensor next = torch::rand({4});
  torch::manual_seed(11);
  CHECK(torch::equal(torch::rand({4}), next));

  CHECK(used.net->is_gradient_checkpointing_enabled());
  CHECK(used.net->segments() == 3);
  CHECK(used.net->is_training());
  CHECK(torch::all(used.net->parameters()[0].grad() == 2).item<bool>());
  for (std::size_t i = 0; i < used.net->buffers().size(); ++i)
    CHECK(torch::equal(used.net->buffers()[i], untouched.net->buffers()[i]));
  for (std::size_t i = 0; i < used.net->parameters().size(); ++i)
    CHECK(torch::equal(used.net->parameters()[i], untouched.net->parameters()[i]));
}

TEST_CASE("a module without chains has plain and plans, and a stem before a chain is plain") {
  torch::manual_seed(0);
  torch::nn::Sequential flat;
  remat::Checkpointed<remat::Sequential> chain;
  for (int i = 0; i < 8; ++i) {
    flat->push_back(torch::nn::Linear(64, 64));
    flat->push_back(torch::nn::Tanh());
    chain->push_back(torch::nn::Linear(64, 64));
  }
  const torch::Tensor x = torch::randn({512, 64});
  struct Wrapped : torch::nn::Module {
    torch::nn::Sequential stem;
    remat::Checkpointed<remat::Sequential> chain;
    torch::Tensor forward(const torch::Tensor& x) { return chain->forward(stem->forward(x)); }
  } model;
  model.stem = model.register_module("stem", flat);
  const Frontier alone = remat::frontier(model.stem, x, loss);
  CHECK(alone.of(Kind::segments).empty());
  CHECK(alone.of(Kind::budget).size() > 3);

  model.chain = model.register_module("chain", chain);
  const Frontier both = remat::frontier(model, x, loss);
  const FrontierPoint& each = find(both, "one region per layer");
  // The stem is not run again; of the chain's layers only what the next layer needs.
  CHECK(each.recomputed_count <= 8);
}

TEST_CASE("a frontier as text is a table of the common schedules and some twenty plans") {
  const Frontier& frontier = frontier_of("resnet18");
  const std::string table = remat::to_string(frontier);

  for (const std::string name : {"plain", "2 segments", "one region per layer", "by a plan"})
    CHECK(table.find(name) != std::string::npos);
  CHECK(table.find("equal segments") == std::string::npos);
  CHECK(std::ranges::count(table, '\n') <= 30);
  const std::string least = remat::to_string(frontier.of(Kind::budget).back().peak);
  CHECK(table.find(least) != std::string::npos);
  CHECK(remat::to_string(Frontier()) == "no points");
}

TEST_CASE("a frontier as JSON has every point") {
  const Frontier& frontier = frontier_of("resnet18");
  const auto parsed = nlohmann::json::parse(remat::to_json(frontier).dump(2));

  CHECK(parsed["forward_seconds"] == frontier.forward_seconds);
  REQUIRE(parsed["points"].size() == frontier.points.size());
  for (std::size_t i = 0; i < frontier.points.size(); ++i) {
    const FrontierPoint& point = frontier.points[i];
    CHECK(parsed["points"][i]["name"] == point.name);
    CHECK(parsed["points"][i]["peak_bytes"] == point.peak.count);
    CHECK(parsed["points"][i]["fraction_of_plain"] == point.fraction_of_plain);
    CHECK(parsed["points"][i]["recomputed_seconds"] == point.recomputed_seconds);
    CHECK(parsed["points"][i]["recomputed_operations"] == point.recomputed_count);
    CHECK(parsed["points"][i]["share_of_forward"] == point.share_of_forward);
  }
  CHECK(parsed["points"][0]["kind"] == "plain");
  CHECK(parsed["points"].back()["kind"] == "budget");
}

TEST_CASE("a frontier as SVG closes what it opens, and names plain and the common schedules") {
  Frontier frontier = frontier_of("resnet18");
  frontier.points.back().share_of_forward = 0.9;
  const std::string svg = remat::to_svg(frontier);

  CHECK(svg.starts_with("<svg "));
  CHECK(svg.ends_with("</svg>\n"));
  for (const std::string name : {"plain: ", "least: ", "2 segments: ", "3 segments, sqrt(9): ",
                                 "4 segments: ", "8 segments: ", "one region per layer: "})
    CHECK(svg.find(name) != std::string::npos);
  CHECK(svg.find("equal segments") == std::string::npos);
  // Every element is either empty or has text alone in it.
  std::size_t open = 0;
  for (std::size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
    const std::size_t end = svg.find('>', at);
    REQUIRE(end != std::string::npos);
    if (svg[at + 1] == '/')
      --open;
    else if (svg[end - 1] != '/')
      ++open;
  }
  CHECK(open == 0);

  frontier.points.back().share_of_forward = 3;
  const std::string without_least = remat::to_svg(frontier);
  CHECK(without_least.find("least: ") == std::string::npos);
  CHECK(without_least.find("the least, outside of the picture, is " +
                           remat::to_string(frontier.points.back().peak)) != std::string::npos);
  CHECK(remat::to_svg(Frontier()).ends_with("</svg>\n"));
}

TEST_CASE("what cannot be traced says so") {
  const Trainee trainee("resnet18");
  CHECK_THROWS_WITH_AS(
      remat::frontier(*trainee.net, trainee.images, [](const torch::Tensor& y) { return y; }),
      doctest::Contains("remat.plan.loss"), remat::ArgumentError);
  trainee.net->eval();
  CHECK_THROWS_WITH_AS(remat::frontier(*trainee.net, trainee.images, loss),
                       doctest::Contains("remat.plan.mode"), remat::ArgumentError);
}

}  // namespace frontier_test
