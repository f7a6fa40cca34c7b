// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "remat/libtorch/nn.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_outcome.hpp"

namespace remat::detail {

/// Runs a module's forward within a budget or by a plan.
///
/// Tracing, planning and following a plan are a fifth of what a program with a network would have
/// to compile. Modules reach them only through this interface, so that a program without budgets
/// and plans compiles none of it.
class PlannedForward {
 public:
  using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

  PlannedForward() = default;
  PlannedForward(const PlannedForward&) = delete;
  PlannedForward& operator=(const PlannedForward&) = delete;
  virtual ~PlannedForward() = default;

  virtual bool is_set() const = 0;
  virtual torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                            const Forward& forward) = 0;
  /// Returns the plan of the last forward; null before the first.
  virtual std::shared_ptr<const MemoryPlan> plan() const = 0;
  /// Says how the last forward kept to its plan.
  virtual PlanOutcome outcome() const = 0;
  /// Returns what puts back the present state, while this lives.
  virtual std::function<void()> remember() = 0;
  virtual std::shared_ptr<PlannedForward> copy() const = 0;
};

/// Stands for no budget and no plan.
///
/// A class rather than a null pointer: where the interface has one other implementation, GCC calls
/// that one without looking, and so compiles it.
class UnplannedForward final : public PlannedForward {
 public:
  bool is_set() const override { return false; }
  torch::Tensor run(torch::nn::Module&, const torch::Tensor& x, const Forward& forward) override {
    return forward(x);
  }
  std::shared_ptr<const MemoryPlan> plan() const override { return nullptr; }
  PlanOutcome outcome() const override { return {}; }
  std::function<void()> remember() override {
    return [] {};
  }
  std::shared_ptr<PlannedForward> copy() const override {
    return std::make_shared<UnplannedForward>();
  }
};

/// What a module's forward is planned by: nothing, until a budget or a plan is given.
///
/// @par Threads  any call from any thread
class PlannedForwardSlot {
 public:
  PlannedForwardSlot() = default;
  PlannedForwardSlot(const PlannedForwardSlot& other) : planned_(other.get()->copy()) {}
  PlannedForwardSlot& operator=(const PlannedForwardSlot& other) {
    if (this != &other) set(other.get()->copy());
    return *this;
  }

  void set(std::shared_ptr<PlannedForward> planned) {
    const std::lock_guard lock(mutex_);
    planned_ = std::move(planned);
  }
  /// Lets the module go by segments again.
  void clear() { set(std::make_shared<UnplannedForward>()); }

  bool is_set() const { return get()->is_set(); }
  std::shared_ptr<const MemoryPlan> plan() const { return get()->plan(); }
  PlanOutcome outcome() const { return get()->outcome(); }

  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                    const PlannedForward::Forward& forward) {
    return get()->run(module, x, forward);
  }

  /// Returns what puts back the present state, while this lives.
  std::function<void()> remember() {
    const auto planned = get();
    return [this, planned, put_back = planned->remember()] {
      put_back();
      set(planned);
    };
  }

 private:
  // The owner of what is called: another thread may set another one meanwhile.
  std::shared_ptr<PlannedForward> get() const {
    const std::lock_guard lock(mutex_);
    return planned_;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<PlannedForward> planned_ = std::make_shared<UnplannedForward>();
};

}  // namespace remat::detail
