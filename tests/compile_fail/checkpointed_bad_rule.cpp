// expect: a rule needs a member remat::Plan operator()(const remat::Chain&) const
// SPDX-License-Identifier: MIT
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"

struct Halves {};

#ifdef REMAT_COMPILES
using Rule = remat::Segments<2>;
#else
using Rule = Halves;
#endif

void build() { remat::Checkpointed<remat::Sequential, Rule> net; }
