// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/tape.hpp"

#include <c10/util/SmallVector.h>

#include <utility>

namespace remat::detail {

/// What an operation made: values, and the storages that they are in.
using MadeValues = c10::SmallVector<std::pair<ValueId, c10::Storage>, 4>;

/// Watches a tape while a step is recorded and run backward, see `StepObserver`. All calls come
/// with the tape's mutex held, except `operation_begins`.
class REMAT_VISIBLE TapeObserver {
 public:
  virtual ~TapeObserver() = default;

  /// An operation that will be recorded is about to run its kernel.
  virtual void operation_begins(Tape& tape) = 0;
  virtual void operation_ended(Tape& tape, OperationId id, const MadeValues& made) = 0;
  /// A layer of a chain begins with a value; none: it came from outside.
  virtual void layer_begins(Tape& tape, ValueId id) = 0;
  /// A layer of a chain ended in a value, which is held from now on, or was before.
  virtual void kept(Tape& tape, ValueId id) = 0;
  /// Autograd saved a value that the region made.
  virtual void saved(Tape& tape, ValueId id) = 0;
  /// Backward wants a saved value; what is missing of it will be recomputed after this call.
  virtual void asked(Tape& tape, ValueId id) = 0;
  /// A saved value is about to lose one of those who wait for it.
  virtual void released(Tape& tape, ValueId id) = 0;
  /// The outermost region has ended; what nothing needs is released after this call.
  virtual void ended(Tape& tape) = 0;
};

}  // namespace remat::detail
