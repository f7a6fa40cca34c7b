// SPDX-License-Identifier: MIT
#pragma once

#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/policies/each_unit.hpp"

namespace remat {

/// The pattern of a transformer: each layer is a segment, and all of them are recomputed.
///
/// What layers save is large beside the tokens that pass between them, and equal for all of them,
/// so that one border per layer is nearly the least memory. The last layer is recomputed, too: one
/// plain layer would hold as much as all borders of a dozen. Embeddings and merging layers are
/// exempted with `remat::plain`. `forward(tokens, mask...)` hands extra arguments to every layer.
struct TransformerLayers {
  using DefaultRule = EachUnit;

  Plan operator()(const Plan& plan, const Chain&) const { return plan; }
};

}  // namespace remat
