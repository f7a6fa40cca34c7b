// expect: remat::Segments<N> needs N >= 1
// SPDX-License-Identifier: MIT
#include "remat/policies/segments.hpp"

#ifdef REMAT_COMPILES
remat::Segments<1> rule;
#else
remat::Segments<0> rule;
#endif
