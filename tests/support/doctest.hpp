// SPDX-License-Identifier: MIT
#pragma once

// The only way to doctest. LibTorch defines glog's CHECK, doctest its own, and the last one wins in
// silence: with glog's, a failing check would end the process instead of being counted. So LibTorch
// comes first, its macros go, then doctest. Programs that know no LibTorch do not pay for it.
#ifdef REMAT_TEST_WITH_LIBTORCH
#include <torch/torch.h>
#undef CHECK
#undef CHECK_EQ
#undef CHECK_NE
#undef CHECK_LT
#undef CHECK_LE
#undef CHECK_GT
#undef CHECK_GE
#endif

#include <doctest/doctest.h>
