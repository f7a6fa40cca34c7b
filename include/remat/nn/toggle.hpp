// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat {

namespace detail {

class PlannedForward;

inline ErrorMessage no_plans(const char* given) {
  return ErrorMessage("remat.budget.module")
      .where("enable_gradient_checkpointing")
      .what(std::string(given) +
            " was given to a module whose forward does not take one tensor "
            "and return one")
      .cure("Give it to the chain or the backbone around the module, or use remat::plan");
}

}  // namespace detail

/// What every checkpointed module offers besides being a module.
///
/// Find it with `dynamic_cast<CheckpointToggle*>(&module)`, or use the free functions on a whole
/// tree.
class CheckpointToggle {
 public:
  virtual ~CheckpointToggle() = default;

  /// Switches checkpointing on, with the segments of the module's own rule.
  virtual void enable_gradient_checkpointing() = 0;
  /// Switches checkpointing on, with this number of segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  virtual void enable_gradient_checkpointing(std::int64_t segment_count) = 0;
  /// Switches checkpointing on, such that a training step needs no more memory than that, in as
  /// little time as can be had.
  ///
  /// The first forward of each shape of input traces a step of its own, with a stand-in for the
  /// loss, and makes a plan; the model is as before. That first forward may need as much memory as
  /// plain. The budget covers this module's forward and backward, and a small reserve for a loss on
  /// its output. Inside another checkpointed region the module follows that one.
  ///
  /// @throws ArgumentError  if this module cannot be planned; an infeasible budget shows in forward
  void enable_gradient_checkpointing(const MemoryBudget& budget);
  /// Switches checkpointing on by a plan that was made before, see `remat::plan`.
  ///
  /// @throws ArgumentError  if this module cannot be planned
  void enable_gradient_checkpointing(const MemoryPlan& plan);
  /// Returns the plan of the last forward within a budget; null without one.
  virtual std::shared_ptr<const MemoryPlan> memory_plan() const { return nullptr; }
  /// Returns whether the last forward ran what was planned, and what was different.
  virtual PlanOutcome plan_outcome() const { return {}; }

  /// Switches checkpointing off: forward is a plain call.
  virtual void disable_gradient_checkpointing() = 0;
  /// Returns whether the switch is on; eval mode does not move it.
  virtual bool is_gradient_checkpointing_enabled() const = 0;

  /// Exempts one of the modules that this one checkpoints, which may be itself.
  ///
  /// @return  false if `unit` is none of them
  virtual bool exempt_unit(const torch::nn::Module& unit) {
    static_cast<void>(unit);
    return false;
  }

  /// Returns how reports call one of the modules that this one checkpoints; empty if it is none.
  virtual std::string unit_name(const torch::nn::Module* unit) const {
    static_cast<void>(unit);
    return "";
  }

  /// Returns what puts the present switch back when it is called, while this module lives.
  ///
  /// A module that plans overrides it, so that its segment count and what it has measured come
  /// back, too.
  virtual std::function<void()> remember_checkpointing() {
    return [this, is_on = is_gradient_checkpointing_enabled()] {
      if (is_on == is_gradient_checkpointing_enabled()) return;
      is_on ? enable_gradient_checkpointing() : disable_gradient_checkpointing();
    };
  }

 protected:
  CheckpointToggle() = default;
  CheckpointToggle(const CheckpointToggle&) = default;
  CheckpointToggle& operator=(const CheckpointToggle&) = default;

 private:
  // Not the two calls with a budget and a plan are virtual, but this: so they, and planning with
  // them, are compiled only where a program calls them. nn/budgeted_toggle.hpp has them.
  virtual void enable_planned(std::shared_ptr<detail::PlannedForward> planned, const char* given) {
    static_cast<void>(planned);
    throw ArgumentError(detail::no_plans(given));
  }
};

namespace detail {

inline void require_segment_count(std::int64_t segment_count, std::string_view where) {
  require(segment_count >= 1, [&] {
    return ErrorMessage("remat.segments.count")
        .where(where)
        .what(std::to_string(segment_count) + " segments were asked for and at least 1 is needed")
        .cure("To checkpoint nothing, call disable_gradient_checkpointing()");
  });
}

/// A flag that one thread may set while others read it, and that is copied with its module.
class Flag {
 public:
  explicit Flag(bool value) : value_(value) {}
  Flag(const Flag& other) : value_(other.get()) {}
  Flag& operator=(const Flag& other) { return *this = other.get(); }
  Flag& operator=(bool value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  bool get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> value_;
};

/// Calls `visit` for the module, if it is checkpointed, and for every checkpointed one below it.
template <class Visit>
std::size_t for_each_toggle(torch::nn::Module& module, Visit visit) {
  std::size_t count = 0;
  const auto visit_if_toggle = [&](torch::nn::Module& candidate) {
    if (auto* toggle = dynamic_cast<CheckpointToggle*>(&candidate)) visit(*toggle), ++count;
  };
  // Not modules(true), which needs a module that a shared_ptr owns.
  visit_if_toggle(module);
  for (const auto& below : module.modules(/*include_self=*/false)) visit_if_toggle(*below);
  return count;
}

}  // namespace detail

/// Switches on everything checkpointed inside `module`, itself included, each by its own rule.
///
/// @return  how many modules were switched; 0 means that nothing in there is checkpointed
inline std::size_t enable_gradient_checkpointing(torch::nn::Module& module) {
  return detail::for_each_toggle(
      module, [](CheckpointToggle& toggle) { toggle.enable_gradient_checkpointing(); });
}

/// Switches on everything checkpointed inside `module`, itself included, with this number of
/// segments.
///
/// @return  how many modules were switched
/// @throws ArgumentError  if `segment_count` is below 1; then nothing has been switched
inline std::size_t enable_gradient_checkpointing(torch::nn::Module& module,
                                                 std::int64_t segment_count) {
  detail::require_segment_count(segment_count, "remat::enable_gradient_checkpointing");
  return detail::for_each_toggle(module, [&](CheckpointToggle& toggle) {
    toggle.enable_gradient_checkpointing(segment_count);
  });
}

/// Switches off everything checkpointed inside `module`, itself included.
///
/// @return  how many modules were switched
inline std::size_t disable_gradient_checkpointing(torch::nn::Module& module) {
  return detail::for_each_toggle(
      module, [](CheckpointToggle& toggle) { toggle.disable_gradient_checkpointing(); });
}

/// Returns whether anything inside `module`, itself included, is switched on.
inline bool is_gradient_checkpointing_enabled(torch::nn::Module& module) {
  bool is_enabled = false;
  detail::for_each_toggle(module, [&](CheckpointToggle& toggle) {
    is_enabled = is_enabled || toggle.is_gradient_checkpointing_enabled();
  });
  return is_enabled;
}

/// As for a module; takes a holder.
template <class Impl>
std::size_t enable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module) {
  return enable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()));
}
/// As for a module; takes a holder.
template <class Impl>
std::size_t enable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module,
                                          std::int64_t segment_count) {
  return enable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()),
                                       segment_count);
}
/// As for a module; takes a holder.
template <class Impl>
std::size_t disable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module) {
  return disable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()));
}
/// As for a module; takes a holder.
template <class Impl>
bool is_gradient_checkpointing_enabled(const torch::nn::ModuleHolder<Impl>& module) {
  return is_gradient_checkpointing_enabled(static_cast<torch::nn::Module&>(*module.ptr()));
}

}  // namespace remat
