// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "remat/plan/memory_plan.hpp"

namespace remat {

namespace detail {

/// Makes 64 bits of texts and numbers, the same on every machine.
///
/// @par Source  FNV-1a, by Fowler, Noll and Vo
class Fingerprint {
 public:
  void add(std::string_view text) {
    add(static_cast<std::int64_t>(text.size()));  // so that "a", "b" is not "ab"
    for (const char letter : text) add_byte(static_cast<unsigned char>(letter));
  }
  void add(std::int64_t number) {
    for (int shift = 0; shift < 64; shift += 8)
      add_byte(static_cast<unsigned char>(static_cast<std::uint64_t>(number) >> shift & 0xff));
  }
  void add(double number) { add(std::bit_cast<std::int64_t>(number)); }
  void add(bool flag) { add_byte(flag ? 1 : 0); }

  /// Returns 16 hexadecimal digits.
  std::string text() const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) digits += kDigits[state_ >> shift & 15];
    return digits;
  }

 private:
  void add_byte(unsigned char byte) { state_ = (state_ ^ byte) * 0x100000001b3; }

  std::uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace detail

/// Returns 16 hexadecimal digits that stand for the operations of a plan, their names and the bytes
/// of their results: plans of the same network and shape of input have the same, whatever their
/// budgets.
inline std::string fingerprint(const MemoryPlan& plan) {
  detail::Fingerprint print;
  for (const MemoryPlan::Operation& operation : plan.operations) {
    print.add(operation.name);
    print.add(static_cast<std::int64_t>(operation.results.size()));
    for (const MemoryPlan::Result& result : operation.results) print.add(result.bytes.count);
  }
  return print.text();
}

namespace detail {

/// Returns 16 hexadecimal digits that stand for all of a plan.
inline std::string checksum(const MemoryPlan& plan) {
  Fingerprint print;
  print.add(fingerprint(plan));
  for (const MemoryPlan::Operation& operation : plan.operations)
    for (const MemoryPlan::Result& result : operation.results) {
      print.add(result.is_kept);
      if (result.is_transient) print.add(std::string_view("transient"));  // as in the file
    }
  for (const Bytes bytes : {plan.budget, plan.peak, plan.plain_peak}) print.add(bytes.count);
  for (const double seconds : {plan.recomputed_seconds, plan.forward_seconds}) print.add(seconds);
  print.add(plan.recomputed_count);
  print.add(plan.saved_count);
  return print.text();
}

}  // namespace detail
}  // namespace remat
