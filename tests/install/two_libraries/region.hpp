// SPDX-License-Identifier: MIT
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

/// What each library exports: checkpoints a block of its own that calls `inner` in its middle.
///
/// Returns how many operations have been recomputed so far.
using Region = std::int64_t (*)(const at::Tensor& input, const at::Tensor& weight,
                                const std::function<at::Tensor(at::Tensor)>& inner,
                                bool is_checkpointed, at::Tensor& result);
