// SPDX-License-Identifier: MIT
#include "remat/backbones.hpp"
#include "remat/memory.hpp"
#include "remat/training/compare_memory.hpp"

#include "tests/unit/nn/tiny_modules.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace memory_report_test {

using Chain = remat::Checkpointed<remat::Sequential>;
using Trial = remat::Checkpointed<tiny::Block>;

Chain chain_of(std::size_t blocks) {
  torch::manual_seed(1);
  Chain chain;
  for (std::size_t index = 0; index < blocks; ++index) chain->push_back(tiny::Block(64));
  return chain;
}

torch::Tensor square_sum(const torch::Tensor& y) { return (y * y).sum(); }

remat::MemoryReport report_of(Chain& chain, const torch::Tensor& x, std::int64_t segments) {
  return remat::compare_memory(chain, x, square_sum, {.segments = segments, .timed_pairs = 0});
}

/// Runs layers by hand and notes what a meter says before and after each.
class ByHand {
 public:
  explicit ByHand(Chain& chain, torch::Tensor x) : chain_(chain), value_(std::move(x)) {}

  torch::Tensor run(std::size_t first, std::size_t last) {
    for (std::size_t index = first; index < last; ++index) {
      const remat::Bytes before = meter_.current();
      meter_.reset_peak();
      value_ = chain_->at<tiny::Block>(index).forward(value_);
      layers.push_back({meter_.peak() - before, meter_.current() - before});
    }
    return value_;
  }

  std::vector<remat::StepMemory> layers;

 private:
  Chain& chain_;
  torch::Tensor value_;
  remat::MemoryMeter meter_;
};

/// Everything that a step could change in any module.
struct State {
  tiny::Trace tensors;
  std::vector<std::uint32_t> versions;
  std::vector<bool> modes;

  explicit State(const torch::nn::Module& model) {
    const auto note = [&](const std::string& name, const torch::Tensor& tensor) {
      tensors[name] = tensor.detach().clone();
      versions.push_back(tensor.unsafeGetTensorImpl()->version_counter().current_version());
      if (tensor.grad().defined()) tensors["grad of " + name] = tensor.grad().clone();
    };
    tensors["random"] = tiny::random_state();
    for (const auto& item : model.named_parameters()) note(item.key(), item.value());
    for (const auto& item : model.named_buffers()) note(item.key(), item.value());
    for (const auto& module : model.modules(/*include_self=*/false))
      modes.push_back(module->is_training());
  }
};

void check_same(const State& before, const State& after) {
  CHECK(tiny::difference(before.tensors, after.tensors) == "");
  CHECK(before.versions == after.versions);
  CHECK(before.modes == after.modes);
}

std::vector<std::string> names_of(const std::vector<remat::UnitMemory>& units) {
  std::vector<std::string> names;
  for (const auto& unit : units) names.push_back(unit.name);
  return names;
}

remat::Bytes highest(const remat::StepTimeline& timeline) {
  return std::ranges::max(timeline.samples, {}, &remat::MemorySample::live).live;
}

/// A checkpointed block inside something.
struct WrapImpl : torch::nn::Module {
  WrapImpl() : inner(register_module("inner", Trial(64))) {}
  torch::Tensor forward(torch::Tensor x) { return inner->forward(x.sin()).cos(); }
  Trial inner;
};
TORCH_MODULE(Wrap);

/// A checkpointed block as a unit, one inside a unit, and one that is called twice.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : chain(register_module("chain", Chain(Trial(64), Wrap()))),
        beside(register_module("beside", Trial(64))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return beside->forward(beside->forward(chain->forward(x)));
  }
  Chain chain;
  Trial beside;
};

TEST_CASE("a report's units take what a meter finds by hand around each layer") {
  Chain chain = chain_of(4);
  const auto x = torch::randn({256, 64});
  const auto report = report_of(chain, x, 2);  // the last segment is plain

  ByHand plain(chain, x);
  square_sum(plain.run(0, 4)).backward();
  ByHand checkpointed(chain, x);
  remat::checkpoint([&] { return checkpointed.run(0, 2); });
  square_sum(checkpointed.run(2, 4)).backward();

  REQUIRE(names_of(report.units) == std::vector<std::string>{"0", "1", "2", "3"});
  for (std::size_t index = 0; index < 4; ++index) {
    CAPTURE(index);
    CHECK(report.units[index].plain.kept == plain.layers[index].kept);
    CHECK(report.units[index].plain.peak == plain.layers[index].peak);
    CHECK(report.units[index].checkpointed.kept == checkpointed.layers[index].kept);
    CHECK(report.units[index].checkpointed.peak == checkpointed.layers[index].peak);
  }
  CHECK(report.units[0].checkpointed.kept < report.units[0].plain.kept);
  CHECK(report.units[3].checkpointed.kept == report.units[3].plain.kept);
}

TEST_CASE("of nested units the outermost counts, and calls of one module are added") {
  const auto model = std::make_shared<NetImpl>();
  const auto report =
      remat::compare_memory(*model, torch::randn({64, 64}), square_sum, {.timed_pairs = 0});

  REQUIRE(names_of(report.units) == std::vector<std::string>{"chain.0", "chain.1", "beside"});
  CHECK(report.units[1].plain.kept > report.units[0].plain.kept);
  CHECK(report.units[2].plain.kept > report.units[0].plain.kept);
  CHECK(report.units[2].plain.peak < report.units[2].plain.kept + report.units[0].plain.peak);
}

TEST_CASE("a checkpointed module that is the whole model is one unit") {
  Trial block(64);
  const auto report = remat::compare_memory(block, torch::randn({64, 64}), square_sum);

  CHECK(names_of(report.units) == std::vector<std::string>{block->name()});
}

TEST_CASE("a timeline's highest point is the peak, and kept is where backward begins") {
  Chain chain = chain_of(6);
  const auto report = report_of(chain, torch::randn({256, 64}), 3);

  const auto check = [](const remat::StepTimeline& timeline, const remat::StepMemory& memory) {
    CHECK(highest(timeline) == memory.peak);
    CHECK(timeline.samples.front() == remat::MemorySample{0, {0}});
    CHECK(std::ranges::is_sorted(timeline.samples, {}, &remat::MemorySample::seconds));
    CHECK(timeline.samples.back().seconds <= timeline.end_seconds);
    const auto after = std::ranges::upper_bound(timeline.samples, timeline.backward_begin_seconds,
                                                {}, &remat::MemorySample::seconds);
    CHECK(std::prev(after)->live == memory.kept);
  };
  check(report.plain_timeline, report.plain);
  check(report.checkpointed_timeline, report.checkpointed);
}

TEST_CASE("the recomputes of a timeline are those that the engine counts, all in backward") {
  Chain chain = chain_of(6);
  const auto report = report_of(chain, torch::randn({256, 64}), 3);

  const remat::StepTimeline& timeline = report.checkpointed_timeline;
  std::int64_t operations = 0;
  double last = timeline.backward_begin_seconds;
  for (const remat::RecomputeSpan& span : timeline.recomputes) {
    CHECK(span.begin_seconds >= last);
    CHECK(span.end_seconds > span.begin_seconds);
    last = span.end_seconds;
    operations += span.operation_count;
  }
  CHECK(last <= timeline.end_seconds);
  CHECK(operations == report.recomputed_operations);
  CHECK(operations > 0);
  CHECK(report.plain_timeline.recomputes.empty());
}

TEST_CASE("a backbone's units have the names of its modules, and it stays as it was") {
  torch::manual_seed(2);
  const auto net = remat::create_classifier("resnet18", 10);
  const auto x = torch::randn({2, 3, 64, 64});
  const auto labels = torch::tensor({1, 2});
  const auto loss = [&](const torch::Tensor& y) { return torch::cross_entropy_loss(y, labels); };
  loss(net->forward(x)).backward();
  const State before(*net);

  const auto report = remat::compare_memory(*net, x, loss, {.timed_pairs = 1});

  check_same(before, State(*net));
  CHECK_FALSE(net->is_gradient_checkpointing_enabled());
  CHECK(report.units.size() >= 8);
  const auto names = names_of(report.units);
  CHECK(std::ranges::count(names, "layer1.0") == 1);
  CHECK(names.front() == "stem");  // put together from conv1 and bn1, and registered nowhere
  for (const std::string& name : names) {
    CAPTURE(name);
    CHECK((name == "stem" || net->named_modules().contains(name)));
  }
}

TEST_CASE("an input keeps its gradient, and its graph if it has one") {
  Chain chain = chain_of(4);
  const auto leaf = torch::randn({32, 64}).requires_grad_();
  (3 * leaf).sum().backward();
  const torch::Tensor gradient = leaf.grad(), content = gradient.clone();
  const auto inner = leaf.sin();
  const State before(*chain);

  const auto of_leaf = report_of(chain, leaf, 2);
  const auto of_inner = report_of(chain, inner, 2);

  CHECK(leaf.grad().is_same(gradient));
  CHECK(torch::equal(gradient, content));
  check_same(before, State(*chain));
  // Both receive a gradient in the step, which is there at its end.
  CHECK(of_inner.plain_timeline.samples.back().live == of_leaf.plain_timeline.samples.back().live);
  CHECK(of_inner.plain.peak == of_leaf.plain.peak);
  CHECK(of_inner.checkpointed.peak == of_leaf.checkpointed.peak);
  inner.sum().backward();
  CHECK(torch::equal(leaf.grad(), content + leaf.detach().cos()));
}

TEST_CASE("where nothing was checkpointed a report says so, with equal curves") {
  Chain chain = chain_of(3);
  const auto report = report_of(chain, torch::randn({32, 64}), 1);

  CHECK(report.regions == 0);
  CHECK(report.saving() == remat::Bytes{0});
  CHECK(report.checkpointed_timeline.recomputes.empty());
  CHECK(report.checkpointed_timeline.samples.size() == report.plain_timeline.samples.size());
  for (const auto& unit : report.units) CHECK(unit.plain.kept == unit.checkpointed.kept);
}

TEST_CASE("a thinned timeline keeps its ends and its extremes") {
  std::vector<remat::MemorySample> samples;
  for (int i = 0; i < 10'000; ++i) samples.push_back({0.001 * i, {(i * 7919) % 1000}});
  samples[4321].live = {5000};
  samples[7654].live = {-3};

  const auto thin = remat::thinned(samples, 100);

  CHECK(thin.size() <= 102);
  CHECK(thin.size() >= 100);
  CHECK(thin.front() == samples.front());
  CHECK(thin.back() == samples.back());
  CHECK(std::ranges::count(thin, samples[4321]) == 1);
  CHECK(std::ranges::count(thin, samples[7654]) == 1);
  CHECK(std::ranges::is_sorted(thin, {}, &remat::MemorySample::seconds));
  CHECK((remat::thinned(thin, 200) == thin));
}

}  // namespace memory_report_test
