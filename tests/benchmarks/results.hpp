// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace benchmarks {

/// What to measure; filled from the command line.
struct Settings {
  std::vector<std::string> models{"resnet18", "resnet50"};
  std::string part = "all";
  std::string strategies;  // regular expression; empty: all
  std::string json;        // file to write, "" for none
  std::int64_t batch = 8;
  std::int64_t image_size = 224;
  std::int64_t repeats = 5;
  std::int64_t threads = 2;
  bool waits_for_turns = false;  // a line on stdin before each round, "done" on stdout after it
};

/// One strategy on one model. The JSON keys of python_side.py are the same.
struct StepResult {
  std::string model, strategy;
  double first_peak_mib = 0;      // of the first step, before the units are measured
  double peak_mib = 0;            // of the steps that were timed
  double saving = 0;              // of plain's peak
  double step_ms = 0;             // median
  double time_ratio = 0;          // median over the rounds of the ratio to plain in the same round
  double cpu_ratio = 0;           // the same for the processor time of all threads: steadier
  double predicted_peak_mib = 0;  // before the steps; 0: nobody said
  double recomputed_share = 0;    // time of recomputes, of plain's forward; median over the rounds
  double predicted_recomputed = -1;  // the same before the steps; below 0: nobody said
  std::int64_t recorded_operations = 0, recomputed_operations = 0;
  bool gradients_equal = false;
  std::int64_t segments = 0;  // in effect in the last step, 0: plain
  bool is_feasible = true;    // false: nothing fits the budget, and nothing was measured
  double least_part = 0;      // of plain's peak, for which something does
};

/// One figure of the micro part.
struct MicroResult {
  std::string name;
  double microseconds = 0;
};

inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<StepResult> measure_steps(const Settings& settings);
std::vector<MicroResult> measure_micro();

}  // namespace benchmarks
