// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/amp.hpp"
#include "remat/memory.hpp"
#include "remat/nn.hpp"
#include "remat/training.hpp"

#include <functional>
#include <string>
#include <utility>
#include <vector>

/// A plan is made in the middle of the user's own step: nothing of that may show.
namespace budget_planning_test {
namespace {

using remat::Bytes;
using remat::MemoryBudget;
using Chain = remat::Checkpointed<remat::Sequential>;

/// Two layers around whatever the test does.
struct FreeImpl : torch::nn::Module {
  using Body = std::function<torch::Tensor(FreeImpl&, torch::Tensor)>;

  FreeImpl()
      : FreeImpl([](FreeImpl& self, torch::Tensor x) {
          return self.second(torch::tanh(self.first(x)));
        }) {}
  explicit FreeImpl(Body what) : body(std::move(what)) {
    first = register_module("first", torch::nn::Linear(32, 32));
    second = register_module("second", torch::nn::Linear(32, 32));
    slow = register_parameter("slow", torch::ones({32, 32}), /*requires_grad=*/false);
  }
  torch::Tensor forward(torch::Tensor x) { return body(*this, std::move(x)); }

  Body body;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::Tensor slow;
};
TORCH_MODULE(Free);
using CheckpointedFree = remat::Checkpointed<Free>;

Chain chain_behind(const torch::nn::AnyModule& layer) {
  Chain chain;
  chain->push_back(layer);
  for (int i = 0; i < 4; ++i) {
    chain->push_back(torch::nn::Linear(32, 32));
    chain->push_back(torch::nn::Tanh());
  }
  return chain;
}

torch::nn::ReLU in_place_relu() { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); }

/// Runs `steps(net)`, which returns what is to be compared, with plain and with a budget.
template <class Make, class Steps>
void check_same(const Make& make, const Steps& steps, double fraction = 0.9) {
  const auto run = [&](bool has_budget) {
    torch::manual_seed(0);
    auto net = make();
    if (has_budget)
      net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(fraction));
    else
      net->disable_gradient_checkpointing();
    std::vector<torch::Tensor> seen = steps(net);
    for (const torch::Tensor& parameter : net->parameters()) {
      seen.push_back(parameter.clone());
      if (parameter.grad().defined()) seen.push_back(parameter.grad());
    }
    seen.push_back(torch::rand({4}));
    return seen;
  };
  const std::vector<torch::Tensor> plain = run(false), planned = run(true);
  REQUIRE(plain.size() == planned.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(plain[i], planned[i]));
  }
}

torch::Tensor batch(std::int64_t seed, std::int64_t size = 256) {
  torch::manual_seed(static_cast<std::uint64_t>(seed));
  return torch::randn({size, 32});
}

Bytes peak_of_step(Chain& chain, const torch::Tensor& x) {
  for (const torch::Tensor& parameter : chain->parameters())
    parameter.mutable_grad() = torch::zeros_like(parameter);
  const remat::MemoryMeter meter;
  chain->forward(x).sum().backward();
  return meter.peak();
}

}  // namespace

TEST_CASE("a first layer in place edits the caller's input once, while a plan is made") {
  for (const bool is_random : {false, true}) {
    CAPTURE(is_random);
    const auto make = [&] {
      return is_random ? chain_behind(torch::nn::AnyModule(
                             torch::nn::Dropout(torch::nn::DropoutOptions(0.5).inplace(true))))
                       : chain_behind(torch::nn::AnyModule(torch::nn::LeakyReLU(
                             torch::nn::LeakyReLUOptions().negative_slope(0.1).inplace(true))));
    };
    check_same(make, [](Chain& net) {
      std::vector<torch::Tensor> seen;
      for (int step = 0; step < 2; ++step) {
        const torch::Tensor x = batch(step);
        seen.push_back(net->forward(x));
        seen.back().sum().backward();
        seen.push_back(x);
        seen.push_back(torch::full({1}, static_cast<double>(x._version())));
      }
      return seen;
    });
  }
}

TEST_CASE("a first layer in place may edit an activation, while a plan is made") {
  check_same([] { return chain_behind(torch::nn::AnyModule(in_place_relu())); },
             [](Chain& net) {
               std::vector<torch::Tensor> seen;
               for (int step = 0; step < 2; ++step) {
                 const torch::Tensor leaf = batch(step).requires_grad_(), x = leaf * 2;
                 seen.push_back(net->forward(x));
                 seen.back().sum().backward();
                 seen.insert(seen.end(), {x, leaf.grad()});
               }
               return seen;
             });
}

TEST_CASE("a forward that writes a parameter or any other tensor writes it once a step") {
  torch::Tensor queue;
  const auto make = [&] {
    queue = torch::zeros({256, 32});
    return CheckpointedFree([&](FreeImpl& self, torch::Tensor x) {
      torch::Tensor hidden = torch::tanh(self.first(x));
      {
        const torch::NoGradGuard no_grad;
        self.slow.mul_(0.9).add_(self.first->weight, 0.1);
        queue.add_(hidden);
      }
      return self.second(torch::matmul(hidden, self.slow));
    });
  };
  const auto steps = [&](CheckpointedFree& net) {
    for (int step = 0; step < 2; ++step) net->forward(batch(step)).sum().backward();
    return std::vector<torch::Tensor>{queue.clone()};
  };
  check_same(make, steps, /*fraction=*/1);
}

TEST_CASE("a report puts back the parameters that a forward writes") {
  CheckpointedFree net([](FreeImpl& self, torch::Tensor x) {
    {
      const torch::NoGradGuard no_grad;
      self.slow.mul_(0.9).add_(self.first->weight, 0.1);
    }
    return self.second(torch::matmul(torch::tanh(self.first(x)), self.slow));
  });
  const torch::Tensor before = net->slow.clone(), graph = net->second->weight.square().sum();
  const std::int64_t version = net->slow._version();
  remat::compare_memory(*net, batch(0),
                        [](const torch::Tensor& output) { return output.square().mean(); });
  CHECK(torch::equal(net->slow, before));
  CHECK(net->slow._version() == version);
  CHECK_NOTHROW(graph.backward());
}

TEST_CASE("hooks of parameters see the gradients of the user's steps alone") {
  CheckpointedFree net;
  int calls = 0;
  net->first->weight.register_hook([&](torch::Tensor gradient) {
    ++calls;
    return gradient;
  });
  net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1));
  const auto accumulator = torch::autograd::impl::grad_accumulator(net->first->weight);
  net->forward(batch(0)).sum().backward();
  CHECK(calls == 1);
  CHECK(torch::autograd::impl::grad_accumulator(net->first->weight) == accumulator);
  const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
  remat::plan(*net, batch(0), loss, MemoryBudget::fraction_of_plain(1));
  CHECK(calls == 1);
  remat::compare_memory(*net, batch(0), loss);
  CHECK(calls == 1);
  net->forward(batch(0)).sum().backward();
  CHECK(calls == 2);
}

TEST_CASE("a graph that the loss reads is still there after a plan was made") {
  CheckpointedFree net;
  const torch::Tensor weight = torch::ones({32}).requires_grad_(), mask = (weight * 2).exp();
  const auto loss = [&](const torch::Tensor& output) { return (output * mask).sum(); };
  remat::plan(*net, batch(0), loss, MemoryBudget::fraction_of_plain(1));
  CHECK_FALSE(weight.grad().defined());
  CHECK_NOTHROW(loss(net->forward(batch(0))).backward());
  CHECK(weight.grad().defined());
}

TEST_CASE("parameters that are unfrozen get a plan of their own, within the budget") {
  torch::manual_seed(0);
  Chain chain;
  for (int i = 0; i < 20; ++i) {
    chain->push_back(torch::nn::Linear(64, 64));
    chain->push_back(torch::nn::Tanh());
  }
  const torch::Tensor x = torch::randn({2048, 64});
  for (const torch::Tensor& parameter : chain->parameters()) parameter.set_requires_grad(false);
  for (const torch::Tensor& parameter : chain->ptr(38)->parameters())
    parameter.set_requires_grad(true);
  chain->enable_gradient_checkpointing(MemoryBudget::bytes(Bytes{6 << 20}));
  peak_of_step(chain, x);
  CHECK(peak_of_step(chain, x) <= chain->memory_plan()->budget);
  const auto frozen = chain->memory_plan();
  for (const torch::Tensor& parameter : chain->parameters()) parameter.set_requires_grad(true);
  peak_of_step(chain, x);
  CHECK(peak_of_step(chain, x) <= chain->memory_plan()->budget);
  CHECK(chain->plan_outcome().is_followed);
  CHECK(chain->memory_plan() != frozen);
  CHECK(chain->memory_plan()->recomputed_count > frozen->recomputed_count);

  chain->enable_gradient_checkpointing(*frozen);  // which does not fit
  peak_of_step(chain, x);
  CHECK(remat::to_string(chain->plan_outcome()).find("more parameters or inputs require grad") !=
        std::string::npos);
}

TEST_CASE("steps of two kinds that alternate are planned once each") {
  int runs = 0;
  CheckpointedFree net([&](FreeImpl& self, torch::Tensor x) {
    ++runs;
    return self.second(torch::tanh(self.first(x)));
  });
  net->enable_gradient_checkpointing(MemoryBudget::fraction_of_plain(1));
  for (int step = 0; step < 8; ++step) {
    torch::Tensor output;
    {
      const remat::amp::Autocast autocast(torch::kCPU, {.enabled = step % 2 == 0});
      output = net->forward(batch(step));
    }
    output.to(torch::kFloat).sum().backward();
    CHECK(net->plan_outcome().is_followed);
  }
  CHECK(runs == 8 + 2 * 2);  // a plan runs the forward twice
}

TEST_CASE("a free function with a budget has plain's bits, and stays within it") {
  struct Parts {
    torch::nn::Linear first{64, 256}, second{256, 64};
    torch::nn::BatchNorm1d norm{64};
  };
  const auto make_function = [](Parts& parts) {
    return [&parts](const torch::Tensor& x, const torch::Tensor& gate) {
      torch::Tensor result = x;
      for (int i = 0; i < 4; ++i)
        result = parts.norm(parts.second(torch::gelu(parts.first(result))) * gate);
      return torch::dropout(result, 0.2, /*train=*/true);
    };
  };
  const auto run = [&](bool has_budget) {
    torch::manual_seed(0);
    Parts parts;
    const torch::Tensor x = torch::randn({512, 64}).requires_grad_();
    const torch::Tensor seed = torch::randn({64}).requires_grad_();
    int calls = 0;
    parts.first->weight.register_hook([&](torch::Tensor gradient) {
      ++calls;
      return gradient;
    });
    remat::Budgeted block(MemoryBudget::fraction_of_plain(0.5), make_function(parts));
    std::vector<torch::Tensor> seen;
    for (int step = 0; step < 3; ++step) {
      for (const auto& tensor : {parts.first->weight, parts.second->weight, x})
        tensor.mutable_grad() = torch::zeros_like(tensor);
      const torch::Tensor gate = seed.sigmoid();
      const remat::MemoryMeter meter;
      const torch::Tensor output = has_budget ? block(x, gate) : make_function(parts)(x, gate);
      output.square().mean().backward();
      if (has_budget && step > 0) {
        CHECK(meter.peak() <= block.memory_plan()->budget);
        CHECK(block.plan_outcome().is_followed);
        CHECK(block.memory_plan()->recomputed_count > 0);
      }
      seen.insert(seen.end(), {output, x.grad(), parts.first->weight.grad(), seed.grad().clone(),
                               parts.norm->running_var.clone(), torch::rand({2})});
    }
    CHECK(calls == 3);
    return seen;
  };
  const std::vector<torch::Tensor> plain = run(false), planned = run(true);
  REQUIRE(plain.size() == planned.size());
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK(torch::equal(plain[i], planned[i]));
  }
}

TEST_CASE("a plan for a free function is kept to by a checkpoint of it") {
  torch::manual_seed(0);
  torch::nn::Linear layer(64, 64);
  const auto block = [&](const torch::Tensor& x) {
    torch::Tensor result = x;
    for (int i = 0; i < 8; ++i) result = torch::gelu(layer(result));
    return result;
  };
  const auto loss = [](const torch::Tensor& output) { return output.square().mean(); };
  const torch::Tensor x = torch::randn({512, 64});
  layer->weight.mutable_grad() = torch::zeros_like(layer->weight);
  layer->bias.mutable_grad() = torch::zeros_like(layer->bias);
  const auto plan = remat::plan(block, x, loss, MemoryBudget::fraction_of_plain(0.5));
  CHECK(layer->weight.grad().count_nonzero().item<std::int64_t>() == 0);
  remat::PlanOutcome outcome;
  const remat::MemoryMeter meter;
  loss(remat::checkpoint(plan, &outcome, block, x)).backward();
  CHECK(meter.peak() == plan.peak);
  CHECK(plan.peak <= plan.budget);
  CHECK(outcome.is_followed);
  layer->eval();  // a function has no mode
  CHECK_NOTHROW(remat::plan(block, x, loss, MemoryBudget::fraction_of_plain(1)));
  const torch::NoGradGuard no_grad;
  CHECK_THROWS_WITH_AS(remat::plan(block, x, loss, MemoryBudget::fraction_of_plain(1)),
                       doctest::Contains("grad mode is off"), remat::ArgumentError);
}

}  // namespace budget_planning_test
