// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/errors.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_trace.hpp"
#include "remat/units.hpp"

namespace remat {

/// Which results of a region's operations stay, operation by operation, and what that is predicted
/// to cost.
///
/// It is applied by position: the n-th operation that runs must be the one that was the n-th when
/// the plan was made. From the first that is another one on, everything is dropped, which is right,
/// and only slower.
struct MemoryPlan {
  /// One result of an operation, and whether it stays.
  struct Result {
    Bytes bytes;
    bool is_kept = false;
    bool is_transient =
        false;  ///< recomputed for another value it goes again, see `StepSimulation`

    friend bool operator==(const Result&, const Result&) = default;
  };
  /// What ran at one position, with its results in the order of its returns.
  struct Operation {
    std::string name;  ///< "aten::convolution"
    std::vector<Result> results;

    friend bool operator==(const Operation&, const Operation&) = default;
  };

  std::vector<Operation> operations;  ///< in the order of forward
  Bytes budget;
  Bytes peak;                         ///< predicted
  Bytes plain_peak;                   ///< without checkpointing
  double recomputed_seconds = 0;      ///< of operations that backward runs again
  double forward_seconds = 0;         ///< of all of forward's, to compare with
  std::int64_t recomputed_count = 0;  ///< operations that backward runs again
  std::int64_t saved_count = 0;       ///< tensors that autograd saves

  friend bool operator==(const MemoryPlan&, const MemoryPlan&) = default;
};

/// Returns the plan for one of the ways to run a traced step.
inline MemoryPlan make_memory_plan(const StepTrace& trace, const StepPoint& point, Bytes plain_peak,
                                   Bytes budget) {
  MemoryPlan plan;
  for (const StepTrace::Operation& operation : trace.operations) {
    MemoryPlan::Operation& planned = plan.operations.emplace_back();
    planned.name = operation.name;
    for (const std::int32_t id : operation.makes) {
      const auto index = static_cast<std::size_t>(id);
      const bool is_kept = point.kept[index];
      const bool is_transient = !is_kept && !point.transient.empty() && point.transient[index];
      planned.results.push_back({Bytes{trace.values[index].bytes}, is_kept, is_transient});
    }
  }
  plan.budget = budget;
  plan.plain_peak = plain_peak;
  plan.peak = point.cost.peak;
  plan.recomputed_seconds = point.cost.seconds;
  plan.forward_seconds = trace.seconds();
  plan.recomputed_count = point.cost.recomputed_count;
  plan.saved_count = trace.saved_count;
  return plan;
}

namespace detail {

[[noreturn]] inline void throw_infeasible(std::string_view where, Bytes most, Bytes least,
                                          Bytes plain) {
  char part[32];
  std::snprintf(part, sizeof part, "%.3f",  // rounded up, so that it is feasible
                static_cast<double>(least.count) / static_cast<double>(plain.count) + 5e-4);
  const auto exact = [](Bytes bytes) {
    return to_string(bytes) + " (" + std::to_string(bytes.count) + " bytes)";
  };
  throw BudgetError(ErrorMessage("remat.budget.infeasible")
                        .where(where)
                        .what("no plan needs " + exact(most) + " or less")
                        .cause("the least that was found is " + exact(least) + ", " + part +
                               " of the plain step's " + to_string(plain))
                        .cure("Raise the budget to that, or make the batch smaller"),
                    least);
}

}  // namespace detail

/// Returns the fastest plan within the budget.
///
/// @param points   all ways to run the traced step, see `KeepSearch`
/// @param reserve  of the budget, for what the trace does not see
/// @throws BudgetError  if no plan fits
inline MemoryPlan plan_within(const StepTrace& trace, const StepPoints& points,
                              const MemoryBudget& budget, Bytes reserve, std::string_view where) {
  const Bytes plain_peak = points.most().cost.peak;
  const Bytes most = budget.resolve(plain_peak + reserve);
  const StepPoint* point = points.fastest_within(most - reserve);
  if (point == nullptr)
    detail::throw_infeasible(where, most, points.least().cost.peak + reserve, plain_peak + reserve);
  return make_memory_plan(trace, *point, plain_peak, most);
}

/// Writes what stays and what runs again, a line for each kind of operation.
inline std::string to_string(const MemoryPlan& plan) {
  struct Row {
    std::size_t results = 0, kept = 0;
    Bytes bytes, kept_bytes;
  };
  std::map<std::string, Row> rows;
  std::size_t transient = 0;
  for (const MemoryPlan::Operation& operation : plan.operations)
    for (const MemoryPlan::Result& result : operation.results) {
      Row& row = rows[operation.name];
      ++row.results, row.bytes += result.bytes;
      if (result.is_kept) ++row.kept, row.kept_bytes += result.bytes;
      transient += result.is_transient;
    }
  char line[200];
  std::snprintf(line, sizeof line, "%-40s %8s %8s %12s %12s\n", "operation", "results", "kept",
                "bytes", "kept");
  std::string text = line;
  for (const auto& [name, row] : rows) {
    std::snprintf(line, sizeof line, "%-40s %8zu %8zu %12s %12s\n", name.substr(0, 40).c_str(),
                  row.results, row.kept, to_string(row.bytes).c_str(),
                  to_string(row.kept_bytes).c_str());
    text += line;
  }
  const double part =
      plan.forward_seconds > 0 ? 100 * plan.recomputed_seconds / plan.forward_seconds : 0.0;
  std::snprintf(line, sizeof line,
                "predicted peak %s of %s allowed (plain %s); %lld operations run again, %.1f %% of "
                "forward's time",
                to_string(plan.peak).c_str(), to_string(plan.budget).c_str(),
                to_string(plan.plain_peak).c_str(), static_cast<long long>(plan.recomputed_count),
                part);
  text += line;
  if (transient > 0)
    text += "; " + std::to_string(transient) + (transient == 1 ? " result is" : " results are") +
            " recomputed more than once";
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryPlan& plan) {
  return stream << to_string(plan);
}

}  // namespace remat
