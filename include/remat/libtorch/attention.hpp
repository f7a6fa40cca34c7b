// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/tensor.hpp"
#include "remat/libtorch/version.hpp"

// By version and not by __has_include: where both are installed, 1.13's headers lie in the system's
// include directory, where a newer LibTorch would find them as well.
#if REMAT_LIBTORCH_AT_LEAST(2, 0)
#include <ATen/ops/scaled_dot_product_attention.h>
#else
#include <ATen/ops/_scaled_dot_product_attention.h>

#include <tuple>
#endif

namespace remat::detail {

/// Computes softmax(query · keyᵀ / √d) · value by the kernel that LibTorch thinks best.
///
/// @param query    (N, heads, L, d), as `key` and `value`
/// @param dropout  rate at which weights are zeroed; give 0 outside of training
/// @return  (N, heads, L, d)
inline at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                               const at::Tensor& value, double dropout) {
#if REMAT_LIBTORCH_AT_LEAST(2, 0)
  return at::scaled_dot_product_attention(query, key, value, /*attn_mask=*/{}, dropout);
#else
  return std::get<0>(
      at::_scaled_dot_product_attention(query, key, value, /*attn_mask=*/{}, dropout));
#endif
}

}  // namespace remat::detail
