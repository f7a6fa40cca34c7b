// expect: a unit of a chain needs to derive from torch::nn::Module
// SPDX-License-Identifier: MIT
#include "remat/nn/chain_layer.hpp"

#ifdef REMAT_COMPILES
struct DoublerImpl : torch::nn::Module {
#else
struct DoublerImpl {
#endif
  at::Tensor forward(at::Tensor x) { return x; }
};

void build() { remat::ChainLayer layer(std::make_shared<DoublerImpl>()); }
