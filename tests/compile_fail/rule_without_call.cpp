// expect: a rule needs a member remat::Plan operator()(const remat::Chain&) const
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"

struct Halves {
#ifdef REMAT_COMPILES
  remat::Plan operator()(const remat::Chain& chain) const {
#else
  remat::Plan plan(const remat::Chain& chain) const {
#endif
      return remat::Plan::from_count(chain.unit_count, 2);
}
}
;

template <remat::Rule RuleType>
struct NeedsRule {};
NeedsRule<Halves> use;
