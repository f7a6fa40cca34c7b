// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "remat/errors.hpp"
#include "remat/units.hpp"

namespace remat {

/// How much memory a training step may need: bytes, or a part of what it needs without
/// checkpointing.
///
/// Counted are tensors that the step allocates (saved values, gradients, temporaries), above the
/// level before it, as `MemoryMeter` does; parameters and inputs are there before.
class MemoryBudget {
 public:
  /// @throws ArgumentError  if there is less than one byte
  static MemoryBudget bytes(Bytes count) {
    require(count.count > 0, [&] {
      return ErrorMessage("remat.budget.bytes")
          .where("remat::MemoryBudget::bytes")
          .what("the budget is " + to_string(count) + ", at least 1 byte was expected");
    });
    return MemoryBudget(count, 0);
  }

  /// @param part  above 0; 1 and more is plain
  /// @throws ArgumentError  if `part` is not above 0
  static MemoryBudget fraction_of_plain(double part) {
    require(std::isfinite(part) && part > 0, [&] {
      return ErrorMessage("remat.budget.fraction")
          .where("remat::MemoryBudget::fraction_of_plain")
          .what("the fraction is " + std::to_string(part) + ", a number above 0 was expected")
          .cure("0.5 is half of the peak without checkpointing");
    });
    return MemoryBudget({}, part);
  }

  /// Returns the bytes, for a step that needs `plain_peak` without checkpointing.
  Bytes resolve(Bytes plain_peak) const {
    if (part_ == 0) return bytes_;
    return {static_cast<std::int64_t>(part_ * static_cast<double>(plain_peak.count))};
  }

  /// Returns the part of plain; 0 for a budget in bytes.
  double fraction() const { return part_; }

  friend bool operator==(const MemoryBudget&, const MemoryBudget&) = default;

 private:
  MemoryBudget(Bytes count, double part) : bytes_(count), part_(part) {}

  Bytes bytes_;
  double part_;  // 0: `bytes_` counts
};

}  // namespace remat
