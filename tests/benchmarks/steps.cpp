// SPDX-License-Identifier: MIT
//
// Peak activation memory and step time of any of the networks under rules, keep policies and
// budgets, and under rotor's schedules.
//
// A step is forward, cross entropy, backward, with the gradients there before it begins. The
// strategies take turns within a round, so that a slow moment of the machine hits them alike, and
// gradients are compared bit for bit with plain's before anything is timed. All networks of one
// name share parameters and gradients.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <ctime>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tests/benchmarks/results.hpp"
#include "tests/benchmarks/rotor.hpp"
#include "tests/benchmarks/rotor_run.hpp"
#include "tests/benchmarks/segment_prediction.hpp"
#include "tests/benchmarks/step_meter.hpp"
#include "tests/benchmarks/strategies.hpp"

namespace benchmarks {
namespace {

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

struct Competitor {
  std::shared_ptr<remat::Backbone> model;
  Forward forward;
  StepResult result;
  // One entry per step.
  std::vector<double> seconds, cpu_seconds, forward_seconds, recompute_seconds;
  // One entry per round: to plain's in the same round.
  std::vector<double> ratios, cpu_ratios, recomputed_shares;

  Competitor(std::string strategy, std::shared_ptr<remat::Backbone> network)
      : model(std::move(network)),
        forward([net = model](const torch::Tensor& images) { return net->forward(images); }) {
    result.strategy = std::move(strategy);
  }
};

struct Batch {
  torch::Tensor images, labels;
};

std::vector<torch::Tensor> gradients(const torch::nn::Module& model) {
  std::vector<torch::Tensor> list;
  for (const auto& parameter : model.parameters()) list.push_back(parameter.grad().clone());
  return list;
}

/// Gives a network gradients, or parameters and gradients of another one.
void give_gradients(const remat::Backbone& net) {
  for (torch::Tensor& parameter : net.parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
}
void share_parameters(const remat::Backbone& net, const remat::Backbone& other) {
  const auto theirs = other.parameters();
  auto parameters = net.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].set_data(theirs[i].detach());
    parameters[i].mutable_grad() = theirs[i].grad();
  }
}

/// Runs one step; notes its times, peak and counters.
void step(Competitor& competitor, const Batch& batch) {
  for (const torch::Tensor& parameter : competitor.model->parameters()) parameter.grad().zero_();
  torch::manual_seed(2);  // dropout and stochastic depth alike in all strategies
  remat::reset_statistics();
  const StepMeter meter;

  const std::clock_t cpu_start = std::clock();
  const auto start = std::chrono::steady_clock::now();
  const torch::Tensor loss =
      torch::cross_entropy_loss(competitor.forward(batch.images), batch.labels);
  const std::chrono::duration<double> forward_time = std::chrono::steady_clock::now() - start;
  loss.backward();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;

  competitor.seconds.push_back(time.count());
  competitor.cpu_seconds.push_back(static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
  competitor.forward_seconds.push_back(forward_time.count());
  competitor.recompute_seconds.push_back(meter.recompute_seconds());
  const auto statistics = remat::statistics();
  competitor.result.peak_mib = meter.peak().mebibytes();
  competitor.result.recorded_operations = statistics.recorded_operations;
  competitor.result.recomputed_operations = statistics.recomputed_operations;
}

/// Notes what was known of the steps to come.
void note_prediction(Competitor& competitor, const SegmentPrediction& prediction) {
  StepResult& result = competitor.result;
  if (const auto plan = competitor.model->memory_plan()) {
    result.predicted_peak_mib = plan->peak.mebibytes();
    result.predicted_recomputed = plan->recomputed_seconds / plan->forward_seconds;
    return;
  }
  const auto* net = dynamic_cast<const remat::ChainBackbone*>(competitor.model.get());
  const auto cost = net == nullptr ? std::nullopt : prediction.of(*net);
  if (!cost) return;
  result.predicted_peak_mib = cost->peak.mebibytes();
  result.predicted_recomputed = cost->seconds / prediction.seconds();
}

/// Runs two steps, of which the first lets each plan measure its units; compares gradients.
///
/// @param expected        plain's; set by the first competitor
/// @param plain_peak_mib  of which an infeasible budget's least is a part
void check(Competitor& competitor, const Batch& batch, std::vector<torch::Tensor>& expected,
           double plain_peak_mib) {
  try {
    step(competitor, batch);
  } catch (const remat::BudgetError& error) {
    competitor.result.is_feasible = false;
    competitor.result.least_part = error.least().mebibytes() / plain_peak_mib;
    return;
  }
  competitor.result.first_peak_mib = competitor.result.peak_mib;
  step(competitor, batch);
  const auto found = gradients(*competitor.model);
  if (expected.empty()) expected = found;
  competitor.result.gradients_equal = true;
  for (std::size_t i = 0; i < found.size(); ++i)
    if (!torch::equal(found[i], expected[i])) competitor.result.gradients_equal = false;
}

/// Rotor's schedules over the blocks of the plain network, at the same parts of plain's peak as the
/// budgets.
std::vector<Competitor> rotor_competitors(const Competitor& plain, const Batch& batch,
                                          const std::regex& wanted) {
  std::vector<Competitor> list;
  std::vector<BlockCost> costs;
  const auto net = std::dynamic_pointer_cast<remat::ChainBackbone>(plain.model);
  const double mebibyte = 1 << 20, plain_peak = plain.result.peak_mib * mebibyte;
  for (const int divisor : kBudgetDivisors) {
    const std::string name = "rotor over blocks 1/" + std::to_string(divisor);
    if (net == nullptr || !std::regex_search(name, wanted)) continue;
    const std::vector<Block> blocks = blocks_of(*net);
    if (costs.empty()) costs = measure_blocks(blocks, batch.images);
    const auto schedule = Rotor(costs, static_cast<std::int64_t>(plain_peak / divisor)).schedule();
    StepResult& result = list.emplace_back(name, plain.model).result;
    result.is_feasible = schedule.has_value();
    if (!schedule) {
      const auto least = least_rotor_limit(costs, static_cast<std::int64_t>(plain_peak));
      result.least_part = static_cast<double>(least) / plain_peak;
      continue;
    }
    double forward = 0;
    for (const BlockCost& cost : costs) forward += cost.seconds;
    result.predicted_peak_mib = static_cast<double>(peak_of(*schedule, costs)) / mebibyte;
    result.predicted_recomputed = forward_seconds_of(*schedule, costs) / forward - 1;
    list.back().forward = [blocks, steps = *schedule](const torch::Tensor& images) {
      return run_schedule(steps, blocks, images);
    };
  }
  return list;
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

/// Makes all competitors and checks them; plain is the first.
std::vector<Competitor> make_competitors(const std::string& name, const Settings& settings,
                                         const Batch& batch) {
  std::vector<Competitor> competitors;
  std::vector<torch::Tensor> expected;
  std::optional<SegmentPrediction> prediction;
  const std::regex wanted(settings.strategies);
  for (const Strategy& strategy : all_strategies()) {
    const bool is_plain = competitors.empty();
    if (!is_plain && !std::regex_search(strategy.name, wanted)) continue;
    torch::manual_seed(0);
    Competitor& competitor = competitors.emplace_back(strategy.name, strategy.create(name));
    if (is_plain)
      give_gradients(*competitor.model);
    else
      share_parameters(*competitor.model, *competitors[0].model);
    check(competitor, batch, expected, competitors[0].result.peak_mib);
    if (is_plain) prediction.emplace(*competitor.model, batch.images, batch.labels);
    if (competitor.result.is_feasible && !strategy.has_keep_policy)
      note_prediction(competitor, *prediction);
  }
  for (Competitor& competitor : rotor_competitors(competitors[0], batch, wanted)) {
    if (competitor.result.is_feasible)
      check(competitor, batch, expected, competitors[0].result.peak_mib);
    competitors.push_back(std::move(competitor));
  }
  return competitors;
}

void run_round(std::vector<Competitor>& competitors, const Batch& batch) {
  for (Competitor& competitor : competitors)
    if (competitor.result.is_feasible) step(competitor, batch);
  const Competitor& plain = competitors[0];
  for (Competitor& competitor : competitors) {
    if (!competitor.result.is_feasible) continue;
    competitor.ratios.push_back(competitor.seconds.back() / plain.seconds.back());
    competitor.cpu_ratios.push_back(competitor.cpu_seconds.back() / plain.cpu_seconds.back());
    competitor.recomputed_shares.push_back(competitor.recompute_seconds.back() /
                                           plain.forward_seconds.back());
  }
}

StepResult result_of(const Competitor& competitor, const std::string& model, double plain_peak,
                     std::int64_t rounds) {
  StepResult result = competitor.result;
  result.model = model;
  if (!result.is_feasible) return result;
  result.saving = 1 - result.peak_mib / plain_peak;
  result.step_ms = 1e3 * median({competitor.seconds.end() - rounds, competitor.seconds.end()});
  result.time_ratio = median(competitor.ratios);
  result.cpu_ratio = median(competitor.cpu_ratios);
  result.recomputed_share = median(competitor.recomputed_shares);
  result.segments = competitor.model->segments();
  return result;
}

/// @param model  a name, or "name:batch"
std::vector<StepResult> measure_model(const std::string& model, const Settings& settings) {
  const std::string name = model.substr(0, model.find(':'));
  const std::int64_t size =
      name == model ? settings.batch : std::stol(model.substr(name.size() + 1));
  torch::manual_seed(1);
  const Batch batch{torch::randn({size, 3, settings.image_size, settings.image_size}),
                    torch::randint(kClasses, {size})};

  wait_for_turn(settings);
  std::vector<Competitor> competitors = make_competitors(name, settings, batch);
  end_turn(settings);
  for (std::int64_t round = 0; round < settings.repeats; ++round) {
    wait_for_turn(settings);
    run_round(competitors, batch);
    end_turn(settings);
  }

  std::vector<StepResult> results;
  for (const Competitor& competitor : competitors)
    results.push_back(
        result_of(competitor, model, competitors[0].result.peak_mib, settings.repeats));
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
