// SPDX-License-Identifier: MIT
#pragma once

#include <initializer_list>
#include <string_view>

/// Facts about LibTorch's operations that their schemas do not state, in one place.
///
/// `tests/integration/hidden_writes.test.cpp` runs every operation that torch::nn uses and compares
/// all arguments before and after, so a line that is missing here shows as a failing test.
namespace remat::detail {

/// An argument that an operation writes although its schema does not say so.
struct HiddenWrite {
  std::string_view operation;
  int argument;
  int only_if;  ///< the write happens only if this boolean argument is true; -1: always
  bool reads;   ///< the operation's results depend on the content it finds there
};

inline constexpr HiddenWrite hidden_writes[] = {
    // Running statistics. In training the results depend on the batch alone.
    {"aten::native_batch_norm", 3, 5, false},
    {"aten::native_batch_norm", 4, 5, false},
    {"aten::cudnn_batch_norm", 3, 5, false},
    {"aten::cudnn_batch_norm", 4, 5, false},
    {"aten::miopen_batch_norm", 3, 5, false},
    {"aten::miopen_batch_norm", 4, 5, false},
    {"aten::batch_norm_gather_stats", 3, -1, false},
    {"aten::batch_norm_gather_stats", 4, -1, false},
    {"aten::batch_norm_gather_stats_with_counts", 3, -1, false},
    {"aten::batch_norm_gather_stats_with_counts", 4, -1, false},
    {"aten::batch_norm_update_stats", 1, -1, true},
    {"aten::batch_norm_update_stats", 2, -1, true},
    // Noise that the kernel fills (2.x declares it).
    {"aten::rrelu_with_noise", 1, 4, true},
    {"aten::rrelu_with_noise_", 1, 4, true},
    // The workspace of oneDNN's recurrent layers, in backward.
    {"aten::mkldnn_rnn_layer_backward", 22, -1, true},
};

inline constexpr bool is_in(std::string_view name, std::initializer_list<std::string_view> names) {
  for (const std::string_view candidate : names)
    if (candidate == name) return true;
  return false;
}

/// Operations whose result takes the first argument's shape but nothing of its content.
inline constexpr bool reads_geometry_only(std::string_view name, std::string_view overload) {
  if (name == "aten::bernoulli") return overload == "p";
  return is_in(name, {"aten::rand_like", "aten::randn_like", "aten::randint_like"});
}

/// Operations that make a tensor whose content somebody else may write through a raw pointer: a
/// factory, although it takes a tensor.
inline constexpr bool is_factory(std::string_view name) {
  return is_in(name, {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
                      "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::new_zeros",
                      "aten::new_ones", "aten::new_full"});
}

/// In-place operations that overwrite their first argument whatever it held.
inline constexpr bool overwrites_first_argument(std::string_view name) {
  return is_in(name, {"aten::bernoulli_", "aten::uniform_", "aten::normal_", "aten::exponential_",
                      "aten::geometric_", "aten::cauchy_", "aten::log_normal_", "aten::random_",
                      "aten::zero_", "aten::fill_", "aten::copy_"});
}

/// Operations that may give a tensor's storage another size or another tensor: what they touch is
/// opaque.
inline constexpr bool repoints(std::string_view name) {
  return name.starts_with("aten::resize_") || name.starts_with("aten::set_") ||
         name.starts_with("aten::_resize_output") || name.starts_with("aten::resize_as_") ||
         name == "aten::set_data" || name == "aten::record_stream";
}

/// Operations whose results may differ from run to run on an accelerator (the list of
/// torch.use_deterministic_algorithms), kept there unless deterministic algorithms are switched on.
inline constexpr bool is_nondeterministic_on_accelerators(std::string_view name) {
  return is_in(name, {"aten::index_add",
                      "aten::index_add_",
                      "aten::index_put",
                      "aten::index_put_",
                      "aten::_index_put_impl_",
                      "aten::index_copy",
                      "aten::index_copy_",
                      "aten::scatter_add",
                      "aten::scatter_add_",
                      "aten::scatter_reduce",
                      "aten::scatter_reduce_",
                      "aten::put",
                      "aten::put_",
                      "aten::bincount",
                      "aten::histc",
                      "aten::cumsum",
                      "aten::kthvalue",
                      "aten::median",
                      "aten::_embedding_bag",
                      "aten::_ctc_loss",
                      "aten::grid_sampler_2d",
                      "aten::grid_sampler_3d",
                      "aten::upsample_bilinear2d",
                      "aten::upsample_bicubic2d",
                      "aten::adaptive_max_pool2d"});
}

}  // namespace remat::detail
