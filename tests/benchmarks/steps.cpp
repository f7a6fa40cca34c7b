// SPDX-License-Identifier: MIT
//
// Peak activation memory and step time of any of the networks under rules and keep policies.
//
// A step is forward, cross entropy, backward, with the gradients there before it begins. The
// strategies take turns within a round, so that a slow moment of the machine hits them alike, and
// gradients are compared bit for bit with plain's before anything is timed.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <chrono>
#include <ctime>
#include <functional>
#include <iostream>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "tests/benchmarks/results.hpp"

namespace benchmarks {
namespace {

/// A keep policy chosen by hand for residual blocks: of each block only the second convolution's
/// result, in a bottleneck the narrow 3x3, which is dear to recompute and cheap to hold.
struct SecondConvolution {
  bool operator()(const remat::keep::Operation& operation, remat::Bytes) const {
    return operation.name == "aten::convolution" && operation.ordinal == 1;
  }
};

struct Strategy {
  std::string name;
  std::function<std::shared_ptr<remat::Backbone>(const std::string& model)> create;
};

constexpr std::int64_t kClasses = 1000;

/// The default policy of the family, with `segment_count` segments; 0: its own rule, -1: switched
/// off.
Strategy by_default(std::string name, std::int64_t segment_count) {
  return {std::move(name), [segment_count](const std::string& model) {
            auto net = remat::create_backbone(model, {.num_classes = kClasses});
            if (segment_count == 0) net->enable_gradient_checkpointing();
            if (segment_count > 0) net->enable_gradient_checkpointing(segment_count);
            return net;
          }};
}

template <class Policy>
Strategy strategy(std::string name) {
  return {std::move(name), [](const std::string& model) {
            auto net = remat::create_backbone<Policy>(model, {.num_classes = kClasses});
            net->enable_gradient_checkpointing();
            return net;
          }};
}

/// The keep policy of the row whose network is made. Chosen while the program runs, so that a
/// pattern with its 33 networks is compiled once and not once per keep policy.
struct KeepOfRow {
  using Function = bool (*)(const remat::keep::Operation&, remat::Bytes);
  static inline Function next = nullptr;

  Function function = next;
  bool operator()(const remat::keep::Operation& operation, remat::Bytes bytes) const {
    return function(operation, bytes);
  }
};

template <class Keep>
bool keeps(const remat::keep::Operation& operation, remat::Bytes bytes) {
  return Keep()(operation, bytes);
}

bool is_one_of(const std::string& model, const std::string& families) {
  return std::regex_search(model, std::regex("^(" + families + ")"));
}

/// One region per unit with this keep policy, in the pattern of the network's family.
std::shared_ptr<remat::Backbone> keeping(KeepOfRow::Function keep, const std::string& model) {
  using namespace remat;
  KeepOfRow::next = keep;
  std::shared_ptr<Backbone> net;
  const BackboneOptions options{.num_classes = kClasses};
  if (is_one_of(model, "vit|swin|maxvit"))
    net = create_backbone<Checkpointed<TransformerLayers, EachUnit, KeepOfRow>>(model, options);
  else if (is_one_of(model, "convnext"))
    net = create_backbone<Checkpointed<StagedHybrid, EachUnit, KeepOfRow>>(model, options);
  else
    net = create_backbone<Checkpointed<Sequential, EachUnit, KeepOfRow>>(model, options);
  net->enable_gradient_checkpointing();
  return net;
}

template <class Keep>
Strategy each_unit(std::string name) {
  return {std::move(name), [](const std::string& model) { return keeping(keeps<Keep>, model); }};
}

/// The keep policy that suits the family: at least 45 % saved for the least time.
Strategy by_family() {
  return {"keep policy of the family", [](const std::string& model) {
            using namespace remat::keep;
            if (is_one_of(model, "resnet")) return keeping(keeps<SecondConvolution>, model);
            if (is_one_of(model, "mobilenet|efficientnet"))
              return keeping(keeps<convolutions_and_matmuls>, model);
            return keeping(keeps<reducing_products>, model);
          }};
}

std::vector<Strategy> all_strategies() {
  using namespace remat;
  constexpr std::int64_t kPerUnit = 100'000;  // more than units means one per unit
  return {
      by_default("plain", -1),
      by_default("default policy", 0),
      by_default("one region per unit", kPerUnit),
      by_default("8 segments", 8),
      strategy<Checkpointed<Sequential, KeepAll>>("KeepAll"),
      strategy<Checkpointed<Sequential, Segments<4>>>("Segments<4>"),
      strategy<Checkpointed<Sequential, SquareRoot>>("SquareRoot"),
      strategy<Checkpointed<Sequential, EveryNth<2>>>("EveryNth<2>"),
      strategy<Checkpointed<Sequential, Segments<4>, keep::convolutions_and_matmuls>>(
          "Segments<4>, convolutions and matmuls kept"),
      each_unit<keep::convolutions_and_matmuls>("EachUnit, convolutions and matmuls kept"),
      each_unit<keep::reducing_products>("EachUnit, reducing products kept"),
      each_unit<SecondConvolution>("EachUnit, second convolution kept"),
      by_family(),
  };
}

struct Competitor {
  Strategy strategy;
  std::shared_ptr<remat::Backbone> model;
  StepResult result;
  std::vector<double> seconds, ratios, cpu_seconds, cpu_ratios;
};

std::vector<torch::Tensor> gradients(const torch::nn::Module& model) {
  std::vector<torch::Tensor> list;
  for (const auto& parameter : model.parameters()) list.push_back(parameter.grad().clone());
  return list;
}

/// Runs one step; notes its times, peak and counters.
void step(Competitor& competitor, const torch::Tensor& images, const torch::Tensor& labels) {
  for (torch::Tensor& parameter : competitor.model->parameters()) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
    parameter.mutable_grad().zero_();
  }
  torch::manual_seed(2);  // dropout and stochastic depth alike in all strategies
  remat::reset_statistics();
  const remat::MemoryMeter meter;

  const std::clock_t cpu_start = std::clock();
  const auto start = std::chrono::steady_clock::now();
  torch::cross_entropy_loss(competitor.model->forward(images), labels).backward();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;

  competitor.seconds.push_back(time.count());
  competitor.cpu_seconds.push_back(static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
  const auto statistics = remat::statistics();
  competitor.result.peak_mib = meter.peak().mebibytes();
  competitor.result.recorded_operations = statistics.recorded_operations;
  competitor.result.recomputed_operations = statistics.recomputed_operations;
}

/// With `--turns`: waits until it is this program's turn, so that another one can alternate with
/// it.
void wait_for_turn(const Settings& settings) {
  std::string line;
  if (settings.waits_for_turns) std::getline(std::cin, line);
}
void end_turn(const Settings& settings) {
  if (settings.waits_for_turns) std::cout << "done" << std::endl;
}

/// @param model  a name, or "name:batch"
std::vector<StepResult> measure_model(const std::string& model, const Settings& settings) {
  const std::string name = model.substr(0, model.find(':'));
  const std::int64_t batch =
      name == model ? settings.batch : std::stol(model.substr(name.size() + 1));
  torch::manual_seed(1);
  const auto images = torch::randn({batch, 3, settings.image_size, settings.image_size});
  const auto labels = torch::randint(kClasses, {batch});
  std::vector<Competitor> competitors;
  const std::regex wanted(settings.strategies);
  for (Strategy& strategy : all_strategies()) {
    if (strategy.name != "plain" && !std::regex_search(strategy.name, wanted)) continue;
    torch::manual_seed(0);
    auto network = strategy.create(name);
    competitors.push_back({std::move(strategy), std::move(network), {}, {}, {}, {}, {}});
  }

  // The first round checks, and lets each plan measure its units.
  wait_for_turn(settings);
  std::vector<torch::Tensor> expected;
  for (Competitor& competitor : competitors) {
    step(competitor, images, labels);
    competitor.result.first_peak_mib = competitor.result.peak_mib;
    step(competitor, images, labels);
    const auto found = gradients(*competitor.model);
    if (expected.empty()) expected = found;
    competitor.result.gradients_equal = true;
    for (std::size_t i = 0; i < found.size(); ++i)
      if (!torch::equal(found[i], expected[i])) competitor.result.gradients_equal = false;
    competitor.seconds.clear();
    competitor.cpu_seconds.clear();
  }
  end_turn(settings);

  for (std::int64_t round = 0; round < settings.repeats; ++round) {
    wait_for_turn(settings);
    for (Competitor& competitor : competitors) step(competitor, images, labels);
    for (Competitor& competitor : competitors) {
      const Competitor& plain = competitors[0];
      competitor.ratios.push_back(competitor.seconds.back() / plain.seconds.back());
      competitor.cpu_ratios.push_back(competitor.cpu_seconds.back() / plain.cpu_seconds.back());
    }
    end_turn(settings);
  }

  std::vector<StepResult> results;
  for (Competitor& competitor : competitors) {
    StepResult& result = competitor.result;
    result.model = model;
    result.strategy = competitor.strategy.name;
    result.saving = 1 - result.peak_mib / competitors[0].result.peak_mib;
    result.step_ms = 1e3 * median(competitor.seconds);
    result.time_ratio = median(competitor.ratios);
    result.cpu_ratio = median(competitor.cpu_ratios);
    result.segments = competitor.model->segments();
    results.push_back(result);
  }
  return results;
}

}  // namespace

std::vector<StepResult> measure_steps(const Settings& settings) {
  at::set_num_threads(static_cast<int>(settings.threads));
  std::vector<StepResult> results;
  for (const std::string& model : settings.models)
    for (StepResult& result : measure_model(model, settings)) results.push_back(std::move(result));
  return results;
}

}  // namespace benchmarks
