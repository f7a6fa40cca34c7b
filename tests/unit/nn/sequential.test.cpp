// SPDX-License-Identifier: MIT
#include "tests/unit/nn/tiny_modules.hpp"

#include "remat/memory/meter.hpp"

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using remat::Sequential;
using tiny::Block;
using torch::nn::Linear;
using torch::nn::ReLU;
using Chain = remat::Checkpointed<Sequential>;

template <class Holder = Chain>
Holder make_chain(std::int64_t width = 6) {
  return Holder(Linear(width, width), Block(width), ReLU(), Block(width),
                torch::nn::Sequential(Block(width), Linear(width, width)));
}

/// As `make_chain`, in LibTorch's parts, and called by hand, since LibTorch's Sequential does not
/// nest.
struct PlainChain : torch::nn::Module {
  explicit PlainChain(std::int64_t width = 6)
      : a(register_module("0", Linear(width, width))),
        b(register_module("1", Block(width))),
        c(register_module("2", ReLU())),
        d(register_module("3", Block(width))),
        e(register_module("4", torch::nn::Sequential(Block(width), Linear(width, width)))) {}
  torch::Tensor forward(torch::Tensor x) { return e->forward(d(c(b(a(x))))); }
  PlainChain* operator->() { return this; }
  PlainChain& operator*() { return *this; }
  Linear a;
  Block b;
  ReLU c;
  Block d;
  torch::nn::Sequential e;
};

/// A user's rule, in four lines.
struct FirstUnitAlone {
  remat::Plan operator()(const remat::Chain& chain) const {
    return remat::Plan({{0, 1, true}, {1, chain.unit_count, false}});
  }
};
struct RuleForOneUnit {
  remat::Plan operator()(const remat::Chain&) const { return remat::Plan::from_sizes({1}); }
};

/// Registers a chain in reset(), as LibTorch's clone() wants it.
struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    body = register_module("body", Chain({{"first", Linear(4, 4)}, {"second", Block(4)}}));
  }
  torch::Tensor forward(torch::Tensor x) { return body->forward(x); }
  Chain body{nullptr};
};
TORCH_MODULE(Net);

std::string what_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE_TEMPLATE(
    "under every rule and keep policy a chain gives the bits of plain, step after step", Holder,
    Chain, remat::Checkpointed<Sequential, remat::Segments<1>>,
    remat::Checkpointed<Sequential, remat::Segments<2>>,
    remat::Checkpointed<Sequential, remat::EachUnit>,
    remat::Checkpointed<Sequential, remat::EachStage>,
    remat::Checkpointed<Sequential, remat::EveryNth<2>>,
    remat::Checkpointed<Sequential, remat::SquareRoot>,
    remat::Checkpointed<Sequential, remat::KeepAll>,
    remat::Checkpointed<Sequential, FirstUnitAlone>,
    remat::Checkpointed<Sequential, remat::Segments<3>, remat::keep::convolutions_and_matmuls>,
    remat::Checkpointed<Sequential, remat::EachUnit, remat::keep::attention>) {
  PlainChain plain;
  auto chain = make_chain<Holder>();
  tiny::copy_weights(plain, *chain);
  const auto x = torch::randn({5, 6});

  for (int index = 0; index < 3; ++index) {
    CAPTURE(index);
    CHECK(tiny::difference(tiny::step(plain, x), tiny::step(chain, x)) == "");
  }
  chain->eval();
  plain.eval();
  CHECK(tiny::difference(tiny::step(plain, x), tiny::step(chain, x)) == "");
}

TEST_CASE(
    "the keys of a chain are those of plain, with checkpointing on, off and for any number of "
    "segments") {
  const PlainChain plain;
  auto chain = make_chain();
  const auto x = torch::randn({5, 6});

  CHECK(tiny::keys(*chain) == tiny::keys(plain));
  tiny::step(chain, x);
  CHECK(tiny::keys(*chain) == tiny::keys(plain));
  chain->enable_gradient_checkpointing(2);
  tiny::step(chain, x);
  CHECK(tiny::keys(*chain) == tiny::keys(plain));
  chain->disable_gradient_checkpointing();
  tiny::step(chain, x);
  CHECK(tiny::keys(*chain) == tiny::keys(plain));
}

TEST_CASE("the first plan goes by count and checkpoints everything, the second by measured bytes") {
  auto chain = make_chain();
  CHECK(chain->plan() ==
        remat::Plan::from_sizes({2, 2, 1, 1}));  // six units, since the nested chain is opened
  CHECK(chain->unit_costs().empty());

  CHECK(tiny::region_count([&] { tiny::step(chain, torch::randn({5, 6})); }) == 4);

  REQUIRE(chain->unit_costs().size() == 6);
  for (const auto& cost : chain->unit_costs()) CHECK(cost.output == remat::Bytes{5 * 6 * 4});
  CHECK(chain->unit_costs()[1].saved > chain->unit_costs()[2].saved);
  const remat::Chain measured = remat::Chain::of(chain->unit_costs());
  CHECK(chain->plan() == remat::Segments<4>()(measured).with_last_plain());
  CHECK(tiny::region_count([&] { tiny::step(chain, torch::randn({5, 6})); }) == 3);
}

TEST_CASE("the first forward measures every unit, also those that the rule leaves plain") {
  auto chain = make_chain<remat::Checkpointed<Sequential, FirstUnitAlone>>();
  CHECK(chain->plan() == remat::Plan::from_sizes({1, 5}));

  CHECK(tiny::region_count([&] { tiny::step(chain, torch::randn({5, 6})); }) == 2);

  REQUIRE(chain->unit_costs().size() == 6);
  CHECK(chain->unit_costs()[4].saved > remat::Bytes{0});  // a block
  CHECK(chain->plan() == remat::Plan({{0, 1, true}, {1, 6, false}}));
  CHECK(tiny::region_count([&] { tiny::step(chain, torch::randn({5, 6})); }) == 1);
}

TEST_CASE("a number of segments at run time overrides the rule until the rule is asked for again") {
  auto chain = make_chain();

  chain->enable_gradient_checkpointing(2);
  CHECK(chain->plan() == remat::Plan::from_sizes({3, 3}));
  chain->enable_gradient_checkpointing(99);
  CHECK(chain->plan().segment_count() == 6);
  tiny::step(chain, torch::randn({5, 6}));
  CHECK(chain->plan().segment_count() == 6);
  chain->enable_gradient_checkpointing(2);
  CHECK(chain->plan().segment_count() == 2);  // what was measured holds for any number of segments
  CHECK_FALSE(chain->plan().segments().back().is_checkpointed);
  chain->enable_gradient_checkpointing();
  CHECK(chain->plan().segment_count() == 4);
  chain->disable_gradient_checkpointing();
  CHECK(chain->plan() == remat::Plan::keep_all(6));
}

TEST_CASE("adding a layer makes a new plan and a new measurement") {
  auto chain = make_chain();
  tiny::step(chain, torch::randn({5, 6}));
  REQUIRE_FALSE(chain->unit_costs().empty());

  chain->push_back(Linear(6, 6));

  CHECK(chain->unit_costs().empty());
  CHECK(chain->plan().unit_count() == 7);
  tiny::step(chain, torch::randn({5, 6}));
  CHECK(chain->unit_costs().size() == 7);
}

TEST_CASE("EachStage takes a nested chain as a stage") {
  const auto chain = make_chain<remat::Checkpointed<Sequential, remat::EachStage>>();

  CHECK(chain->plan() == remat::Plan::from_sizes({1, 1, 1, 1, 2}));
}

TEST_CASE("nested checkpointed chains are opened, too, also behind AnyModule") {
  Chain inner(Linear(4, 4), ReLU());
  Chain outer(Linear(4, 4), inner, torch::nn::AnyModule(Chain(ReLU(), ReLU())),
              torch::nn::Sequential(Chain(ReLU())));

  CHECK(outer->plan().unit_count() == 6);
  CHECK(tiny::keys(*outer) ==
        std::vector<std::string>{"0.weight", "0.bias", "1.0.weight", "1.0.bias"});
  CHECK(outer(torch::randn({2, 4})).size(1) == 4);

  inner->disable_gradient_checkpointing();
  CHECK(to_string(outer->plan()).find("[1,2) plain | [2,3) plain") != std::string::npos);
}

TEST_CASE("extra arguments reach every layer, and their gradients are those of plain") {
  tiny::Masked first(4), second(4);
  remat::Checkpointed<Sequential, remat::EachUnit> chain(first, second);
  const auto mask = torch::rand({3, 4}, torch::requires_grad());
  const auto x = torch::randn({3, 4});

  const auto y = chain->forward(x, mask);
  const auto plain = second->forward(first->forward(x, mask), mask);
  const auto from_chain = torch::autograd::grad({y.sum()}, {mask, first->fc->weight});
  const auto from_plain = torch::autograd::grad({plain.sum()}, {mask, first->fc->weight});

  CHECK(torch::equal(y, plain));
  CHECK(torch::equal(from_chain[0], from_plain[0]));
  CHECK(torch::equal(from_chain[1], from_plain[1]));
  CHECK(first->masks.size() == 2);  // once per call: user code does not run in backward
  CHECK(torch::equal(chain(x, mask), y));
}

TEST_CASE("layers may hand tuples to each other, also across segments") {
  remat::Checkpointed<Sequential, remat::EachUnit> chain{tiny::Split(), tiny::Join(), ReLU()};
  const auto x = torch::randn({3, 4}, torch::requires_grad());

  for (int index = 0; index < 2; ++index) {
    const auto y = chain(x);
    const auto gradient = torch::autograd::grad({y.sum()}, {x})[0];
    const auto plain = (x.sin() * x.exp()).relu();
    CHECK(torch::equal(y, plain));
    CHECK(torch::equal(gradient, torch::autograd::grad({plain.sum()}, {x})[0]));
  }
}

TEST_CASE("call operator, forward, LibTorch's Sequential and a member agree") {
  Chain chain(Linear(4, 4), ReLU(), Linear(4, 2));
  torch::nn::Sequential around(chain, ReLU());
  struct Owner : torch::nn::Module {
    explicit Owner(const Chain& given) : chain(register_module("chain", given)) {}
    Chain chain;
  };
  Owner owner(chain);
  const auto x = torch::randn({3, 4});

  CHECK(torch::equal(chain(x), chain->forward(x)));
  CHECK(torch::equal(around->forward(x), chain(x).relu()));
  CHECK(torch::equal(owner.chain(x), chain(x)));
  CHECK(owner.named_parameters().keys().front() == "chain.0.weight");
  CHECK(torch::nn::AnyModule(chain).get<Chain>().get() == chain.get());
}

TEST_CASE("a chain is built from modules, names, a dictionary or step by step") {
  const std::vector<std::string> keys = {"first.weight", "first.bias", "second.0.weight",
                                         "second.0.bias"};

  const Chain from_names(
      {{"first", Linear(4, 4)}, {"second", torch::nn::Sequential(Linear(4, 2))}});
  CHECK(tiny::keys(*from_names) == keys);

  Chain by_push;
  by_push->push_back("first", Linear(4, 4));
  by_push->push_back("second", Chain(Linear(4, 2)));
  CHECK(tiny::keys(*by_push) == keys);

  torch::OrderedDict<std::string, torch::nn::AnyModule> dictionary;
  dictionary.insert("first", torch::nn::AnyModule(Linear(4, 4)));
  const Chain from_dictionary(std::move(dictionary));
  CHECK(from_dictionary->named_parameters().keys().front() == "first.weight");

  const Chain from_pairs({torch::nn::NamedAnyModule("first", Linear(4, 4))});
  CHECK(from_pairs->named_parameters().keys().front() == "first.weight");

  Chain mixed(std::make_shared<torch::nn::LinearImpl>(4, 4), torch::nn::AnyModule(ReLU()),
              torch::nn::ReLUImpl());
  torch::nn::Sequential more(ReLU(), Linear(4, 2));
  mixed->extend(*more);
  mixed->extend(*by_push);
  CHECK(mixed->size() == 7);
  CHECK(mixed->plan().unit_count() == 7);
}

TEST_CASE("a chain is indexed, iterated and printed like LibTorch's Sequential") {
  Chain chain(Linear(4, 3), ReLU(), torch::nn::Sequential(Linear(3, 2)));

  CHECK(chain->size() == 3);
  CHECK(chain[0]->as<Linear>() != nullptr);
  CHECK(chain->at<Linear>(0).options.out_features() == 3);
  std::vector<std::string> names;
  for (const auto& layer : *chain) names.push_back(layer->name());
  CHECK(names == std::vector<std::string>{"torch::nn::LinearImpl", "torch::nn::ReLUImpl",
                                          "torch::nn::SequentialImpl"});
  std::ostringstream text;
  text << chain;
  CHECK(text.str() ==
        "remat::Checkpointed<remat::Sequential>(\n"
        "  (0): torch::nn::Linear(in_features=4, out_features=3, bias=true)\n"
        "  (1): torch::nn::ReLU()\n"
        "  (2): torch::nn::Sequential(\n"
        "    (0): torch::nn::Linear(in_features=3, out_features=2, bias=true)\n"
        "  )\n"
        ")");
}

TEST_CASE("a clone keeps names, modes and switches, and runs layers of its own") {
  Chain chain({{"conv1", Linear(4, 4)},
               {"stage", torch::nn::Sequential({{"block", Block(4)}})},
               {"inner", Chain({{"last", Linear(4, 4)}})}});
  chain->enable_gradient_checkpointing(2);
  const auto x = torch::randn({5, 4});
  tiny::step(chain, x);
  chain->at<Linear>(0).eval();

  Chain copy = std::dynamic_pointer_cast<Chain::ContainedType>(chain->clone());

  CHECK(tiny::keys(*copy) == tiny::keys(*chain));
  CHECK(copy->plan() == chain->plan());
  CHECK(copy->unit_costs() == chain->unit_costs());
  CHECK_FALSE(copy[0]->is_training());
  CHECK(copy[1]->is_training());
  CHECK(tiny::difference(tiny::step(chain, x), tiny::step(copy, x)) == "");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.zero_();
  }
  CHECK(copy(x).abs().sum().item<float>() == 0);
  CHECK(chain(x).abs().sum().item<float>() != 0);

  chain->eval();
  remat::disable_gradient_checkpointing(chain);
  const auto off = chain->clone();
  CHECK_FALSE(off->is_training());
  CHECK_FALSE(remat::is_gradient_checkpointing_enabled(*off));
}

TEST_CASE("a layer that appears twice is one layer in the clone") {
  Linear shared(4, 4);
  Chain chain(shared, ReLU(), shared);

  Chain copy = std::dynamic_pointer_cast<Chain::ContainedType>(chain->clone());

  CHECK(copy[0] == copy[2]);
  CHECK(copy[0] != chain[0]);
}

TEST_CASE("a chain is cloned with its parent, under its names") {
  Net net;
  net->body->enable_gradient_checkpointing(1);
  remat::plain(net, "body.second");
  Net copy = std::dynamic_pointer_cast<NetImpl>(net->clone());
  const auto x = torch::randn({5, 4});

  CHECK(tiny::keys(*copy) == tiny::keys(*net));
  CHECK(copy->body->plan() == net->body->plan());
  CHECK(tiny::difference(tiny::step(net, x), tiny::step(copy, x)) == "");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : copy->parameters()) parameter.zero_();
  }
  CHECK(copy->forward(x).abs().sum().item<float>() == 0);
  CHECK(net->forward(x).abs().sum().item<float>() != 0);
}

TEST_CASE("a chain is a plain call when there is nothing to drop") {
  auto chain = make_chain();
  const auto x = torch::randn({5, 6});
  const auto count = [&] { return tiny::region_count([&] { chain->forward(x); }); };
  REQUIRE(count() > 0);

  SUBCASE("in eval mode") { chain->eval(); }
  SUBCASE("when switched off") { chain->disable_gradient_checkpointing(); }
  SUBCASE("when nothing requires grad") {
    for (auto& parameter : chain->parameters()) parameter.set_requires_grad(false);
  }
  SUBCASE("without grad mode") {
    {
      const torch::NoGradGuard no_grad;
      CHECK(count() == 0);
    }
    chain->eval();
  }

  CHECK(count() == 0);
}

TEST_CASE("layers train although the input needs no grad, and frozen ones have no gradient") {
  auto chain = make_chain();
  PlainChain plain;
  tiny::copy_weights(plain, *chain);
  for (auto* module :
       {static_cast<torch::nn::Module*>(chain.get()), static_cast<torch::nn::Module*>(&plain)})
    for (auto& parameter : module->children()[1]->parameters()) parameter.set_requires_grad(false);
  const auto x = torch::randn({5, 6});

  const auto from_chain =
      tiny::step(*chain, x, [&](torch::Tensor input) { return chain(input); }, false);
  const auto from_plain =
      tiny::step(plain, x, [&](torch::Tensor input) { return plain.forward(input); }, false);

  CHECK(tiny::difference(from_chain, from_plain) == "");
  CHECK(from_chain.count("grad of 0.weight") == 1);
  CHECK(from_chain.count("grad of 1.fc.weight") == 0);
}

TEST_CASE("between forward and backward a chain holds less than plain") {
  const auto held = [](auto& module, const torch::Tensor& x) {
    tiny::step(module, x);  // so that gradients exist and units are measured
    const remat::MemoryMeter meter;
    const auto y = module->forward(x);
    return meter.current();
  };
  PlainChain plain(64);
  auto chain = make_chain<remat::Checkpointed<Sequential, remat::Segments<3>>>(64);
  const auto x = torch::randn({256, 64});

  const auto in_plain = held(plain, x);
  const auto in_chain = held(chain, x);

  CHECK(in_chain.count * 10 < in_plain.count * 7);
}

TEST_CASE("a layer exempted while building runs outside of any region and keeps its name") {
  Chain chain(Linear(4, 4), remat::plain(Block(4)), Linear(4, 4));
  remat::Checkpointed<Sequential, remat::Segments<1>> named(
      {{"a", Linear(4, 4)},
       {"b", remat::plain(torch::nn::Sequential(Block(4), ReLU()))},
       {"c", ReLU()}});
  torch::nn::Sequential plain(Linear(4, 4), Block(4), Linear(4, 4));
  tiny::copy_weights(*plain, *chain);
  const auto x = torch::randn({5, 4});

  CHECK(tiny::keys(*chain) == tiny::keys(*plain));
  CHECK(to_string(chain->plan()) == "[0,1) checkpoint | [1,2) plain | [2,3) checkpoint");
  CHECK(to_string(named->plan()) ==
        "[0,1) checkpoint | [1,2) plain | [2,3) plain | [3,4) checkpoint");
  for (int index = 0; index < 2; ++index)
    CHECK(tiny::difference(tiny::step(plain, x), tiny::step(chain, x)) == "");
  CHECK(chain->unit_costs()[1].saved == remat::Bytes{0});
}

TEST_CASE("an exempted layer stays plain in a region around the chain") {
  Chain chain(remat::plain(Block(4)), remat::plain(torch::nn::Sequential(Block(4), ReLU())));
  const auto before = remat::statistics();

  tiny::step(*chain, torch::randn({5, 4}),
             [&](torch::Tensor x) { return remat::checkpoint([&] { return chain(x); }); });

  CHECK(remat::statistics().regions == before.regions + 1);
  CHECK(remat::statistics().recomputed_operations == before.recomputed_operations);
}

TEST_CASE("an exception in a layer passes, and the next step is right") {
  tiny::ThrowingBlock throwing;
  Chain chain(Linear(4, 4), throwing, Linear(4, 4));
  const auto x = torch::randn({5, 4});
  throwing->throw_count = 1;

  CHECK_THROWS_WITH_AS(chain(x), "thrown by the block", std::domain_error);

  CHECK(chain->unit_costs().empty());
  const auto checkpointed = tiny::step(chain, x);
  chain->disable_gradient_checkpointing();
  CHECK(tiny::difference(checkpointed, tiny::step(chain, x)) == "");
}

TEST_CASE("several threads run one chain, the first forward included") {
  Chain chain(Linear(8, 8), ReLU(), Linear(8, 8), torch::nn::Tanh(), Linear(8, 8));
  const auto x = torch::randn({5, 8});
  const auto gradient = [&] {
    auto input = x.clone().set_requires_grad(true);
    return torch::autograd::grad({chain(input).sum()}, {input})[0];
  };
  std::vector<torch::Tensor> results(4);

  std::vector<std::thread> threads;
  for (auto& result : results)
    threads.emplace_back([&] {
      for (int index = 0; index < 10; ++index) result = gradient();
    });
  for (auto& thread : threads) thread.join();

  chain->disable_gradient_checkpointing();
  for (const auto& result : results) CHECK(torch::equal(result, gradient()));
  CHECK(chain->unit_costs().size() == 5);
}

TEST_CASE("what cannot be right is an argument error that says what was given and expected") {
  Chain empty;
  Chain splits{tiny::Split()};
  Chain chain(Linear(4, 4));
  const remat::Checkpointed<Sequential, RuleForOneUnit> wrong_rule(Linear(4, 4), ReLU());
  const auto x = torch::randn({2, 4});

  CHECK(what_of([&] { empty->forward(x); }) ==
        "[remat.chain.empty] remat::CheckpointedSequentialImpl: forward was called on a chain of "
        "no layers. Add layers "
        "first.");
  CHECK(what_of([&] { splits->forward(x); })
            .starts_with("[remat.chain.result] remat::CheckpointedSequentialImpl: the last layer "
                         "returned std::tuple<at::Tensor, at::Tensor>, "
                         "a tensor was expected"));
  CHECK(what_of([&] { chain->ptr(1); }) ==
        "[remat.chain.index] remat::CheckpointedSequentialImpl: layer 1 was asked for, and there "
        "are 1.");
  CHECK(what_of([&] { chain->at<ReLU>(0); })
            .starts_with("[remat.chain.type] remat::CheckpointedSequentialImpl: layer 0 is a "
                         "torch::nn::LinearImpl"));
  CHECK(what_of([&] { chain->push_back(Linear(nullptr)); })
            .starts_with("[remat.chain.layer] remat::Checkpointed<Sequential>: an empty holder or "
                         "null pointer was given"));
  CHECK(what_of([&] {
          chain->push_back(std::shared_ptr<torch::nn::LinearImpl>());
        }).starts_with("[remat.chain.layer]"));
  CHECK(what_of([&] {
          chain->push_back(torch::nn::AnyModule());
        }).starts_with("[remat.chain.layer]"));
  CHECK(what_of([&] { wrong_rule->plan(); })
            .starts_with("[remat.plan.units] remat::CheckpointedSequentialImpl: the rule planned "
                         "for 1 units and the chain has 2"));
  CHECK(chain->size() == 1);
}
