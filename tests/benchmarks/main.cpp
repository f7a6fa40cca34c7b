// SPDX-License-Identifier: MIT

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/benchmarks/results.hpp"

namespace {

using namespace benchmarks;

constexpr const char* kUsage =
    R"(MODEL:N measures that model with a batch of N.
usage: remat_benchmark [--part micro|steps|all] [--models resnet18,vit_l_16:2] [--strategies REGEX]
                       [--batch 8] [--size 224] [--repeats 5] [--threads 2] [--json FILE] [--turns]
)";

Settings parse(int count, char** values) {
  Settings settings;
  for (int i = 1; i < count; ++i) {
    const std::string name = values[i];
    if (name == "--turns") {
      settings.waits_for_turns = true;
      continue;
    }
    if (i + 1 == count) throw std::invalid_argument(kUsage);
    const std::string value = values[++i];
    if (name == "--part")
      settings.part = value;
    else if (name == "--strategies")
      settings.strategies = value;
    else if (name == "--batch")
      settings.batch = std::stol(value);
    else if (name == "--size")
      settings.image_size = std::stol(value);
    else if (name == "--repeats")
      settings.repeats = std::stol(value);
    else if (name == "--threads")
      settings.threads = std::stol(value);
    else if (name == "--json")
      settings.json = value;
    else if (name == "--models") {
      settings.models.clear();
      std::istringstream list(value);
      for (std::string model; std::getline(list, model, ',');) settings.models.push_back(model);
    } else
      throw std::invalid_argument(kUsage);
  }
  return settings;
}

void print_row(const StepResult& r, std::FILE* out) {
  std::fprintf(out, "%-20s %-44s ", r.model.c_str(), r.strategy.c_str());
  if (!r.is_feasible) {
    std::fprintf(out, "infeasible, least %.3f of plain's peak\n", r.least_part);
    return;
  }
  std::fprintf(out, "%9.1f %9.1f %9.1f %6.1f%% %9.1f %6.3f %6.3f %9lld %11lld %6.1f%% %s\n",
               r.first_peak_mib, r.predicted_peak_mib, r.peak_mib, 100 * r.saving, r.step_ms,
               r.time_ratio, r.cpu_ratio, static_cast<long long>(r.recorded_operations),
               static_cast<long long>(r.recomputed_operations), 100 * r.recomputed_share,
               r.gradients_equal ? "equal" : "DIFFER");
}

void print(const std::vector<StepResult>& results, std::FILE* out) {
  std::fprintf(out, "\n%-20s %-44s %9s %9s %9s %7s %9s %6s %6s %9s %11s %7s %s\n", "model",
               "strategy", "1st MiB", "predicted", "peak MiB", "saving", "step ms", "ratio", "cpu",
               "recorded", "recomputed", "share", "gradients");
  for (const StepResult& result : results) print_row(result, out);
}

void write_step(std::ostream& out, const StepResult& r) {
  out << "  {\"model\": \"" << r.model << "\", \"strategy\": \"" << r.strategy << "\"";
  if (!r.is_feasible) {
    out << ", \"least_part\": " << r.least_part << "}";
    return;
  }
  out << ", \"first_peak_mib\": " << r.first_peak_mib << ", \"peak_mib\": " << r.peak_mib
      << ", \"saving\": " << r.saving << ", \"step_ms\": " << r.step_ms
      << ", \"time_ratio\": " << r.time_ratio << ", \"cpu_ratio\": " << r.cpu_ratio
      << ", \"recomputed_share\": " << r.recomputed_share;
  if (r.predicted_peak_mib > 0) out << ", \"predicted_peak_mib\": " << r.predicted_peak_mib;
  if (r.predicted_recomputed >= 0) out << ", \"predicted_recomputed\": " << r.predicted_recomputed;
  out << ", \"segments\": " << r.segments << ", \"recorded\": " << r.recorded_operations
      << ", \"recomputed\": " << r.recomputed_operations
      << ", \"gradients_equal\": " << (r.gradients_equal ? "true" : "false") << "}";
}

/// The names hold no character that JSON would want escaped.
void write_json(const std::string& path, const Settings& settings,
                const std::vector<MicroResult>& micro, const std::vector<StepResult>& steps) {
  std::ofstream out(path);
  out << "{\"batch\": " << settings.batch << ", \"size\": " << settings.image_size
      << ", \"repeats\": " << settings.repeats << ", \"threads\": " << settings.threads
      << ",\n \"micro_us\": {";
  for (std::size_t i = 0; i < micro.size(); ++i)
    out << (i == 0 ? "" : ", ") << '"' << micro[i].name << "\": " << micro[i].microseconds;
  out << "},\n \"steps\": [";
  for (std::size_t i = 0; i < steps.size(); ++i) {
    out << (i == 0 ? "\n" : ",\n");
    write_step(out, steps[i]);
  }
  out << "]}\n";
  if (!out) throw std::runtime_error("cannot write " + path);
}

}  // namespace

int main(int count, char** values) {
  try {
    const Settings settings = parse(count, values);
    std::vector<MicroResult> micro;
    std::vector<StepResult> steps;
    if (settings.part != "steps") micro = measure_micro();
    if (settings.part != "micro") steps = measure_steps(settings);
    std::FILE* out = settings.waits_for_turns ? stderr : stdout;
    for (const MicroResult& result : micro)
      std::fprintf(out, "%-46s %12.3f us\n", result.name.c_str(), result.microseconds);
    if (!steps.empty()) print(steps, out);
    if (!settings.json.empty()) write_json(settings.json, settings, micro, steps);
    for (const StepResult& result : steps)
      if (result.is_feasible && !result.gradients_equal) return 1;
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "remat_benchmark: %s\n", error.what());
    return 2;
  }
}
