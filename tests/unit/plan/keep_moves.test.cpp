// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/plan/keep_moves.hpp"
#include "tests/support/random_trace.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace keep_moves_test {

using remat::KeepMoves;
using remat::StepPoint;
using remat::StepTrace;

TEST_CASE("a move is taken back, and turns only what it may") {
  const StepTrace trace = random_traces::random_trace(1, 30);
  for (const auto turn : {KeepMoves::Turn::kept, KeepMoves::Turn::kept_and_transient}) {
    KeepMoves moves(trace);
    StepPoint point{remat::KeptValues(trace.values.size(), false), {}};
    bool has_kept = false, has_transient = false;
    for (int i = 0; i < 200; ++i) {
      StepPoint before = point;
      moves.move(point, turn);
      if (turn == KeepMoves::Turn::kept_and_transient)
        before.transient.resize(before.kept.size());  // none is said twice
      CHECK_FALSE((point.kept == before.kept && point.transient == before.transient));
      if (i % 2 == 0) {
        moves.undo(point);
        CHECK(point.kept == before.kept);
        CHECK(point.transient == before.transient);
      }
      CHECK_FALSE(point.kept[0]);  // it came from outside
      for (std::size_t id = 0; id < point.transient.size(); ++id) {
        CHECK_FALSE((point.kept[id] && point.transient[id]));
        has_transient = has_transient || point.transient[id];
      }
      for (const bool is_kept : point.kept) has_kept = has_kept || is_kept;
    }
    CHECK(has_kept);
    CHECK(has_transient == (turn == KeepMoves::Turn::kept_and_transient));
  }
}

TEST_CASE("what a transient value is written over is transient with it") {
  StepTrace trace = random_traces::random_trace(2, 4);
  trace.values[3].takes_over = 2;
  const KeepMoves moves(trace);
  CHECK(moves.candidates() == std::vector<std::int32_t>{1, 3, 4});
  StepPoint point{remat::KeptValues(5, false), {}, remat::TransientValues(5, false)};
  moves.set(point, 3, false, true);
  CHECK(point.transient == remat::TransientValues{false, false, true, true, false});
  moves.set(point, 3, true, false);
  CHECK(point.transient == remat::TransientValues(5, false));
  CHECK(point.kept[3]);
}

}  // namespace keep_moves_test
