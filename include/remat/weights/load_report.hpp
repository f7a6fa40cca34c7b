// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "remat/libtorch/dtypes.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/byte_source.hpp"

namespace remat {

/// A key whose tensor in the file cannot be copied into the module's.
struct KeyMismatch {
  std::string key;
  std::vector<std::int64_t> stored, expected;  ///< shapes: the file's and the module's
  at::ScalarType stored_dtype, expected_dtype;
};

inline std::ostream& operator<<(std::ostream& out, const KeyMismatch& mismatch) {
  out << '"' << detail::printable(mismatch.key) << "\" is " << at::IntArrayRef(mismatch.stored);
  if (mismatch.stored == mismatch.expected) out << ' ' << detail::dtype_name(mismatch.stored_dtype);
  out << " in the file and " << at::IntArrayRef(mismatch.expected);
  if (mismatch.stored == mismatch.expected)
    out << ' ' << detail::dtype_name(mismatch.expected_dtype);
  return out << " in the module";
}

/// What became of each key of a file and of a module. Prints.
struct LoadReport {
  std::vector<std::string> matched;     ///< in both, and loaded
  std::vector<std::string> fitted;      ///< in both, and loaded after LoadOptions::fit
  std::vector<std::string> skipped;     ///< left alone because of LoadOptions::skip
  std::vector<std::string> tolerated;   ///< in one only, and right all the same (see load_weights)
  std::vector<std::string> missing;     ///< in the module only
  std::vector<std::string> unexpected;  ///< in the file only
  std::vector<KeyMismatch> mismatched;  ///< in both, with another shape
  std::string removed_prefix;           ///< what was taken off all names of the file

  /// Returns how many keys of the module have their numbers from the file now.
  std::size_t loaded_count() const { return matched.size() + fitted.size(); }
};

namespace detail {

/// Prints up to eight items, and how many more there are.
template <class Items, class Print>
void print_some(std::ostream& out, const Items& items, Print print) {
  constexpr std::size_t kShown = 8;
  std::size_t shown = 0;
  for (const auto& item : items) {
    if (shown == kShown) break;
    out << (shown++ == 0 ? ": " : ", ");
    print(item);
  }
  if (items.size() > shown) out << " and " << items.size() - shown << " more";
}

inline void print_keys(std::ostream& out, const std::vector<std::string>& keys,
                       std::string_view title) {
  if (keys.empty()) return;
  out << "; " << keys.size() << ' ' << title;
  print_some(out, keys, [&](const std::string& key) { out << '"' << printable(key) << '"'; });
}

inline void print_problems(std::ostream& out, const LoadReport& report) {
  print_keys(out, report.missing, "missing");
  print_keys(out, report.unexpected, "unexpected");
  if (report.mismatched.empty()) return;
  out << "; " << report.mismatched.size() << " of another shape";
  print_some(out, report.mismatched, [&](const KeyMismatch& mismatch) { out << mismatch; });
}

}  // namespace detail

inline std::ostream& operator<<(std::ostream& out, const LoadReport& report) {
  out << report.matched.size() << " keys matched";
  detail::print_keys(out, report.fitted, "fitted");
  detail::print_keys(out, report.skipped, "skipped");
  detail::print_keys(out, report.tolerated, "tolerated");
  detail::print_problems(out, report);
  if (!report.removed_prefix.empty())
    out << "; \"" << report.removed_prefix << "\" taken off all names of the file";
  return out;
}

}  // namespace remat
