// expect: a pattern needs a default constructor
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"
#include "remat/policies/each_unit.hpp"

struct AsItIs {
#ifndef REMAT_COMPILES
  explicit AsItIs(int) {}
#endif
  using DefaultRule = remat::EachUnit;
  remat::Plan operator()(const remat::Plan& plan, const remat::Chain&) const { return plan; }
};

template <remat::Pattern PatternType>
struct NeedsPattern {};
NeedsPattern<AsItIs> use;
