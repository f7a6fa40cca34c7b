// expect: checkpoint_sequential needs a torch::nn::Sequential, or a range of modules or callables
// SPDX-License-Identifier: MIT
#include "remat/nn/checkpoint_sequential.hpp"

#ifdef REMAT_COMPILES
using Element = at::Tensor (*)(at::Tensor);
#else
using Element = int;
#endif

at::Tensor run(const std::vector<Element>& calls, const at::Tensor& x) {
  return remat::checkpoint_sequential(calls, 2, x);
}
