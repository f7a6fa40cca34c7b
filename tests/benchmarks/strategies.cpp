// SPDX-License-Identifier: MIT

#include "tests/benchmarks/strategies.hpp"

#include "remat/remat.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <regex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace benchmarks {
namespace {

/// A keep policy chosen by hand for residual blocks: of each block only the second convolution's
/// result, in a bottleneck the narrow 3x3, which is dear to recompute and cheap to hold.
struct SecondConvolution {
  bool operator()(const remat::keep::Operation& operation, remat::Bytes) const {
    return operation.name == "aten::convolution" && operation.ordinal == 1;
  }
};

/// Segments of equal numbers of units, as Python's `checkpoint_sequential` makes them. The pattern
/// leaves the last one plain where that does not raise the peak; there it always is.
template <std::size_t count>
struct EqualSegments {
  remat::Plan operator()(const remat::Chain& chain) const {
    return remat::Plan::from_count(chain.unit_count, count);
  }
};

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

Strategy by_budget(int divisor) {
  return {
      "memory budget 1/" + std::to_string(divisor), [divisor](const std::string& model) {
        auto net = remat::create_backbone(model, {.num_classes = kClasses});
        net->enable_gradient_checkpointing(remat::MemoryBudget::fraction_of_plain(1.0 / divisor));
        return net;
      }};
}

/// Segments by a rule over all units of the chain.
template <class Rule, class Keep = remat::keep::nothing>
Strategy by_rule(std::string name) {
  return {std::move(name),
          [](const std::string& model) {
            using Policy = remat::Checkpointed<remat::Sequential, Rule, Keep>;
            auto net = remat::create_backbone<Policy>(model, {.num_classes = kClasses});
            net->enable_gradient_checkpointing();
            return net;
          },
          !std::is_same_v<Keep, remat::keep::nothing>};
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
  return {std::move(name), [](const std::string& model) { return keeping(keeps<Keep>, model); },
          true};
}

/// The keep policy that suits the family: at least 45 % saved for the least time.
Strategy by_family() {
  return {"keep policy of the family",
          [](const std::string& model) {
            using namespace remat::keep;
            if (is_one_of(model, "resnet")) return keeping(keeps<SecondConvolution>, model);
            if (is_one_of(model, "mobilenet|efficientnet"))
              return keeping(keeps<convolutions_and_matmuls>, model);
            return keeping(keeps<reducing_products>, model);
          },
          true};
}

}  // namespace

std::vector<Strategy> all_strategies() {
  using namespace remat;
  constexpr std::int64_t kPerUnit = 100'000;  // more than units means one per unit
  std::vector<Strategy> list{
      by_default("plain", -1),
      by_default("default policy", 0),
      by_default("one region per unit", kPerUnit),
      by_default("8 segments", 8),
      by_rule<KeepAll>("KeepAll"),
      by_rule<Segments<4>>("Segments<4>"),
      by_rule<SquareRoot>("SquareRoot"),
      by_rule<EveryNth<2>>("EveryNth<2>"),
      by_rule<EqualSegments<2>>("2 equal segments"),
      by_rule<EqualSegments<4>>("4 equal segments"),
      by_rule<EqualSegments<8>>("8 equal segments"),
      by_rule<Segments<4>, keep::convolutions_and_matmuls>(
          "Segments<4>, convolutions and matmuls kept"),
      each_unit<keep::convolutions_and_matmuls>("EachUnit, convolutions and matmuls kept"),
      each_unit<keep::reducing_products>("EachUnit, reducing products kept"),
      each_unit<SecondConvolution>("EachUnit, second convolution kept"),
      by_family(),
  };
  for (const int divisor : kBudgetDivisors) list.push_back(by_budget(divisor));
  return list;
}

}  // namespace benchmarks
