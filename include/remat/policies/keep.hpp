// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>

#include "remat/units.hpp"

/// Keep policies: inside a checkpointed region, which results stay instead of being recomputed.
///
/// - `nothing`: only the region's inputs and results stay. Memory is short; the default.
/// - `convolutions_and_matmuls`: what is costly to compute again stays, and normalisations,
///   activations and dropout are recomputed. Time matters; MobileNet and EfficientNet.
/// - `reducing_products`: of those the products that do not enlarge what they read, most of the time
///   for a part of the memory. Transformers, RegNet, bottlenecks.
/// - `attention`: attention products and attention kernels. Long sequences, where attention is most
///   of the time.
///
/// Left out: a policy by size alone, since a user's own predicate says that in one line.
namespace remat::keep {

/// What a keep policy is told about an operation.
struct Operation {
  std::string_view name;     ///< "aten::convolution"
  std::size_t ordinal = 0;   ///< how many operations of this name came before it in the region
  Bytes largest_input;       ///< the largest tensor among its arguments
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

/// Keeps the results of those convolutions and matrix products that are no larger than the largest
/// tensor which the product reads.
///
/// In a block that widens and narrows again, a transformer's MLP, ConvNeXt's block, a bottleneck,
/// the wide results take most of the memory and the narrow ones as much time to compute: keeping
/// the narrow ones only saves nearly as much memory as `nothing` and costs little more time than
/// `convolutions_and_matmuls`. A weight counts as a tensor that is read.
struct reducing_products {
  constexpr bool operator()(const Operation& operation, Bytes size) const {
    return size <= operation.largest_input && convolutions_and_matmuls()(operation, size);
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
