// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "remat/units.hpp"

namespace remat {

/// What one training step did, forward and backward, as plain numbers: enough to say what it would
/// need with other values kept.
///
/// Values, operations and their numbers are those of the region's `Graph`. Memory is told apart in
/// two kinds: that of the values, whose lifetimes depend on what is kept, and all other memory
/// (gradients, temporaries of backward, what ran outside of the region), whose course does not.
struct StepTrace {
  /// No producer, or nothing written over.
  static constexpr std::int32_t kNone = -1;

  /// The content of one storage at one time.
  struct Value {
    std::int64_t bytes = 0;
    std::int32_t producer = kNone;    ///< the operation that made it; none: it came from outside
    std::int32_t takes_over = kNone;  ///< the recorded value over which it was written, in place
    bool is_copied = false;       ///< written over something from outside: a recompute copies that
    bool is_always_kept = false;  ///< a side result so small that it is never recomputed
    bool is_result = false;       ///< what the region returned
  };

  /// One operation, in the order of forward.
  struct Operation {
    std::string name;                 ///< "aten::convolution"
    std::vector<std::int32_t> reads;  ///< values, one entry per argument
    std::vector<std::int32_t> makes;  ///< values
    std::int64_t peak = 0;            ///< bytes above those before it, its results included
    double seconds = 0;
  };

  /// What happened at a point of the step.
  enum class Kind : std::uint8_t {
    ran,       ///< an operation of forward
    let_go,    ///< nobody but the tape holds a value's memory any more
    ended,     ///< the region ended
    saved,     ///< autograd saved a value
    asked,     ///< backward asked for a saved value
    released,  ///< a saved value was released
    done,      ///< the step ended
  };

  /// Something that happened, and the other memory at that time.
  struct Event {
    Kind kind = Kind::done;
    std::int32_t id = kNone;  ///< of the operation or value
    std::int64_t other = 0;   ///< bytes of other memory when it happened
    std::int64_t peak = 0;    ///< most bytes of other memory since the event before
  };

  std::vector<Value> values;
  std::vector<Operation> operations;
  std::vector<Event> events;
  std::int64_t saved_count = 0;  ///< tensors that autograd saved in the region

  /// The values in which the layers of a chain ended, in the order of forward; those of chains
  /// inside layers, too. Empty: no layers are known. A layer that ended outside of the region's
  /// record, as a plain one does, is not in it.
  std::vector<std::int32_t> layer_ends;
  /// The value with which the first of them began; none: it came from outside.
  std::int32_t layers_begin = kNone;

  /// Returns for each value how many saved tensors wait for it when the region has ended.
  std::vector<std::int32_t> saved_counts() const {
    std::vector<std::int32_t> counts(values.size(), 0);
    for (const Event& event : events) {
      if (event.kind == Kind::ended) break;
      if (event.kind == Kind::saved) ++counts[static_cast<std::size_t>(event.id)];
      if (event.kind == Kind::released) --counts[static_cast<std::size_t>(event.id)];
    }
    return counts;
  }

  /// Returns for each value whether another one is written over it.
  std::vector<bool> overwritten_values() const {
    std::vector<bool> is_overwritten(values.size(), false);
    for (const Value& value : values)
      if (value.takes_over != kNone)
        is_overwritten[static_cast<std::size_t>(value.takes_over)] = true;
    return is_overwritten;
  }

  /// Returns for each value whether a plan may keep it: it has memory of its own, is worth a
  /// decision, and is not written over.
  std::vector<bool> keepable_values() const {
    std::vector<bool> can_keep = overwritten_values();
    for (std::size_t id = 0; id < values.size(); ++id)
      can_keep[id] = !can_keep[id] && values[id].producer != kNone && values[id].bytes > 0 &&
                     !values[id].is_always_kept;
    return can_keep;
  }

  /// Returns for each value that a plan may keep whether plain does: autograd saved it.
  std::vector<bool> kept_by_plain() const {
    std::vector<bool> kept = keepable_values();
    const std::vector<std::int32_t> counts = saved_counts();
    for (std::size_t id = 0; id < kept.size(); ++id) kept[id] = kept[id] && counts[id] > 0;
    return kept;
  }

  /// Returns the bytes of what the region returned.
  Bytes result_bytes() const {
    Bytes sum;
    for (const Value& value : values)
      if (value.is_result) sum += Bytes{value.bytes};
    return sum;
  }

  /// Returns the measured time of forward's operations.
  double seconds() const {
    double sum = 0;
    for (const Operation& operation : operations) sum += operation.seconds;
    return sum;
  }
};

}  // namespace remat
