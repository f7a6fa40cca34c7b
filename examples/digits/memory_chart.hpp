// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "remat/remat.hpp"

namespace digits {

/// Live memory over the time of one step.
using Course = std::vector<remat::MemorySample>;

/// Writes a picture of live memory during one step, plain and checkpointed, as SVG.
///
/// @throws std::runtime_error  if the file cannot be written
inline void write_memory_chart(const std::string& path, const Course& plain,
                               const Course& checkpointed) {
  remat::Bytes highest;
  for (const Course* course : {&plain, &checkpointed})
    for (const remat::MemorySample& sample : *course) highest = std::max(highest, sample.live);
  remat::MemoryChart chart("Live activation memory during one training step", highest);
  chart.add_curve(plain, remat::MemoryCurveStyle::plain());
  chart.add_curve(checkpointed, remat::MemoryCurveStyle::checkpointed());
  std::ofstream file(path);
  file << chart.text();
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path);
}

}  // namespace digits
