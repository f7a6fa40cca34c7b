// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/recompute.hpp"

#include <memory>
#include <mutex>
#include <utility>

namespace remat::detail {

/// Takes back what a backward pass that keeps its graph was lent; runs when that pass ends, however
/// it ends.
class LentUntil {
 public:
  explicit LentUntil(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  LentUntil(const LentUntil&) = delete;
  LentUntil& operator=(const LentUntil&) = delete;
  ~LentUntil() {
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    take_back(*tape_);
  }
  static void take_back(Tape& tape) {
    for (const ValueId id : tape.lent)
      tape.values[static_cast<std::size_t>(id)].lent = c10::Storage();
    tape.lent.clear();
  }

 private:
  std::shared_ptr<Tape> tape_;
};

/// The content of a value for a saved tensor of `region`; recomputes it if it was dropped. The tape
/// is locked by the caller.
inline c10::Storage materialise(Tape& tape, ValueId id, RegionId region) {
  Value& value = tape.values[static_cast<std::size_t>(id)];
  if (value.lent) return value.lent;
  if (value.held) return value.held;

  const BackwardPass pass = current_backward_pass();
  if (pass == BackwardPass::keeps_graph && tape.lent_until.expired()) {
    auto token = std::make_shared<LentUntil>(tape.shared_from_this());
    tape.lent_until = token;
    attach_to_backward_pass(std::move(token));
  }
  c10::Storage content = Slice(tape, id, region).run(pass != BackwardPass::releases_graph);
  if (pass == BackwardPass::outside) LentUntil::take_back(tape);
  return content;
}

}  // namespace remat::detail
