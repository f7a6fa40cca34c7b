// SPDX-License-Identifier: MIT
#pragma once

// nn.hpp comes first: clip_grad.h names torch::Tensor without declaring it.
#include "remat/libtorch/nn.hpp"

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>
