// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include "remat/amp.hpp"

namespace train {

/// Mixed precision as it suits the device: float16 with a scaler on an accelerator, bfloat16, whose
/// range is float32's, on the CPU.
struct Precision {
  c10::Device device;
  bool is_mixed;

  c10::ScalarType dtype() const {
    if (!is_mixed) return torch::kFloat32;
    return device.is_cpu() ? torch::kBFloat16 : torch::kHalf;
  }
  const char* name() const {
    if (!is_mixed) return "float32";
    return device.is_cpu() ? "bfloat16 where autocast allows it"
                           : "float16 where autocast allows it";
  }
  remat::amp::GradScalerOptions scaler() const { return {.enabled = is_mixed && !device.is_cpu()}; }
  /// Computes a tensor in this precision, and returns it in float32.
  template <class Compute>
  torch::Tensor run(Compute compute) const {
    if (!is_mixed) return compute();
    remat::amp::AutocastOptions options;
    options.dtype = dtype();
    const remat::amp::Autocast autocast(device.type(), options);
    return compute().to(torch::kFloat32);
  }
};

}  // namespace train
