// expect: a keep policy needs a member bool operator()(const remat::keep::Operation&, remat::Bytes)
// SPDX-License-Identifier: MIT
#include "remat/policies/concepts.hpp"

struct KeepSmall {
#ifdef REMAT_COMPILES
  bool operator()(const remat::keep::Operation&, remat::Bytes result) const {
#else
  bool operator()(remat::Bytes result) const {
#endif
      return result.count < 1024;
}
}
;

template <remat::KeepPolicy Keep>
struct NeedsKeep {};
NeedsKeep<KeepSmall> use;
