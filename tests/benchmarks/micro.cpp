// SPDX-License-Identifier: MIT
//
// What a region costs where the operations cost nothing: per recorded operation, per recomputed
// operation, and as a whole on a step of one tiny layer.

#include "remat/remat.hpp"

#include <benchmark/benchmark.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/benchmarks/results.hpp"

namespace benchmarks {
namespace {

constexpr int kChainLength = 1000;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

torch::Tensor chain(torch::Tensor x) {
  for (int i = 0; i < kChainLength; ++i) x = x.tanh();
  return x;
}

/// A chain of tiny operations, forward: what recording adds to each.
void chain_forward(benchmark::State& state, bool is_checkpointed) {
  const auto x = torch::ones({4}).requires_grad_();
  for (auto _ : state) {
    const auto start = Clock::now();
    torch::Tensor y = is_checkpointed ? remat::checkpoint(chain, x) : chain(x);
    state.SetIterationTime(seconds_since(start));
  }
}

/// The same, backward: what the recompute adds to each.
void chain_backward(benchmark::State& state, bool is_checkpointed) {
  const auto x = torch::ones({4}).requires_grad_();
  for (auto _ : state) {
    torch::Tensor y = is_checkpointed ? remat::checkpoint(chain, x) : chain(x);
    y = y.sum();
    const auto start = Clock::now();
    y.backward();
    state.SetIterationTime(seconds_since(start));
  }
}

/// The operations alone, without autograd: what a recomputed operation costs at least.
void chain_without_grad(benchmark::State& state) {
  const auto x = torch::ones({4});
  const torch::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(chain(x));
}

class TinyImpl : public torch::nn::Module {
 public:
  TinyImpl() : linear(register_module("linear", torch::nn::Linear(16, 16))) {}
  torch::Tensor forward(torch::Tensor x) { return torch::tanh(linear->forward(x)); }

  torch::nn::Linear linear;
};

/// Forward and backward of `call` on one tiny layer.
template <class Call>
void tiny_step(benchmark::State& state, Call call) {
  torch::manual_seed(0);
  const auto x = torch::randn({4, 16}).requires_grad_();
  for (auto _ : state) call(x).sum().backward();
}

void tiny_plain(benchmark::State& state) {
  TinyImpl tiny;
  tiny_step(state, [&](const torch::Tensor& x) { return tiny.forward(x); });
}

void tiny_checkpointed(benchmark::State& state) {
  TinyImpl tiny;
  tiny_step(state, [&](const torch::Tensor& x) {
    return remat::checkpoint([&](const torch::Tensor& t) { return tiny.forward(t); }, x);
  });
}

void tiny_nested(benchmark::State& state) {
  TinyImpl tiny;
  const auto inner = [&](const torch::Tensor& t) { return tiny.forward(t); };
  tiny_step(state, [&](const torch::Tensor& x) {
    return remat::checkpoint([&](const torch::Tensor& t) { return remat::checkpoint(inner, t); },
                             x);
  });
}

void tiny_switched_off(benchmark::State& state) {
  remat::Checkpointed<TinyImpl> tiny;
  tiny->disable_gradient_checkpointing();
  tiny_step(state, [&](const torch::Tensor& x) { return tiny->forward(x); });
}

/// Collects medians under their names while the usual table is printed.
class Collector : public benchmark::ConsoleReporter {
 public:
  void ReportRuns(const std::vector<Run>& runs) override {
    ConsoleReporter::ReportRuns(runs);
    for (const Run& run : runs)
      if (run.aggregate_name == "median")
        microseconds[run.run_name.function_name] = run.GetAdjustedRealTime();
  }

  std::map<std::string, double> microseconds;
};

template <class Function>
void add(const std::string& name, Function function, bool has_manual_time = false) {
  auto* entry = benchmark::RegisterBenchmark(name.c_str(), function);
  entry->Unit(benchmark::kMicrosecond)->Repetitions(7)->MinTime(0.2)->ReportAggregatesOnly(true);
  if (has_manual_time)
    entry->UseManualTime();
  else
    entry->UseRealTime();
}

}  // namespace

std::vector<MicroResult> measure_micro() {
  add("chain forward plain", [](benchmark::State& state) { chain_forward(state, false); }, true);
  add("chain forward recorded", [](benchmark::State& state) { chain_forward(state, true); }, true);
  add("chain backward plain", [](benchmark::State& state) { chain_backward(state, false); }, true);
  add(
      "chain backward recomputed", [](benchmark::State& state) { chain_backward(state, true); },
      true);
  add("chain without grad", chain_without_grad);
  add("tiny layer plain", tiny_plain);
  add("tiny layer checkpointed", tiny_checkpointed);
  add("tiny layer nested", tiny_nested);
  add("tiny layer switched off", tiny_switched_off);
  at::set_num_threads(1);
  // The repetitions of all entries are mixed, so that a slow moment hits them alike.
  std::string program = "remat_benchmark", mixed = "--benchmark_enable_random_interleaving=true";
  char* arguments[] = {program.data(), mixed.data(), nullptr};
  int argument_count = 2;
  benchmark::Initialize(&argument_count, arguments);
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);

  auto& time = collector.microseconds;
  std::vector<MicroResult> results;
  for (const auto& [name, microseconds] : time) results.push_back({name, microseconds});
  const double recorded =
      (time["chain forward recorded"] - time["chain forward plain"]) / kChainLength;
  const double recomputed =
      (time["chain backward recomputed"] - time["chain backward plain"]) / kChainLength;
  results.push_back({"per recorded operation, added", recorded});
  results.push_back({"per recomputed operation, with the operation", recomputed});
  results.push_back(
      {"per recomputed operation, added", recomputed - time["chain without grad"] / kChainLength});
  results.push_back({"region, added", time["tiny layer checkpointed"] - time["tiny layer plain"]});
  results.push_back(
      {"region in a region, added", time["tiny layer nested"] - time["tiny layer plain"]});
  results.push_back(
      {"region switched off, added", time["tiny layer switched off"] - time["tiny layer plain"]});
  return results;
}

}  // namespace benchmarks
