// expect: a unit of a chain needs a forward that is public, not a template and not overloaded
// SPDX-License-Identifier: MIT
#include "remat/nn/chain_layer.hpp"

struct DoublerImpl : torch::nn::Module {
  at::Tensor forward(at::Tensor x) { return x; }
#ifndef REMAT_COMPILES
  at::Tensor forward(at::Tensor x, at::Tensor) { return x; }
#endif
};

void build() { remat::ChainLayer layer(std::make_shared<DoublerImpl>()); }
