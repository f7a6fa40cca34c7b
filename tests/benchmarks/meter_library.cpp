// SPDX-License-Identifier: MIT
//
// The library's own memory meter for python_side.py, so that both languages are measured alike.

#include <memory>

#include "remat/memory.hpp"

namespace {
std::unique_ptr<remat::MemoryMeter> meter;
}

extern "C" {

__attribute__((visibility("default"))) void remat_meter_start() {
  meter = std::make_unique<remat::MemoryMeter>();
}
__attribute__((visibility("default"))) void remat_meter_stop() { meter.reset(); }
__attribute__((visibility("default"))) long long remat_meter_peak() { return meter->peak().count; }
}
