// SPDX-License-Identifier: MIT
#include "remat/remat.hpp"

// The umbrella in an object of its own, linked into the test program beside the objects of the
// tests: a function that lacks `inline` is then defined twice, and the program does not link.
