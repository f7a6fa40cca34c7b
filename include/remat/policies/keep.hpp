// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "remat/units.hpp"

/// Keep policies: inside a checkpointed region, which results stay instead of being recomputed.
///
/// | policy                   | keeps                                    | choose it when | |
/// ------------------------ | ---------------------------------------- |
/// ----------------------------------------- | | nothing                  | only the region's
/// inputs and results     | memory is short; the default              | | convolutions_and_matmuls
/// | what is costly to compute again          | time matters, normalisations are recomputed | |
/// attention                | attention products and attention kernels | transformers: attention is
/// most of the time |
///
/// Left out: a policy by size alone, since a user's own predicate says that in one line.
namespace remat::keep {

/// What a keep policy is told about an operation.
struct Operation {
  std::string_view name;    ///< "aten::convolution"
  std::size_t ordinal = 0;  ///< how many operations of this name came before it in the region
  Bytes largest_input;      ///< the largest tensor among its arguments
  std::size_t position = 0;  ///< how many operations of any name came before it in the region
  std::size_t result = 0;    ///< which of its results is asked about, in the order of its returns
};

namespace detail {

constexpr bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  for (const std::string_view candidate : names)
    if (name == candidate) return true;
  return false;
}

}  // namespace detail

/// Keeps no result inside a region.
struct nothing {
  constexpr bool operator()(const Operation&, Bytes) const { return false; }
};

/// Keeps the results of convolutions and matrix products.
///
/// The names cover what records below autograd on LibTorch 1.13 and 2.13: `linear` and `matmul`
/// show as their products.
struct convolutions_and_matmuls {
  constexpr bool operator()(const Operation& operation, Bytes) const {
    return operation.name.starts_with("aten::convolution") ||
           operation.name.starts_with("aten::_convolution") ||
           operation.name.starts_with("aten::mkldnn_convolution") ||
           operation.name.starts_with("aten::cudnn_convolution") ||
           operation.name.starts_with("aten::miopen_convolution") ||
           detail::is_one_of(operation.name,
                             {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                              "aten::addbmm", "aten::linear", "aten::mkldnn_linear", "aten::mv",
                              "aten::addmv", "aten::dot", "aten::_addmm_activation"});
  }
};

/// Keeps what attention computes: its two products, its softmax, and the results of fused attention
/// kernels.
///
/// Batched products appear in a transformer's attention only, so `bmm` and `baddbmm` stand for it.
struct attention {
  constexpr bool operator()(const Operation& operation, Bytes) const {
    return operation.name.starts_with("aten::_scaled_dot_product_") ||
           operation.name.starts_with("aten::scaled_dot_product_attention") ||
           detail::is_one_of(
               operation.name,
               {"aten::_flash_attention_forward", "aten::_efficient_attention_forward",
                "aten::_cudnn_attention_forward", "aten::_native_multi_head_attention",
                "aten::_transform_bias_rescale_qkv", "aten::bmm", "aten::baddbmm", "aten::_softmax",
                "aten::_safe_softmax", "aten::_masked_softmax"});
  }
};

}  // namespace remat::keep
