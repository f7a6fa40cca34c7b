// expect: a keep policy needs a copy constructor
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"

struct KeepSmall {
  KeepSmall() = default;
#ifndef REMAT_COMPILES
  KeepSmall(const KeepSmall&) = delete;
#endif
  bool operator()(const remat::keep::Operation&, remat::Bytes result) const {
    return result.count < 1024;
  }
};

template <remat::KeepPolicy Keep>
struct NeedsKeep {};
NeedsKeep<KeepSmall> use;
