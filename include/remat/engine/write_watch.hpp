// SPDX-License-Identifier: MIT
#pragma once

#include "remat/config.hpp"
#include "remat/engine/value.hpp"

#include <memory>
#include <mutex>
#include <vector>

namespace remat::detail {

class Tape;

/// Who still needs the content that a storage has now: tapes enter what they refer to but do not
/// own.
///
/// A recorder that sees a write coming (batch-norm statistics, an input edited in place) asks here
/// first, so that a region which is waiting for its backward keeps the content it saw. One table
/// for the process; a leaf in the order of locks.
class REMAT_VISIBLE WriteWatch {
 public:
  struct Entry {
    std::weak_ptr<Tape> tape;
    ValueId value;
  };

  void enter(const c10::StorageImpl* storage, std::weak_ptr<Tape> tape, ValueId value) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_[storage].push_back({std::move(tape), value});
  }

  void leave(const c10::StorageImpl* storage, const std::weak_ptr<Tape>& tape, ValueId value) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end()) return;
    auto& list = found->second;
    // Backward releases in the opposite order of forward: the last entry is nearly always the one.
    for (std::size_t i = list.size(); i-- > 0;) {
      if (list[i].value != value || list[i].tape.owner_before(tape) ||
          tape.owner_before(list[i].tape))
        continue;
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (list.empty()) entries_.erase(found);
  }

  std::vector<Entry> find(const c10::StorageImpl* storage) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(storage);
    return found == entries_.end() ? std::vector<Entry>{} : found->second;
  }

 private:
  mutable std::mutex mutex_;
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<Entry>> entries_;
};

/// The process's watch, one for all libraries that contain this header.
REMAT_VISIBLE inline WriteWatch& write_watch() {
  static auto* watch = new WriteWatch;
  return *watch;
}

}  // namespace remat::detail
