// expect: a pattern needs a member type DefaultRule
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"
#include "remat/policies/each_unit.hpp"

struct AsItIs {
#ifdef REMAT_COMPILES
  using DefaultRule = remat::EachUnit;
#endif
  remat::Plan operator()(const remat::Plan& plan, const remat::Chain&) const { return plan; }
};

template <remat::Pattern PatternType>
struct NeedsPattern {};
NeedsPattern<AsItIs> use;
