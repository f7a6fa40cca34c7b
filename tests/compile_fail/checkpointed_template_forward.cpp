// expect: a module to checkpoint needs a forward that is public, not a template and not overloaded
// SPDX-License-Identifier: MIT
#include "remat/nn/checkpointed.hpp"

struct DoublerImpl : torch::nn::Module {
#ifdef REMAT_COMPILES
  at::Tensor forward(at::Tensor x) { return x; }
#else
  template <class Input>
  Input forward(Input x) {
    return x;
  }
#endif
};

void build() { remat::Checkpointed<DoublerImpl> doubler; }
