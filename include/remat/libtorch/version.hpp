// SPDX-License-Identifier: MIT
#pragma once

#include <torch/version.h>

/// True when the LibTorch at hand is at least `major.minor`. Detection by the compiler is
/// preferred; this is for behaviour that cannot be detected.
#define REMAT_LIBTORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
