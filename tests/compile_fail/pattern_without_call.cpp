// expect: a pattern needs a member remat::Plan operator()(const remat::Plan&, const remat::Chain&)
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"
#include "remat/policies/each_unit.hpp"

struct AsItIs {
  using DefaultRule = remat::EachUnit;
#ifdef REMAT_COMPILES
  remat::Plan operator()(const remat::Plan& plan, const remat::Chain&) const { return plan; }
#endif
};

template <remat::Pattern PatternType>
struct NeedsPattern {};
NeedsPattern<AsItIs> use;
