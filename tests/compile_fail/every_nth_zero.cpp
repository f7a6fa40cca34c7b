// expect: remat::EveryNth<N> needs N >= 1
// SPDX-License-Identifier: MIT
#include "remat/policies/every_nth.hpp"

#ifdef REMAT_COMPILES
remat::EveryNth<1> rule;
#else
remat::EveryNth<0> rule;
#endif
