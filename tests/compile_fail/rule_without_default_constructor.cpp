// expect: a rule needs a default constructor
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"

struct Halves {
#ifndef REMAT_COMPILES
  explicit Halves(int) {}
#endif
  remat::Plan operator()(const remat::Chain& chain) const {
    return remat::Plan::from_count(chain.unit_count, 2);
  }
};

template <remat::Rule RuleType>
struct NeedsRule {};
NeedsRule<Halves> use;
