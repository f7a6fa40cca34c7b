// SPDX-License-Identifier: MIT
#include "remat/memory.hpp"
#include "remat/training/compare_memory.hpp"

#include "tests/unit/nn/tiny_modules.hpp"

#include <sstream>
#include <string>

namespace compare_memory_test {

using Chain = remat::Checkpointed<remat::Sequential>;

Chain wide_chain() {
  torch::manual_seed(1);
  Chain chain;
  for (int index = 0; index < 6; ++index) chain->push_back(tiny::Block(64));
  return chain;
}

torch::Tensor square_sum(const torch::Tensor& y) { return (y * y).sum(); }

/// The same step, written by hand.
remat::StepMemory by_hand(torch::nn::Module& model, Chain& chain, const torch::Tensor& x) {
  for (auto& parameter : model.parameters()) parameter.mutable_grad() = torch::Tensor();
  const remat::MemoryMeter meter;
  remat::StepMemory memory;
  const torch::Tensor output = chain->forward(x);
  const torch::Tensor value = square_sum(output);
  memory.kept = meter.current();
  value.backward();
  memory.peak = meter.peak();
  return memory;
}

/// Everything that a step could change.
struct State {
  tiny::Trace tensors;
  std::vector<bool> modes;
  std::vector<std::uint32_t> versions;
  bool is_on;
  std::size_t segments, costs;

  explicit State(Chain& chain) {
    tensors["random"] = tiny::random_state();
    for (const auto& item : chain->named_parameters()) {
      tensors[item.key()] = item.value().detach().clone();
      if (item.value().grad().defined())
        tensors["grad of " + item.key()] = item.value().grad().clone();
    }
    for (const auto& item : chain->named_buffers()) {
      tensors[item.key()] = item.value().clone();
      versions.push_back(item.value().unsafeGetTensorImpl()->version_counter().current_version());
    }
    for (const auto& module : chain->modules(/*include_self=*/true))
      modes.push_back(module->is_training());
    is_on = chain->is_gradient_checkpointing_enabled();
    segments = chain->segment_count();
    costs = chain->unit_costs().size();
  }
};

void check_same(const State& before, const State& after) {
  CHECK(tiny::difference(before.tensors, after.tensors) == "");
  CHECK(before.modes == after.modes);
  CHECK(before.versions == after.versions);
  CHECK(before.is_on == after.is_on);
  CHECK(before.segments == after.segments);
  CHECK(before.costs == after.costs);
}

/// Gradients, one frozen block, a segment count of its own: nothing here is a default.
Chain unusual_chain() {
  Chain chain = wide_chain();
  by_hand(*chain, chain, torch::randn({32, 64}));
  chain->enable_gradient_checkpointing(2);
  chain->ptr(1)->eval();
  return chain;
}

TEST_CASE("compare_memory says why checkpointing does not work in this process") {
  std::string text;
  try {
    remat::detail::require_engine({.is_available = false, .reason = "another engine is in front"});
  } catch (const remat::EnvironmentError& error) {
    text = error.what();
  }
  CHECK(text.starts_with("[remat.memory.engine]"));
  CHECK(text.find("another engine is in front") != std::string::npos);
}

}  // namespace compare_memory_test

using namespace compare_memory_test;

TEST_CASE("peak and kept bytes are those that a meter finds in the same steps by hand") {
  Chain chain = wide_chain();
  const auto x = torch::randn({256, 64});
  const remat::MemoryReport report =
      remat::compare_memory(chain, x, square_sum, {.segments = 3, .timed_pairs = 0});

  chain->enable_gradient_checkpointing(3);
  by_hand(*chain, chain, x);
  const remat::StepMemory checkpointed = by_hand(*chain, chain, x);
  chain->disable_gradient_checkpointing();
  const remat::StepMemory plain = by_hand(*chain, chain, x);

  CHECK(report.checkpointed.peak == checkpointed.peak);
  CHECK(report.checkpointed.kept == checkpointed.kept);
  CHECK(report.plain.peak == plain.peak);
  CHECK(report.plain.kept == plain.kept);
  CHECK(report.saving() > remat::Bytes{0});
  CHECK(report.regions == 2);
  CHECK(report.recomputed_operations > 0);
  CHECK_FALSE(report.time_ratio);
}

TEST_CASE("a comparison leaves the model and the random numbers as they were") {
  Chain chain = unusual_chain();
  const auto x = torch::randn({32, 64}).requires_grad_();
  const State before(chain);

  SUBCASE("with the switches as they are") { remat::compare_memory(chain, x, square_sum); }
  SUBCASE("with another number of segments") {
    remat::compare_memory(chain, x, square_sum, {.segments = 5});
  }
  SUBCASE("when the loss throws and changes modes") {
    int calls = 0;
    const auto loss = [&](const torch::Tensor& y) {
      if (++calls == 3) {
        chain->train();
        throw std::domain_error("thrown by the loss");
      }
      return square_sum(y);
    };
    CHECK_THROWS_AS(remat::compare_memory(chain, x, loss, {.segments = 4}), std::domain_error);
  }

  check_same(before, State(chain));
  CHECK_FALSE(x.grad().defined());
}

TEST_CASE("a chain that is off is compared by its own rule, and off again") {
  Chain chain = wide_chain();
  chain->disable_gradient_checkpointing();

  const auto report = remat::compare_memory(chain, torch::randn({256, 64}), square_sum);

  CHECK(report.regions > 0);
  CHECK(report.time_ratio.value_or(0) > 0);
  CHECK_FALSE(chain->is_gradient_checkpointing_enabled());
  CHECK(chain->unit_costs().empty());
}

TEST_CASE("a graph from before a comparison still finds the buffers that it has saved") {
  Chain chain(torch::nn::BatchNorm1d(4));
  chain->ptr(0)->eval();
  const auto x = torch::randn({8, 4}).requires_grad_();
  const torch::Tensor pending = chain->at<torch::nn::BatchNorm1d>(0).forward(x).sum();
  chain->ptr(0)->train();

  remat::compare_memory(chain, torch::randn({8, 4}), square_sum);

  CHECK_NOTHROW(pending.backward());
}

TEST_CASE("what cannot be compared is an error that says why") {
  const auto x = torch::randn({8, 64});
  const auto compare = [&](auto& model, const auto& loss) {
    remat::compare_memory(model, x, loss);
  };
  const auto code_of = [&](auto& model, const auto& loss) -> std::string {
    try {
      compare(model, loss);
    } catch (const remat::ArgumentError& error) {
      return std::string(error.code());
    }
    return "";
  };
  Chain chain = wide_chain();
  tiny::Block plain(64);

  CHECK(code_of(plain, square_sum) == "remat.memory.nothing");
  CHECK(code_of(chain, [](const torch::Tensor& y) { return y; }) == "remat.memory.loss");
  CHECK(code_of(chain, [](const torch::Tensor&) { return torch::Tensor(); }) ==
        "remat.memory.loss");
  chain->eval();
  CHECK(code_of(chain, square_sum) == "remat.memory.eval");
}

TEST_CASE("a report reads as three lines") {
  remat::MemoryReport report{
      {{4 << 20}, {3 << 20}}, {{1 << 20}, {512 << 10}}, 3, 42, std::optional<double>(1.25)};
  std::ostringstream text;
  text << report;
  CHECK(text.str() ==
        "plain:        peak 4.0 MiB, kept for backward 3.0 MiB\n"
        "checkpointed: peak 1.0 MiB, kept for backward 512.0 KiB\n"
        "saving:       3.0 MiB (75.0 % of the peak); 42 operations recomputed; time x1.25");
}

TEST_CASE("memory statistics are printed as one line that never shows a missing figure as 0") {
  std::ostringstream text;
  remat::print_memory_stats(torch::kCPU, text);
  CHECK(text.str() == remat::describe_memory(torch::kCPU) + "\n");
  CHECK(text.str().find("not available") != std::string::npos);
}
