// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include "remat/detail/new_file.hpp"
#include "remat/errors.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/memory_plan_json_reader.hpp"
#include "remat/plan/plan_fingerprint.hpp"

namespace remat {

namespace detail {

[[noreturn]] inline void throw_unwritable_plan(const std::filesystem::path& path,
                                               std::string_view what, std::string_view cure) {
  throw PlanError(ErrorMessage("remat.plan_file.write")
                      .where("\"" + path.string() + "\"")
                      .what(what)
                      .cure(cure));
}

/// Returns the JSON of everything but the operations, open at its end.
inline std::string plan_head(const MemoryPlan& plan) {
  const nlohmann::ordered_json head{{"format", kPlanFormat},
                                    {"version", kPlanVersion},
                                    {"fingerprint", fingerprint(plan)},
                                    {"checksum", checksum(plan)},
                                    {"budget_bytes", plan.budget.count},
                                    {"peak_bytes", plan.peak.count},
                                    {"plain_peak_bytes", plan.plain_peak.count},
                                    {"recomputed_seconds", plan.recomputed_seconds},
                                    {"forward_seconds", plan.forward_seconds},
                                    {"recomputed_count", plan.recomputed_count},
                                    {"saved_count", plan.saved_count}};
  const std::string text = head.dump(2);
  return text.substr(0, text.rfind('\n'));
}

inline std::string operation_json(const MemoryPlan::Operation& operation) {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const MemoryPlan::Result& result : operation.results) {
    results.push_back({{"bytes", result.bytes.count}, {"is_kept", result.is_kept}});
    if (result.is_transient) results.back()["is_transient"] = true;
  }
  return nlohmann::ordered_json{{"name", operation.name}, {"results", std::move(results)}}.dump();
}

}  // namespace detail

/// Reads a plan from the JSON that `to_json` writes.
///
/// @param name  what messages call the text
/// @throws PlanError  if the text is anything else, a plan edited by hand among it
inline MemoryPlan parse_plan(std::string_view json, const std::string& name = "plan") {
  return detail::PlanReader(name).read(json);
}

/// Writes a plan as JSON, an operation in a line; `parse_plan` reads the same, to the bit.
///
/// Needs nlohmann-json, as this whole header.
///
/// @throws PlanError  for a plan with a number that none can have, such as a time that is not
/// finite
inline std::string to_json(const MemoryPlan& plan) {
  const auto refuse = [](const std::string& what) {
    throw PlanError(ErrorMessage("remat.plan_file.write")
                        .where("remat::to_json")
                        .what("the plan cannot be written: " + what));
  };
  std::string json;
  try {
    json = detail::plan_head(plan) + ",\n  \"operations\": [";
    for (const MemoryPlan::Operation& operation : plan.operations)
      json += (json.ends_with('[') ? "\n    " : ",\n    ") + detail::operation_json(operation);
    json += plan.operations.empty() ? "]\n}\n" : "\n  ]\n}\n";
  } catch (const nlohmann::json::exception&) {
    refuse("the name of an operation is no UTF-8");
  }
  if (json.size() > detail::kLargestPlanFile) refuse("it takes more than 64 MiB");
  try {
    parse_plan(json);
  } catch (const PlanError& error) {
    refuse(std::string(error.message()));
  }
  return json;
}

/// Writes a plan to a file, which gets its name when it is complete.
///
/// @throws PlanError  if the file cannot be written; one that had the name before is as it was
inline void save_plan(const MemoryPlan& plan, const std::filesystem::path& path) {
  const std::string json = to_json(plan);
  detail::NewFile file(path, &detail::throw_unwritable_plan);
  file.write(json.data(), json.size());
  file.complete();
}

/// Reads a plan from a file that `save_plan` has written.
///
/// It is for the network, the shape of input and the LibTorch that it was made for: where other
/// operations run, `PlanOutcome` says so, and what follows is dropped.
///
/// @throws PlanError  if there is no such file, it is no plan, or not as it was written
inline MemoryPlan load_plan(const std::filesystem::path& path) {
  const auto refuse = [&](std::string_view what, std::string_view cure) {
    throw PlanError(ErrorMessage("remat.plan_file.read")
                        .where("\"" + path.string() + "\"")
                        .what(what)
                        .cure(cure));
  };
  std::error_code ignored;
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, ignored))
    refuse(std::filesystem::exists(path, ignored) ? "the plan cannot be read"
                                                  : "there is no such file",
           "Check the path");
  std::string json;
  std::array<char, 1 << 16> part{};
  while (file.read(part.data(), part.size()) || file.gcount() > 0) {
    json.append(part.data(), static_cast<std::size_t>(file.gcount()));
    if (json.size() > detail::kLargestPlanFile)
      refuse("the file is larger than 64 MiB, which no plan is", "Check the path");
  }
  return parse_plan(json, path.string());
}

}  // namespace remat
