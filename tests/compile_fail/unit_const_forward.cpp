// expect: a unit of a chain needs a forward that is not const, returns something and takes no
// SPDX-License-Identifier: MIT
#include "remat/nn/chain_layer.hpp"

struct DoublerImpl : torch::nn::Module {
#ifdef REMAT_COMPILES
  at::Tensor forward(at::Tensor x) { return x; }
#else
  at::Tensor forward(at::Tensor x) const { return x; }
#endif
};

void build() { remat::NamedLayer layer("doubler", std::make_shared<DoublerImpl>()); }
