// SPDX-License-Identifier: MIT
#pragma once

// Every macro that a compiler flag may set, with effect, default and whether it changes layout.
// Set a switch that changes layout for the whole program, or not at all.

/// Marks what must be one and the same in all libraries of a process: exception types, so that a
/// catch in one library takes what another threw, and the engine's state. Default: default
/// visibility. Does not change layout.
#ifndef REMAT_VISIBLE
#if defined(_WIN32)
#define REMAT_VISIBLE
#else
#define REMAT_VISIBLE __attribute__((visibility("default")))
#endif
#endif
