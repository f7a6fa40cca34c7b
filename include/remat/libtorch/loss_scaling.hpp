// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/dispatch.hpp"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/isfinite.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace remat::detail {

/// Whether LibTorch has its loss scaling kernels for this device. On the CPU they are absent from
/// 1.13, whose `at::_amp_update_scale_` then throws.
inline bool has_loss_scaling_kernels(c10::Device device) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_amp_update_scale_", ""});
  return op.has_value() && op->hasKernelForDispatchKey(
                               c10::computeDispatchKey(at::kFloat, at::kStrided, device.type()));
}

/// As LibTorch's kernel of that name, by ordinary operations: sets `found_inf` to 1 where an entry
/// is infinite or not a number, and multiplies by `inv_scale`.
inline void check_and_unscale_by_operations(std::vector<at::Tensor>& grads, at::Tensor& found_inf,
                                            const at::Tensor& inv_scale) {
  for (at::Tensor& grad : grads) {
    if (!at::isfinite(grad).all().item<bool>()) found_inf.fill_(1);
    // The kernel multiplies in float32 and rounds once; `mul_` would round the factor, too.
    if (grad.element_size() < inv_scale.element_size())
      grad.copy_(grad.to(inv_scale.scalar_type()).mul(inv_scale));
    else
      grad.mul_(inv_scale);
  }
}

/// As LibTorch's kernel of that name: the factor is applied in double and rounded once, and the
/// scale does not grow past float32.
inline void update_scale_by_operations(at::Tensor& scale, at::Tensor& growth_tracker,
                                       const at::Tensor& found_inf, double growth_factor,
                                       double backoff_factor, std::int64_t growth_interval) {
  const double current = static_cast<double>(scale.item<float>());
  if (found_inf.item<float>() != 0.0f) {
    scale.fill_(static_cast<float>(current * backoff_factor));
    growth_tracker.zero_();
    return;
  }
  const std::int64_t successes = std::int64_t{growth_tracker.item<std::int32_t>()} + 1;
  if (successes != growth_interval) {
    growth_tracker.fill_(successes);
    return;
  }
  const auto grown = static_cast<float>(current * growth_factor);
  if (std::isfinite(grown)) scale.fill_(grown);
  growth_tracker.zero_();
}

/// Divides gradients of one device and dtype by the scale, and notes whether all are finite.
///
/// @param grads      dense
/// @param found_inf  float32 of one element, as `inv_scale`, on the gradients' device
inline void check_and_unscale(std::vector<at::Tensor>& grads, at::Tensor& found_inf,
                              const at::Tensor& inv_scale) {
  if (has_loss_scaling_kernels(found_inf.device()))
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale);
  else
    check_and_unscale_by_operations(grads, found_inf, inv_scale);
}

/// Moves the scale after a step: back where infinities were found, up after `growth_interval` clean
/// ones.
///
/// @param growth_tracker  int32 of one element: clean steps since the scale changed
inline void update_scale(at::Tensor& scale, at::Tensor& growth_tracker, const at::Tensor& found_inf,
                         double growth_factor, double backoff_factor,
                         std::int64_t growth_interval) {
  if (has_loss_scaling_kernels(scale.device()))
    at::_amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor,
                           growth_interval);
  else
    update_scale_by_operations(scale, growth_tracker, found_inf, growth_factor, backoff_factor,
                               growth_interval);
}

}  // namespace remat::detail
