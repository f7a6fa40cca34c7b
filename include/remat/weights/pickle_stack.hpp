// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/pickle_values.hpp"

namespace remat::detail {

/// Reports that the opcodes of a pickle make no sense.
[[noreturn]] inline void refuse_pickle(const ByteCursor& cursor, std::string_view what) {
  cursor.source().damaged("before byte " + std::to_string(cursor.position()) + " its pickle " +
                          std::string(what));
}

/// The stack on which a pickle puts its values together, with marks where groups begin.
class PickleStack {
 public:
  /// @param cursor  where the pickle is read, for messages
  explicit PickleStack(const ByteCursor& cursor) : cursor_(cursor) {}

  void push(PickleId id) { values_.push_back(id); }

  PickleId top() const {
    if (values_.size() <= floor()) refuse_pickle(cursor_, "takes a value where there is none");
    return values_.back();
  }

  PickleId pop() {
    const PickleId id = top();
    values_.pop_back();
    return id;
  }

  void mark() {
    if (marks_.size() == kMostNested) refuse_pickle(cursor_, "is nested too deeply");
    marks_.push_back(values_.size());
  }

  std::vector<PickleId> take(std::size_t count) {
    if (values_.size() < floor() + count)
      refuse_pickle(cursor_, "takes more values than there are");
    return take_from(values_.size() - count);
  }

  std::vector<PickleId> take_to_mark() {
    if (marks_.empty()) refuse_pickle(cursor_, "ends a group that it never began");
    const std::size_t begin = floor();
    marks_.pop_back();
    return take_from(begin);
  }

 private:
  static constexpr std::size_t kMostNested = 1000;

  /// Values below the last mark belong to the group around it.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  std::vector<PickleId> take_from(std::size_t begin) {
    const auto first = values_.begin() + static_cast<std::ptrdiff_t>(begin);
    std::vector<PickleId> taken(first, values_.end());
    values_.erase(first, values_.end());
    return taken;
  }

  const ByteCursor& cursor_;
  std::vector<PickleId> values_;
  std::vector<std::size_t> marks_;
};

}  // namespace remat::detail
