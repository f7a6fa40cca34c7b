// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "remat/checkpoint.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/nn/chain_units.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/plan/balance.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"

namespace remat::detail {

/// A pattern, a rule and a keep policy as values: templates end here.
struct ChainPolicy {
  std::function<Plan(const Chain&)> rule;
  std::function<Plan(const Plan&, const Chain&)> pattern;
  std::function<Plan(const Chain&, std::size_t)> segments;
  KeepPredicate keep;

  template <class PatternType, class RuleType, class Keep>
  static ChainPolicy of() {
    ChainPolicy policy{RuleType(), PatternType(), balanced_plan, make_keep_predicate<Keep>()};
    if constexpr (shares_out_segments<PatternType>)
      policy.segments = [pattern = PatternType()](const Chain& chain, std::size_t segment_count) {
        return pattern.segments(chain, segment_count);
      };
    return policy;
  }
};

/// The plan for one structure of a chain, and what it came from; never changed once it is shared.
struct ChainPlan {
  std::vector<ChainUnit> units;
  std::optional<std::int64_t> segment_count;  // as asked for at run time; empty: the rule's
  std::vector<UnitCost> unit_costs;           // empty: not measured yet
  Plan plan;
  std::vector<std::string> segment_names;
  std::size_t counted_segments = 0;  // those with a unit that may be recomputed
  bool is_to_measure = false;
};

/// Plans a chain, anew when its structure, its segment count or its exemptions change.
///
/// @par Threads  any call from any thread; a plan, once handed out, stays as it is
class ChainPlanner {
 public:
  using Shared = std::shared_ptr<const ChainPlan>;

  explicit ChainPlanner(ChainPolicy policy)
      : policy_(std::make_shared<const ChainPolicy>(std::move(policy))) {}

  const ChainPolicy& policy() const { return *policy_; }

  /// Overrides the rule with a number of segments; empty: back to the rule.
  void set_segment_count(std::optional<std::int64_t> segment_count) {
    const std::lock_guard lock(mutex_);
    segment_count_ = segment_count;
  }

  void exempt(const torch::nn::Module& unit) {
    const std::lock_guard lock(mutex_);
    exempted_.push_back(&unit);
  }

  /// Marks the exempted ones among the units from `first` on.
  void mark_exempted(std::vector<ChainUnit>& units, std::size_t first) const {
    const std::lock_guard lock(mutex_);
    if (exempted_.empty()) return;
    for (std::size_t index = first; index < units.size(); ++index)
      if (std::ranges::find(exempted_, units[index].identity) != exempted_.end())
        units[index].is_plain = true;
  }

  /// Returns the plan for `units`, which are those of `chain`.
  Shared plan_for(const ChainStructure& chain, const std::vector<ChainUnit>& units) const {
    const std::lock_guard lock(mutex_);
    if (current_ == nullptr || current_->segment_count != segment_count_ ||
        current_->units != units) {
      // Costs depend on the units and on which of them are plain, not on the number of segments.
      const bool are_costs_valid = current_ != nullptr && current_->units == units;
      current_ =
          make_plan(chain, units, are_costs_valid ? current_->unit_costs : std::vector<UnitCost>());
    }
    return current_;
  }

  /// Plans by what a forward over `measured` has found the units to cost.
  void store_costs(const ChainStructure& chain, const ChainPlan& measured,
                   std::vector<UnitCost> costs) {
    const std::lock_guard lock(mutex_);
    // Another thread, or a change in between, may have been first.
    if (current_.get() == &measured) current_ = make_plan(chain, measured.units, std::move(costs));
  }

  /// Returns what puts the present segment count and plan back, while this planner lives.
  std::function<void()> remember() {
    const std::lock_guard lock(mutex_);
    return [this, segment_count = segment_count_, current = current_] {
      const std::lock_guard lock_again(mutex_);
      segment_count_ = segment_count;
      current_ = current;
    };
  }

  /// Takes over the plan of a chain with the same units, which are `units` here.
  void take_over(const ChainPlan& other, const std::vector<ChainUnit>& units) {
    const std::lock_guard lock(mutex_);
    segment_count_ = other.segment_count;
    exempted_.clear();
    current_ = nullptr;
    if (units.size() != other.units.size()) return;
    auto copy = std::make_shared<ChainPlan>(other);
    copy->units = units;
    for (std::size_t index = 0; index < units.size(); ++index) {
      copy->units[index].is_plain = other.units[index].is_plain;
      if (other.units[index].is_plain) exempted_.push_back(units[index].identity);
    }
    current_ = std::move(copy);
  }

 private:
  Shared make_plan(const ChainStructure& chain, const std::vector<ChainUnit>& units,
                   std::vector<UnitCost> costs) const {
    auto result = std::make_shared<ChainPlan>();
    result->units = units;
    result->segment_count = segment_count_;
    result->unit_costs = costs;
    const Chain known = describe(chain, units.size(), std::move(costs));
    Plan plan = segment_count_ ? policy_->segments(known, static_cast<std::size_t>(*segment_count_))
                               : policy_->rule(known);
    require_all_units(chain, plan, units.size());
    if (!known.is_measured() && plan.checkpointed_count() > 0) {
      // Plain segments are not measured, so the rule's are none in the first forward.
      result->is_to_measure = true;
      std::vector<Segment> segments = plan.segments();
      for (Segment& segment : segments) segment.is_checkpointed = true;
      plan = Plan(std::move(segments));
    }
    plan = policy_->pattern(plan, known);
    require_all_units(chain, plan, units.size());
    std::vector<std::size_t> plain_units;
    for (std::size_t index = 0; index < units.size(); ++index)
      if (units[index].is_plain) plain_units.push_back(index);
    result->plan = plan.with_plain_units(plain_units);
    result->segment_names = segment_names(result->plan, chain.unit_names());
    result->counted_segments = counted_segments(result->plan, known, plain_units);
    return result;
  }

  static Chain describe(const ChainStructure& chain, std::size_t unit_count,
                        std::vector<UnitCost> costs) {
    Chain known{unit_count, std::move(costs), {}};
    std::size_t first = 0;
    for (const ChainStage& stage : chain.stages()) {
      known.stage_sizes.push_back(stage.unit_count);
      if (!stage.is_nested) known.lone_units.push_back(first);
      first += stage.unit_count;
    }
    return known;
  }

  /// What the pattern leaves plain in the finest plan of an unmeasured chain, it leaves plain in
  /// any.
  std::size_t counted_segments(const Plan& plan, const Chain& known,
                               const std::vector<std::size_t>& plain_units) const {
    Chain unmeasured = known;
    unmeasured.unit_costs.clear();
    const std::size_t unit_count = known.unit_count;
    const Plan finest = policy_->pattern(Plan::from_count(unit_count, unit_count), unmeasured)
                            .with_plain_units(plain_units);
    std::vector<bool> may_be_recomputed(unit_count, false);
    for (const Segment& segment : finest.segments())
      for (std::size_t unit = segment.first; segment.is_checkpointed && unit < segment.last; ++unit)
        may_be_recomputed[unit] = true;
    return static_cast<std::size_t>(
        std::ranges::count_if(plan.segments(), [&](const Segment& segment) {
          for (std::size_t unit = segment.first; unit < segment.last; ++unit)
            if (may_be_recomputed[unit]) return true;
          return false;
        }));
  }

  static void require_all_units(const ChainStructure& chain, const Plan& plan,
                                std::size_t unit_count) {
    require(plan.unit_count() == unit_count, [&] {
      return ErrorMessage("remat.plan.units")
          .where(chain.title())
          .what("the rule planned for " + std::to_string(plan.unit_count()) +
                " units and the chain has " + std::to_string(unit_count))
          .cure("Let the rule return segments that cover Chain::unit_count units");
    });
  }

  static std::vector<std::string> segment_names(const Plan& plan,
                                                const std::vector<std::string>& unit_names) {
    std::vector<std::string> texts;
    for (const Segment& segment : plan.segments()) {
      const std::string range =
          segment.unit_count() == 1
              ? "unit " + unit_names[segment.first]
              : "units " + unit_names[segment.first] + " to " + unit_names[segment.last - 1];
      texts.push_back("segment " + std::to_string(texts.size() + 1) + " of " +
                      std::to_string(plan.segment_count()) + " (" + range + ")");
    }
    return texts;
  }

  std::shared_ptr<const ChainPolicy> policy_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<std::int64_t> segment_count_;
  std::vector<const torch::nn::Module*> exempted_;
  mutable Shared current_;
};

}  // namespace remat::detail
