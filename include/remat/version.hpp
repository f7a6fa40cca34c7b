// SPDX-License-Identifier: MIT
#pragma once

// CMake reads these three lines; nothing else states the version.
#define REMAT_VERSION_MAJOR 0
#define REMAT_VERSION_MINOR 1
#define REMAT_VERSION_PATCH 0
