// SPDX-License-Identifier: MIT
#pragma once

// remat 0.1.0 in one file, made by scripts/amalgamate.py: do not edit.
//
//   remat/config.hpp
//   remat/units.hpp
//   remat/errors.hpp
//   remat/libtorch/tensor.hpp
//   remat/libtorch/version.hpp
//   remat/libtorch/autocast.hpp
//   remat/libtorch/dtypes.hpp
//   remat/amp/autocast.hpp
//   remat/amp/grad_scaler_state.hpp
//   remat/libtorch/dispatch.hpp
//   remat/libtorch/loss_scaling.hpp
//   remat/libtorch/nn.hpp
//   remat/libtorch/optimizer.hpp
//   remat/amp/grad_scaler.hpp
//   remat/amp.hpp
//   remat/backbones/initial_weights.hpp
//   remat/libtorch/layers.hpp
//   remat/engine/operator_facts.hpp
//   remat/engine/operator_traits.hpp
//   remat/libtorch/random.hpp
//   remat/engine/value.hpp
//   remat/engine/call.hpp
//   remat/detail/stable_list.hpp
//   remat/engine/write_watch.hpp
//   remat/libtorch/threads.hpp
//   remat/plan/cost.hpp
//   remat/policies/keep.hpp
//   remat/engine/tape.hpp
//   remat/libtorch/autograd.hpp
//   remat/engine/process.hpp
//   remat/libtorch/allocator.hpp
//   remat/engine/recompute.hpp
//   remat/engine/materialise.hpp
//   remat/engine/tape_observer.hpp
//   remat/engine/saved_tensor.hpp
//   remat/engine/recorder.hpp
//   remat/engine/install.hpp
//   remat/engine/tensors_in.hpp
//   remat/engine/region.hpp
//   remat/checkpoint.hpp
//   remat/plan/memory_budget.hpp
//   remat/plan/step_trace.hpp
//   remat/plan/step_simulation.hpp
//   remat/plan/step_points.hpp
//   remat/plan/memory_plan.hpp
//   remat/plan/plan_outcome.hpp
//   remat/engine/plan_follower.hpp
//   remat/nn/step_kind.hpp
//   remat/engine/step_observer.hpp
//   remat/engine/trace_step.hpp
//   remat/libtorch/graph_leaves.hpp
//   remat/libtorch/leaf_slots.hpp
//   remat/nn/toggle.hpp
//   remat/nn/model_state.hpp
//   remat/nn/trace_module.hpp
//   remat/plan/minimum_cut.hpp
//   remat/plan/cheapest_keeps.hpp
//   remat/plan/cut_points.hpp
//   remat/plan/recompute_time.hpp
//   remat/plan/chain_search.hpp
//   remat/plan/keep_moves.hpp
//   remat/plan/price_walk.hpp
//   remat/plan/plan.hpp
//   remat/plan/simulate.hpp
//   remat/plan/balance.hpp
//   remat/plan/segment_keeps.hpp
//   remat/plan/keep_search.hpp
//   remat/nn/budgeted_run.hpp
//   remat/nn/planned_forward.hpp
//   remat/nn/budgeted_toggle.hpp
//   remat/backbones/backbone.hpp
//   remat/detail/literal.hpp
//   remat/policies/concepts.hpp
//   remat/nn/concepts.hpp
//   remat/nn/chain_layer.hpp
//   remat/nn/chain_units.hpp
//   remat/nn/holder.hpp
//   remat/nn/unit_mark.hpp
//   remat/nn/checkpointed.hpp
//   remat/nn/chain_plan.hpp
//   remat/nn/chain_run.hpp
//   remat/nn/chain.hpp
//   remat/detail/nearest_names.hpp
//   remat/nn/plain.hpp
//   remat/backbones/chain_backbone.hpp
//   remat/backbones/published.hpp
//   remat/weights/byte_source.hpp
//   remat/weights/load_report.hpp
//   remat/weights/state_dict.hpp
//   remat/weights/module_tensors.hpp
//   remat/weights/load_comparison.hpp
//   remat/weights/file_kind.hpp
//   remat/weights/byte_cursor.hpp
//   remat/weights/element_types.hpp
//   remat/weights/pickle_globals.hpp
//   remat/weights/pickle_values.hpp
//   remat/weights/pickle_stack.hpp
//   remat/weights/pickle.hpp
//   remat/weights/extent.hpp
//   remat/weights/pickled_tensor.hpp
//   remat/weights/pickled_state_dict.hpp
//   remat/weights/pickled_reader.hpp
//   remat/weights/legacy_reader.hpp
//   remat/weights/zip_directory.hpp
//   remat/libtorch/archive.hpp
//   remat/weights/zip_reader.hpp
//   remat/weights/open.hpp
//   remat/weights/load.hpp
//   remat/backbones/pretrained.hpp
//   remat/backbones/family.hpp
//   remat/nn/blocks/activation.hpp
//   remat/nn/blocks/stochastic_depth.hpp
//   remat/nn/blocks/convnext_block.hpp
//   remat/nn/blocks/layer_norm_2d.hpp
//   remat/nn/blocks/trunc_normal.hpp
//   remat/policies/segments.hpp
//   remat/policies/sequential.hpp
//   remat/nn/sequential.hpp
//   remat/policies/each_unit.hpp
//   remat/policies/each_stage.hpp
//   remat/policies/staged_hybrid.hpp
//   remat/backbones/convnext.hpp
//   remat/nn/blocks/conv_norm_act.hpp
//   remat/nn/blocks/fan_out_init.hpp
//   remat/nn/blocks/rounded_width.hpp
//   remat/nn/blocks/squeeze_excitation.hpp
//   remat/nn/blocks/mb_conv.hpp
//   remat/backbones/efficientnet.hpp
//   remat/nn/blocks/map_partition.hpp
//   remat/nn/blocks/relative_position.hpp
//   remat/nn/blocks/partition_attention.hpp
//   remat/nn/blocks/maxvit_layer.hpp
//   remat/policies/transformer_layers.hpp
//   remat/backbones/maxvit.hpp
//   remat/backbones/mobilenet_v2.hpp
//   remat/backbones/mobilenet_v3.hpp
//   remat/backbones/position_embedding.hpp
//   remat/backbones/regnet.hpp
//   remat/backbones/resnet.hpp
//   remat/nn/blocks/linear.hpp
//   remat/nn/blocks/patch_merging.hpp
//   remat/nn/blocks/mlp.hpp
//   remat/nn/blocks/window_attention.hpp
//   remat/nn/blocks/swin_block.hpp
//   remat/backbones/swin.hpp
//   remat/libtorch/attention.hpp
//   remat/nn/blocks/self_attention.hpp
//   remat/nn/blocks/encoder_layer.hpp
//   remat/backbones/vision_transformer.hpp
//   remat/backbones/registry.hpp
//   remat/backbones.hpp
//   remat/plan/graph.hpp
//   remat/engine/graph_of.hpp
//   remat/explain.hpp
//   remat/memory/timeline.hpp
//   remat/memory/meter.hpp
//   remat/libtorch/device_memory.hpp
//   remat/memory/stats.hpp
//   remat/memory.hpp
//   remat/nn/blocks/gated_attention.hpp
//   remat/models/multi_view.hpp
//   remat/models.hpp
//   remat/nn/budgeted.hpp
//   remat/nn/checkpoint_sequential.hpp
//   remat/nn.hpp
//   remat/plan/budget_text.hpp
//   remat/plan/frontier.hpp
//   remat/plan/plan_fingerprint.hpp
//   remat/plan.hpp
//   remat/policies/every_nth.hpp
//   remat/policies/keep_all.hpp
//   remat/policies/square_root.hpp
//   remat/policies.hpp
//   remat/training/memory_report.hpp
//   remat/training/step_recorder.hpp
//   remat/training/compare_memory.hpp
//   remat/training/plan.hpp
//   remat/training/frontier.hpp
//   remat/training/svg_elements.hpp
//   remat/training/svg_chart.hpp
//   remat/training/frontier_svg.hpp
//   remat/training/memory_report_svg.hpp
//   remat/training.hpp
//   remat/version.hpp
//   remat/detail/new_file.hpp
//   remat/weights/new_file.hpp
//   remat/weights.hpp
//   remat/remat.hpp

#include <optional>
#include <string>
#include <utility>

#include <cstddef>
#include <stdexcept>
#include <string_view>

// Every macro that a compiler flag may set, with effect, default and whether it changes layout.
// Set a switch that changes layout for the whole program, or not at all.

/// Marks what must be one and the same in all libraries of a process: exception types, so that a
/// catch in one library takes what another threw, and the engine's state. Default: default
/// visibility. Does not change layout.
#ifndef REMAT_VISIBLE
#if defined(_WIN32)
#define REMAT_VISIBLE
#else
#define REMAT_VISIBLE __attribute__((visibility("default")))
#endif
#endif

#include <algorithm>
#include <array>
#include <charconv>
#include <compare>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <ostream>
#include <system_error>

namespace remat {

/// Counts bytes; a difference may be negative.
struct Bytes {
  std::int64_t count = 0;

  friend constexpr auto operator<=>(const Bytes&, const Bytes&) = default;

  constexpr Bytes& operator+=(Bytes other) { return count += other.count, *this; }
  constexpr Bytes& operator-=(Bytes other) { return count -= other.count, *this; }
  friend constexpr Bytes operator+(Bytes left, Bytes right) { return left += right; }
  friend constexpr Bytes operator-(Bytes left, Bytes right) { return left -= right; }
  friend constexpr Bytes operator-(Bytes bytes) { return {-bytes.count}; }
  friend constexpr Bytes operator*(Bytes bytes, std::int64_t factor) {
    return {bytes.count * factor};
  }
  friend constexpr Bytes operator*(std::int64_t factor, Bytes bytes) { return bytes * factor; }

  /// Returns the number of mebibytes, for a table or a ratio.
  constexpr double mebibytes() const { return static_cast<double>(count) / (1 << 20); }
};

namespace detail {

/// Each 1024 of the one before.
inline constexpr std::array<const char*, 5> kByteUnits = {"B", "KiB", "MiB", "GiB", "TiB"};

/// Reads a whole text as a number without a sign or an exponent; 010 is none.
template <class Number>
std::optional<Number> parse_digits(std::string_view text) {
  const auto is_digit = [](char letter) { return letter >= '0' && letter <= '9'; };
  if (text.empty() || text.find_first_not_of("0123456789.") != std::string_view::npos) return {};
  if (text.size() > 1 && text[0] == '0' && is_digit(text[1])) return {};
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

}  // namespace detail

/// Writes bytes with the largest unit that leaves at least 1: "512 B", "12.3 MiB".
inline std::string to_string(Bytes bytes) {
  auto value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  while ((value >= 1024 || value <= -1024) && unit + 1 < detail::kByteUnits.size())
    value /= 1024, ++unit;
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value,
                detail::kByteUnits[unit]);
  return text.data();
}

/// Reads bytes as people and `to_string` write them: "2147483648", "512 B", "1.5GiB", "12.3 MiB".
///
/// A part of a byte is left out. KB, MB and GB mean two things, and are none of these.
///
/// @return  nothing for any other text, a negative number and more than an int64 holds among them
inline std::optional<Bytes> parse_bytes(std::string_view text) {
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, end);
  std::string_view name = text.substr(end);
  if (name.size() > 1 && name[0] == ' ') name.remove_prefix(1);
  if (name.empty()) name = detail::kByteUnits.front();
  const auto unit = std::find(detail::kByteUnits.begin(), detail::kByteUnits.end(), name);
  if (unit == detail::kByteUnits.end()) return {};
  const std::int64_t factor = std::int64_t{1} << (10 * (unit - detail::kByteUnits.begin()));
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  if (number.find('.') == std::string_view::npos || factor == 1) {
    const auto count = detail::parse_digits<std::int64_t>(number);
    if (!count || *count > kMost / factor) return {};
    return Bytes{*count * factor};
  }
  const auto count = detail::parse_digits<double>(number);
  if (!count || *count >= static_cast<double>(kMost / factor)) return {};
  return Bytes{static_cast<std::int64_t>(*count * static_cast<double>(factor))};
}

inline std::ostream& operator<<(std::ostream& stream, Bytes bytes) {
  return stream << to_string(bytes);
}

/// Counts milliseconds.
struct Milliseconds {
  double count = 0;

  friend constexpr auto operator<=>(const Milliseconds&, const Milliseconds&) = default;

  constexpr Milliseconds& operator+=(Milliseconds other) { return count += other.count, *this; }
  friend constexpr Milliseconds operator+(Milliseconds left, Milliseconds right) {
    return left += right;
  }
};

/// Writes milliseconds with one decimal: "12.3 ms".
inline std::string to_string(Milliseconds time) {
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%.1f ms", time.count);
  return text.data();
}

inline std::ostream& operator<<(std::ostream& stream, Milliseconds time) {
  return stream << to_string(time);
}

namespace literals {

constexpr Bytes operator""_B(unsigned long long count) {
  return {static_cast<std::int64_t>(count)};
}
constexpr Bytes operator""_KiB(unsigned long long count) { return operator""_B(count << 10); }
constexpr Bytes operator""_MiB(unsigned long long count) { return operator""_B(count << 20); }
constexpr Bytes operator""_GiB(unsigned long long count) { return operator""_B(count << 30); }

}  // namespace literals

}  // namespace remat

namespace remat {

/// Builds the four parts of a message: where, what was given and expected, likely cause, cure.
///
/// A part that is not set is left out. `docs/errors.md` has a paragraph for each code.
class ErrorMessage {
 public:
  explicit ErrorMessage(std::string_view code) : code_(code) {}

  /// Names the place: the function, module or region that found the error.
  ErrorMessage& where(std::string_view text) { return set(where_, text); }
  /// States what was given and what was expected, both values.
  ErrorMessage& what(std::string_view text) { return set(what_, text); }
  /// States the likely cause.
  ErrorMessage& cause(std::string_view text) { return set(cause_, text); }
  /// States what to do.
  ErrorMessage& cure(std::string_view text) { return set(cure_, text); }

  /// Returns the stable identifier, for example "remat.recompute.changed".
  const std::string& code() const noexcept { return code_; }

  /// Returns "where: what: cause. cure."
  std::string text() const {
    std::string result = where_;
    append(result, ": ", what_);
    append(result, ": ", cause_);
    append(result, ". ", cure_);
    if (!result.empty() && result.back() != '.') result += '.';
    return result;
  }

 private:
  ErrorMessage& set(std::string& part, std::string_view text) {
    while (!text.empty() && text.back() == '.') text.remove_suffix(1);
    part = text;
    return *this;
  }

  static void append(std::string& result, std::string_view separator, const std::string& part) {
    if (part.empty()) return;
    if (!result.empty()) result += separator;
    result += part;
  }

  std::string code_;
  std::string where_;
  std::string what_;
  std::string cause_;
  std::string cure_;
};

/// Lets a caller ask any of the library's exceptions for its code and text.
///
/// It does not derive from std::exception: each error type derives from the standard type that a
/// caller would expect, and from this.
class REMAT_VISIBLE Error {
 public:
  Error() = default;
  Error(const Error&) = default;
  Error& operator=(const Error&) = default;
  virtual ~Error() = default;

  /// Returns the stable identifier, for example "remat.recompute.changed".
  virtual std::string_view code() const noexcept = 0;
  /// Returns the text without the code.
  virtual std::string_view message() const noexcept = 0;
};

namespace detail {

/// Joins a standard exception type and `Error`; both texts are slices of `what()`, so copies cannot
/// throw.
template <class Standard>
class REMAT_VISIBLE CodedError : public Standard, public Error {
 public:
  CodedError(std::string_view code, std::string_view message)
      : Standard("[" + std::string(code) + "] " + std::string(message)), code_size_(code.size()) {}
  explicit CodedError(const ErrorMessage& message) : CodedError(message.code(), message.text()) {}

  std::string_view code() const noexcept override {
    return std::string_view(this->what()).substr(1, code_size_);
  }
  std::string_view message() const noexcept override {
    return std::string_view(this->what()).substr(code_size_ + 3);
  }

 private:
  std::size_t code_size_;
};

}  // namespace detail

/// Reports an argument that cannot be right: a segment count of 0, an unknown name.
class REMAT_VISIBLE ArgumentError : public detail::CodedError<std::invalid_argument> {
 public:
  using CodedError::CodedError;
};

/// Reports a memory budget below what any plan needs.
class REMAT_VISIBLE BudgetError : public ArgumentError {
 public:
  BudgetError(const ErrorMessage& message, Bytes least) : ArgumentError(message), least_(least) {}

  /// Returns the least budget for which a plan was found.
  Bytes least() const noexcept { return least_; }

 private:
  Bytes least_;
};

/// Reports, in backward, that something which the recompute needs is no longer what it was.
class REMAT_VISIBLE RecomputeError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a weight file that cannot be read, or that does not fit the module: then nothing was
/// changed.
class REMAT_VISIBLE WeightsError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a configuration that cannot be right: an unknown key, a value of another type, a number
/// out of range; the text says where in the file.
class REMAT_VISIBLE ConfigError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a file with a memory plan that cannot be read or written.
class REMAT_VISIBLE PlanError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports that the process does not offer what is asked for: an engine that cannot be installed, a
/// device.
class REMAT_VISIBLE EnvironmentError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Checks a precondition, always on.
///
/// @throws ArgumentError  with this code and text if `condition` is false
inline void require(bool condition, std::string_view code, std::string_view message) {
  if (!condition) throw ArgumentError(code, message);
}

/// Checks a precondition; the message is built only if it does not hold.
///
/// @param message  callable without arguments that returns an `ErrorMessage`
/// @throws ArgumentError  with that message if `condition` is false
template <class MakeMessage>
  requires requires(MakeMessage make) { ErrorMessage(make()); }
void require(bool condition, MakeMessage&& message) {
  if (!condition) throw ArgumentError(ErrorMessage(std::forward<MakeMessage>(message)()));
}

}  // namespace remat

// tensor.hpp comes first: it holds the cure for the include order of LibTorch 1.13 with Clang.

// ivalue.h comes first: with Clang, C++20 and LibTorch 1.13 the other order meets a vector of an
// incomplete type in ATen/core/List.h (pytorch/pytorch#97689).
#include <ATen/core/ivalue.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <sstream>

namespace remat::detail {

using OptionalTensor = decltype(std::declval<c10::IValue>().toOptionalTensorVector())::value_type;

/// How a tensor lies over its storage: everything that is needed to build it again over other
/// bytes.
struct Geometry {
  c10::impl::SizesAndStrides sizes_and_strides;
  std::int64_t offset = 0;
  c10::DispatchKeySet keys;  // device, and the conjugate and negative bits
  caffe2::TypeMeta dtype;
  bool is_wrapped_number =
      false;  // a Python or C++ scalar in tensor's clothes: it does not take part in type promotion

  static Geometry of(const at::Tensor& tensor) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    Geometry geometry;
    const auto sizes = tensor.sizes();
    geometry.sizes_and_strides.resize(sizes.size());
    geometry.sizes_and_strides.set_sizes(sizes);
    const auto strides = tensor.strides();
    for (std::size_t i = 0; i < strides.size(); ++i)
      geometry.sizes_and_strides.stride_at_unchecked(i) = strides[i];
    geometry.offset = tensor.storage_offset();
    geometry.keys = impl->key_set();
    geometry.dtype = tensor.dtype();
    geometry.is_wrapped_number = impl->is_wrapped_number();
    return geometry;
  }

  c10::IntArrayRef sizes() const {
    return {sizes_and_strides.sizes_data(), sizes_and_strides.size()};
  }
  c10::IntArrayRef strides() const {
    return {sizes_and_strides.strides_data(), sizes_and_strides.size()};
  }

  std::int64_t numel() const {
    std::int64_t count = 1;
    for (const std::int64_t size : sizes()) count *= size;
    return count;
  }

  std::int64_t nbytes() const { return numel() * static_cast<std::int64_t>(dtype.itemsize()); }

  /// The part of the storage, in bytes, that lies between the first and the last element.
  std::pair<std::size_t, std::size_t> span() const {
    if (numel() == 0) return {0, 0};
    std::int64_t last = offset;
    for (std::size_t i = 0; i < sizes_and_strides.size(); ++i)
      last += (sizes()[i] - 1) * strides()[i];
    return {static_cast<std::size_t>(offset) * dtype.itemsize(),
            static_cast<std::size_t>(last + 1) * dtype.itemsize()};
  }
};

/// A tensor without autograd history over `storage`.
inline at::Tensor tensor_over(const c10::Storage& storage, const Geometry& geometry) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), geometry.keys,
                                                         geometry.dtype);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_offset(geometry.offset);
  impl->set_sizes_and_strides(geometry.sizes(), geometry.strides());
  if (geometry.is_wrapped_number) impl->set_wrapped_number(true);
  return tensor;
}

/// Named tensors are gone in 2.13, and with them the question.
template <class AnyTensor>
bool has_dimension_names(const AnyTensor& tensor) {
  if constexpr (requires { tensor.has_names(); })
    return tensor.has_names();
  else
    return false;
}

/// True for an ordinary dense tensor, whose content is that of its storage. All others (sparse,
/// oneDNN, nested, quantized, wrappers of other systems) are opaque: they are kept, never
/// recomputed.
inline bool has_plain_storage(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !has_dimension_names(tensor) &&
         !tensor.unsafeGetTensorImpl()->key_set().has_any(
             c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::NestedTensor,
                                  c10::DispatchKey::ZeroTensor, c10::DispatchKey::FuncTorchBatched,
                                  c10::DispatchKey::FuncTorchGradWrapper}));
}

inline c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

/// The whole storage as a flat tensor of bytes, to copy it on whatever device it lives.
inline at::Tensor bytes_of(const c10::Storage& storage) {
  Geometry flat;
  flat.sizes_and_strides.set_sizes({static_cast<std::int64_t>(storage.nbytes())});
  flat.sizes_and_strides.stride_at_unchecked(0) = 1;
  flat.keys =
      c10::DispatchKeySet(c10::computeDispatchKey(at::kByte, at::kStrided, storage.device()));
  flat.dtype = caffe2::TypeMeta::Make<std::uint8_t>();
  return tensor_over(storage, flat);
}

inline c10::Storage copy_of(const c10::Storage& storage) {
  return at::clone(bytes_of(storage)).storage();
}

inline c10::Storage uninitialised_storage(std::int64_t nbytes, c10::Device device) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

/// "[64, 3, 7, 7] float cpu"
inline std::string describe(const Geometry& geometry, c10::Device device) {
  std::ostringstream out;
  out << geometry.sizes() << ' ' << geometry.dtype.name() << ' ' << device;
  return out.str();
}

}  // namespace remat::detail

#include <torch/version.h>

/// True when the LibTorch at hand is at least `major.minor`. Detection by the compiler is
/// preferred; this is for behaviour that cannot be detected.
#define REMAT_LIBTORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

namespace remat::detail {

// By version: a call of a free function in LibTorch's namespace cannot be asked for by `requires`,
// since its name is looked up where it is written. The old spellings still compile with a newer
// LibTorch, but print a warning at each call.

/// Whether LibTorch has autocast for this kind of device at all.
inline bool has_autocast(c10::DeviceType device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  return at::autocast::is_autocast_available(device);
#else
  return device == at::kCPU || device == at::kCUDA || device == at::kXPU;
#endif
}

/// Whether the CPU's kernels take float16.
inline constexpr bool kHasCpuHalf = REMAT_LIBTORCH_AT_LEAST(2, 4);

/// Whether a weight that is cast while autograd is off enters the cache without history, so that
/// later uses in the same scope give it no gradient (pytorch/pytorch#65766).
inline constexpr bool kCachesCastsWithoutHistory = !REMAT_LIBTORCH_AT_LEAST(2, 13);

/// What autocast is set to on this thread, for one kind of device. The cache is common to all.
struct AutocastState {
  bool is_enabled = false;
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool uses_cache = true;

  friend bool operator==(const AutocastState&, const AutocastState&) = default;
};

/// @param device  one that `has_autocast`
inline AutocastState autocast_state(c10::DeviceType device) {
  AutocastState state;
  state.uses_cache = at::autocast::is_autocast_cache_enabled();
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  state.is_enabled = at::autocast::is_autocast_enabled(device);
  state.dtype = at::autocast::get_autocast_dtype(device);
#else
  switch (device) {
    case at::kCUDA:
      state.is_enabled = at::autocast::is_enabled();
      state.dtype = at::autocast::get_autocast_gpu_dtype();
      break;
    case at::kXPU:
      state.is_enabled = at::autocast::is_xpu_enabled();
      state.dtype = at::autocast::get_autocast_xpu_dtype();
      break;
    default:
      state.is_enabled = at::autocast::is_cpu_enabled();
      state.dtype = at::autocast::get_autocast_cpu_dtype();
  }
#endif
  return state;
}

/// @param device  one that `has_autocast`
inline void set_autocast_state(c10::DeviceType device, const AutocastState& state) {
  at::autocast::set_autocast_cache_enabled(state.uses_cache);
#if REMAT_LIBTORCH_AT_LEAST(2, 4)
  at::autocast::set_autocast_enabled(device, state.is_enabled);
  at::autocast::set_autocast_dtype(device, state.dtype);
#else
  switch (device) {
    case at::kCUDA:
      at::autocast::set_enabled(state.is_enabled);
      at::autocast::set_autocast_gpu_dtype(state.dtype);
      break;
    case at::kXPU:
      at::autocast::set_xpu_enabled(state.is_enabled);
      at::autocast::set_autocast_xpu_dtype(state.dtype);
      break;
    default:
      at::autocast::set_cpu_enabled(state.is_enabled);
      at::autocast::set_autocast_cpu_dtype(state.dtype);
  }
#endif
}

/// Counts an open scope of this thread; returns how many are open now.
inline int enter_autocast() { return at::autocast::increment_nesting(); }

/// Takes back `enter_autocast`; the outermost scope leaves no casts behind.
inline void leave_autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

/// Whether a device of this kind is there; for kinds that cannot be asked, true.
inline bool has_device(c10::DeviceType device) { return device != at::kCUDA || at::hasCUDA(); }

}  // namespace remat::detail

#include <c10/core/ScalarType.h>

namespace remat::detail {

/// Asks for one enumerator that only newer LibTorch versions have.
template <class Ask>
constexpr std::optional<c10::ScalarType> newer_type(Ask ask) {
  if constexpr (requires { ask(std::type_identity<c10::ScalarType>{}); })
    return ask(std::type_identity<c10::ScalarType>{});
  else
    return std::nullopt;
}

using NamedType = std::pair<std::string_view, std::optional<c10::ScalarType>>;

#define REMAT_NEWER_TYPE(name)                                       \
  newer_type([](auto type) -> decltype(decltype(type)::type::name) { \
    return decltype(type)::type::name;                               \
  })

/// Python's names of the dtypes that tensors of LibTorch can have, here or in a newer version.
inline constexpr std::array kNamedTypes{
    NamedType{"float32", c10::ScalarType::Float},
    NamedType{"float64", c10::ScalarType::Double},
    NamedType{"float16", c10::ScalarType::Half},
    NamedType{"bfloat16", c10::ScalarType::BFloat16},
    NamedType{"int64", c10::ScalarType::Long},
    NamedType{"int32", c10::ScalarType::Int},
    NamedType{"int16", c10::ScalarType::Short},
    NamedType{"int8", c10::ScalarType::Char},
    NamedType{"uint8", c10::ScalarType::Byte},
    NamedType{"bool", c10::ScalarType::Bool},
    NamedType{"complex64", c10::ScalarType::ComplexFloat},
    NamedType{"complex128", c10::ScalarType::ComplexDouble},
    NamedType{"complex32", c10::ScalarType::ComplexHalf},
    NamedType{"uint16", REMAT_NEWER_TYPE(UInt16)},
    NamedType{"uint32", REMAT_NEWER_TYPE(UInt32)},
    NamedType{"uint64", REMAT_NEWER_TYPE(UInt64)},
    NamedType{"float8_e4m3fn", REMAT_NEWER_TYPE(Float8_e4m3fn)},
    NamedType{"float8_e5m2", REMAT_NEWER_TYPE(Float8_e5m2)},
    NamedType{"float8_e4m3fnuz", REMAT_NEWER_TYPE(Float8_e4m3fnuz)},
    NamedType{"float8_e5m2fnuz", REMAT_NEWER_TYPE(Float8_e5m2fnuz)},
    NamedType{"float8_e8m0fnu", REMAT_NEWER_TYPE(Float8_e8m0fnu)},
};

#undef REMAT_NEWER_TYPE

/// Returns the type that Python calls `torch.<name>`; nothing if tensors cannot have it here.
inline std::optional<c10::ScalarType> scalar_type(std::string_view name) {
  for (const auto& [known, type] : kNamedTypes)
    if (known == name) return type;
  return std::nullopt;
}

/// Returns Python's name without `torch.`, or LibTorch's where Python has none.
inline std::string_view dtype_name(c10::ScalarType type) {
  for (const auto& [name, known] : kNamedTypes)
    if (known == type) return name;
  return c10::toString(type);
}

}  // namespace remat::detail

namespace remat::amp {

/// What an `Autocast` sets; meant for designated initialisers. The defaults are Python's.
struct AutocastOptions {
  /// bfloat16 or float16; unset: what the thread has, which is bfloat16 on the CPU and float16 on
  /// CUDA if no scope around this one says otherwise
  std::optional<c10::ScalarType> dtype{};
  /// false: operations run in the dtype of their arguments, in an outer scope too
  bool enabled = true;
  /// whether a weight is cast once for the whole scope; unset: as it is, and at first it is on
  std::optional<bool> cache_enabled{};
};

/// Runs what LibTorch lists as safe in a lower precision while it lives: Python's `torch.autocast`
/// as a C++ scope.
///
/// Scopes nest; each restores what it found. Parameters stay in float32 and are cast when used;
/// such casts are cached until the outermost scope ends, so do not step an optimizer inside. A
/// scope around forward and loss is enough: the recompute runs in the precision of forward wherever
/// backward is called.
///
/// With LibTorch before 2.13 a weight cast without autograd would stay in the cache and get no
/// gradient later: open another scope for the part without autograd; it leaves the cache alone.
///
/// @par Threads  acts on the thread that made it, and is destroyed there, in the order of a stack
/// @par Source   Micikevicius et al., Mixed Precision Training (2017)
class Autocast {
 public:
  /// @param device  the kind of device that the operations run on; others are not affected
  /// @throws ArgumentError     if the device has no autocast, or the dtype is no lower precision
  /// @throws EnvironmentError  if this LibTorch cannot do that: float16 on the CPU before 2.4, CUDA
  ///                           without a GPU
  explicit Autocast(c10::DeviceType device, const AutocastOptions& options = {}) : device_(device) {
    require_autocast(device);
    before_ = remat::detail::autocast_state(device);
    remat::detail::AutocastState state = before_;
    state.is_enabled = options.enabled;
    state.dtype = options.dtype.value_or(before_.dtype);
    if (options.enabled) {
      require_dtype(device, state.dtype);
      require_present(device);
    }
    const bool is_nested = remat::detail::enter_autocast() > 1;
    if (remat::detail::kCachesCastsWithoutHistory && is_nested && !at::GradMode::is_enabled())
      state.uses_cache = false;
    state.uses_cache = options.cache_enabled.value_or(state.uses_cache);
    remat::detail::set_autocast_state(device, state);
  }
  ~Autocast() {
    remat::detail::leave_autocast();
    remat::detail::set_autocast_state(device_, before_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  static std::string place(c10::DeviceType device) {
    return "autocast on " + c10::DeviceTypeName(device, /*lower_case=*/true);
  }

  static void require_autocast(c10::DeviceType device) {
    require(remat::detail::has_autocast(device), [&] {
      return ErrorMessage("remat.autocast.device")
          .where(place(device))
          .what("LibTorch has no autocast for this kind of device")
          .cure("Give the one that the network runs on, for example torch::kCPU or torch::kCUDA");
    });
  }

  static void require_dtype(c10::DeviceType device, c10::ScalarType dtype) {
    require(dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half, [&] {
      return ErrorMessage("remat.autocast.dtype")
          .where(place(device))
          .what("the dtype is " + std::string(remat::detail::dtype_name(dtype)) +
                ", and bfloat16 or float16 was expected")
          .cure("Give one of them, or enabled = false for a part that is to run as it is");
    });
    if (device == c10::DeviceType::CPU && dtype == c10::ScalarType::Half &&
        !remat::detail::kHasCpuHalf)
      throw EnvironmentError(ErrorMessage("remat.autocast.cpu_half")
                                 .where(place(device))
                                 .what("the dtype is float16, and LibTorch " TORCH_VERSION
                                       " has no such kernels for the CPU")
                                 .cause("they came with LibTorch 2.4")
                                 .cure("Use bfloat16, which needs no loss scaling either"));
  }

  static void require_present(c10::DeviceType device) {
    if (remat::detail::has_device(device)) return;
    throw EnvironmentError(ErrorMessage("remat.autocast.no_device")
                               .where(place(device))
                               .what("LibTorch sees no such device")
                               .cure("Give the one that the network runs on, or enabled = "
                                     "torch::cuda::is_available()"));
  }

  c10::DeviceType device_;
  remat::detail::AutocastState before_;
};

/// Returns whether operations on this kind of device run in a lower precision on this thread; false
/// for a kind that has no autocast.
inline bool is_autocast_enabled(c10::DeviceType device) {
  return remat::detail::has_autocast(device) && remat::detail::autocast_state(device).is_enabled;
}

}  // namespace remat::amp

#include <map>
#include <vector>

#include <cmath>

namespace remat::amp {

/// What a `GradScaler` starts from; meant for designated initialisers. The defaults are Python's.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< above 1, applied after `growth_interval` clean steps
  double backoff_factor = 0.5;  ///< in (0, 1), applied after infinities
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: `step` steps, everything else does nothing
};

/// What a training that goes on later must find again: plain numbers, to be saved as one likes.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  std::int64_t growth_interval = 0;
  std::int64_t growth_tracker = 0;  ///< clean steps since the scale changed

  bool operator==(const GradScalerState&) const = default;
};

}  // namespace remat::amp

namespace remat::detail {

/// Refuses a state that no scaler can have.
///
/// @throws ArgumentError  with this code, place and cure
inline void require_sensible(const amp::GradScalerState& state, std::string_view code,
                             std::string_view where, std::string_view cure) {
  const auto refuse_unless = [&](bool condition, std::string_view name, double given,
                                 std::string_view expected) {
    require(condition, [&] {
      std::ostringstream what;
      what << "the " << name << " is " << given << ", and " << expected << " was expected";
      return ErrorMessage(code).where(where).what(what.str()).cure(cure);
    });
  };
  const auto largest = static_cast<double>(std::numeric_limits<float>::max());
  const auto interval = static_cast<double>(state.growth_interval);
  refuse_unless(state.scale > 0 && state.scale <= largest, "scale", state.scale,
                "a positive float32");
  refuse_unless(state.growth_factor > 1 && std::isfinite(state.growth_factor), "growth factor",
                state.growth_factor, "a finite number above 1");
  refuse_unless(state.backoff_factor > 0 && state.backoff_factor < 1, "backoff factor",
                state.backoff_factor, "a number between 0 and 1");
  refuse_unless(state.growth_interval >= 1, "growth interval", interval, "1 at least");
  // Beyond the interval the scale would never grow again, in silence.
  refuse_unless(state.growth_tracker >= 0 && state.growth_tracker < state.growth_interval &&
                    state.growth_tracker <= std::numeric_limits<std::int32_t>::max(),
                "growth tracker", static_cast<double>(state.growth_tracker),
                "a count below the growth interval");
}

}  // namespace remat::detail

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace remat::detail {

using OperatorHandle = c10::OperatorHandle;
using Stack = torch::jit::Stack;
using RecordFunction = void (*)(const OperatorHandle&, c10::DispatchKeySet, Stack*);

/// The dispatch key on which the recorder sits: below autograd and autocast, above the factories'
/// BackendSelect, with no kernel and no fallback in LibTorch 1.13 to 2.13. Newer headers reserve
/// it, so `register_recorder` asks first.
inline constexpr c10::DispatchKey recorder_key = c10::DispatchKey::Fake;

/// Everything below the recorder, to pass an operation on.
inline c10::DispatchKeySet below_recorder(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, recorder_key);
}

/// What a recompute must not meet again: autograd and its version counters, autocast (recorded
/// arguments are already cast), the recorder.
inline c10::DispatchKeySet keys_above_recompute() {
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet(recorder_key);
}

/// Puts `record` on the recorder's key for the rest of the process; false when somebody else holds
/// the key.
template <RecordFunction record>
bool register_recorder() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(recorder_key)) return false;
  // Never destroyed, on purpose: that would deregister, and regions may outlive any static object.
  // A static pointer, so that leak checkers see it held.
  static auto* library =
      new torch::Library(torch::Library::IMPL, "_", recorder_key, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<record>());
  return true;
}

}  // namespace remat::detail

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/isfinite.h>

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

// nn.hpp comes first: clip_grad.h names torch::Tensor without declaring it.

// tensor.hpp comes first: it holds the cure for the include order of LibTorch 1.13 with Clang.

#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/named_any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <type_traits>

namespace remat {

namespace detail {

template <class Member>
struct FirstArgument;
template <class Result, class Class, class Argument>
struct FirstArgument<Result (Class::*)(Argument) const> {
  using type = std::remove_cvref_t<Argument>;
};

}  // namespace detail

/// The optional device that LibTorch's `clone()` takes: `c10::optional` in 1.13, `std::optional`
/// later.
using OptionalDevice = detail::FirstArgument<decltype(&torch::nn::Module::clone)>::type;

namespace detail {

/// Whether autograd records on this thread; elsewhere a checkpoint has nothing to save.
inline bool autograd_records() {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

inline bool has_trainable_parameter(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters(/*recurse=*/false))
    if (parameter.requires_grad()) return true;
  for (const auto& child : module.children())
    if (has_trainable_parameter(*child)) return true;
  return false;
}

}  // namespace detail

}  // namespace remat

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

namespace remat::amp {

/// Keeps small gradients from vanishing in float16: scales the loss, unscales the gradients, skips
/// steps whose gradients are infinite, and adapts the scale. Python's `torch.amp.GradScaler`.
///
/// ```
/// scaler.scale(loss).backward();
/// scaler.clip_grad_norm_(optimizer, 1.0);   // or unscale_, or neither
/// scaler.step(optimizer);                   // each optimizer once
/// scaler.update();                          // once per iteration
/// ```
/// The arithmetic is Python's, so the scales of a training are the same to the bit, also on the CPU
/// with LibTorch 1.13, which has no kernels for it.
///
/// @par Threads  none of its own; use from one thread at a time
/// @par Source   Micikevicius et al., Mixed Precision Training (2017), section 3.2
class GradScaler {
 public:
  /// @param device  where the scale is kept: that of the loss
  /// @throws ArgumentError     if a factor or the interval makes no sense
  /// @throws EnvironmentError  if it is enabled and LibTorch sees no such device
  explicit GradScaler(c10::Device device, const GradScalerOptions& options = {})
      : device_(device),
        is_enabled_(options.enabled),
        settings_{options.init_scale, options.growth_factor, options.backoff_factor,
                  options.growth_interval, 0} {
    if (!is_enabled_) return;
    remat::detail::require_sensible(settings_, "remat.grad_scaler.options", "GradScaler",
                                    "Use Python's defaults: 65536, 2, 0.5 and 2000");
    if (!remat::detail::has_device(device.type()))
      throw EnvironmentError(ErrorMessage("remat.grad_scaler.no_device")
                                 .where("GradScaler on " + device.str())
                                 .what("LibTorch sees no such device")
                                 .cure("Give the device of the loss, or enabled = false"));
  }
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// Returns the loss times the scale, with its history; the loss itself if disabled.
  torch::Tensor scale(const torch::Tensor& loss) {
    if (!is_enabled_) return loss;
    if (!scale_.defined()) make_tensors();
    return loss * scale_.to(loss.device(), /*non_blocking=*/true);
  }
  /// Returns each loss times the scale.
  std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& losses) {
    std::vector<torch::Tensor> scaled;
    scaled.reserve(losses.size());
    for (const torch::Tensor& loss : losses) scaled.push_back(scale(loss));
    return scaled;
  }

  /// Divides the gradients of an optimizer's parameters by the scale, once per iteration, so that
  /// they can be inspected or edited before `step`, which otherwise does it.
  ///
  /// @throws ArgumentError  if it was done already, if the optimizer has been stepped since the
  ///                        last `update`, if no loss was scaled, or if a gradient is float16: then
  ///                        no gradient is changed
  void unscale_(torch::optim::Optimizer& optimizer) {
    if (!is_enabled_) return;
    require_scaled("unscale_");
    Progress& progress = progress_[&optimizer];
    require(progress.stage != Stage::unscaled, [] {
      return ErrorMessage("remat.grad_scaler.unscaled_twice")
          .where("GradScaler::unscale_")
          .what("this optimizer's gradients were unscaled already since the last update()")
          .cause(
              "update() was not called at the end of the last iteration, perhaps because its "
              "step was skipped by hand")
          .cure("Call update() at the end of every iteration, and unscale_ at most once in it");
    });
    require(progress.stage != Stage::stepped, [] {
      return ErrorMessage("remat.grad_scaler.unscaled_late")
          .where("GradScaler::unscale_")
          .what("this optimizer was stepped already since the last update()")
          .cause(
              "unscale_ comes after step, or update() is missing at the end of the last "
              "iteration")
          .cure("Call unscale_, then step, then update()");
    });
    progress.found_inf = unscale_gradients(optimizer);
    progress.stage = Stage::unscaled;
  }

  /// Unscales the gradients if that is still to be done, then scales them down together so that
  /// their norm is at most `max_norm`.
  ///
  /// @return  the norm before, of the unscaled gradients
  /// @throws ArgumentError  as `unscale_`
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                         double norm_type = 2) {
    if (is_enabled_ && progress_[&optimizer].stage != Stage::unscaled) unscale_(optimizer);
    std::vector<torch::Tensor> parameters;
    for (const auto& group : optimizer.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
  }

  /// Unscales the gradients unless that was done, and steps the optimizer if all of them are
  /// finite.
  ///
  /// @param closure  only without scaling, as in Python
  /// @return  whether the optimizer was stepped
  /// @throws ArgumentError  if it was stepped already since the last `update`, if no loss was
  ///                        scaled, if no parameter has a gradient, or for a closure
  bool step(torch::optim::Optimizer& optimizer,
            torch::optim::Optimizer::LossClosure closure = nullptr) {
    if (!is_enabled_) {
      optimizer.step(std::move(closure));
      return true;
    }
    require_steppable(optimizer, closure != nullptr);
    Progress& progress = progress_[&optimizer];
    if (progress.stage == Stage::ready) unscale_(optimizer);
    require(!progress.found_inf.empty(), [] { return no_checks("step"); });

    float found = 0;
    for (const torch::Tensor& found_inf : progress.found_inf) found += found_inf.item<float>();
    const bool is_finite = found == 0.0f;
    if (is_finite) optimizer.step();
    progress.stage = Stage::stepped;
    return is_finite;
  }

  /// Ends an iteration: moves the scale back if a step was skipped, and up after `growth_interval`
  /// iterations without one.
  ///
  /// @param new_scale  replaces the scale instead; the count of clean steps goes on
  /// @throws ArgumentError  if nothing was unscaled or stepped since the last `update`, or if
  ///                        `new_scale` is not positive and finite
  void update(std::optional<double> new_scale = {}) {
    if (!is_enabled_) return;
    require_scaled("update");
    if (new_scale.has_value()) {
      GradScalerState wanted = settings_;
      wanted.scale = *new_scale;
      remat::detail::require_sensible(wanted, "remat.grad_scaler.new_scale", "GradScaler::update",
                                      "Give a positive scale, or none to let it adapt");
      scale_.fill_(*new_scale);
    } else {
      torch::Tensor found_inf = found_anywhere();
      remat::detail::update_scale(scale_, growth_tracker_, found_inf, settings_.growth_factor,
                                  settings_.backoff_factor, settings_.growth_interval);
    }
    progress_.clear();
  }

  /// Returns the scale; 1 if disabled. Waits for an accelerator.
  double get_scale() const {
    if (!is_enabled_) return 1;
    return scale_.defined() ? static_cast<double>(scale_.item<float>()) : settings_.scale;
  }

  /// Returns whether it scales at all; false makes everything but `step` do nothing.
  bool is_enabled() const noexcept { return is_enabled_; }

  /// Returns what `load_state` takes; call it after `update`. All zero if disabled.
  GradScalerState state() const {
    if (!is_enabled_) return {};
    GradScalerState state = settings_;
    state.scale = get_scale();
    if (growth_tracker_.defined()) state.growth_tracker = growth_tracker_.item<std::int32_t>();
    return state;
  }

  /// Goes on from a saved state; nothing if disabled.
  ///
  /// @throws ArgumentError  if no scaler can have saved that: then nothing is changed
  void load_state(const GradScalerState& state) {
    if (!is_enabled_) return;
    require(state != GradScalerState{}, [] {
      return ErrorMessage("remat.grad_scaler.state")
          .where("GradScaler::load_state")
          .what("the state is empty")
          .cause("it was saved from a disabled scaler, or never filled")
          .cure("Start with a new scaler");
    });
    remat::detail::require_sensible(state, "remat.grad_scaler.state", "GradScaler::load_state",
                                    "Load what state() returned");
    settings_ = state;
    if (!scale_.defined()) return;
    scale_.fill_(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
  }

 private:
  enum class Stage { ready, unscaled, stepped };

  /// How far an optimizer is in this iteration.
  struct Progress {
    Stage stage = Stage::ready;
    std::vector<torch::Tensor> found_inf;  // one per device
  };

  /// Gradients that one call of the kernel takes.
  struct Batch {
    c10::Device device;
    c10::ScalarType dtype;
    std::vector<torch::Tensor> grads;
  };

  static ErrorMessage no_checks(std::string_view function) {
    return ErrorMessage("remat.grad_scaler.no_checks")
        .where("GradScaler::" + std::string(function))
        .what("No inf checks were recorded: no gradient was unscaled since the last update()")
        .cause(
            "backward was not called, the optimizer holds other parameters, or step() is "
            "missing")
        .cure("Call scale(loss).backward(), then step(optimizer), then update()");
  }

  void require_scaled(std::string_view function) const {
    require(scale_.defined(), [&] {
      return ErrorMessage("remat.grad_scaler.not_scaled")
          .where("GradScaler::" + std::string(function))
          .what("no loss was scaled before")
          .cause("backward was called on the bare loss")
          .cure("Call scale(loss).backward()");
    });
  }

  void require_steppable(const torch::optim::Optimizer& optimizer, bool has_closure) const {
    require(!has_closure, [] {
      return ErrorMessage("remat.grad_scaler.closure")
          .where("GradScaler::step")
          .what("a closure was given, and none can be run while scaling is enabled")
          .cause("it would make new gradients, scaled ones, inside the step")
          .cure("Use an optimizer that needs none, or a scaler with enabled = false");
    });
    require_scaled("step");
    const auto found = progress_.find(&optimizer);
    require(found == progress_.end() || found->second.stage != Stage::stepped, [] {
      return ErrorMessage("remat.grad_scaler.stepped_twice")
          .where("GradScaler::step")
          .what("this optimizer was stepped already since the last update()")
          .cause("update() is missing at the end of the last iteration")
          .cure("Call update() once per iteration, after the steps of all optimizers");
    });
  }

  static void require_unscalable(const torch::Tensor& parameter, std::size_t group,
                                 std::size_t index) {
    const torch::Tensor& grad = parameter.grad();
    require(grad.scalar_type() != c10::ScalarType::Half, [&] {
      std::ostringstream what;
      what << "parameter " << index << " of group " << group << ", " << parameter.sizes()
           << ", has a gradient of float16, and float32 was expected";
      return ErrorMessage("remat.grad_scaler.half_gradient")
          .where("GradScaler::unscale_")
          .what(what.str())
          .cause("the whole model was turned to float16")
          .cure("Leave the parameters in float32 and run forward under remat::amp::Autocast");
    });
  }

  void make_tensors() {
    const at::NoGradGuard no_grad;
    const auto options = at::TensorOptions().device(device_);
    scale_ = at::empty({}, options.dtype(at::kFloat)).fill_(settings_.scale);
    growth_tracker_ = at::empty({}, options.dtype(at::kInt)).fill_(settings_.growth_tracker);
  }

  static std::vector<Batch> batches_of(torch::optim::Optimizer& optimizer) {
    std::vector<Batch> batches;
    const auto& groups = optimizer.param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const auto& parameters = groups[group].params();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        torch::Tensor grad = parameters[i].grad();
        if (!grad.defined()) continue;
        require_unscalable(parameters[i], group, i);
        if (grad.is_sparse()) grad = grad._values();
        add_to_batch(batches, std::move(grad));
      }
    }
    return batches;
  }

  static void add_to_batch(std::vector<Batch>& batches, torch::Tensor grad) {
    for (Batch& batch : batches) {
      if (batch.device != grad.device() || batch.dtype != grad.scalar_type()) continue;
      batch.grads.push_back(std::move(grad));
      return;
    }
    batches.push_back({grad.device(), grad.scalar_type(), {std::move(grad)}});
  }

  /// Returns one flag per device.
  std::vector<torch::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer) const {
    const at::NoGradGuard no_grad;
    std::vector<Batch> batches = batches_of(optimizer);
    // In double, since a float's reciprocal may be rounded differently on some devices.
    const torch::Tensor inv_scale = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
    std::vector<torch::Tensor> flags;
    for (Batch& batch : batches) {
      std::size_t i = 0;
      while (i < flags.size() && flags[i].device() != batch.device) ++i;
      if (i == flags.size())
        flags.push_back(
            at::empty({}, at::TensorOptions().dtype(at::kFloat).device(batch.device)).zero_());
      remat::detail::check_and_unscale(batch.grads, flags[i],
                                       inv_scale.to(batch.device, /*non_blocking=*/true));
    }
    return flags;
  }

  torch::Tensor found_anywhere() const {
    const at::NoGradGuard no_grad;
    torch::Tensor sum;
    for (const auto& [optimizer, progress] : progress_)
      for (const torch::Tensor& flag : progress.found_inf) {
        const torch::Tensor here = flag.to(scale_.device(), /*non_blocking=*/true);
        sum = sum.defined() ? sum + here : here;
      }
    require(sum.defined(), [] { return no_checks("update"); });
    return sum;
  }

  c10::Device device_;
  bool is_enabled_;
  GradScalerState settings_;  // its scale and tracker hold until the tensors are made
  torch::Tensor scale_, growth_tracker_;
  std::map<const torch::optim::Optimizer*, Progress> progress_;
};

}  // namespace remat::amp

#include <memory>

#include <concepts>

namespace remat {

class Backbone;

/// Whether a backbone begins with published weights; false unless it is made from true.
///
/// The reader of weight files is a fifth of what a program with a network would have to compile.
/// So the wish for weights brings the reader with it, and a program without that wish compiles none
/// of it.
class Pretrained {
 public:
  Pretrained() = default;
  // NOLINTNEXTLINE(*-explicit-*): `{.pretrained = true}`
  Pretrained(bool is_wanted);

  /// Returns whether they are wanted.
  operator bool() const { return load_ != nullptr; }  // NOLINT(*-explicit-*): likewise
  /// Loads the weights if they are wanted.
  void load_into(Backbone& backbone) const {
    if (load_ != nullptr) load_(backbone);
  }

 private:
  void (*load_)(Backbone&) = nullptr;
};

/// The file with whose weights a backbone begins; empty: none. It brings the reader with it, as
/// `Pretrained` does.
class WeightsFile {
 public:
  WeightsFile() = default;
  template <std::convertible_to<std::string> Path>
    requires(!std::same_as<std::remove_cvref_t<Path>, WeightsFile>)
  WeightsFile(Path&& path);  // NOLINT(*-explicit-*): `{.weights = "net.pth"}`

  /// Returns the file's path.
  operator const std::string&() const { return path_; }  // NOLINT(*-explicit-*): likewise
  /// Returns the file's path.
  const std::string& path() const { return path_; }
  /// Returns whether there is no file.
  bool empty() const { return path_.empty(); }
  /// Loads the weights if there is a file.
  void load_into(Backbone& backbone) const {
    if (!empty()) load_(backbone, path_);
  }

 private:
  std::string path_;
  void (*load_)(Backbone&, const std::string&) = nullptr;
};

}  // namespace remat

#include <ATen/TensorIndexing.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu6.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/enum.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <functional>

#include <mutex>
#include <variant>

#include <initializer_list>

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

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <set>

namespace remat::detail {

/// What the recorder needs to know of an operator, read once from its schema and from
/// `operator_facts.hpp`.
struct OperatorTraits {
  enum class Kind : std::uint8_t { tensor, tensor_list, optional_tensor_list };

  struct Argument {
    std::uint16_t index;
    Kind kind;
    bool is_written = false;        // by the schema
    bool is_geometry_only = false;  // the content does not matter
    bool is_overwritten = false;    // written without being read
    int hidden_write_if =
        -2;  // -2: no hidden write; -1: always; else the boolean argument that decides
    bool hidden_write_reads = false;
  };

  struct Return {
    Kind kind;
    bool is_tensor = false;
    bool is_alias = false;
  };

  std::string name;  // "aten::convolution"
  std::string overload;
  std::vector<Argument> arguments;  // those that hold tensors
  std::vector<Return> returns;
  int generator_argument = -1;
  std::uint16_t argument_count = 0;
  bool is_view =
      false;  // returns an alias that it does not write: unrecorded, uses carry the geometry
  bool writes = false;         // by the schema or hidden
  bool makes_tensors = false;  // some return is a tensor that is not an alias
  bool is_aten = true;
  bool repoints = false;  // may give a tensor another storage or size
  bool is_factory = false;
  bool is_random = false;
  bool is_nondeterministic = false;

  explicit OperatorTraits(const OperatorHandle& handle);

  /// Whether the operation may be recorded and run again at all.
  bool is_recordable() const;
};

/// Operators outside `aten` that the user declared to be pure, so that they may be recomputed.
class RecomputableOperators {
 public:
  void allow(std::string name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.insert(std::move(name));
  }
  bool contains(const std::string& name) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_.count(name) != 0;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> names_;
};

inline RecomputableOperators& recomputable_operators() {
  static auto* operators = new RecomputableOperators;
  return *operators;
}

inline bool OperatorTraits::is_recordable() const {
  return !repoints && (is_aten || recomputable_operators().contains(name));
}

inline OperatorTraits::OperatorTraits(const OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  name = schema.name();
  overload = schema.overload_name();
  argument_count = static_cast<std::uint16_t>(schema.arguments().size());

  const auto tensor_kind = [](c10::TypePtr type, Kind& kind) {
    using c10::TypeKind;
    bool is_list = false, is_optional_element = false;
    if (type->kind() == TypeKind::OptionalType)
      type = type->castRaw<c10::OptionalType>()->getElementType();
    if (type->kind() == TypeKind::ListType) {
      is_list = true;
      type = type->castRaw<c10::ListType>()->getElementType();
      if (type->kind() == TypeKind::OptionalType) {
        is_optional_element = true;
        type = type->castRaw<c10::OptionalType>()->getElementType();
      }
    }
    kind = !is_list              ? Kind::tensor
           : is_optional_element ? Kind::optional_tensor_list
                                 : Kind::tensor_list;
    return type->kind() == TypeKind::TensorType;
  };

  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    Argument traits{static_cast<std::uint16_t>(i), Kind::tensor};
    if (tensor_kind(argument.type(), traits.kind)) {
      traits.is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
      for (const HiddenWrite& write : hidden_writes)
        if (write.operation == name && write.argument == static_cast<int>(i) &&
            !traits.is_written) {
          traits.hidden_write_if = write.only_if;
          traits.hidden_write_reads = write.reads;
        }
      if (arguments.empty()) {
        traits.is_geometry_only = reads_geometry_only(name, overload);
        traits.is_overwritten = traits.is_written && overwrites_first_argument(name);
      }
      writes = writes || traits.is_written || traits.hidden_write_if != -2;
      arguments.push_back(traits);
    } else if (argument.type()->str().find("Generator") != std::string::npos) {
      generator_argument = static_cast<int>(i);
    }
  }

  for (const c10::Argument& result : schema.returns()) {
    Return traits{Kind::tensor};
    traits.is_tensor = tensor_kind(result.type(), traits.kind);
    traits.is_alias = result.alias_info() != nullptr;
    is_view = is_view || (traits.is_alias && !result.alias_info()->isWrite());
    makes_tensors = makes_tensors || (traits.is_tensor && !traits.is_alias);
    returns.push_back(traits);
  }

  is_aten = name.starts_with("aten::");
  repoints = remat::detail::repoints(name);
  is_factory = arguments.empty() || remat::detail::is_factory(name);
  is_random = handle.hasTag(at::Tag::nondeterministic_seeded) || generator_argument >= 0;
  is_nondeterministic = is_nondeterministic_on_accelerators(name);
}

/// The traits of an operator. They live as long as the process, since tapes refer to them from any
/// thread.
inline const OperatorTraits& traits_of(const OperatorHandle& handle) {
  struct Table {
    std::mutex mutex;
    std::map<std::pair<std::string, std::string>, std::unique_ptr<const OperatorTraits>> entries;
  };
  static auto* table = new Table;
  static thread_local ska::flat_hash_map<const void*, const OperatorTraits*>
      cache;  // spares the lock

  const c10::FunctionSchema& schema = handle.schema();
  const OperatorTraits*& entry = cache[&schema];
  // A library that was unloaded may have left its schema's address to another one.
  if (entry == nullptr || entry->name != schema.name() ||
      entry->overload != schema.overload_name()) {
    std::lock_guard<std::mutex> lock(table->mutex);
    auto& shared = table->entries[{schema.name(), schema.overload_name()}];
    if (!shared) shared = std::make_unique<const OperatorTraits>(handle);
    entry = shared.get();
  }
  return *entry;
}

}  // namespace remat::detail

#include <ATen/core/Generator.h>

#include <cstring>

namespace remat::detail {

/// Where a random operation drew its numbers, and the generator's state before it did.
struct RandomState {
  at::Generator generator;
  at::Tensor state;  // bytes on the CPU: 5056 for the CPU's generator, seed and offset for an
                     // accelerator's
};

inline at::Tensor state_of(const at::Generator& generator) {
  at::Generator handle = generator;
  std::lock_guard<std::mutex> lock(handle.mutex());
  return handle.get_state();
}

inline void set_state(const at::Generator& generator, const at::Tensor& state) {
  at::Generator handle = generator;
  std::lock_guard<std::mutex> lock(handle.mutex());
  handle.set_state(state);
}

inline at::Generator default_generator(c10::Device device) {
  return at::globalContext().defaultGenerator(device);
}

/// Two states of the CPU's bytes: operations that carry the random tag and draw nothing share one
/// copy.
inline bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

/// Serialises the operations that can only draw from a device's default generator, among regions
/// and their recomputes.
inline std::mutex& shared_generator_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

/// Calls `draw` and notes the generator's state before it. The default generator belongs to all
/// threads of the process.
///
/// An operation with a generator argument draws from a private copy while the generator's own mutex
/// is held, as it would be in plain: no other thread can come between. Without such an argument, a
/// thread outside of any region still can.
///
/// @param given  the generator argument, or null
template <class Draw>
void draw_and_note(RandomState& random, c10::IValue* given, Draw draw) {
  if (given == nullptr) {
    std::lock_guard<std::mutex> lock(shared_generator_mutex());
    random.state = state_of(random.generator);
    draw();
    return;
  }
  std::lock_guard<std::mutex> lock(random.generator.mutex());
  random.state = random.generator.get_state();
  at::Generator copy = random.generator.clone();
  *given = copy;
  try {
    draw();
  } catch (...) {
    random.generator.set_state(
        copy.get_state());  // numbers that were drawn before it failed are drawn, as in plain
    throw;
  }
  random.generator.set_state(copy.get_state());
}

/// Calls `draw` so that it draws what it drew in forward, and leaves the stream of numbers of the
/// process untouched.
template <class Draw>
void draw_again(const RandomState& random, c10::IValue* given, Draw draw) {
  if (given != nullptr) {
    at::Generator copy = random.generator.clone();
    copy.set_state(random.state);
    *given = copy;
    draw();
    return;
  }
  std::lock_guard<std::mutex> lock(shared_generator_mutex());
  struct Restore {
    const at::Generator& generator;
    at::Tensor state = state_of(generator);
    ~Restore() { set_state(generator, state); }
  } restore{random.generator};
  set_state(random.generator, random.state);
  draw();
}

}  // namespace remat::detail

namespace remat::detail {

using ValueId = std::int32_t;
using OperationId = std::int32_t;
using RegionId = std::int32_t;
inline constexpr std::int32_t none = -1;

/// The version of a tensor at one time, and whether it has been edited since.
struct Version {
  c10::VariableVersion counter;
  std::uint32_t number = 0;

  static Version of(const at::Tensor& tensor) {
    Version version;
    version.counter = tensor.unsafeGetTensorImpl()->version_counter();
    version.number = number_of(tensor);
    return version;
  }
  /// 0 for inference tensors, which have no counter.
  static std::uint32_t number_of(const at::Tensor& tensor) {
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? counter.current_version() : 0;
  }
  std::uint32_t now() const { return counter.enabled() ? counter.current_version() : number; }
  bool is_unchanged() const { return now() == number; }
};

/// The content of one storage at one time. An in-place operation makes a new value of the same
/// storage; views make none.
struct Value {
  c10::Storage held;  // external, kept, or recomputed; null: dropped
  c10::Storage
      lent;  // recomputed for a backward pass that keeps its graph, gone when that pass ends
  std::int64_t nbytes = 0;
  std::uint64_t digest = 0;  // debug mode: of what the first reader saw; 0: none
  OperationId producer =
      none;  // none: external, it existed before or was made where the recorder does not look
  RegionId scope = none;  // the innermost region that encloses all its uses
  std::int32_t need = 0;  // saved tensors that wait for it and live operations that read it
  std::int32_t kept_from_depth = 0;  // regions this deep and deeper keep it
  std::uint32_t version = 0;    // of the tensor when it was made or first read, to notice a write
                                // that the recorder did not see
  bool is_shared : 1 = false;   // `held` is a storage that others may write
  bool is_watched : 1 = false;  // entered in the write watch
  bool is_written : 1 =
      false;  // made in place: autograd moves the version once more when the operation has returned
  bool is_fresh : 1 = false;  // made by a factory in this region and not read yet
  bool is_revocable : 1 =
      false;  // `held` is a region's result: the producer stays able to make it again
  bool is_recomputed : 1 = false;
  bool is_tiny : 1 = false;     // kept whatever the policies say
  bool is_counted : 1 = false;  // its bytes stand in the costs of a unit
  bool is_saved : 1 = false;
  bool is_result : 1 = false;  // a region's result
  bool is_transient : 1 =
      false;  // a recompute that is run for another value does not leave it here
};

/// A value with a geometry: an argument of an operation, or a tensor that autograd saved.
struct Use {
  Geometry geometry;
  Version version;
  std::uint64_t digest = 0;  // of an external content when it was read; 0: none
  ValueId value = none;
  std::int32_t position = none;  // in a list; none: the argument is the tensor itself
  std::uint16_t argument = 0;
  c10::Device device{c10::kCPU};
  bool needs_content = true;  // false: only the geometry is read, or everything is overwritten
  bool is_written = false;    // the operation writes into it
};

/// A value that an operation makes, and where it is found afterwards.
struct Result {
  ValueId value = none;
  std::int32_t index = none;     // among the returns; none: it is the written argument of `use`
  std::int32_t position = none;  // in a returned list
  std::int32_t use = none;       // among the operation's uses
};

/// An operation that was recorded. Its parts lie in the tape's arrays, one behind the other.
struct Operation {
  OperatorHandle handle;
  const OperatorTraits* traits;
  std::unique_ptr<RandomState> random;
  std::size_t first_argument = 0;
  std::size_t first_use = 0;
  std::size_t first_result = 0;
  std::uint32_t use_count = 0;
  std::uint32_t result_count = 0;
  RegionId region = none;
  bool is_live = false;  // some result is dropped and needed
  float seconds = 0;     // measured on request only
};

/// Mixes some words of the bytes `[first, last)` of a storage: notices changes that move no version
/// counter, such as C++ SGD's. Short contents and, with `every_byte`, any are read whole. 0 where
/// bytes cannot be read cheaply.
inline std::uint64_t digest_of(const c10::Storage& storage, std::size_t first, std::size_t last,
                               bool every_byte = false) {
  constexpr std::size_t sample_count = 16;
  if (!storage || storage.device_type() != c10::kCPU) return 0;
  last = std::min(last, storage.nbytes());
  const auto* bytes = static_cast<const unsigned char*>(storage.data());
  if (bytes == nullptr || first >= last) return 0;

  const std::size_t nbytes = last - first;
  std::uint64_t hash = 0x9E3779B97F4A7C15u ^ nbytes;
  const auto mix = [&](std::size_t offset, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + first + offset, size);
    hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
    hash ^= hash >> 32;
  };
  const std::size_t words = nbytes / 8;
  const std::size_t step = every_byte || words <= sample_count ? 1 : words / sample_count;
  for (std::size_t i = 0; i < words; i += step) mix(i * 8, 8);
  if (nbytes % 8 != 0) mix(words * 8, nbytes % 8);
  return hash == 0 ? 1 : hash;
}

/// Of the whole storage.
inline std::uint64_t digest_of(const c10::Storage& storage, bool every_byte = false) {
  return digest_of(storage, 0, std::numeric_limits<std::size_t>::max(), every_byte);
}

/// Of what a tensor can reach: parameters that share one storage are told apart.
inline std::uint64_t digest_of(const c10::Storage& storage, const Geometry& geometry) {
  const auto [first, last] = geometry.span();
  return digest_of(storage, first, last);
}

}  // namespace remat::detail

#include <c10/util/SmallVector.h>

namespace remat::detail {

/// An operation that is about to run: its arguments on the stack, and what the recorder has to know
/// of the tensors among them.
class Call {
 public:
  /// A tensor that the operation will write.
  struct Written {
    at::Tensor tensor;
    std::uint16_t argument;
    std::int32_t position;
    bool is_read;      // its old content matters
    bool is_external;  // nobody recorded how its old content came about
    std::int64_t nbytes;
  };

  Call(const OperatorHandle& handle, const OperatorTraits& traits, c10::DispatchKeySet keys,
       Stack& stack)
      : traits_(traits),
        handle_(handle),
        keys_(keys),
        stack_(stack),
        first_(stack.size() - traits.argument_count) {
    inspect_arguments();
  }

  c10::IValue& argument(std::size_t index) { return stack_[first_ + index]; }
  c10::IValue& returned(std::size_t index) {
    return stack_[stack_.size() - traits_.returns.size() + index];
  }

  /// Passes the operation on to its kernel; returns take the place of arguments.
  void run() { handle_.redispatchBoxed(below_recorder(keys_), &stack_); }

  /// Calls `visit(tensor, position)` for each defined tensor in an argument or return.
  template <class Visit>
  static void for_each_tensor(const c10::IValue& value, OperatorTraits::Kind kind, Visit visit) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined()) visit(tensor, std::int32_t{none});
    } else if (kind == OperatorTraits::Kind::tensor_list && value.isTensorList()) {
      std::int32_t position = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor, position);
        ++position;
      }
    } else if (kind == OperatorTraits::Kind::optional_tensor_list && value.isOptionalTensorList()) {
      std::int32_t position = 0;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        if (tensor && tensor->defined()) visit(*tensor, position);
        ++position;
      }
    }
  }

  const Written* find_written(std::uint16_t argument, std::int32_t position) const {
    for (const Written& one : written)
      if (one.argument == argument && one.position == position) return &one;
    return nullptr;
  }

  bool is_source(const c10::StorageImpl* storage) const {
    return std::find(sources.begin(), sources.end(), storage) != sources.end();
  }

  bool has_tensor = false;
  bool has_opaque = false;            // a tensor without a plain storage
  std::int64_t largest = 0;           // bytes of the largest tensor among the arguments
  std::optional<c10::Device> device;  // of the first tensor
  c10::SmallVector<const c10::StorageImpl*, 8> sources;
  c10::SmallVector<const c10::StorageImpl*, 2> borrowed;  // those that do not own their memory
  c10::SmallVector<Written, 2> written;

 private:
  /// A tensor over memory that it does not own, such as from_blob's: it may be gone before
  /// backward, unless plain holds it as well.
  static bool is_borrowed(const at::Tensor& tensor) {
    return tensor.storage().data_ptr().get_context() == nullptr && tensor.storage().nbytes() > 0 &&
           tensor.is_cpu() && !tensor.requires_grad();
  }

  bool writes_hidden(const OperatorTraits::Argument& traits) {
    return traits.hidden_write_if == -1 ||
           (traits.hidden_write_if >= 0 &&
            argument(static_cast<std::size_t>(traits.hidden_write_if)).toBool());
  }

  void inspect_arguments() {
    for (const auto& traits : traits_.arguments) {
      const bool is_hidden = traits.hidden_write_if != -2 && writes_hidden(traits);
      for_each_tensor(argument(traits.index), traits.kind,
                      [&](const at::Tensor& tensor, std::int32_t position) {
                        has_tensor = true;
                        if (!has_plain_storage(tensor)) {
                          has_opaque = true;
                          return;
                        }
                        largest = std::max(largest, static_cast<std::int64_t>(tensor.nbytes()));
                        if (position == none && !device) device = tensor.device();
                        sources.push_back(storage_of(tensor));
                        if (is_borrowed(tensor)) borrowed.push_back(storage_of(tensor));
                        if (!traits.is_written && !is_hidden) return;
                        const bool covers = tensor.is_non_overlapping_and_dense() &&
                                            tensor.nbytes() == tensor.storage().nbytes();
                        const bool is_read = is_hidden ? traits.hidden_write_reads
                                                       : !(traits.is_overwritten && covers);
                        written.push_back({tensor, traits.index, position, is_read, true,
                                           static_cast<std::int64_t>(tensor.storage().nbytes())});
                      });
    }
    // An argument that shares the written one's memory reads it after all.
    for (Written& one : written)
      one.is_read =
          one.is_read || std::count(sources.begin(), sources.end(), storage_of(one.tensor)) > 1;
  }

  const OperatorTraits& traits_;
  const OperatorHandle& handle_;
  c10::DispatchKeySet keys_;
  Stack& stack_;
  std::size_t first_;
};

}  // namespace remat::detail

#include <bit>
#include <new>

namespace remat::detail {

/// A list that only grows at its end and never moves an element. Chunk k holds `FirstChunk << k`
/// elements, so that a tape of three operations is as cheap as one of a hundred thousand is
/// compact; std::deque allocates 512 bytes at a time, from the start.
template <class Element, std::size_t FirstChunk = 8>
class StableList {
  static_assert(std::has_single_bit(FirstChunk), "the size of the first chunk is a power of two");

 public:
  StableList() = default;
  StableList(const StableList&) = delete;
  StableList& operator=(const StableList&) = delete;
  ~StableList() {
    for (std::size_t i = size_; i-- > 0;) std::destroy_at(&(*this)[i]);
    for (std::size_t k = 0; k < chunks_.size(); ++k)
      std::allocator<Element>().deallocate(chunks_[k], FirstChunk << k);
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  Element& operator[](std::size_t index) {
    const std::size_t chunk = chunk_of(index);
    return chunks_[chunk][index - start_of(chunk)];
  }
  const Element& operator[](std::size_t index) const {
    return const_cast<StableList&>(*this)[index];
  }

  template <class... Arguments>
  Element& emplace_back(Arguments&&... arguments) {
    const std::size_t chunk = chunk_of(size_);
    if (chunk == chunks_.size()) {
      chunks_.reserve(chunk + 1);  // so that the allocation below has an owner whatever happens
      chunks_.push_back(std::allocator<Element>().allocate(FirstChunk << chunk));
    }
    Element* place = chunks_[chunk] + (size_ - start_of(chunk));
    new (place) Element(std::forward<Arguments>(arguments)...);
    ++size_;
    return *place;
  }
  void push_back(Element element) { emplace_back(std::move(element)); }

 private:
  static std::size_t chunk_of(std::size_t index) {
    return static_cast<std::size_t>(std::bit_width(index / FirstChunk + 1)) - 1;
  }
  static std::size_t start_of(std::size_t chunk) {
    return FirstChunk * ((std::size_t{1} << chunk) - 1);
  }

  std::vector<Element*> chunks_;
  std::size_t size_ = 0;
};

}  // namespace remat::detail

namespace remat::detail {

class Tape;

/// Who still needs the content that a storage has now: tapes enter what they refer to but do not
/// own.
///
/// A recorder that sees a write coming (batch-norm statistics, an input edited in place) asks here
/// first, so that a region which is waiting for its backward keeps the content it saw. One table
/// for the process; a leaf in the order of locks.
class REMAT_VISIBLE WriteWatch {
 public:
  struct Entry {
    std::weak_ptr<Tape> tape;
    ValueId value;
  };

  void enter(const c10::StorageImpl* storage, std::weak_ptr<Tape> tape, ValueId value) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_[storage].push_back({std::move(tape), value});
  }

  void leave(const c10::StorageImpl* storage, const std::weak_ptr<Tape>& tape, ValueId value) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end()) return;
    auto& list = found->second;
    // Backward releases in the opposite order of forward: the last entry is nearly always the one.
    for (std::size_t i = list.size(); i-- > 0;) {
      if (list[i].value != value || list[i].tape.owner_before(tape) ||
          tape.owner_before(list[i].tape))
        continue;
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (list.empty()) entries_.erase(found);
  }

  std::vector<Entry> find(const c10::StorageImpl* storage) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(storage);
    return found == entries_.end() ? std::vector<Entry>{} : found->second;
  }

 private:
  mutable std::mutex mutex_;
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<Entry>> entries_;
};

/// The process's watch, one for all libraries that contain this header.
REMAT_VISIBLE inline WriteWatch& write_watch() {
  static auto* watch = new WriteWatch;
  return *watch;
}

}  // namespace remat::detail

// First, for Clang: see libtorch/tensor.hpp.

#include <ATen/Parallel.h>

namespace remat::detail {

/// Sums depend on how many threads share them: recompute with as many as forward had.
class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(int count)
      : before_(at::get_num_threads()), differs_(before_ != count) {
    if (differs_) at::set_num_threads(count);
  }
  ~ThreadCountGuard() {
    if (differs_) at::set_num_threads(before_);
  }
  ThreadCountGuard(const ThreadCountGuard&) = delete;
  ThreadCountGuard& operator=(const ThreadCountGuard&) = delete;

 private:
  int before_;
  bool differs_;
};

}  // namespace remat::detail

namespace remat {

/// What one unit of a chain costs in memory.
struct UnitCost {
  Bytes saved;   ///< tensors that backward needs and a checkpointed segment drops
  Bytes output;  ///< the unit's result, which stays if a segment ends there
  Bytes kept{};  ///< tensors that backward needs and a keep policy holds in any case

  friend bool operator==(const UnitCost&, const UnitCost&) = default;
  friend std::ostream& operator<<(std::ostream& stream, const UnitCost& cost) {
    return stream << "saved " << cost.saved << ", output " << cost.output << ", kept " << cost.kept;
  }
};

/// What a rule is told about a chain.
struct Chain {
  std::size_t unit_count = 0;
  std::vector<UnitCost>
      unit_costs;  ///< one per unit; empty before the first forward has measured them
  std::vector<std::size_t>
      stage_sizes;  ///< units per stage, their sum is `unit_count`; empty: one stage
  std::vector<std::size_t>
      lone_units{};  ///< units that are layers by themselves, and not blocks of a nested chain

  /// Returns a chain of which only the number of units is known.
  static Chain of(std::size_t unit_count) { return {unit_count, {}, {}}; }
  /// Returns a chain with measured units.
  static Chain of(std::vector<UnitCost> unit_costs) {
    const std::size_t unit_count = unit_costs.size();
    return {unit_count, std::move(unit_costs), {}};
  }

  /// Returns whether each unit has its cost.
  bool is_measured() const { return unit_count != 0 && unit_costs.size() == unit_count; }
};

}  // namespace remat

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

namespace remat::detail {

/// Which results stay although they could be recomputed; empty: none.
using KeepPredicate = std::function<bool(const keep::Operation&, Bytes)>;

class SavedTensor;
class TapeObserver;

/// A checkpointed region of a tape. Regions that are opened inside another share its tape.
struct Region {
  std::string name;
  RegionId parent = none;
  int depth = 0;
  std::size_t first_operation = 0;
  std::size_t first_saved = 0;
  KeepPredicate keep;
  ska::flat_hash_map<const OperatorTraits*, std::size_t>
      ordinals;  // operations of each kind so far, for `keep`
  std::vector<UnitCost>* unit_costs = nullptr;
};

/// The operations of a region and all regions inside it, with the values between them.
///
/// The invariant that everything rests on: an operation is **live** exactly when one of its results
/// is dropped and needed, and a value's **need** counts the saved tensors that wait for it and the
/// live operations that read its content. So when a saved tensor goes away, what only it depended
/// on goes with it, at once and without a search. Held values without need are released as soon as
/// the tape is sealed; until then any value may still find a reader.
///
/// Threads: every member is guarded by `mutex`, which is recursive because freeing part of a graph
/// inside a backward pass ends here again.
class REMAT_VISIBLE Tape : public std::enable_shared_from_this<Tape> {
 public:
  Tape() { current_.reserve(16); }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  ~Tape() {
    for (std::size_t i = 0; i < values.size(); ++i) release(static_cast<ValueId>(i));
  }

  std::recursive_mutex mutex;
  StableList<Value> values;
  StableList<Operation> operations;
  StableList<Use> uses;
  StableList<Result> results;
  StableList<c10::IValue> arguments;  // with nothing in the place of tensors
  StableList<Region, 1> regions;
  RegionId region = none;  // the innermost open one
  struct Unedited {
    Version version;
    std::uint64_t digest = 0;
  };
  ska::flat_hash_map<ValueId, Unedited>
      revocable;  // of the results that are held although their user may edit them
  std::vector<SavedTensor*>
      recent;  // saved since the last operation: that operation may be the one that saves them
  std::size_t saved_count = 0;                         // of all tensors that autograd saved so far
  std::vector<const c10::StorageImpl*> recent_memory;  // of the external tensors among those
  std::weak_ptr<void> lent_until;  // alive while a backward pass that keeps its graph will take
                                   // back what it was lent
  std::vector<ValueId> lent;
  at::Tensor last_random_state;
  int thread_count = at::get_num_threads();
  std::shared_ptr<TapeObserver> observer;               // null: nobody looks
  std::function<void(const at::Tensor&)> before_write;  // empty: nobody minds
  bool measures_time = false;
  bool is_indivisible = false;  // regions inside are part of the outermost one
  bool is_sealed = false;

  // --- values of storages ---

  /// The value that a storage holds now; none if nothing is known of it.
  ValueId current(const c10::StorageImpl* storage) const {
    const auto found = current_.find(storage);
    return found == current_.end() ? none : found->second;
  }

  /// The same, unless the tensor's version shows that something wrote it where the recorder does
  /// not look (another thread, a raw kernel that marks its argument): then nothing is known of it,
  /// and it counts as external from here on.
  ValueId current(const at::Tensor& tensor, std::uint32_t version) const {
    const ValueId id = current(storage_of(tensor));
    if (id == none) return none;
    const Value& value = values[static_cast<std::size_t>(id)];
    if (value.is_fresh || (value.producer == none && !value.held)) return id;
    const bool is_known =
        version == value.version || (value.is_written && version == value.version + 1);
    return is_known ? id : none;
  }

  /// A new value that `tensor`'s storage holds from now on.
  ValueId define(const at::Tensor& tensor, OperationId producer) {
    const auto id = static_cast<ValueId>(values.size());
    Value& value = values.emplace_back();
    value.producer = producer;
    value.nbytes = static_cast<std::int64_t>(tensor.storage().nbytes());
    value.version = Version::number_of(tensor);
    value.scope = region;
    value.kept_from_depth = regions[static_cast<std::size_t>(region)].depth + 1;
    current_[storage_of(tensor)] = id;
    // While its address is a key the storage's block must not be given to another storage.
    identities_.push_back(tensor.storage().getWeakStorageImpl());
    return id;
  }

  /// The storage's content was made where the recorder does not look: it counts as external from
  /// its next use on.
  void forget(const c10::StorageImpl* storage) { current_.erase(storage); }

  /// Lets go of the content that is held, for the storage is about to be overwritten; true if the
  /// value can still be had.
  bool let_go(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (!value.held || !value.is_shared) return true;
    if (value.producer == none) return false;
    release(id);
    if (value.need > 0) wake(value.producer);
    return true;
  }

  /// Keeps the content of a storage that others may write from now on in a copy. The copy may be
  /// shared.
  void replace_by_snapshot(ValueId id, const c10::Storage& snapshot) {
    Value& value = values[static_cast<std::size_t>(id)];
    release(id);
    value.held = snapshot;
  }

  void watch(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    value.is_watched = true;
    write_watch().enter(value.held.unsafeGetStorageImpl(), weak_from_this(), id);
  }

  void forget_recent() {
    recent.clear();
    recent_memory.clear();
  }

  // --- need ---

  void add_need(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.need++ == 0 && !is_held(value) && value.producer != none) wake(value.producer);
  }

  void remove_need(ValueId id) {
    if (lose_reader(id)) settle(values[static_cast<std::size_t>(id)].producer);
  }

  /// Gives a dropped value its content. Its producer may now rest, and what only that needed goes.
  void set_held(ValueId id, c10::Storage storage) {
    Value& value = values[static_cast<std::size_t>(id)];
    value.held = std::move(storage);
    if (value.need > 0 && value.producer != none) settle(value.producer);
  }

  /// Holds a result in a storage that its user may edit: while it is unedited it need not be
  /// recomputed, but it can be.
  void hold_revocably(ValueId id, const at::Tensor& tensor) {
    Value& value = values[static_cast<std::size_t>(id)];
    const bool was_held = is_held(value);
    value.held = tensor.storage();
    value.is_shared = value.is_revocable = true;
    revocable[id] = {Version::of(tensor), digest_of(value.held)};
    if (was_held && value.need > 0) wake(value.producer);
  }

  /// Whether the content counts as there for good. A revocable one does not: its producer stays
  /// live behind it.
  static bool is_held(const Value& value) { return value.held && !value.is_revocable; }

  /// Ends recording: what nothing needs is released.
  void seal() {
    is_sealed = true;
    current_.clear();
    identities_.clear();
    forget_recent();
    last_random_state = at::Tensor();
    for (std::size_t i = 0; i < values.size(); ++i)
      if (values[i].need == 0 && values[i].held) release(static_cast<ValueId>(i));
  }

  // --- regions ---

  RegionId common_ancestor(RegionId a, RegionId b) const {
    while (a != b) {
      if (depth(a) >= depth(b))
        a = regions[static_cast<std::size_t>(a)].parent;
      else
        b = regions[static_cast<std::size_t>(b)].parent;
    }
    return a;
  }

  int depth(RegionId id) const {
    return id == none ? -1 : regions[static_cast<std::size_t>(id)].depth;
  }

  /// Notes that something in `user` reads the value.
  void widen_scope(ValueId id, RegionId user) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.scope != user) value.scope = common_ancestor(value.scope, user);
  }

  /// "segment 2 (units 3-5)" or, nested, "outer / inner".
  std::string name_of(RegionId id) const {
    if (id == none) return "checkpoint";
    const Region& here = regions[static_cast<std::size_t>(id)];
    return here.parent == none ? here.name : name_of(here.parent) + " / " + here.name;
  }

 private:
  using Worklist =
      c10::SmallVector<OperationId, 16>;  // no recursion: chains are as long as networks are deep

  /// An operation becomes live: it needs what it reads, and so may the producers of that.
  void wake(OperationId first) {
    Worklist todo{first};
    while (!todo.empty()) {
      Operation& operation = operations[static_cast<std::size_t>(todo.pop_back_val())];
      if (operation.is_live) continue;
      operation.is_live = true;
      for_each_read(operation, [&](ValueId id) {
        Value& value = values[static_cast<std::size_t>(id)];
        if (value.need++ == 0 && !is_held(value) && value.producer != none)
          todo.push_back(value.producer);
      });
    }
  }

  /// An operation may have lost its last wanted result: then it rests, and what only it needed
  /// goes.
  void settle(OperationId first) {
    Worklist todo{first};
    while (!todo.empty()) {
      Operation& operation = operations[static_cast<std::size_t>(todo.pop_back_val())];
      if (!operation.is_live || has_wanted_result(operation)) continue;
      operation.is_live = false;
      for_each_read(operation, [&](ValueId id) {
        if (lose_reader(id)) todo.push_back(values[static_cast<std::size_t>(id)].producer);
      });
    }
  }

  /// True if it was the last one and a producer may rest.
  bool lose_reader(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (--value.need > 0) return false;
    // Before the tape is sealed a later operation may still read what is there, unless it can be
    // made again.
    if (value.held && (is_sealed || value.is_recomputed)) release(id);
    return value.producer != none;
  }

  bool has_wanted_result(const Operation& operation) const {
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const Value& value =
          values[static_cast<std::size_t>(results[operation.first_result + i].value)];
      if (value.need > 0 && !is_held(value)) return true;
    }
    return false;
  }

  template <class Visit>
  void for_each_read(const Operation& operation, Visit visit) {
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = uses[operation.first_use + i];
      if (use.needs_content) visit(use.value);
    }
  }

  void release(ValueId id) {
    Value& value = values[static_cast<std::size_t>(id)];
    if (value.is_watched)
      write_watch().leave(value.held.unsafeGetStorageImpl(), weak_from_this(), id);
    value.is_watched = value.is_shared = value.is_revocable = value.is_recomputed = false;
    value.held = c10::Storage();
  }

  ska::flat_hash_map<const c10::StorageImpl*, ValueId> current_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> identities_;
};

}  // namespace remat::detail

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace remat::detail {

using SavedTensorHooks = torch::autograd::SavedVariableHooks;

/// The autograd engine of the process with one thing added: it asks `source` for saved-tensor hooks
/// first.
///
/// LibTorch's own default hooks exist in Python only. Everything else, execution above all, goes to
/// the engine that was there before (in a Python process Python's), so that its hooks, anomaly mode
/// and threads keep working. Never destroyed.
class HookEngine final : public torch::autograd::Engine {
 public:
  using Source = std::unique_ptr<SavedTensorHooks> (*)(bool& handled);
  using NodePtr =
      decltype(torch::autograd::Edge::function);  // shared_ptr up to 2.8, intrusive_ptr later

  HookEngine(torch::autograd::Engine& previous, Source source)
      : previous_(previous), source_(source) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return previous_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePtr root,
      torch::autograd::InputBuffer&& buffer) override {
    return previous_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return previous_.make_anomaly_metadata();
  }
  std::unique_ptr<SavedTensorHooks> get_default_saved_variable_hooks() override {
    bool handled = false;
    auto hooks = source_(handled);
    return handled ? std::move(hooks) : previous_.get_default_saved_variable_hooks();
  }

 private:
  torch::autograd::Engine& previous_;
  Source source_;
};

/// What the running backward pass does with its graph, seen from inside an unpack.
enum class BackwardPass { outside, releases_graph, keeps_graph };

inline BackwardPass current_backward_pass() {
  using namespace torch::autograd;
  // The map's address is no identity (it repeats between passes), but it is null exactly outside of
  // a backward pass.
  if (get_current_graph_task_exec_info() == nullptr) return BackwardPass::outside;
  return get_current_graph_task_keep_graph() ? BackwardPass::keeps_graph
                                             : BackwardPass::releases_graph;
}

/// Ties `token` to the running backward pass: it is released when the pass ends, by success or by
/// an exception.
inline void attach_to_backward_pass(std::shared_ptr<void> token) {
  torch::autograd::Engine::get_default_engine().queue_callback([token = std::move(token)] {});
}

}  // namespace remat::detail

#include <atomic>
#include <cstdlib>

namespace remat {

/// Whether checkpointing works in this process, and why not if it does not.
struct EngineStatus {
  bool is_available = false;
  std::string reason;  ///< empty when available
};

/// Writes "checkpointing works", or why it does not.
inline std::ostream& operator<<(std::ostream& stream, const EngineStatus& status) {
  return status.is_available ? stream << "checkpointing works"
                             : stream << "checkpointing is off: " << status.reason;
}

/// Counts over the whole process since the start or the last `reset_statistics()`.
struct Statistics {
  std::int64_t regions = 0;
  std::int64_t recorded_operations = 0;
  std::int64_t recomputed_operations = 0;
};

namespace detail {

/// What a thread's recorder and hooks work on.
struct REMAT_VISIBLE ThreadState {
  std::shared_ptr<Tape> tape;  // of the outermost region that is open on this thread
  bool is_plain = false;       // within `plain`: results are kept, nothing is recorded
  bool is_probing = false;     // `hooks_arrive` asks whether the hook engine is still installed
  bool probe_arrived = false;
};

/// The engine's state, one object for all libraries of a process that contain this header: with
/// default visibility the linker and the loader make one of it even under -fvisibility=hidden. Its
/// name carries the layout's version, so that libraries with different layouts do not meet here;
/// the second one then finds the dispatch key taken and stays off.
struct REMAT_VISIBLE ProcessStateLayout1 {
  std::mutex mutex;
  std::atomic<HookEngine*> hook_engine{nullptr};
  std::atomic<bool> is_registered{false};
  std::atomic<bool> is_refused{false};  // set after `refusal`
  std::string refusal;
  std::atomic<std::int64_t> regions{0}, recorded{0}, recomputed{0};
  std::atomic<bool> is_debug{std::getenv("REMAT_DEBUG") != nullptr};
  std::atomic<bool> keeps_statistics{true};  // small side results such as a batch norm's mean;
                                             // tests switch it off to drop everything
};

REMAT_VISIBLE inline ProcessStateLayout1& process_state() {
  static auto* state = new ProcessStateLayout1;
  return *state;
}

REMAT_VISIBLE inline ThreadState& thread_state() {
  static thread_local ThreadState state;
  return state;
}

}  // namespace detail

/// Returns the counts of regions and operations so far.
inline Statistics statistics() {
  const auto& state = detail::process_state();
  return {state.regions, state.recorded, state.recomputed};
}

/// Sets all counts to 0.
inline void reset_statistics() {
  auto& state = detail::process_state();
  state.regions = state.recorded = state.recomputed = 0;
}

/// Switches the debug mode: regions remember a digest of every value that they drop, and backward
/// compares what it recomputed.
///
/// It finds what no tape can see, a write through a raw pointer, and names operation and value.
/// Costs a pass over each value. The environment variable REMAT_DEBUG switches it on from the
/// start.
inline void set_debug(bool enabled) { detail::process_state().is_debug = enabled; }

/// Declares that the operator `name` ("mylib::gelu") computes its results from its arguments alone,
/// so that it may be recomputed.
///
/// Operators outside `aten` are kept otherwise. Never declare one that communicates, or that reads
/// or writes anything but its arguments.
inline void allow_recompute(std::string name) {
  detail::recomputable_operators().allow(std::move(name));
}

}  // namespace remat

// First, for Clang: see libtorch/tensor.hpp.

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace remat::detail {

/// Receives each allocation and release that LibTorch's allocators report on the thread it was set
/// on, and on the threads of backward passes that are started there; and when a recompute, or the
/// forward of a unit, begins and ends there.
class REMAT_VISIBLE AllocationListener : public c10::MemoryReportingInfoBase {
 public:
  /// @param block  the memory; it may be null where an allocator does not say
  /// @param bytes  negative for a release
  virtual void changed(const void* block, std::int64_t bytes, c10::Device device) = 0;

  virtual void recompute_begins() {}
  /// @param operation_count  how many ran again; 0 if one of them failed
  virtual void recompute_ended(std::int64_t /*operation_count*/) {}

  /// Says that a unit of a chain, or a checkpointed module, is called; they nest.
  ///
  /// @param module  the `torch::nn::Module`, to be told from others
  virtual void unit_begins(const void* /*module*/) {}
  virtual void unit_ended() {}

  // The signature differs between versions; the one that matches overrides, and `override` would
  // refuse the other.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  virtual void reportMemoryUsage(void* block, std::int64_t bytes, std::int64_t, std::int64_t,
                                 c10::Device device) {
    changed(block, bytes, device);
  }
  virtual void reportMemoryUsage(void* block, std::int64_t bytes, std::size_t, std::size_t,
                                 c10::Device device) {
    changed(block, bytes, device);
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif
  bool memoryProfilingEnabled() const override { return true; }
};

/// The listener that is set on this thread; null if there is none, or a profiler took its place.
inline AllocationListener* allocation_listener() {
  return dynamic_cast<AllocationListener*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
}

/// Sets a listener for the life of the guard. It takes the profiler's place: the inner one wins.
class AllocationListenerGuard {
 public:
  explicit AllocationListenerGuard(std::shared_ptr<AllocationListener> listener)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(listener)) {}

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Shows whoever listens to allocations where a recompute begins and ends.
struct RecomputeMark {
  RecomputeMark() {
    if (listener != nullptr) listener->recompute_begins();
  }
  ~RecomputeMark() {
    if (listener != nullptr) listener->recompute_ended(operation_count);
  }
  RecomputeMark(const RecomputeMark&) = delete;
  RecomputeMark& operator=(const RecomputeMark&) = delete;

  AllocationListener* listener = allocation_listener();
  std::int64_t operation_count = 0;
};

/// Runs the operations that one dropped value needs, and nothing else.
///
/// A slice is a transaction. What it computes lives in its own table and moves to the tape only
/// after the last operation has succeeded, so that an exception (memory exhausted, a parameter that
/// was changed) leaves the tape as it was.
///
/// Regions nest on one tape. When a saved tensor of region R needs an operation of a region that is
/// neither R nor around R, that run is temporary: of its results only those stay that leave the
/// region, for the region's own backward part comes later and will run it again. So a chain of
/// chains costs one more run per level and the memory of one inner segment. A plan does the same
/// value by value: what it calls transient stays only behind the slice that is run for it.
class Slice {
 public:
  Slice(Tape& tape, ValueId target, RegionId for_region)
      : tape_(tape), target_(target), for_region_(for_region) {}

  c10::Storage run(bool lends) {
    collect();
    {
      RecomputeMark mark;
      c10::impl::ExcludeDispatchKeyGuard below(keys_above_recompute());
      // Kernels below autograd read grad mode (oneDNN's LSTM returns no workspace without it), and
      // only operations that ran with it on are recorded. No graph arises: autograd's keys are
      // excluded.
      at::AutoGradMode as_recorded(true);
      const ThreadCountGuard threads(tape_.thread_count);
      for (const OperationId id : order_)
        run_operation(tape_.operations[static_cast<std::size_t>(id)]);
      mark.operation_count = static_cast<std::int64_t>(order_.size());
    }
    process_state().recomputed += static_cast<std::int64_t>(order_.size());
    return commit(lends);
  }

 private:
  struct Made {
    c10::Storage storage;
    std::int32_t readers = 0;          // operations of this slice that still have to read it
    std::int32_t resting_readers = 0;  // those of them that will not run again
    bool stays = false;
  };

  Value& value(ValueId id) { return tape_.values[static_cast<std::size_t>(id)]; }

  void collect() {
    std::vector<ValueId> todo{target_};
    ska::flat_hash_map<OperationId, bool> seen;
    while (!todo.empty()) {
      const ValueId id = todo.back();
      todo.pop_back();
      if (is_available(id)) continue;
      const OperationId producer = value(id).producer;
      if (producer == none) throw lost(id);
      if (!seen.emplace(producer, true).second) continue;
      order_.push_back(producer);
      const Operation& operation = tape_.operations[static_cast<std::size_t>(producer)];
      for (std::size_t i = 0; i < operation.use_count; ++i) {
        const Use& use = tape_.uses[operation.first_use + i];
        if (use.needs_content) todo.push_back(use.value);
      }
    }
    std::sort(order_.begin(), order_.end());  // recorded order is a topological one

    for (const OperationId id : order_)
      for_each_missing_read(id, [this](ValueId read) { ++made_[read].readers; });
    made_[target_].stays = true;
    for (auto id = order_.rbegin(); id != order_.rend(); ++id)
      if (plan_stay(tape_.operations[static_cast<std::size_t>(*id)]))
        for_each_missing_read(*id, [this](ValueId read) { ++made_[read].resting_readers; });
  }

  template <class Visit>
  void for_each_missing_read(OperationId id, Visit visit) {
    const Operation& operation = tape_.operations[static_cast<std::size_t>(id)];
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape_.uses[operation.first_use + i];
      if (use.needs_content && !is_available(use.value)) visit(use.value);
    }
  }

  /// Decides which results stay behind the slice, once that is known of whatever reads them; true
  /// if the operation need not run again after it.
  bool plan_stay(const Operation& operation) {
    bool rests = true;
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const ValueId id = tape_.results[operation.first_result + i].value;
      if (id == target_ || !is_wanted_afterwards(id)) continue;
      if (may_stay(operation, value(id)))
        made_[id].stays = true;
      else
        rests = false;
    }
    return rests;
  }

  bool is_wanted_afterwards(ValueId id) {
    if (value(id).need == 0 || is_available(id)) return false;
    const auto found = made_.find(id);
    return found == made_.end() || value(id).need > found->second.resting_readers;
  }

  /// Neither transient by a plan nor an inner part of a temporary run.
  bool may_stay(const Operation& operation, const Value& made) const {
    if (made.is_transient) return false;
    const int shared_depth = tape_.depth(tape_.common_ancestor(operation.region, for_region_));
    return tape_.depth(made.scope) <= shared_depth || made.kept_from_depth <= shared_depth + 1;
  }

  bool is_available(ValueId id) {
    Value& there = value(id);
    if (there.lent) return true;
    if (!there.held) return false;
    return !there.is_revocable || is_unchanged(id);
  }

  bool is_unchanged(ValueId id) {
    const auto found = tape_.revocable.find(id);
    return found != tape_.revocable.end() && found->second.version.is_unchanged() &&
           found->second.digest == digest_of(value(id).held);
  }

  /// The bytes that a use reads, and a private copy of them if the operation writes there.
  c10::Storage content_for(const Operation& operation, const Use& use) {
    if (!use.needs_content)
      return use.is_written ? uninitialised_storage(value(use.value).nbytes, use.device)
                            : empty_storage(use.device);
    const auto found = made_.find(use.value);
    if (found != made_.end() && found->second.storage) {
      Made& made = found->second;
      const bool is_last = --made.readers == 0 && !made.stays;
      c10::Storage content = is_last ? std::move(made.storage) : made.storage;
      if (is_last) made.storage = c10::Storage();
      return use.is_written && content.use_count() > 1 ? copy_of(content) : content;
    }
    const Value& there = value(use.value);
    if (!there.lent && there.is_shared && !there.is_revocable) check_unchanged(operation, use);
    const c10::Storage& content = there.lent ? there.lent : there.held;
    return use.is_written ? copy_of(content) : content;
  }

  void skip_read(ValueId id) {
    const auto found = made_.find(id);
    if (found != made_.end() && found->second.storage && --found->second.readers == 0 &&
        !found->second.stays)
      found->second.storage = c10::Storage();
  }

  static c10::Storage empty_storage(c10::Device device) { return uninitialised_storage(0, device); }

  void check_unchanged(const Operation& operation, const Use& use) {
    const Value& there = value(use.value);
    const std::uint32_t now = use.version.now();
    if (use.version.is_unchanged() &&
        (use.digest == 0 || use.digest == digest_of(there.held, use.geometry)))
      return;
    ErrorMessage message("remat.recompute.changed");
    message.where("checkpoint \"" + tape_.name_of(operation.region) + "\"")
        .what("the tensor " + describe(use.geometry, use.device) + ", which " +
              operation.traits->name + " (argument " + std::to_string(use.argument) +
              ") needs again, has been modified by an inplace operation: it was at version " +
              std::to_string(use.version.number) + " in forward and is at version " +
              std::to_string(now) + " now" +
              (use.version.is_unchanged() ? ", with another content" : ""))
        .cause(
            "something wrote into it between forward and backward, for example an optimizer step")
        .cure(
            "Step the optimizer after backward, give the region a clone, or exempt the layer with "
            "remat::plain");
    throw RecomputeError(message);
  }

  using WrittenContents =
      c10::SmallVector<std::pair<std::int32_t, c10::Storage>, 2>;  // use and private copy

  /// Puts the tensors of one argument, those of uses `first` and on, into the stack; returns the
  /// next argument's first use.
  std::size_t put_argument(const Operation& operation, std::size_t first,
                           const WrittenContents& written, Stack& stack) {
    const Use& use = tape_.uses[operation.first_use + first];
    c10::IValue& argument = stack[use.argument];
    if (use.position == none) {
      argument = tensor_for(operation, use, written);
      return first + 1;
    }
    const bool is_optional = argument.isOptionalTensorList();
    auto list = is_optional ? c10::List<at::Tensor>() : argument.toTensorList().copy();
    auto optional_list =
        is_optional ? argument.to<c10::List<OptionalTensor>>().copy() : c10::List<OptionalTensor>();
    std::size_t i = first;
    for (; i < operation.use_count; ++i) {
      const Use& element = tape_.uses[operation.first_use + i];
      if (element.argument != use.argument) break;
      at::Tensor tensor = tensor_for(operation, element, written);
      if (is_optional)
        optional_list.set(static_cast<std::size_t>(element.position),
                          OptionalTensor(std::move(tensor)));
      else
        list.set(static_cast<std::size_t>(element.position), std::move(tensor));
    }
    if (is_optional)
      argument = optional_list;
    else
      argument = list;
    return i;
  }

  /// The private copy that a use shares with a written one, since they shared memory in forward;
  /// null if it has none.
  const c10::Storage* find_written(const Operation& operation, const Use& use,
                                   const WrittenContents& written) const {
    for (const auto& [index, content] : written)
      if (tape_.uses[operation.first_use + static_cast<std::size_t>(index)].value == use.value)
        return &content;
    return nullptr;
  }

  at::Tensor tensor_for(const Operation& operation, const Use& use,
                        const WrittenContents& written) {
    const c10::Storage* shared = find_written(operation, use, written);
    if (shared == nullptr) return tensor_over(content_for(operation, use), use.geometry);
    if (!use.is_written && use.needs_content) skip_read(use.value);
    return tensor_over(*shared, use.geometry);
  }

  void run_operation(Operation& operation) {
    Stack stack;
    stack.reserve(operation.traits->argument_count);
    for (std::size_t i = 0; i < operation.traits->argument_count; ++i)
      stack.push_back(tape_.arguments[operation.first_argument + i]);

    WrittenContents written;
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape_.uses[operation.first_use + i];
      if (use.is_written && find_written(operation, use, written) == nullptr)
        written.emplace_back(static_cast<std::int32_t>(i), content_for(operation, use));
      else if (use.is_written && use.needs_content)
        skip_read(use.value);
    }
    for (std::size_t i = 0; i < operation.use_count;)
      i = put_argument(operation, i, written, stack);
    const auto call = [&] { operation.handle.callBoxed(&stack); };
    if (operation.random)
      draw_again(*operation.random, generator_argument(operation, stack), call);
    else
      call();
    std::vector<at::Tensor> list;  // of the return that was unpacked last
    std::int32_t unpacked = none;
    for (std::size_t i = 0; i < operation.result_count; ++i) {
      const Result& result = tape_.results[operation.first_result + i];
      const auto found = made_.find(result.value);
      if (found == made_.end() || (found->second.readers == 0 && !found->second.stays)) continue;
      c10::Storage storage;
      if (result.index != none) {
        const c10::IValue& returned = stack[static_cast<std::size_t>(result.index)];
        if (result.position != none && unpacked != result.index)
          list = returned.toTensorVector(), unpacked = result.index;
        storage = result.position == none
                      ? returned.toTensor().storage()
                      : list[static_cast<std::size_t>(result.position)].storage();
      } else {
        for (auto& [use, content] : written)
          if (use == result.use) storage = content;
      }
      check_same(operation, result.value, storage);
      found->second.storage = std::move(storage);
    }
  }

  static c10::IValue* generator_argument(const Operation& operation, Stack& stack) {
    const int index = operation.traits->generator_argument;
    return index < 0 ? nullptr : &stack[static_cast<std::size_t>(index)];
  }

  void check_same(const Operation& operation, ValueId id, const c10::Storage& storage) {
    const Value& expected = value(id);
    const bool has_size = static_cast<std::int64_t>(storage.nbytes()) == expected.nbytes;
    if (has_size && (expected.digest == 0 || expected.digest == digest_of(storage, true))) return;
    ErrorMessage message("remat.recompute.differs");
    message.where("checkpoint \"" + tape_.name_of(operation.region) + "\"")
        .what(operation.traits->name + " gave " +
              (has_size ? "another content" : std::to_string(storage.nbytes()) + " bytes") +
              " when it was recomputed, " +
              (has_size ? "digests differ"
                        : "and " + std::to_string(expected.nbytes) + " in forward"))
        .cause(
            "the operation does not depend on its arguments alone, or its result was written "
            "through a raw pointer in forward")
        .cure("Exempt the layer with remat::plain");
    throw RecomputeError(message);
  }

  RecomputeError lost(ValueId id) {
    ErrorMessage message("remat.recompute.lost");
    message.where("checkpoint \"" + tape_.name_of(value(id).scope) + "\"")
        .what("a content of " + std::to_string(value(id).nbytes) +
              " bytes that backward needs is gone")
        .cause("a defect of remat")
        .cure("Please report it; exempting the layer with remat::plain avoids it");
    return RecomputeError(message);
  }

  c10::Storage commit(bool lends) {
    c10::Storage wanted = made_[target_].storage;
    for (auto& [id, made] : made_) {
      if (!made.stays || !made.storage) continue;
      if (lends) {
        value(id).lent = std::move(made.storage);
        tape_.lent.push_back(id);
      } else {
        value(id).is_recomputed = true;
        tape_.set_held(id, std::move(made.storage));
      }
    }
    return wanted;
  }

  Tape& tape_;
  ValueId target_;
  RegionId for_region_;
  std::vector<OperationId> order_;
  ska::flat_hash_map<ValueId, Made> made_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Takes back what a backward pass that keeps its graph was lent; runs when that pass ends, however
/// it ends.
class LentUntil {
 public:
  explicit LentUntil(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}
  LentUntil(const LentUntil&) = delete;
  LentUntil& operator=(const LentUntil&) = delete;
  ~LentUntil() {
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    take_back(*tape_);
  }
  static void take_back(Tape& tape) {
    for (const ValueId id : tape.lent)
      tape.values[static_cast<std::size_t>(id)].lent = c10::Storage();
    tape.lent.clear();
  }

 private:
  std::shared_ptr<Tape> tape_;
};

/// The content of a value for a saved tensor of `region`; recomputes it if it was dropped. The tape
/// is locked by the caller.
inline c10::Storage materialise(Tape& tape, ValueId id, RegionId region) {
  Value& value = tape.values[static_cast<std::size_t>(id)];
  if (value.lent) return value.lent;
  if (value.held) return value.held;

  const BackwardPass pass = current_backward_pass();
  if (pass == BackwardPass::keeps_graph && tape.lent_until.expired()) {
    auto token = std::make_shared<LentUntil>(tape.shared_from_this());
    tape.lent_until = token;
    attach_to_backward_pass(std::move(token));
  }
  c10::Storage content = Slice(tape, id, region).run(pass != BackwardPass::releases_graph);
  if (pass == BackwardPass::outside) LentUntil::take_back(tape);
  return content;
}

}  // namespace remat::detail

namespace remat::detail {

/// What an operation made: values, and the storages that they are in.
using MadeValues = c10::SmallVector<std::pair<ValueId, c10::Storage>, 4>;

/// Watches a tape while a step is recorded and run backward, see `StepObserver`. All calls come
/// with the tape's mutex held, except `operation_begins`.
class REMAT_VISIBLE TapeObserver {
 public:
  virtual ~TapeObserver() = default;

  /// An operation that will be recorded is about to run its kernel.
  virtual void operation_begins(Tape& tape) = 0;
  virtual void operation_ended(Tape& tape, OperationId id, const MadeValues& made) = 0;
  /// A layer of a chain begins with a value; none: it came from outside.
  virtual void layer_begins(Tape& tape, ValueId id) = 0;
  /// A layer of a chain ended in a value, which is held from now on, or was before.
  virtual void kept(Tape& tape, ValueId id) = 0;
  /// Autograd saved a value that the region made.
  virtual void saved(Tape& tape, ValueId id) = 0;
  /// Backward wants a saved value; what is missing of it will be recomputed after this call.
  virtual void asked(Tape& tape, ValueId id) = 0;
  /// A saved value is about to lose one of those who wait for it.
  virtual void released(Tape& tape, ValueId id) = 0;
  /// The outermost region has ended; what nothing needs is released after this call.
  virtual void ended(Tape& tape) = 0;
};

}  // namespace remat::detail

namespace remat::detail {

/// A tensor that autograd saved inside a region.
///
/// If the region made it, only the geometry is kept and unpacking asks the tape. Otherwise (inputs,
/// parameters, buffers, what was made unseen) it is what plain autograd keeps: the same memory,
/// with the same check of its version.
class SavedTensor final : public SavedTensorHooks {
 public:
  explicit SavedTensor(std::shared_ptr<Tape> tape) : tape_(std::move(tape)) {}

  SavedTensor(const SavedTensor&) = delete;
  SavedTensor& operator=(const SavedTensor&) = delete;

  ~SavedTensor() override {
    if (value_ == none) return;
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    leave_recent();
    lose();
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = Version::of(tensor);
    if (!has_plain_storage(tensor)) {
      c10::impl::ExcludeDispatchKeyGuard unrecorded(recorder_key);
      opaque_ = tensor.detach();
      return;
    }
    geometry_ = Geometry::of(tensor);
    device_ = tensor.device();

    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    const ValueId id = tape_->current(tensor, version_.number);
    region_ = tape_->region;
    ++tape_->saved_count;
    if (id == none || tape_->values[static_cast<std::size_t>(id)].producer == none) {
      memory_ = tensor.storage();
      tape_->recent_memory.push_back(memory_.unsafeGetStorageImpl());
      const at::Tensor base =
          tensor.is_view() ? at::Tensor(tensor._base()) : tensor;  // linear saves weight.t()
      is_parameter_ = base.is_leaf() && base.requires_grad();
      if (is_parameter_) digest_ = digest_of(memory_, geometry_);
      return;
    }
    bind(id);
    tape_->recent.push_back(this);
  }

  at::Tensor call_unpack_hook() override {
    if (!version_.is_unchanged()) throw changed();
    if (opaque_.defined()) return opaque_;
    c10::Storage storage = memory_;
    if (!storage) {
      std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
      if (tape_->observer) tape_->observer->asked(*tape_, value_);
      storage = materialise(*tape_, value_, region_);
    } else if (digest_ != 0 && digest_ != digest_of(storage, geometry_)) {
      throw changed();
    }
    at::Tensor tensor = tensor_over(storage, geometry_);
    // Shared with the original, so that a graph of gradients notices later changes as in plain.
    if (version_.counter.enabled())
      tensor.unsafeGetTensorImpl()->set_version_counter(version_.counter);
    return tensor;
  }

  ValueId value() const { return value_; }

  /// The operation that saved this tensor has also written it: refer to what it holds afterwards.
  void rebind(ValueId id) {
    lose();
    bind(id);
  }

  /// As `rebind`, but the new content is external: hold the memory.
  void rebind(const c10::Storage& memory) {
    lose();
    value_ = none;
    memory_ = memory;
  }

 private:
  void bind(ValueId id) {
    value_ = id;
    Value& value = tape_->values[static_cast<std::size_t>(id)];
    value.is_saved = true;
    tape_->add_need(id);
    tape_->widen_scope(id, region_);
    count_cost(value);
    if (tape_->observer) tape_->observer->saved(*tape_, id);
  }

  void lose() {
    if (tape_->observer) tape_->observer->released(*tape_, value_);
    tape_->remove_need(value_);
  }

  /// A unit's cost is what it would have saved and does not, and what a policy keeps of it.
  void count_cost(Value& value) {
    if (value.is_counted) return;
    value.is_counted = true;
    for (RegionId id = region_; id != none;
         id = tape_->regions[static_cast<std::size_t>(id)].parent) {
      auto* costs = tape_->regions[static_cast<std::size_t>(id)].unit_costs;
      if (costs == nullptr || costs->empty()) continue;
      (value.held ? costs->back().kept : costs->back().saved) += Bytes{value.nbytes};
    }
  }

  void leave_recent() {
    auto& recent = tape_->recent;
    recent.erase(std::remove(recent.begin(), recent.end(), this), recent.end());
  }

  RecomputeError changed() const {
    ErrorMessage message("remat.recompute.saved_tensor_changed");
    message.where("checkpoint \"" + tape_->name_of(region_) + "\"")
        .what((is_parameter_ ? "the parameter " : "the saved tensor ") +
              describe(geometry_, device_) +
              ", needed for gradient computation, has been modified by an inplace operation: it "
              "was at version " +
              std::to_string(version_.number) + " in forward and is at version " +
              std::to_string(version_.now()) + " now")
        .cause(
            "it was edited between the operation that saved it and backward, for example by an "
            "optimizer step or an in-place operation")
        .cure("Edit it after backward, or give the region a clone of it");
    return RecomputeError(message);
  }

  std::shared_ptr<Tape> tape_;
  Geometry geometry_;
  Version version_;
  c10::Storage memory_;
  at::Tensor opaque_;
  std::uint64_t digest_ = 0;
  ValueId value_ = none;  // none: `memory_` or `opaque_` has it
  RegionId region_ = none;
  c10::Device device_{c10::kCPU};
  bool is_parameter_ = false;
};

}  // namespace remat::detail

#include <chrono>

namespace remat::detail {

/// Notes one operation of a region while it runs: before, what it reads and will write; after, what
/// it made.
class Recorder {
 public:
  Recorder(Tape& tape, const OperatorHandle& handle, const OperatorTraits& traits,
           c10::DispatchKeySet keys, Stack& stack)
      : tape_(tape), handle_(handle), traits_(traits), call_(handle, traits, keys, stack) {}

  void run() {
    if (is_recordable())
      record();
    else
      run_unrecorded();
  }

 private:
  using Written = Call::Written;

  Value& value(ValueId id) { return tape_.values[static_cast<std::size_t>(id)]; }

  bool holds_borrowed() {
    if (call_.borrowed.empty()) return true;
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    return std::all_of(
        call_.borrowed.begin(), call_.borrowed.end(), [this](const c10::StorageImpl* storage) {
          return std::find(tape_.recent_memory.begin(), tape_.recent_memory.end(), storage) !=
                 tape_.recent_memory.end();
        });
  }

  bool is_recordable() {
    if (!at::GradMode::is_enabled() || thread_state().is_plain || call_.has_opaque ||
        !call_.has_tensor || traits_.is_factory)
      return false;
    if (!traits_.is_recordable() || !holds_borrowed()) return false;
    if (traits_.is_nondeterministic && call_.device && call_.device->type() != c10::kCPU &&
        !at::globalContext().deterministicAlgorithms())
      return false;
    if (traits_.makes_tensors) return true;
    // It only writes: worth a record if it changes something that this region made.
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : call_.written)
      if (is_made_here(written)) return true;
    return false;
  }

  /// Made by a recorded operation, or by a factory of this region and about to be overwritten from
  /// end to end.
  bool is_made_here(const Written& written) {
    const ValueId id = tape_.current(storage_of(written.tensor));
    return id != none && (value(id).producer != none || (value(id).is_fresh && !written.is_read));
  }

  // --- operations that are not recorded ---

  /// What it writes and makes is external from its next use on, and costs nothing if there is none.
  void run_unrecorded() {
    for (const Written& written : call_.written) save_content_of(written.tensor);
    call_.run();
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    for (const Written& written : call_.written) {
      rebind_recent(written.tensor, none);
      tape_.forget(storage_of(written.tensor));
    }
    for_each_made([&](const at::Tensor& tensor, std::int32_t, std::int32_t) {
      tape_.forget(storage_of(tensor));
      // Content may come later, by a filler that the recorder sees or through a raw pointer that it
      // does not.
      if (traits_.is_factory && at::GradMode::is_enabled() && !thread_state().is_plain)
        value(tape_.define(tensor, none)).is_fresh = true;
    });
    tape_.forget_recent();
  }

  /// A write is coming: whoever needs the content as it is now gets a copy, or lets go of what it
  /// can make again.
  void save_content_of(const at::Tensor& tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    {
      std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
      const ValueId id = tape_.current(storage);
      const bool is_made_here = id != none && (value(id).producer != none || value(id).is_fresh);
      if (tape_.before_write && !is_made_here) tape_.before_write(tensor);
      if (id != none) tape_.let_go(id);
    }
    c10::Storage snapshot;
    for (const WriteWatch::Entry& entry : write_watch().find(storage)) {
      const std::shared_ptr<Tape> tape = entry.tape.lock();
      if (!tape) continue;
      std::lock_guard<std::recursive_mutex> lock(tape->mutex);
      if (!tape->values[static_cast<std::size_t>(entry.value)].is_watched) continue;
      if (!snapshot) snapshot = copy_of(tensor.storage());
      tape->replace_by_snapshot(entry.value, snapshot);
    }
  }

  void rebind_recent(const at::Tensor& tensor, ValueId now) {
    const ValueId before = tape_.current(storage_of(tensor));
    if (before == none) return;
    for (SavedTensor* saved : tape_.recent) {
      if (saved->value() != before) continue;
      if (now != none)
        saved->rebind(now);
      else
        saved->rebind(tensor.storage());
    }
  }

  /// Calls `visit(tensor, return index, list position)` for each returned tensor with a storage of
  /// its own.
  template <class Visit>
  void for_each_made(Visit visit) {
    for (std::size_t i = 0; i < traits_.returns.size(); ++i) {
      if (!traits_.returns[i].is_tensor || traits_.returns[i].is_alias) continue;
      Call::for_each_tensor(call_.returned(i), traits_.returns[i].kind,
                            [&](const at::Tensor& tensor, std::int32_t position) {
                              // Some operations return an argument's storage although their schema
                              // does not say so.
                              if (has_plain_storage(tensor) && !call_.is_source(storage_of(tensor)))
                                visit(tensor, static_cast<std::int32_t>(i), position);
                            });
    }
  }

  // --- operations that are recorded ---

  void record() {
    note_uses();
    for (const Written& written : call_.written) save_content_of(written.tensor);
    std::unique_ptr<RandomState> random =
        traits_.is_random ? std::make_unique<RandomState>() : nullptr;

    if (tape_.observer) tape_.observer->operation_begins(tape_);
    const auto start = tape_.measures_time ? std::chrono::steady_clock::now()
                                           : std::chrono::steady_clock::time_point{};
    if (random)
      draw(*random);
    else
      call_.run();
    const float seconds =
        tape_.measures_time
            ? std::chrono::duration<float>(std::chrono::steady_clock::now() - start).count()
            : 0;

    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    const auto id = static_cast<OperationId>(tape_.operations.size());
    Operation& operation =
        tape_.operations.emplace_back(Operation{handle_, &traits_, std::move(random)});
    operation.seconds = seconds;
    operation.region = tape_.region;
    operation.first_argument = first_argument_;
    operation.first_use = first_use_;
    operation.first_result = tape_.results.size();
    operation.use_count = static_cast<std::uint32_t>(tape_.uses.size() - first_use_);
    define_results(id);
    operation.result_count =
        static_cast<std::uint32_t>(tape_.results.size() - operation.first_result);
    apply_keep_policy(operation);
    if (tape_.observer) tape_.observer->operation_ended(tape_, id, made_);
    tape_.forget_recent();
    ++process_state().recorded;
  }

  /// Notes the arguments, with what their tensors refer to in place of the tensors. If the kernel
  /// throws these notes stay behind without an operation, which does no harm.
  void note_uses() {
    std::lock_guard<std::recursive_mutex> lock(tape_.mutex);
    first_argument_ = tape_.arguments.size();
    first_use_ = tape_.uses.size();
    for (std::size_t i = 0; i < traits_.argument_count; ++i)
      tape_.arguments.push_back(call_.argument(i));
    for (Written& written : call_.written) written.is_external = !is_made_here(written);
    for (const auto& traits : traits_.arguments) {
      c10::IValue& noted = tape_.arguments[first_argument_ + traits.index];
      Call::for_each_tensor(
          call_.argument(traits.index), traits.kind,
          [&](const at::Tensor& tensor, std::int32_t position) {
            const Written* written = call_.find_written(traits.index, position);
            if (written != nullptr && !written->is_read && traits.hidden_write_if != -2)
              return;  // running statistics: recompute without
            Use& use = tape_.uses.emplace_back();
            use.geometry = Geometry::of(tensor);
            use.version = Version::of(tensor);
            use.device = tensor.device();
            use.argument = traits.index;
            use.position = position;
            use.is_written = written != nullptr;
            use.needs_content =
                !traits.is_geometry_only && (written == nullptr || written->is_read);
            use.value =
                use.needs_content ? value_to_read(tensor, use.version) : value_to_overwrite(tensor);
            if (use.needs_content && value(use.value).producer == none)
              use.digest = digest_of(tensor.storage(), use.geometry);
            tape_.widen_scope(use.value, tape_.region);
          });
      strip(noted, traits.kind);
    }
  }

  static void strip(c10::IValue& argument, OperatorTraits::Kind kind) {
    if (argument.isTensor()) {
      argument = at::Tensor();
    } else if (kind == OperatorTraits::Kind::tensor_list && argument.isTensorList()) {
      c10::List<at::Tensor> empty;
      for (std::size_t i = argument.toTensorVector().size(); i > 0; --i)
        empty.push_back(at::Tensor());
      argument = empty;
    } else if (kind == OperatorTraits::Kind::optional_tensor_list &&
               argument.isOptionalTensorList()) {
      c10::List<OptionalTensor> empty;
      for (std::size_t i = argument.toOptionalTensorVector().size(); i > 0; --i)
        empty.push_back(OptionalTensor());
      argument = empty;
    }
  }

  /// The value that a tensor's storage holds. What nobody recorded is external: the storage itself
  /// is held, and watched.
  ValueId value_to_read(const at::Tensor& tensor, const Version& version) {
    ValueId id = tape_.current(tensor, version.number);
    if (id != none && (value(id).producer != none || value(id).held)) {
      note_digest(id, tensor);
      return id;
    }
    if (id == none) id = tape_.define(tensor, none);
    Value& external = value(id);
    external.is_fresh = false;
    external.version = version.number;
    external.held = tensor.storage();
    external.is_shared = true;
    tape_.watch(id);
    return id;
  }

  /// Only the storage's size matters.
  ValueId value_to_overwrite(const at::Tensor& tensor) {
    const ValueId id = tape_.current(storage_of(tensor));
    return id != none ? id : tape_.define(tensor, none);
  }

  /// Debug mode: what a reader sees is what the recompute must bring, whatever happened to it since
  /// it was made.
  void note_digest(ValueId id, const at::Tensor& tensor) {
    Value& read = value(id);
    if (!process_state().is_debug || read.digest != 0 || read.producer == none) return;
    read.digest = digest_of(tensor.storage(), true);
  }

  /// Runs a random operation and notes the state from which it drew.
  void draw(RandomState& random) {
    c10::IValue* given =
        traits_.generator_argument < 0
            ? nullptr
            : &call_.argument(static_cast<std::size_t>(traits_.generator_argument));
    if (given != nullptr && given->isGenerator()) random.generator = given->toGenerator();
    if (!random.generator.defined())
      random.generator = default_generator(call_.device.value_or(c10::Device(c10::kCPU)));
    draw_and_note(random, given, [this] { call_.run(); });
    at::Tensor& last = tape_.last_random_state;
    if (last.defined() && same_state(random.state, last)) random.state = last;
    last = random.state;
  }

  void define_results(OperationId id) {
    for (const Written& written : call_.written) {
      const c10::StorageImpl* storage = storage_of(written.tensor);
      const std::int32_t use = use_of(written);
      const bool has_moved =
          !call_.is_source(storage) ||
          static_cast<std::int64_t>(written.tensor.storage().nbytes()) != written.nbytes;
      if (written.is_external || use == none || has_moved) {
        rebind_recent(written.tensor, none);
        tape_.forget(storage);
        continue;
      }
      const ValueId before = tape_.current(storage);
      if (value(before).producer == id)
        continue;  // another view of the same storage was written too
      const ValueId now = tape_.define(written.tensor, id);
      value(now).is_written = true;
      for (SavedTensor* saved : tape_.recent)
        if (saved->value() == before) saved->rebind(now);
      tape_.results.push_back({now, none, none, use});
      made_.emplace_back(now, written.tensor.storage());
    }
    for_each_made([&](const at::Tensor& tensor, std::int32_t index, std::int32_t position) {
      const ValueId made = tape_.define(tensor, id);
      tape_.results.push_back({made, index, position, none});
      made_.emplace_back(made, tensor.storage());
      largest_made_ = std::max(largest_made_, static_cast<std::int64_t>(tensor.nbytes()));
    });
  }

  std::int32_t use_of(const Written& written) const {
    for (std::size_t i = first_use_; i < tape_.uses.size(); ++i)
      if (tape_.uses[i].argument == written.argument && tape_.uses[i].position == written.position)
        return static_cast<std::int32_t>(i - first_use_);
    return none;
  }

  /// Kept: what the policies of this and all enclosing regions want, and side results that are tiny
  /// beside what they come with: a batch norm's statistics, but not a layer norm's, of which there
  /// are two for each position.
  void apply_keep_policy(const Operation& operation) {
    constexpr std::int64_t tiny_share = 64, tiny_bytes = 16 << 10;
    const bool keeps_statistics = process_state().keeps_statistics;
    const std::int64_t largest = std::max(call_.largest, largest_made_);
    std::size_t index = 0;
    for (auto& [id, storage] : made_) {
      Value& made = value(id);
      made.is_tiny =
          keeps_statistics && made.nbytes <= tiny_bytes && made.nbytes * tiny_share <= largest;
      made.kept_from_depth = made.is_tiny ? 0 : kept_from(made, index);
      ++index;
      if (made.kept_from_depth == 0) {
        made.is_shared = true;
        tape_.set_held(id, storage);
      }
    }
    for (RegionId id = operation.region; id != none;
         id = tape_.regions[static_cast<std::size_t>(id)].parent) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      if (region.keep) ++region.ordinals[&traits_];
    }
  }

  /// The depth from which on every region that encloses the operation keeps the value.
  int kept_from(const Value& made, std::size_t index) {
    RegionId id = tape_.region;
    int depth = tape_.depth(id) + 1;
    for (; id != none; id = tape_.regions[static_cast<std::size_t>(id)].parent, --depth) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      const std::size_t position = tape_.operations.size() - 1 - region.first_operation;
      if (!region.keep || !region.keep({traits_.name, region.ordinals[&traits_],
                                        Bytes{call_.largest}, position, index},
                                       Bytes{made.nbytes}))
        break;
    }
    return depth;
  }

  Tape& tape_;
  const OperatorHandle& handle_;
  const OperatorTraits& traits_;
  Call call_;
  std::size_t first_argument_ = 0;
  std::size_t first_use_ = 0;
  std::int64_t largest_made_ = 0;  // bytes of the largest result
  MadeValues made_;
};

/// The fallback on the recorder's dispatch key.
inline void record_operation(const OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(
      recorder_key);  // what the kernel calls in turn is part of this operation
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  const OperatorTraits& traits = traits_of(handle);
  const bool matters =
      traits.writes || (!traits.is_view && traits.makes_tensors) || traits.repoints;
  if (!tape || !matters)
    handle.redispatchBoxed(below_recorder(keys), stack);
  else
    Recorder(*tape, handle, traits, keys, *stack).run();
}

}  // namespace remat::detail

namespace remat::detail {

/// Where the hook engine gets its hooks: from the tape of the calling thread's region, if one is
/// open.
inline std::unique_ptr<SavedTensorHooks> saved_tensor_hooks(bool& handled) {
  ThreadState& thread = thread_state();
  if (thread.is_probing) {
    thread.probe_arrived = true;
    handled = true;
    return nullptr;
  }
  if (!thread.tape || thread.is_plain) return nullptr;
  handled = true;
  return std::make_unique<SavedTensor>(thread.tape);
}

inline torch::autograd::Engine& installed_hook_engine() { return *process_state().hook_engine; }

/// Whether autograd still asks our engine: libtorch_python, loaded later, installs its own over it.
/// Asking whether the current engine is ours would not do, since it may be wrapped by another one.
inline bool hooks_arrive() {
  ThreadState& thread = thread_state();
  thread.is_probing = true;
  thread.probe_arrived = false;
  torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks();
  thread.is_probing = false;
  return thread.probe_arrived;
}

/// Puts recorder and hooks in place at the first region, and the hooks again when somebody replaced
/// them.
inline bool install_engine() {
  ProcessStateLayout1& state = process_state();
  if (!state.is_refused && state.is_registered && hooks_arrive()) return true;

  std::lock_guard<std::mutex> lock(state.mutex);
  if (state.is_refused) return false;
  if (!state.is_registered) {
    if (!register_recorder<&record_operation>()) {
      state.refusal =
          "the dispatch key that remat records on is taken: this LibTorch uses it, or another "
          "version of remat is loaded";
      state.is_refused = true;
      return false;
    }
    state.is_registered = true;
  }
  if (!hooks_arrive()) {
    // Leaked, like the one it may replace: threads may be inside of either.
    state.hook_engine =
        new HookEngine(torch::autograd::Engine::get_default_engine(), &saved_tensor_hooks);
    torch::autograd::set_default_engine_stub(&installed_hook_engine);
  }
  return true;
}

}  // namespace remat::detail

namespace remat {

/// Returns whether checkpointing works in this process, and the reason if it does not. Regions are
/// plain calls then.
inline EngineStatus engine_status() {
  if (detail::install_engine()) return {true, {}};
  return {false, detail::process_state().refusal};
}

}  // namespace remat

#include <ranges>
#include <tuple>

namespace remat::detail {

template <class Type, class Visit>
concept VisitsItsTensors =
    requires(const Type& value, Visit visit) { visit_tensors(value, visit); };

template <class Type>
concept TupleLike = requires { std::tuple_size<Type>::value; };

template <class Type>
concept OptionalLike = requires(const Type& value) {
  { value.has_value() } -> std::convertible_to<bool>;
  *value;
};

template <class Type>
concept RangeLike = requires(const Type& value) {
  value.begin() != value.end();
  requires !std::is_same_v<std::remove_cvref_t<decltype(*value.begin())>, Type>;
};

/// Calls `visit` for every tensor in a result: bare, or inside optional, vector, list, map, array,
/// pair and tuple, to any depth.
///
/// A user's own struct takes part with `template <class Visit> void visit_tensors(const Mine& mine,
/// Visit visit)` beside it. A type that is not known holds none: its tensors are still right, they
/// are only recomputed where a kept result would have spared that.
template <class Type, class Visit>
void for_each_tensor_in(const Type& value, Visit visit) {
  if constexpr (std::is_base_of_v<at::TensorBase, Type>) {
    visit(value);
  } else if constexpr (VisitsItsTensors<Type, Visit>) {
    visit_tensors(value, visit);
  } else if constexpr (TupleLike<Type>) {
    std::apply([&](const auto&... elements) { (for_each_tensor_in(elements, visit), ...); }, value);
  } else if constexpr (OptionalLike<Type>) {
    if (value.has_value()) for_each_tensor_in(*value, visit);
  } else if constexpr (RangeLike<Type>) {
    for (const auto& element : value) for_each_tensor_in(element, visit);
  }
}

}  // namespace remat::detail

namespace remat::detail {

/// How a region is to be checkpointed.
struct RegionOptions {
  KeepPredicate keep{};                         ///< empty: keep nothing
  std::string name = "checkpoint";              ///< for messages
  std::vector<UnitCost>* unit_costs = nullptr;  ///< filled by unit, see `begin_unit`
  bool measures_time = false;
  bool is_indivisible = false;  ///< regions inside are part of this one, if it is the outermost
  std::shared_ptr<TapeObserver> observer{};  ///< watches the tape, if this region is the outermost
  std::function<void(const at::Tensor&)>
      before_write{};  ///< sees what is about to be written and is from outside, if this region is
                       ///< the outermost
  std::function<void(Tape&)> at_end{};  ///< sees the tape when the region has ended well
};

/// Whether a region that is opened now would do anything: elsewhere it is a plain call.
inline bool records_regions() {
  const std::shared_ptr<Tape>& around = thread_state().tape;
  if (around && around->is_indivisible) return false;
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !thread_state().is_plain && install_engine();
}

/// An open region. The first one on a thread makes a tape; those inside share it.
class RegionScope {
 public:
  explicit RegionScope(const RegionOptions& options) : include_(c10::DispatchKeySet(recorder_key)) {
    ThreadState& thread = thread_state();
    is_outermost_ = !thread.tape;
    if (is_outermost_) thread.tape = std::make_shared<Tape>();
    tape_ = thread.tape;
    if (is_outermost_) {
      tape_->observer = options.observer;
      tape_->before_write = options.before_write;
      tape_->is_indivisible = options.is_indivisible;
    }

    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    parent_ = tape_->region;
    Region& region = tape_->regions.emplace_back();
    region.name = options.name;
    region.parent = parent_;
    region.depth = tape_->depth(parent_) + 1;
    region.first_operation = tape_->operations.size();
    region.first_saved = tape_->saved_count;
    region.keep = options.keep;
    region.unit_costs = options.unit_costs;
    tape_->region = static_cast<RegionId>(tape_->regions.size() - 1);
    tape_->measures_time = tape_->measures_time || options.measures_time;
    ++process_state().regions;
  }

  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;

  ~RegionScope() {
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    Region& region = tape_->regions[static_cast<std::size_t>(tape_->region)];
    region.unit_costs = nullptr;
    region.keep = nullptr;  // what it captured may own what this graph hangs on
    tape_->region = parent_;
    if (!is_outermost_) return;
    if (tape_->observer) tape_->observer->ended(*tape_);
    tape_->before_write = nullptr;
    tape_->seal();
    thread_state().tape.reset();
  }

  /// Keeps a result of the outermost region: its user holds the memory anyway, and what follows it
  /// need not be recomputed for it. The user may edit it, so that it can be recomputed all the
  /// same.
  void keep_result(const at::Tensor& tensor) {
    if (!tensor.defined() || !has_plain_storage(tensor)) return;
    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    const ValueId id = tape_->current(tensor, Version::number_of(tensor));
    if (id == none) return;
    Value& value = tape_->values[static_cast<std::size_t>(id)];
    value.is_result = true;
    if (is_outermost_ && value.producer != none) tape_->hold_revocably(id, tensor);
  }

  Tape& tape() { return *tape_; }

 private:
  std::shared_ptr<Tape> tape_;
  RegionId parent_ = none;
  bool is_outermost_ = false;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// Calls `fn(inputs...)` as a region: what autograd saves in it is let go and recomputed in
/// backward.
template <class Function, class... Inputs>
decltype(auto) run_region(const RegionOptions& options, Function&& fn, Inputs&&... inputs) {
  using ResultType = std::invoke_result_t<Function, Inputs...>;
  if (!records_regions())
    return static_cast<ResultType>(
        std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...));

  RegionScope scope(options);
  if constexpr (std::is_void_v<ResultType>) {
    std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
    if (options.at_end) options.at_end(scope.tape());
  } else {
    ResultType result = std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
    for_each_tensor_in(result, [&](const auto& tensor) { scope.keep_result(tensor); });
    if (options.at_end) options.at_end(scope.tape());
    if constexpr (std::is_reference_v<ResultType>)
      return static_cast<ResultType>(result);
    else
      return result;
  }
}

/// Within a region that measures units: what follows belongs to the next one. The unit's output is
/// the caller's to note.
inline void begin_unit() {
  ThreadState& thread = thread_state();
  if (!thread.tape) return;
  std::lock_guard<std::recursive_mutex> lock(thread.tape->mutex);
  Region& region = thread.tape->regions[static_cast<std::size_t>(thread.tape->region)];
  if (region.unit_costs != nullptr) region.unit_costs->emplace_back();
}

/// While it lives, operations on this thread run as if there were no checkpoint: what they make is
/// kept.
class PlainScope {
 public:
  PlainScope() : before_(std::exchange(thread_state().is_plain, true)) {}
  ~PlainScope() { thread_state().is_plain = before_; }
  PlainScope(const PlainScope&) = delete;
  PlainScope& operator=(const PlainScope&) = delete;

 private:
  bool before_;
};

}  // namespace remat::detail

namespace remat {

/// Runs `fn(inputs...)` and drops the tensors that autograd would save; backward recomputes the
/// operations it needs.
///
/// `fn` runs exactly once. Any callable, any arguments, any result; tensors that `fn` captures get
/// their gradients too.
///
/// @param fn      any callable; tensors it reads may not be edited before backward
/// @param inputs  handed to `fn` as they are
/// @return        exactly what `fn` returns
/// @throws RecomputeError  in backward, if a tensor that it needs was changed in the meantime
/// @par Keeps     the tensors that enter, the results, small side results such as a batch norm's
/// mean, and 5 KiB of random state per
///                random operation on the CPU
/// @par Threads   several threads may run regions, and backward passes over them, at once
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(Function&& fn, Inputs&&... inputs) {
  return detail::run_region(detail::RegionOptions{}, std::forward<Function>(fn),
                            std::forward<Inputs>(inputs)...);
}

/// As `checkpoint(fn, inputs...)`, but keeps the results for which `keep` says so.
///
/// @param keep  `keep::convolutions_and_matmuls{}`, `keep::attention{}`, or a predicate of your own
/// on `(keep::Operation, Bytes)`
template <class Keep, class Function, class... Inputs>
  requires std::predicate<const Keep&, const keep::Operation&, Bytes> &&
           std::invocable<Function, Inputs...>
decltype(auto) checkpoint(Keep keep, Function&& fn, Inputs&&... inputs) {
  detail::RegionOptions options;
  if constexpr (!std::is_same_v<Keep, keep::nothing>) options.keep = std::move(keep);
  return detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// Calls `fn(inputs...)` inside a region as if there were no checkpoint: what it makes is kept. For
/// an operation that does not fit.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) call_plain(Function&& fn, Inputs&&... inputs) {
  const detail::PlainScope scope;
  return std::invoke(std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace remat

namespace remat {

/// How much memory a training step may need: bytes, or a part of what it needs without
/// checkpointing.
///
/// Counted are tensors that the step allocates (saved values, gradients, temporaries), above the
/// level before it, as `MemoryMeter` does; parameters and inputs are there before.
class MemoryBudget {
 public:
  /// @throws ArgumentError  if there is less than one byte
  static MemoryBudget bytes(Bytes count) {
    require(count.count > 0, [&] {
      return ErrorMessage("remat.budget.bytes")
          .where("remat::MemoryBudget::bytes")
          .what("the budget is " + to_string(count) + ", at least 1 byte was expected");
    });
    return MemoryBudget(count, 0);
  }

  /// @param part  above 0; 1 and more is plain
  /// @throws ArgumentError  if `part` is not above 0
  static MemoryBudget fraction_of_plain(double part) {
    require(std::isfinite(part) && part > 0, [&] {
      return ErrorMessage("remat.budget.fraction")
          .where("remat::MemoryBudget::fraction_of_plain")
          .what("the fraction is " + std::to_string(part) + ", a number above 0 was expected")
          .cure("0.5 is half of the peak without checkpointing");
    });
    return MemoryBudget({}, part);
  }

  /// Returns the bytes, for a step that needs `plain_peak` without checkpointing.
  Bytes resolve(Bytes plain_peak) const {
    if (part_ == 0) return bytes_;
    return {static_cast<std::int64_t>(part_ * static_cast<double>(plain_peak.count))};
  }

  /// Returns the part of plain; 0 for a budget in bytes.
  double fraction() const { return part_; }

  friend bool operator==(const MemoryBudget&, const MemoryBudget&) = default;

 private:
  MemoryBudget(Bytes count, double part) : bytes_(count), part_(part) {}

  Bytes bytes_;
  double part_;  // 0: `bytes_` counts
};

}  // namespace remat

#include <iterator>

namespace remat {

/// What one training step did, forward and backward, as plain numbers: enough to say what it would
/// need with other values kept.
///
/// Values, operations and their numbers are those of the region's `Graph`. Memory is told apart in
/// two kinds: that of the values, whose lifetimes depend on what is kept, and all other memory
/// (gradients, temporaries of backward, what ran outside of the region), whose course does not.
struct StepTrace {
  /// No producer, or nothing written over.
  static constexpr std::int32_t kNone = -1;

  /// The content of one storage at one time.
  struct Value {
    std::int64_t bytes = 0;
    std::int32_t producer = kNone;    ///< the operation that made it; none: it came from outside
    std::int32_t takes_over = kNone;  ///< the recorded value over which it was written, in place
    bool is_copied = false;       ///< written over something from outside: a recompute copies that
    bool is_always_kept = false;  ///< a side result so small that it is never recomputed
    bool is_result = false;       ///< what the region returned
  };

  /// One operation, in the order of forward.
  struct Operation {
    std::string name;                 ///< "aten::convolution"
    std::vector<std::int32_t> reads;  ///< values, one entry per argument
    std::vector<std::int32_t> makes;  ///< values
    std::int64_t peak = 0;            ///< bytes above those before it, its results included
    double seconds = 0;
  };

  /// What happened at a point of the step.
  enum class Kind : std::uint8_t {
    ran,       ///< an operation of forward
    let_go,    ///< nobody but the tape holds a value's memory any more
    ended,     ///< the region ended
    saved,     ///< autograd saved a value
    asked,     ///< backward asked for a saved value
    released,  ///< a saved value was released
    done,      ///< the step ended
  };

  /// Something that happened, and the other memory at that time.
  struct Event {
    Kind kind = Kind::done;
    std::int32_t id = kNone;  ///< of the operation or value
    std::int64_t other = 0;   ///< bytes of other memory when it happened
    std::int64_t peak = 0;    ///< most bytes of other memory since the event before
  };

  std::vector<Value> values;
  std::vector<Operation> operations;
  std::vector<Event> events;
  std::int64_t saved_count = 0;  ///< tensors that autograd saved in the region

  /// The values in which the layers of a chain ended, in the order of forward; those of chains
  /// inside layers, too. Empty: no layers are known. A layer that ended outside of the region's
  /// record, as a plain one does, is not in it.
  std::vector<std::int32_t> layer_ends;
  /// The value with which the first of them began; none: it came from outside.
  std::int32_t layers_begin = kNone;

  /// Returns for each value how many saved tensors wait for it when the region has ended.
  std::vector<std::int32_t> saved_counts() const {
    std::vector<std::int32_t> counts(values.size(), 0);
    for (const Event& event : events) {
      if (event.kind == Kind::ended) break;
      if (event.kind == Kind::saved) ++counts[static_cast<std::size_t>(event.id)];
      if (event.kind == Kind::released) --counts[static_cast<std::size_t>(event.id)];
    }
    return counts;
  }

  /// Returns for each value whether another one is written over it.
  std::vector<bool> overwritten_values() const {
    std::vector<bool> is_overwritten(values.size(), false);
    for (const Value& value : values)
      if (value.takes_over != kNone)
        is_overwritten[static_cast<std::size_t>(value.takes_over)] = true;
    return is_overwritten;
  }

  /// Returns for each value whether a plan may keep it: it has memory of its own, is worth a
  /// decision, and is not written over.
  std::vector<bool> keepable_values() const {
    std::vector<bool> can_keep = overwritten_values();
    for (std::size_t id = 0; id < values.size(); ++id)
      can_keep[id] = !can_keep[id] && values[id].producer != kNone && values[id].bytes > 0 &&
                     !values[id].is_always_kept;
    return can_keep;
  }

  /// Returns for each value that a plan may keep whether plain does: autograd saved it.
  std::vector<bool> kept_by_plain() const {
    std::vector<bool> kept = keepable_values();
    const std::vector<std::int32_t> counts = saved_counts();
    for (std::size_t id = 0; id < kept.size(); ++id) kept[id] = kept[id] && counts[id] > 0;
    return kept;
  }

  /// Returns the bytes of what the region returned.
  Bytes result_bytes() const {
    Bytes sum;
    for (const Value& value : values)
      if (value.is_result) sum += Bytes{value.bytes};
    return sum;
  }

  /// Returns the measured time of forward's operations.
  double seconds() const {
    double sum = 0;
    for (const Operation& operation : operations) sum += operation.seconds;
    return sum;
  }
};

}  // namespace remat

namespace remat {

/// Says for each value of a trace whether it stays.
using KeptValues = std::vector<bool>;

/// Says for each value of a trace whether it is transient; empty: none is.
///
/// What is not kept is recomputed, and then stays until its last use. A transient value goes at
/// once, unless it is the one that was asked for, and is recomputed once more when it is needed
/// again: the plan by values of what nested regions do.
using TransientValues = std::vector<bool>;

/// What a step costs with some values kept.
struct StepCost {
  Bytes peak;                         ///< the most bytes alive at once, above those before the step
  double seconds = 0;                 ///< of operations that backward runs again
  std::int64_t recomputed_count = 0;  ///< how many those are
};

/// Runs a traced step on paper, with other values kept than when it was traced.
///
/// Does to numbers what the engine does to tensors: the same counts of need, the same slices, the
/// same releases, so that the predicted peak is the one that the memory meter shows. It covers one
/// region without regions inside, and backward passes that release their graph.
///
/// @par Threads  one simulation per thread; it refers to the trace
class StepSimulation {
 public:
  explicit StepSimulation(const StepTrace& trace)
      : trace_(trace), saved_(trace.saved_counts()), block_(trace.values.size()) {
    for (std::size_t id = 0; id < trace.values.size(); ++id) {
      const StepTrace::Value& value = trace.values[id];
      const bool is_new = value.takes_over == StepTrace::kNone;
      block_[id] = is_new ? static_cast<std::int32_t>(id) : block_[at(value.takes_over)];
    }
    readers_.resize(trace.values.size());
    resting_readers_.resize(trace.values.size());
    state_.resize(trace.values.size());
    made_in_.resize(trace.values.size());
    seen_in_.resize(trace.operations.size());
  }

  /// Returns what the step costs if the given values stay and none is transient.
  ///
  /// @param timeline  gets for each event of the trace the most bytes alive from the event before
  /// on; may be null
  StepCost run(const KeptValues& kept, std::vector<Bytes>* timeline = nullptr) {
    return run(kept, {}, timeline);
  }

  /// Returns what the step costs if the given values stay, and the given others are transient.
  StepCost run(const KeptValues& kept, const TransientValues& transient,
               std::vector<Bytes>* timeline = nullptr) {
    std::fill(state_.begin(), state_.end(), State());
    for (std::size_t id = 0; id < transient.size(); ++id) state_[id].is_transient = transient[id];
    is_live_.assign(trace_.operations.size(), false);
    live_ = peak_ = 0;
    is_ended_ = false;
    cost_ = StepCost();
    if (timeline != nullptr) timeline->clear();
    for (const StepTrace::Event& event : trace_.events) {
      other_ = event.other;
      const std::int64_t before = std::exchange(peak_, live_ + event.peak);
      happen(event, kept);
      if (timeline != nullptr) timeline->push_back({peak_});
      peak_ = std::max(peak_, before);
    }
    cost_.peak = {peak_};
    return cost_;
  }

 private:
  enum class Memory : std::uint8_t { none, first, again };  // of forward, or of a recompute
  struct State {
    std::int32_t need = 0;
    std::int32_t holders = 0;  // of a block: values that the tape holds in it
    Memory held = Memory::none;
    bool is_revocable = false;
    bool is_used = false;  // a block: somebody besides the tape holds it
    bool is_made = false;  // in the running slice: its memory is there
    bool stays = false;    // it will be there when the slice has run
    bool is_transient = false;
  };

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  const StepTrace::Operation& operation(std::int32_t id) const { return trace_.operations[at(id)]; }
  State& state(std::int32_t id) { return state_[at(id)]; }
  const StepTrace::Value& value(std::int32_t id) const { return trace_.values[at(id)]; }

  void happen(const StepTrace::Event& event, const KeptValues& kept) {
    switch (event.kind) {
      case StepTrace::Kind::ran:
        return run_first(event.id, kept);
      case StepTrace::Kind::let_go:
        return let_go(event.id);
      case StepTrace::Kind::ended:
        return end_region();
      case StepTrace::Kind::asked:
        if (state(event.id).held == Memory::none) run_slice(event.id);
        return;
      case StepTrace::Kind::released:
        if (is_ended_ && lose_reader(event.id)) settle(value(event.id).producer);
        return;
      case StepTrace::Kind::saved:
      case StepTrace::Kind::done:
        return;
    }
  }

  void see(std::int64_t bytes) { peak_ = std::max(peak_, bytes + other_); }

  // --- forward ---

  void run_first(std::int32_t id, const KeptValues& kept) {
    see(live_ + operation(id).peak);
    for (const std::int32_t made : operation(id).makes) {
      const StepTrace::Value& result = value(made);
      State& block = state(block_[at(made)]);
      if (result.takes_over == StepTrace::kNone) {
        live_ += result.bytes;
        block.is_used = true;
      } else if (state(result.takes_over).held != Memory::none) {
        state(result.takes_over).held = Memory::none;  // let go: it would have to be copied
        --block.holders;
      }
      if (result.is_always_kept || kept[at(made)]) hold(made);
    }
  }

  void hold(std::int32_t id) {
    state(id).held = Memory::first;
    ++state(block_[at(id)]).holders;
  }

  void let_go(std::int32_t id) {
    State& block = state(block_[at(id)]);
    if (!block.is_used) return;
    block.is_used = false;
    if (block.holders == 0) live_ -= value(id).bytes;
  }

  void release(std::int32_t id) {
    State& released = state(id);
    const Memory memory = std::exchange(released.held, Memory::none);
    released.is_revocable = false;
    if (memory == Memory::again) live_ -= value(id).bytes;
    if (memory != Memory::first) return;
    State& block = state(block_[at(id)]);
    if (--block.holders == 0 && !block.is_used) live_ -= value(id).bytes;
  }

  void end_region() {
    is_ended_ = true;
    const auto count = static_cast<std::int32_t>(trace_.values.size());
    for (std::int32_t id = 0; id < count; ++id) {
      state(id).need += saved_[at(id)];
      if (!value(id).is_result || value(id).producer == StepTrace::kNone) continue;
      if (state(id).held == Memory::none) hold(id);
      state(id).is_revocable = true;
    }
    for (std::int32_t id = 0; id < count; ++id)
      if (saved_[at(id)] > 0 && !is_held(id)) wake(value(id).producer);
    for (std::int32_t id = 0; id < count; ++id)
      if (state(id).need == 0 && state(id).held != Memory::none) release(id);
  }

  // --- need ---

  bool is_held(std::int32_t id) {
    return state(id).held != Memory::none && !state(id).is_revocable;
  }

  void wake(std::int32_t first) {
    todo_.assign(1, first);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      if (id == StepTrace::kNone || is_live_[at(id)]) continue;
      is_live_[at(id)] = true;
      for (const std::int32_t read : operation(id).reads)
        if (state(read).need++ == 0 && !is_held(read)) todo_.push_back(value(read).producer);
    }
  }

  void settle(std::int32_t first) {
    todo_.assign(1, first);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      if (!is_live_[at(id)] || has_wanted_result(id)) continue;
      is_live_[at(id)] = false;
      for (const std::int32_t read : operation(id).reads)
        if (lose_reader(read)) todo_.push_back(value(read).producer);
    }
  }

  bool has_wanted_result(std::int32_t id) {
    return std::ranges::any_of(operation(id).makes, [this](std::int32_t made) {
      return state(made).need > 0 && !is_held(made);
    });
  }

  bool lose_reader(std::int32_t id) {
    if (--state(id).need > 0) return false;
    if (state(id).held != Memory::none) release(id);
    return value(id).producer != StepTrace::kNone;
  }

  // --- slices ---

  bool is_there(std::int32_t id) {
    return state(id).held != Memory::none || value(id).producer == StepTrace::kNone;
  }

  void run_slice(std::int32_t target) {
    ++slice_;
    collect(target);
    for (const std::int32_t id : order_) run_again(id);
    for (const std::int32_t id : touched_) {
      State& made = state(id);
      if (!std::exchange(made.is_made, false)) continue;
      if (!made.stays) {
        live_ -= value(id).bytes;
        continue;
      }
      made.held = Memory::again;
      if (made.need > 0) settle(value(id).producer);
    }
  }

  void collect(std::int32_t target) {
    order_.clear();
    touched_.clear();
    todo_.assign(1, target);
    while (!todo_.empty()) {
      const std::int32_t id = todo_.back();
      todo_.pop_back();
      const std::int32_t producer = value(id).producer;
      if (is_there(id) || seen_in_[at(producer)] == slice_) continue;
      seen_in_[at(producer)] = slice_;
      order_.push_back(producer);
      const auto& reads = operation(producer).reads;
      todo_.insert(todo_.end(), reads.begin(), reads.end());
    }
    std::ranges::sort(order_);
    for (const std::int32_t id : order_)
      for (const std::int32_t read : operation(id).reads)
        if (!is_there(read)) touch(read), ++readers_[at(read)];
    touch(target);
    state(target).stays = true;
    for (auto id = order_.rbegin(); id != order_.rend(); ++id) {
      if (!plan_stay(*id, target)) continue;
      for (const std::int32_t read : operation(*id).reads)
        if (!is_there(read)) ++resting_readers_[at(read)];
    }
  }

  /// Decides which results stay behind the slice, once that is known of whatever reads them; true
  /// if the operation need not run again after it.
  bool plan_stay(std::int32_t id, std::int32_t target) {
    bool rests = true;
    for (const std::int32_t made : operation(id).makes) {
      if (made == target || state(made).need == 0 || is_there(made)) continue;
      touch(made);
      if (state(made).need <= resting_readers_[at(made)]) continue;
      if (state(made).is_transient)
        rests = false;
      else
        state(made).stays = true;
    }
    return rests;
  }

  void touch(std::int32_t id) {
    if (made_in_[at(id)] == slice_) return;
    made_in_[at(id)] = slice_;
    readers_[at(id)] = resting_readers_[at(id)] = 0;
    state(id).stays = state(id).is_made = false;
    touched_.push_back(id);
  }

  bool is_touched(std::int32_t id) const { return made_in_[at(id)] == slice_; }

  void run_again(std::int32_t id) {
    const StepTrace::Operation& again = operation(id);
    cost_.seconds += again.seconds;
    ++cost_.recomputed_count;
    for (const std::int32_t made : again.makes) {
      const StepTrace::Value& result = value(made);
      // Written in place: into the old content if nobody else wants that, else into a copy.
      if (result.takes_over != StepTrace::kNone ? !read_last(result.takes_over) : result.is_copied)
        live_ += result.bytes;
    }
    see(live_ + again.peak);
    for (const std::int32_t made : again.makes) {
      const StepTrace::Value& result = value(made);
      const bool is_written = result.takes_over != StepTrace::kNone || result.is_copied;
      const bool is_wanted = is_touched(made) && (readers_[at(made)] > 0 || state(made).stays);
      if (is_wanted) state(made).is_made = true;
      if (is_wanted && !is_written) live_ += result.bytes;
      if (!is_wanted && is_written) live_ -= result.bytes;
    }
    for (const std::int32_t read : again.reads) {
      const bool is_written = std::ranges::any_of(
          again.makes, [&](std::int32_t made) { return value(made).takes_over == read; });
      if (!is_written && read_last(read)) live_ -= value(read).bytes;
    }
  }

  /// Counts a reader off; true if it was the last one and the memory is now its reader's.
  bool read_last(std::int32_t id) {
    if (!is_touched(id) || !state(id).is_made) return false;
    if (--readers_[at(id)] > 0 || state(id).stays) return false;
    state(id).is_made = false;
    return true;
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;  // saved tensors per value when the region ended
  std::vector<std::int32_t> block_;  // the value that first had the memory
  std::vector<State> state_;
  std::vector<bool> is_live_;
  std::vector<std::int32_t> readers_;          // operations of the slice that still have to read it
  std::vector<std::int32_t> resting_readers_;  // operations of it that will not run again
  std::vector<std::int64_t> made_in_, seen_in_;  // the last slice that a value, an operation was in
  std::vector<std::int32_t> todo_, order_, touched_;
  std::int64_t slice_ = 0, live_ = 0, peak_ = 0, other_ = 0;
  bool is_ended_ = false;
  StepCost cost_;
};

}  // namespace remat

namespace remat {

/// One way to run a step: what stays, and what that costs.
struct StepPoint {
  KeptValues kept;
  StepCost cost;
  TransientValues transient{};
};

/// The ways of which none is better than another in memory and in time, the least memory first.
///
/// A budget takes the fastest that fits. So a smaller budget never gets more memory than a larger
/// one.
class StepPoints {
 public:
  /// Adds a way unless one that is there needs neither more memory nor more time; takes out those
  /// that are now worse.
  void add(const StepPoint& point) {
    const auto [peak, seconds, count] = point.cost;
    const auto above = points_.upper_bound(peak.count);
    if (above != points_.begin() && std::prev(above)->second.cost.seconds <= seconds) return;
    auto worse = points_.lower_bound(peak.count);
    while (worse != points_.end() && worse->second.cost.seconds >= seconds)
      worse = points_.erase(worse);
    points_.emplace(peak.count, point);
  }

  bool is_empty() const { return points_.empty(); }
  /// Returns the way of the least memory; there must be one.
  const StepPoint& least() const { return points_.begin()->second; }
  /// Returns the fastest way, that of a plain step; there must be one.
  const StepPoint& most() const { return points_.rbegin()->second; }
  /// Returns the fastest way within the budget; null if there is none.
  const StepPoint* fastest_within(Bytes budget) const {
    const auto above = points_.upper_bound(budget.count);
    return above == points_.begin() ? nullptr : &std::prev(above)->second;
  }
  /// Returns the ways, the least memory first.
  std::vector<StepPoint> list() const {
    std::vector<StepPoint> points;
    for (const auto& [peak, point] : points_) points.push_back(point);
    return points;
  }

 private:
  std::map<std::int64_t, StepPoint> points_;  // by peak; seconds fall
};

}  // namespace remat

namespace remat {

/// Which results of a region's operations stay, operation by operation, and what that is predicted
/// to cost.
///
/// It is applied by position: the n-th operation that runs must be the one that was the n-th when
/// the plan was made. From the first that is another one on, everything is dropped, which is right,
/// and only slower.
struct MemoryPlan {
  /// One result of an operation, and whether it stays.
  struct Result {
    Bytes bytes;
    bool is_kept = false;
    bool is_transient =
        false;  ///< recomputed for another value it goes again, see `StepSimulation`

    friend bool operator==(const Result&, const Result&) = default;
  };
  /// What ran at one position, with its results in the order of its returns.
  struct Operation {
    std::string name;  ///< "aten::convolution"
    std::vector<Result> results;

    friend bool operator==(const Operation&, const Operation&) = default;
  };

  std::vector<Operation> operations;  ///< in the order of forward
  Bytes budget;
  Bytes peak;                         ///< predicted
  Bytes plain_peak;                   ///< without checkpointing
  double recomputed_seconds = 0;      ///< of operations that backward runs again
  double forward_seconds = 0;         ///< of all of forward's, to compare with
  std::int64_t recomputed_count = 0;  ///< operations that backward runs again
  std::int64_t saved_count = 0;       ///< tensors that autograd saves

  friend bool operator==(const MemoryPlan&, const MemoryPlan&) = default;
};

/// Returns the plan for one of the ways to run a traced step.
inline MemoryPlan make_memory_plan(const StepTrace& trace, const StepPoint& point, Bytes plain_peak,
                                   Bytes budget) {
  MemoryPlan plan;
  for (const StepTrace::Operation& operation : trace.operations) {
    MemoryPlan::Operation& planned = plan.operations.emplace_back();
    planned.name = operation.name;
    for (const std::int32_t id : operation.makes) {
      const auto index = static_cast<std::size_t>(id);
      const bool is_kept = point.kept[index];
      const bool is_transient = !is_kept && !point.transient.empty() && point.transient[index];
      planned.results.push_back({Bytes{trace.values[index].bytes}, is_kept, is_transient});
    }
  }
  plan.budget = budget;
  plan.plain_peak = plain_peak;
  plan.peak = point.cost.peak;
  plan.recomputed_seconds = point.cost.seconds;
  plan.forward_seconds = trace.seconds();
  plan.recomputed_count = point.cost.recomputed_count;
  plan.saved_count = trace.saved_count;
  return plan;
}

namespace detail {

[[noreturn]] inline void throw_infeasible(std::string_view where, Bytes most, Bytes least,
                                          Bytes plain) {
  char part[32];
  std::snprintf(part, sizeof part, "%.3f",  // rounded up, so that it is feasible
                static_cast<double>(least.count) / static_cast<double>(plain.count) + 5e-4);
  const auto exact = [](Bytes bytes) {
    return to_string(bytes) + " (" + std::to_string(bytes.count) + " bytes)";
  };
  throw BudgetError(ErrorMessage("remat.budget.infeasible")
                        .where(where)
                        .what("no plan needs " + exact(most) + " or less")
                        .cause("the least that was found is " + exact(least) + ", " + part +
                               " of the plain step's " + to_string(plain))
                        .cure("Raise the budget to that, or make the batch smaller"),
                    least);
}

}  // namespace detail

/// Returns the fastest plan within the budget.
///
/// @param points   all ways to run the traced step, see `KeepSearch`
/// @param reserve  of the budget, for what the trace does not see
/// @throws BudgetError  if no plan fits
inline MemoryPlan plan_within(const StepTrace& trace, const StepPoints& points,
                              const MemoryBudget& budget, Bytes reserve, std::string_view where) {
  const Bytes plain_peak = points.most().cost.peak;
  const Bytes most = budget.resolve(plain_peak + reserve);
  const StepPoint* point = points.fastest_within(most - reserve);
  if (point == nullptr)
    detail::throw_infeasible(where, most, points.least().cost.peak + reserve, plain_peak + reserve);
  return make_memory_plan(trace, *point, plain_peak, most);
}

/// Writes what stays and what runs again, a line for each kind of operation.
inline std::string to_string(const MemoryPlan& plan) {
  struct Row {
    std::size_t results = 0, kept = 0;
    Bytes bytes, kept_bytes;
  };
  std::map<std::string, Row> rows;
  std::size_t transient = 0;
  for (const MemoryPlan::Operation& operation : plan.operations)
    for (const MemoryPlan::Result& result : operation.results) {
      Row& row = rows[operation.name];
      ++row.results, row.bytes += result.bytes;
      if (result.is_kept) ++row.kept, row.kept_bytes += result.bytes;
      transient += result.is_transient;
    }
  char line[200];
  std::snprintf(line, sizeof line, "%-40s %8s %8s %12s %12s\n", "operation", "results", "kept",
                "bytes", "kept");
  std::string text = line;
  for (const auto& [name, row] : rows) {
    std::snprintf(line, sizeof line, "%-40s %8zu %8zu %12s %12s\n", name.substr(0, 40).c_str(),
                  row.results, row.kept, to_string(row.bytes).c_str(),
                  to_string(row.kept_bytes).c_str());
    text += line;
  }
  const double part =
      plan.forward_seconds > 0 ? 100 * plan.recomputed_seconds / plan.forward_seconds : 0.0;
  std::snprintf(line, sizeof line,
                "predicted peak %s of %s allowed (plain %s); %lld operations run again, %.1f %% of "
                "forward's time",
                to_string(plan.peak).c_str(), to_string(plan.budget).c_str(),
                to_string(plan.plain_peak).c_str(), static_cast<long long>(plan.recomputed_count),
                part);
  text += line;
  if (transient > 0)
    text += "; " + std::to_string(transient) + (transient == 1 ? " result is" : " results are") +
            " recomputed more than once";
  return text;
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryPlan& plan) {
  return stream << to_string(plan);
}

}  // namespace remat

namespace remat {

/// How a forward pass kept to its plan.
struct PlanOutcome {
  bool is_followed = true;  ///< the same operations ran, all of them, none with a larger result
  std::string deviation;    ///< what was different first; empty: nothing

  friend bool operator==(const PlanOutcome&, const PlanOutcome&) = default;
};

/// Writes "the plan was followed", or where it was left.
inline std::string to_string(const PlanOutcome& outcome) {
  return outcome.is_followed ? "the plan was followed" : "the plan was left: " + outcome.deviation;
}

inline std::ostream& operator<<(std::ostream& stream, const PlanOutcome& outcome) {
  return stream << to_string(outcome);
}

}  // namespace remat

namespace remat::detail {

/// A plan in one forward pass: says as a keep policy what stays, and compares what ran.
///
/// The policy is not asked about every operation, since tiny results stay anyway; so the end
/// compares all of them once more, and finds those that did not run.
class PlanFollower {
 public:
  explicit PlanFollower(std::shared_ptr<const MemoryPlan> plan) : plan_(std::move(plan)) {}

  const std::shared_ptr<const MemoryPlan>& plan() const { return plan_; }
  bool has_ended() const { return has_ended_; }
  /// Whether the pass came to its end, and was another than planned.
  bool has_deviated() const { return has_ended_ && !outcome_.is_followed; }

  /// Returns how the pass kept to the plan. Where nothing was recorded there was nothing to keep
  /// to.
  PlanOutcome outcome() const {
    if (has_begun_ && !has_ended_ && outcome_.is_followed)
      return {false, "forward ended with an exception"};
    return outcome_;
  }

  bool is_kept(const keep::Operation& operation, Bytes bytes) {
    has_begun_ = true;
    if (!outcome_.is_followed) return false;
    if (operation.position >= plan_->operations.size())
      return leave(operation.position, operation.name, "where the plan ends");
    const MemoryPlan::Operation& planned = plan_->operations[operation.position];
    if (planned.name != operation.name)
      return leave(operation.position, operation.name, "where " + planned.name + " was planned");
    if (operation.result >= planned.results.size())
      return leave(operation.position, operation.name,
                   "with more results than the " + std::to_string(planned.results.size()) +
                       " that were planned");
    const MemoryPlan::Result& result = planned.results[operation.result];
    if (bytes > result.bytes && result.bytes.count > 0)  // 0: memory that was there before
      return leave(operation.position, operation.name,
                   "with a result of " + to_string(bytes) + " where " + to_string(result.bytes) +
                       " were planned");
    return result.is_kept;
  }

  /// Compares the innermost region of the tape, which is about to end.
  void end(Tape& tape) {
    const std::lock_guard<std::recursive_mutex> lock(tape.mutex);
    has_begun_ = has_ended_ = true;
    if (!outcome_.is_followed) return;
    const Region& region = tape.regions[static_cast<std::size_t>(tape.region)];
    const std::size_t first = region.first_operation;
    const std::size_t ran = tape.operations.size() - first, planned = plan_->operations.size();
    for (std::size_t i = 0; i < ran && i < planned; ++i)
      if (const std::string_view name = tape.operations[first + i].traits->name;
          name != plan_->operations[i].name) {
        leave(i, name, "where " + plan_->operations[i].name + " was planned");
        return;
      }
    const std::size_t saved = tape.saved_count - region.first_saved;
    if (ran != planned)
      outcome_ = {false, "the plan has " + std::to_string(planned) + " operations, " +
                             std::to_string(ran) + " ran"};
    else if (saved > static_cast<std::size_t>(plan_->saved_count))
      outcome_ = {false, "autograd saved " + std::to_string(saved) + " tensors where " +
                             std::to_string(plan_->saved_count) +
                             " were planned: more parameters or inputs require grad"};
    else
      mark_transient(tape, first);
  }

 private:
  /// Only backward reads it, so that the end is early enough.
  void mark_transient(Tape& tape, std::size_t first) const {
    for (std::size_t i = 0; i < plan_->operations.size(); ++i) {
      const auto& planned = plan_->operations[i].results;
      const Operation& ran = tape.operations[first + i];
      for (std::size_t k = 0; k < ran.result_count && k < planned.size(); ++k) {
        const ValueId id = tape.results[ran.first_result + k].value;
        tape.values[static_cast<std::size_t>(id)].is_transient = planned[k].is_transient;
      }
    }
  }

  /// From here on everything is dropped: right whatever runs, though what is recomputed at once may
  /// need more than the budget.
  bool leave(std::size_t position, std::string_view name, const std::string& where) {
    outcome_ = {false, "operation " + std::to_string(position) + ", " + std::string(name) +
                           ", ran " + where};
    return false;
  }

  std::shared_ptr<const MemoryPlan> plan_;
  PlanOutcome outcome_;
  bool has_begun_ = false;
  bool has_ended_ = false;
};

/// Makes the region that is opened with these options follow a plan.
///
/// @return  what knows, when the region has ended, how it kept to it
inline std::shared_ptr<const PlanFollower> follow_plan(RegionOptions& options,
                                                       std::shared_ptr<const MemoryPlan> plan) {
  auto follower = std::make_shared<PlanFollower>(std::move(plan));
  options.is_indivisible = true;
  options.keep = [follower](const keep::Operation& operation, Bytes bytes) {
    return follower->is_kept(operation, bytes);
  };
  options.at_end = [follower](Tape& tape) { follower->end(tape); };
  return follower;
}

}  // namespace remat::detail

namespace remat::detail {

/// What decides, besides the input's sizes, which operations a module's step runs and what autograd
/// saves of them.
struct StepKind {
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the input
  c10::Device device{c10::kCPU};
  AutocastState autocast;
  std::vector<bool> requires_grad;  // the input and the parameters
  std::vector<bool> is_training;    // the module and those below

  static StepKind of(const torch::nn::Module& module, const torch::Tensor& x) {
    StepKind kind;
    kind.dtype = x.scalar_type();
    kind.device = x.device();
    if (has_autocast(x.device().type())) kind.autocast = autocast_state(x.device().type());
    kind.requires_grad.push_back(x.requires_grad());
    kind.add(module);
    return kind;
  }

  friend bool operator==(const StepKind&, const StepKind&) = default;

 private:
  void add(const torch::nn::Module& module) {
    is_training.push_back(module.is_training());
    for (const torch::Tensor& parameter : module.parameters(/*recurse=*/false))
      requires_grad.push_back(parameter.requires_grad());
    for (const auto& child : module.children()) add(*child);
  }
};

}  // namespace remat::detail

namespace remat::detail {

/// Traces one training step for `StepSimulation`: set as the tape's observer and, on the thread
/// that runs forward and backward, as the allocation listener.
///
/// Autograd's own memory is observed and not modelled: what is allocated is either a recorded
/// value, or made by a recompute, or other memory, whose course does not depend on what is kept.
class REMAT_VISIBLE StepObserver final : public AllocationListener, public TapeObserver {
 public:
  /// Returns the trace; called after the backward pass.
  StepTrace finish() {
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::done, none);
    return std::move(trace_);
  }

  // --- memory ---

  void changed(const void* block, std::int64_t bytes, c10::Device) override {
    const std::lock_guard lock(mutex_);
    if (bytes > 0) {
      blocks_[block] = {slice_depth_ > 0 ? Owner::slice
                        : is_running_    ? Owner::operation
                                         : Owner::other,
                        bytes, none};
      if (slice_depth_ == 0) grow(is_running_, bytes);
      return;
    }
    const auto found = blocks_.find(block);
    if (found == blocks_.end()) return;  // from before the step
    const Block gone = found->second;
    blocks_.erase(found);
    if (gone.owner == Owner::value) {
      emit_let_go(gone.value);
    } else if (gone.owner != Owner::slice) {
      grow(gone.owner == Owner::operation, -gone.bytes);
    }
  }

  void recompute_begins() override {
    const std::lock_guard lock(mutex_);
    ++slice_depth_;
  }
  void recompute_ended(std::int64_t) override {
    const std::lock_guard lock(mutex_);
    --slice_depth_;
  }

  // --- the tape ---

  void operation_begins(Tape& tape) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::ran, none);
    is_running_ = true;
    running_event_ = trace_.events.size() - 1;
    operation_bytes_ = operation_peak_ = 0;
  }

  void operation_ended(Tape& tape, OperationId id, const MadeValues& made) override {
    const std::lock_guard lock(mutex_);
    is_running_ = false;
    trace_.events[running_event_].id = id;
    trace_.operations.resize(static_cast<std::size_t>(id) + 1);
    trace_.operations[static_cast<std::size_t>(id)].peak = operation_peak_;
    for (const auto& [value, storage] : made) {
      StepTrace::Value& noted = this->value(value);
      const auto found = blocks_.find(storage.data());
      if (found == blocks_.end()) continue;
      Block& block = found->second;
      noted.bytes = block.bytes;
      if (block.owner == Owner::operation) operation_bytes_ -= block.bytes;
      if (block.owner == Owner::other) other_ -= block.bytes, noted.is_copied = true;
      if (block.owner == Owner::value) noted.takes_over = block.value;
      block.owner = Owner::value;
      block.value = value;
      if (tape.values[static_cast<std::size_t>(value)].held) kept_.push_back(value);
    }
    // What else the operation left behind, such as the state of a random number generator.
    for (auto& [address, block] : blocks_)
      if (block.owner == Owner::operation) block.owner = Owner::other;
    other_ += operation_bytes_;
    peak_ = std::max(peak_, other_);
  }

  void layer_begins(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    if (!has_layers_) trace_.layers_begin = id;
    has_layers_ = true;
  }
  void kept(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    if (std::ranges::find(kept_, id) == kept_.end()) kept_.push_back(id);
    auto& ends = trace_.layer_ends;
    // A layer that hands on its input, or a view of it, did nothing that could be dropped.
    if (std::ranges::find(ends, id) == ends.end()) ends.push_back(id);
  }
  void saved(Tape&, ValueId id) override {
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::saved, id);
  }
  void asked(Tape& tape, ValueId id) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::asked, id);
  }
  void released(Tape& tape, ValueId id) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::released, id);
  }

  void ended(Tape& tape) override {
    look_for_unused(tape);
    const std::lock_guard lock(mutex_);
    emit(StepTrace::Kind::ended, none);
    trace_.saved_count = static_cast<std::int64_t>(tape.saved_count);
    trace_.operations.resize(tape.operations.size());
    for (std::size_t i = 0; i < tape.values.size(); ++i) {
      StepTrace::Value& noted = value(static_cast<ValueId>(i));
      noted.producer = tape.values[i].producer;
      noted.is_always_kept = tape.values[i].is_tiny;
      noted.is_result = tape.values[i].is_result;
      if (noted.is_result && tape.values[i].held && noted.producer != none)
        kept_.push_back(static_cast<ValueId>(i));
    }
    for (std::size_t i = 0; i < tape.operations.size(); ++i) note(tape, i);
  }

 private:
  enum class Owner : std::uint8_t { value, operation, slice, other };
  struct Block {
    Owner owner = Owner::other;
    std::int64_t bytes = 0;
    ValueId value = none;
  };

  StepTrace::Value& value(ValueId id) {
    if (trace_.values.size() <= static_cast<std::size_t>(id))
      trace_.values.resize(static_cast<std::size_t>(id) + 1);
    return trace_.values[static_cast<std::size_t>(id)];
  }

  void note(const Tape& tape, std::size_t index) {
    const Operation& operation = tape.operations[index];
    StepTrace::Operation& noted = trace_.operations[index];
    noted.name = operation.traits->name;
    noted.seconds = static_cast<double>(operation.seconds);
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape.uses[operation.first_use + i];
      if (use.needs_content) noted.reads.push_back(use.value);
    }
    for (std::size_t i = 0; i < operation.result_count; ++i)
      noted.makes.push_back(tape.results[operation.first_result + i].value);
  }

  void grow(bool in_operation, std::int64_t bytes) {
    if (in_operation) {
      operation_bytes_ += bytes;
      operation_peak_ = std::max(operation_peak_, operation_bytes_);
    } else {
      other_ += bytes;
      peak_ = std::max(peak_, other_);
    }
  }

  void emit(StepTrace::Kind kind, std::int32_t id) {
    trace_.events.push_back({kind, id, other_, peak_});
    peak_ = other_;
  }

  void emit_let_go(ValueId id) {
    if (is_let_go_.size() <= static_cast<std::size_t>(id))
      is_let_go_.resize(static_cast<std::size_t>(id) + 1);
    if (is_let_go_[static_cast<std::size_t>(id)]) return;
    is_let_go_[static_cast<std::size_t>(id)] = true;
    emit(StepTrace::Kind::let_go, id);
  }

  /// What the tape holds does not show by a release that nobody else holds it any more.
  void look_for_unused(Tape& tape) {
    const std::lock_guard tape_lock(tape.mutex);
    const std::lock_guard lock(mutex_);
    std::erase_if(kept_, [&](ValueId id) {
      const Value& value = tape.values[static_cast<std::size_t>(id)];
      if (value.held && value.held.use_count() > 1) return false;
      if (value.held) emit_let_go(id);
      return true;
    });
  }

  std::recursive_mutex mutex_;  // a block that is freed in a look at the tape is reported at once
  StepTrace trace_;
  ska::flat_hash_map<const void*, Block> blocks_;
  std::vector<ValueId> kept_;  // by the tape, and by others as far as is known
  std::vector<bool> is_let_go_;
  std::int64_t other_ = 0, peak_ = 0;                      // of other memory
  std::int64_t operation_bytes_ = 0, operation_peak_ = 0;  // of the running operation
  std::size_t running_event_ = 0;
  int slice_depth_ = 0;
  bool is_running_ = false;
  bool has_layers_ = false;
};

}  // namespace remat::detail

namespace remat::detail {

/// Calls `step(options)`, which runs forward as a region with these options and then backward, and
/// returns what it did.
///
/// The region keeps nothing but what `keep_while_tracing` is given, so that a step that does not
/// fit in memory without checkpointing can be traced.
template <class Step>
StepTrace trace_step(std::string name, Step&& step) {
  const auto observer = std::make_shared<StepObserver>();
  RegionOptions options;
  options.name = std::move(name);
  options.measures_time = true;
  options.is_indivisible = true;
  options.observer = observer;
  const AllocationListenerGuard guard(observer);
  std::forward<Step>(step)(options);
  return observer->finish();
}

/// While a step is traced: calls `visit(tape, value)` with what the tensor's storage holds, if the
/// region made that, else with none.
template <class Visit>
void visit_while_tracing(const at::Tensor& tensor, Visit&& visit) {
  const std::shared_ptr<Tape>& tape = thread_state().tape;
  if (!tape || !tape->observer || !tensor.defined() || !has_plain_storage(tensor)) return;
  const std::lock_guard<std::recursive_mutex> lock(tape->mutex);
  const ValueId id = tape->current(tensor, Version::number_of(tensor));
  const bool is_made = id != none && tape->values[static_cast<std::size_t>(id)].producer != none;
  visit(*tape, is_made ? id : none);
}

/// While a step is traced: notes where the layers of a chain begin.
inline void begin_layer_while_tracing(const at::Tensor& input) {
  visit_while_tracing(input, [](Tape& tape, ValueId id) { tape.observer->layer_begins(tape, id); });
}

/// While a step is traced: keeps a layer's output, so that backward recomputes layer by layer.
inline void keep_while_tracing(const at::Tensor& output) {
  visit_while_tracing(output, [&](Tape& tape, ValueId id) {
    if (id == none) return;
    Value& value = tape.values[static_cast<std::size_t>(id)];
    if (!value.held) {
      value.is_shared = true;
      tape.set_held(id, output.storage());
    }
    tape.observer->kept(tape, id);
  });
}

}  // namespace remat::detail

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>

namespace remat::detail {

/// Finds the leaves behind what this thread computes from now on: a graph that was there before,
/// and leads to leaves of its own, is not entered.
class GraphLeaves {
 public:
  /// Adds the leaves that a backward pass from `result` would come to.
  void find_behind(const at::Tensor& result) {
    using torch::autograd::AccumulateGrad;
    if (!result.defined() || !result.requires_grad()) return;
    std::vector<Node*> todo{torch::autograd::impl::gradient_edge(result).function.get()};
    while (!todo.empty()) {
      Node* node = todo.back();
      todo.pop_back();
      if (node == nullptr || !seen_.insert(node).second) continue;
      if (const auto* accumulate = dynamic_cast<const AccumulateGrad*>(node))
        leaves_.push_back(accumulate->variable);
      else if (node->thread_id() == thread_ && node->sequence_nr() >= first_)
        for (const torch::autograd::Edge& edge : node->next_edges())
          todo.push_back(edge.function.get());
    }
  }

  const std::vector<at::Tensor>& leaves() const { return leaves_; }

 private:
  using Node = torch::autograd::Node;

  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::uint64_t first_ = at::sequence_number::peek();  // of the operations to come
  ska::flat_hash_set<Node*> seen_;
  std::vector<at::Tensor> leaves_;
};

}  // namespace remat::detail

#include <torch/csrc/autograd/variable.h>

namespace remat::detail {

/// Hooks that run when a gradient has been accumulated; LibTorch has them from 2.1 on.
template <class Meta>
struct AccumulationHooks {
  void exchange(Meta&) {}
};
template <class Meta>
  requires requires(Meta& meta) { meta.post_acc_grad_hooks_; }
struct AccumulationHooks<Meta> {
  decltype(Meta::post_acc_grad_hooks_) hooks;

  void exchange(Meta& meta) { std::swap(hooks, meta.post_acc_grad_hooks_); }
};

/// What a backward pass finds at a leaf: the gradient, hooks, and the node that accumulates, which
/// may have hooks of its own.
///
/// Exchanged for an empty one, passes leave the leaf's gradient alone and call none of its hooks.
class LeafSlots {
 public:
  const at::Tensor& gradient() const { return gradient_; }

  /// Swaps these with a leaf's.
  void exchange(const at::Tensor& leaf) {
    Meta* meta = torch::autograd::impl::get_autograd_meta(leaf);
    if (meta == nullptr) return;  // it never required grad
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    std::swap(gradient_, meta->grad_);
    std::swap(hooks_, meta->hooks_);
    std::swap(hook_list_, meta->cpp_hooks_list_);
    std::swap(accumulator_, meta->grad_accumulator_);
    accumulation_hooks_.exchange(*meta);
  }

 private:
  using Meta = torch::autograd::AutogradMeta;

  at::Tensor gradient_;
  decltype(Meta::hooks_) hooks_;
  decltype(Meta::cpp_hooks_list_) hook_list_;
  decltype(Meta::grad_accumulator_) accumulator_{decltype(torch::autograd::Edge::function)()};
  AccumulationHooks<Meta> accumulation_hooks_;
};

}  // namespace remat::detail

namespace remat {

namespace detail {

class PlannedForward;

inline ErrorMessage no_plans(const char* given) {
  return ErrorMessage("remat.budget.module")
      .where("enable_gradient_checkpointing")
      .what(std::string(given) +
            " was given to a module whose forward does not take one tensor "
            "and return one")
      .cure("Give it to the chain or the backbone around the module, or use remat::plan");
}

}  // namespace detail

/// What every checkpointed module offers besides being a module.
///
/// Find it with `dynamic_cast<CheckpointToggle*>(&module)`, or use the free functions on a whole
/// tree.
class CheckpointToggle {
 public:
  virtual ~CheckpointToggle() = default;

  /// Switches checkpointing on, with the segments of the module's own rule.
  virtual void enable_gradient_checkpointing() = 0;
  /// Switches checkpointing on, with this number of segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  virtual void enable_gradient_checkpointing(std::int64_t segment_count) = 0;
  /// Switches checkpointing on, such that a training step needs no more memory than that, in as
  /// little time as can be had.
  ///
  /// The first forward of each shape of input traces a step of its own, with a stand-in for the
  /// loss, and makes a plan; the model is as before. That first forward may need as much memory as
  /// plain. The budget covers this module's forward and backward, and a small reserve for a loss on
  /// its output. Inside another checkpointed region the module follows that one.
  ///
  /// @throws ArgumentError  if this module cannot be planned; an infeasible budget shows in forward
  void enable_gradient_checkpointing(const MemoryBudget& budget);
  /// Switches checkpointing on by a plan that was made before, see `remat::plan`.
  ///
  /// @throws ArgumentError  if this module cannot be planned
  void enable_gradient_checkpointing(const MemoryPlan& plan);
  /// Returns the plan of the last forward within a budget; null without one.
  virtual std::shared_ptr<const MemoryPlan> memory_plan() const { return nullptr; }
  /// Returns whether the last forward ran what was planned, and what was different.
  virtual PlanOutcome plan_outcome() const { return {}; }

  /// Switches checkpointing off: forward is a plain call.
  virtual void disable_gradient_checkpointing() = 0;
  /// Returns whether the switch is on; eval mode does not move it.
  virtual bool is_gradient_checkpointing_enabled() const = 0;

  /// Exempts one of the modules that this one checkpoints, which may be itself.
  ///
  /// @return  false if `unit` is none of them
  virtual bool exempt_unit(const torch::nn::Module& unit) {
    static_cast<void>(unit);
    return false;
  }

  /// Returns how reports call one of the modules that this one checkpoints; empty if it is none.
  virtual std::string unit_name(const torch::nn::Module* unit) const {
    static_cast<void>(unit);
    return "";
  }

  /// Returns what puts the present switch back when it is called, while this module lives.
  ///
  /// A module that plans overrides it, so that its segment count and what it has measured come
  /// back, too.
  virtual std::function<void()> remember_checkpointing() {
    return [this, is_on = is_gradient_checkpointing_enabled()] {
      if (is_on == is_gradient_checkpointing_enabled()) return;
      is_on ? enable_gradient_checkpointing() : disable_gradient_checkpointing();
    };
  }

 protected:
  CheckpointToggle() = default;
  CheckpointToggle(const CheckpointToggle&) = default;
  CheckpointToggle& operator=(const CheckpointToggle&) = default;

 private:
  // Not the two calls with a budget and a plan are virtual, but this: so they, and planning with
  // them, are compiled only where a program calls them. nn/budgeted_toggle.hpp has them.
  virtual void enable_planned(std::shared_ptr<detail::PlannedForward> planned, const char* given) {
    static_cast<void>(planned);
    throw ArgumentError(detail::no_plans(given));
  }
};

namespace detail {

inline void require_segment_count(std::int64_t segment_count, std::string_view where) {
  require(segment_count >= 1, [&] {
    return ErrorMessage("remat.segments.count")
        .where(where)
        .what(std::to_string(segment_count) + " segments were asked for and at least 1 is needed")
        .cure("To checkpoint nothing, call disable_gradient_checkpointing()");
  });
}

/// A flag that one thread may set while others read it, and that is copied with its module.
class Flag {
 public:
  explicit Flag(bool value) : value_(value) {}
  Flag(const Flag& other) : value_(other.get()) {}
  Flag& operator=(const Flag& other) { return *this = other.get(); }
  Flag& operator=(bool value) {
    value_.store(value, std::memory_order_relaxed);
    return *this;
  }
  bool get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> value_;
};

/// Calls `visit` for the module, if it is checkpointed, and for every checkpointed one below it.
template <class Visit>
std::size_t for_each_toggle(torch::nn::Module& module, Visit visit) {
  std::size_t count = 0;
  const auto visit_if_toggle = [&](torch::nn::Module& candidate) {
    if (auto* toggle = dynamic_cast<CheckpointToggle*>(&candidate)) visit(*toggle), ++count;
  };
  // Not modules(true), which needs a module that a shared_ptr owns.
  visit_if_toggle(module);
  for (const auto& below : module.modules(/*include_self=*/false)) visit_if_toggle(*below);
  return count;
}

}  // namespace detail

/// Switches on everything checkpointed inside `module`, itself included, each by its own rule.
///
/// @return  how many modules were switched; 0 means that nothing in there is checkpointed
inline std::size_t enable_gradient_checkpointing(torch::nn::Module& module) {
  return detail::for_each_toggle(
      module, [](CheckpointToggle& toggle) { toggle.enable_gradient_checkpointing(); });
}

/// Switches on everything checkpointed inside `module`, itself included, with this number of
/// segments.
///
/// @return  how many modules were switched
/// @throws ArgumentError  if `segment_count` is below 1; then nothing has been switched
inline std::size_t enable_gradient_checkpointing(torch::nn::Module& module,
                                                 std::int64_t segment_count) {
  detail::require_segment_count(segment_count, "remat::enable_gradient_checkpointing");
  return detail::for_each_toggle(module, [&](CheckpointToggle& toggle) {
    toggle.enable_gradient_checkpointing(segment_count);
  });
}

/// Switches off everything checkpointed inside `module`, itself included.
///
/// @return  how many modules were switched
inline std::size_t disable_gradient_checkpointing(torch::nn::Module& module) {
  return detail::for_each_toggle(
      module, [](CheckpointToggle& toggle) { toggle.disable_gradient_checkpointing(); });
}

/// Returns whether anything inside `module`, itself included, is switched on.
inline bool is_gradient_checkpointing_enabled(torch::nn::Module& module) {
  bool is_enabled = false;
  detail::for_each_toggle(module, [&](CheckpointToggle& toggle) {
    is_enabled = is_enabled || toggle.is_gradient_checkpointing_enabled();
  });
  return is_enabled;
}

/// As for a module; takes a holder.
template <class Impl>
std::size_t enable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module) {
  return enable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()));
}
/// As for a module; takes a holder.
template <class Impl>
std::size_t enable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module,
                                          std::int64_t segment_count) {
  return enable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()),
                                       segment_count);
}
/// As for a module; takes a holder.
template <class Impl>
std::size_t disable_gradient_checkpointing(const torch::nn::ModuleHolder<Impl>& module) {
  return disable_gradient_checkpointing(static_cast<torch::nn::Module&>(*module.ptr()));
}
/// As for a module; takes a holder.
template <class Impl>
bool is_gradient_checkpointing_enabled(const torch::nn::ModuleHolder<Impl>& module) {
  return is_gradient_checkpointing_enabled(static_cast<torch::nn::Module&>(*module.ptr()));
}

}  // namespace remat

namespace remat::detail {

/// Puts back at its end everything that training steps change in a model: gradients, buffers,
/// modes, checkpoint switches with segment counts and plans, the random states, and what
/// `before_write` was told of.
///
/// While it lives, steps see no gradients and call no hooks of parameters; parameters and buffers
/// have versions of their own, so that a graph from before that has saved one still finds it
/// unchanged. Backward passes of other threads must not use the model's parameters meanwhile: their
/// gradients would go the same way.
class ModelState {
 public:
  /// @param input  gets the same care as a parameter
  ModelState(torch::nn::Module& model, const torch::Tensor& input) {
    modes_.emplace_back(&model, model.is_training());
    for (const auto& below : model.modules(/*include_self=*/false))
      modes_.emplace_back(below.get(), below->is_training());
    for_each_toggle(model, [&](CheckpointToggle& toggle) {
      switches_.push_back(toggle.remember_checkpointing());
    });
    for (const torch::Tensor& parameter : model.parameters()) remember_leaf(parameter);
    remember_leaf(input);
    for (const torch::Tensor& buffer : model.buffers()) remember_buffer(buffer);
    remember_generator(at::kCPU);
    // From here on nothing throws.
    for (const Versioned& versioned : versions_) own_version(versioned);
    exchange_leaves();
    at::autocast::clear_cache();
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  ~ModelState() {
    // A destructor that throws ends the process; a device that has failed cannot be put back.
    try {
      rewind();
    } catch (...) {
    }
    // Backwards, for a tensor may have been remembered twice: as it was first is how it was.
    std::for_each(versions_.rbegin(), versions_.rend(), [](const Versioned& versioned) {
      impl(versioned.first)->set_version_counter(versioned.second);
    });
    exchange_leaves();
    for (const auto& put_back : switches_) put_back();
    if (std::ranges::all_of(
            modes_, [](const auto& mode) { return mode.first->is_training() == mode.second; }))
      return;
    // From the root down, since train() reaches everything below.
    for (const auto& [module, is_training] : modes_) module->train(is_training);
  }

  /// Makes the next step start where the first one did: without gradients, with the same content
  /// and random numbers.
  void rewind() {
    for (const auto& [leaf, slots] : leaves_)
      if (leaf.grad().defined()) leaf.mutable_grad() = torch::Tensor();
    // Else the next pass finds this one's casts, and runs other operations than those to come.
    at::autocast::clear_cache();
    const torch::NoGradGuard no_grad;
    for (const Buffer& buffer : buffers_) buffer.tensor.copy_(buffer.content);
    for (const Written& written : written_)
      bytes_of(written.storage).copy_(bytes_of(written.content));
    for (const RandomState& random : generators_) set_state(random.generator, random.state);
  }

  /// Gives every parameter that had a gradient one of zeros: backward adds to those, which needs
  /// other memory than making them does.
  void zero_known_gradients() {
    for (const auto& [leaf, slots] : leaves_)
      if (slots.gradient().defined()) leaf.mutable_grad() = torch::zeros_like(slots.gradient());
  }

  /// Gives a leaf that is no parameter of the model the same care, from here on.
  void add_leaf(const torch::Tensor& leaf) {
    if (!remember_leaf(leaf)) return;
    own_version(versions_.back());
    leaves_.back().second.exchange(leaf);
  }

  /// Keeps the content of a tensor that a step is about to write and that is no buffer: a parameter
  /// that follows another, a queue.
  void before_write(const torch::Tensor& tensor) {
    const c10::StorageImpl* storage = storage_of(tensor);
    const auto is_known = [&](const Written& known) {
      return known.storage.unsafeGetStorageImpl() == storage;
    };
    const auto is_buffer = [&](const Buffer& known) {
      return has_plain_storage(known.tensor) && storage_of(known.tensor) == storage;
    };
    if (std::ranges::any_of(written_, is_known) || std::ranges::any_of(buffers_, is_buffer)) return;
    written_.push_back({tensor.storage(), copy_of(tensor.storage())});
    remember_generator(tensor.device());
    remember_version(tensor);
    own_version(versions_.back());
  }

 private:
  struct Buffer {
    torch::Tensor tensor, content;
  };
  struct Written {
    c10::Storage storage, content;
  };

  using Versioned = std::pair<torch::Tensor, c10::VariableVersion>;

  static c10::TensorImpl* impl(const torch::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

  static void own_version(const Versioned& versioned) {
    const auto& [tensor, version] = versioned;
    impl(tensor)->set_version_counter(c10::VariableVersion(version.current_version()));
  }

  void exchange_leaves() {
    for (auto& [leaf, slots] : leaves_) slots.exchange(leaf);
  }

  /// False if it was known, as tied weights are, or is none.
  bool remember_leaf(const torch::Tensor& leaf) {
    if (!leaf.defined() || !leaf.is_leaf() || leaf.is_inference()) return false;
    const auto is_same = [&](const auto& known) { return known.first.is_same(leaf); };
    if (std::ranges::any_of(leaves_, is_same)) return false;
    remember_generator(leaf.device());
    remember_version(leaf);
    leaves_.emplace_back(leaf, LeafSlots());
    return true;
  }

  void remember_buffer(const torch::Tensor& buffer) {
    if (!buffer.defined() || buffer.is_inference()) return;
    remember_generator(buffer.device());
    const auto is_same = [&](const Buffer& known) { return known.tensor.is_same(buffer); };
    if (std::ranges::any_of(buffers_, is_same)) return;
    remember_version(buffer);
    buffers_.push_back({buffer, buffer.detach().clone()});
  }

  void remember_version(const torch::Tensor& tensor) {
    if (!tensor.is_inference()) versions_.emplace_back(tensor, impl(tensor)->version_counter());
  }

  void remember_generator(c10::Device device) {
    if (device.is_meta()) return;
    const at::Generator generator = default_generator(device);
    const auto is_same = [&](const RandomState& known) { return known.generator == generator; };
    if (std::ranges::none_of(generators_, is_same))
      generators_.push_back({generator, state_of(generator)});
  }

  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
  std::vector<std::function<void()>> switches_;
  std::vector<std::pair<torch::Tensor, LeafSlots>> leaves_;
  std::vector<Versioned> versions_;
  std::vector<Buffer> buffers_;
  std::vector<Written> written_;
  std::vector<RandomState> generators_;
};

}  // namespace remat::detail

#include <ATen/ops/_unsafe_view.h>

namespace remat::detail {

/// Traces a module's step, `backward(forward(input), leaves)`, and leaves everything as it was.
///
/// The step runs twice, for kernels set themselves up in the first. Gradients go to the module's
/// parameters, a stand-in for `x`, and leaves that the forward reads besides; `leaves` lists them.
/// A graph from before that the step reads, a mask's for example, is its owner's.
///
/// @param forward   takes a tensor that shares the content of `x`
/// @param backward  runs a backward pass with `leaves` as its `inputs`, if there are any
template <class Forward, class Backward>
StepTrace trace_module(torch::nn::Module& module, const torch::Tensor& x, Forward&& forward,
                       Backward&& backward) {
  const torch::Tensor leaf = x.detach().requires_grad_(x.requires_grad());
  ModelState state(module, leaf);
  const auto step = [&](const RegionOptions& options) {
    GraphLeaves found;
    // A layer may write to its input only where that is no leaf.
    const torch::Tensor input = x.is_leaf() ? leaf : at::_unsafe_view(leaf, leaf.sizes());
    auto output = run_region(options, [&] { return forward(input); });
    for_each_tensor_in(output, [&](const torch::Tensor& result) { found.find_behind(result); });
    for (const torch::Tensor& tensor : found.leaves()) state.add_leaf(tensor);
    backward(output, found.leaves());
  };
  RegionOptions first{.name = module.name(), .is_indivisible = true};
  first.before_write = [&](const torch::Tensor& tensor) { state.before_write(tensor); };
  step(first);
  state.rewind();
  state.zero_known_gradients();
  return trace_step(module.name(), step);
}

}  // namespace remat::detail

namespace remat {

/// A network of pipes between a source and a sink, and the cheapest set of pipes that separates
/// them.
///
/// @par Source  Dinic 1970: blocking flows over levels of breadth-first search
class MinimumCut {
 public:
  /// The cost of a pipe that is never cut.
  static constexpr std::int64_t kUncuttable = std::numeric_limits<std::int64_t>::max() / 4;

  /// Nodes have the numbers 0 to `node_count` - 1, besides the source and the sink.
  explicit MinimumCut(std::size_t node_count)
      : outgoing_(node_count + 2), source_(node_count), sink_(node_count + 1) {}

  /// Returns the node that all flow comes from.
  std::size_t source() const { return source_; }
  /// Returns the node that all flow goes to.
  std::size_t sink() const { return sink_; }

  /// Adds a pipe that costs `cost` to cut; at `kUncuttable` it never is.
  void add(std::size_t from, std::size_t to, std::int64_t cost) {
    outgoing_[from].push_back(pipes_.size());
    pipes_.push_back({to, cost});
    outgoing_[to].push_back(pipes_.size());
    pipes_.push_back({from, 0});
  }

  /// Finds the cut; afterwards `is_on_source_side` answers.
  void find() {
    while (measure_levels()) {
      next_.assign(outgoing_.size(), 0);
      while (push(source_, kUncuttable) > 0) {
      }
    }
  }

  /// Returns whether the cut leaves the node with the source.
  bool is_on_source_side(std::size_t node) const { return level_[node] >= 0; }

 private:
  struct Pipe {
    std::size_t to = 0;
    std::int64_t room = 0;
  };

  bool measure_levels() {
    level_.assign(outgoing_.size(), -1);
    level_[source_] = 0;
    queue_.assign(1, source_);
    for (std::size_t i = 0; i < queue_.size(); ++i)
      for (const std::size_t index : outgoing_[queue_[i]]) {
        const Pipe& pipe = pipes_[index];
        if (pipe.room == 0 || level_[pipe.to] >= 0) continue;
        level_[pipe.to] = level_[queue_[i]] + 1;
        queue_.push_back(pipe.to);
      }
    return level_[sink_] >= 0;
  }

  /// Pushes flow along one path of rising levels; returns how much.
  std::int64_t push(std::size_t node, std::int64_t most) {
    if (node == sink_) return most;
    for (std::size_t& i = next_[node]; i < outgoing_[node].size(); ++i) {
      const std::size_t index = outgoing_[node][i];
      const Pipe pipe = pipes_[index];
      if (pipe.room == 0 || level_[pipe.to] != level_[node] + 1) continue;
      const std::int64_t pushed = push(pipe.to, std::min(most, pipe.room));
      if (pushed == 0) continue;
      pipes_[index].room -= pushed;
      pipes_[index ^ 1].room += pushed;  // pipes are added in pairs
      return pushed;
    }
    return 0;
  }

  std::vector<Pipe> pipes_;
  std::vector<std::vector<std::size_t>> outgoing_;
  std::size_t source_, sink_;
  std::vector<int> level_;
  std::vector<std::size_t> queue_, next_;
};

}  // namespace remat

namespace remat {

/// The operations of a trace from `first` up to, and without, `last`.
struct OperationRange {
  std::size_t first = 0, last = 0;
};

/// Decides between keeping and recomputing, exactly, where keeping has a price.
///
/// What backward needs must be kept or recomputed, and what a recomputed operation reads must be
/// so in turn. Which choice is the cheapest, prices and seconds together, is a minimum cut: between
/// a value and its operation runs a pipe at the price of the value, from the operation to the sink
/// one at its time, and to what it reads pipes that cannot be cut.
///
/// @par Source  the cut is that of the partitioner of PyTorch's AOTAutograd, which minimises bytes;
/// here bytes have prices, so that a search over prices obeys a budget
/// @par Threads  any; it refers to the trace
class CheapestKeeps {
 public:
  explicit CheapestKeeps(const StepTrace& trace)
      : trace_(trace), saved_(trace.saved_counts()), can_keep_(trace.keepable_values()) {
    unit_ = trace.seconds() > 0 ? 1e12 / trace.seconds() : 0;
  }

  /// Returns the values to keep among those that the operations make, in order.
  ///
  /// @param price  seconds, by the value's number; what was made before the range is there for free
  template <class Price>
  std::vector<std::int32_t> operator()(OperationRange range, const Price& price) const {
    const std::size_t operation_count = range.last - range.first;
    std::vector<std::int32_t> made;
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes)
        if (!value(id).is_always_kept) made.push_back(id);
    std::ranges::sort(made);
    // Nodes: the operations, then the values.
    const auto node_of = [&](std::int32_t id) -> std::size_t {
      const auto found = std::ranges::lower_bound(made, id);
      const bool is_made = found != made.end() && *found == id;
      return is_made ? operation_count + static_cast<std::size_t>(found - made.begin()) : kNoNode;
    };
    MinimumCut cut(operation_count + made.size());
    for (std::size_t i = 0; i < made.size(); ++i) {
      const std::int32_t id = made[i];
      const std::size_t node = operation_count + i;
      if (saved_[at(id)] > 0) cut.add(cut.source(), node, MinimumCut::kUncuttable);
      cut.add(node, at(value(id).producer) - range.first,
              can_keep_[at(id)] ? cost_of(price(id)) + kKeepAtATie : MinimumCut::kUncuttable);
    }
    for (std::size_t i = 0; i < operation_count; ++i) {
      const StepTrace::Operation& operation = trace_.operations[range.first + i];
      cut.add(i, cut.sink(), cost_of(operation.seconds) + kRunAtATie);
      for (const std::int32_t id : operation.reads)
        if (const std::size_t node = node_of(id); node != kNoNode)
          cut.add(i, node, MinimumCut::kUncuttable);
    }
    cut.find();
    std::vector<std::int32_t> kept;
    for (std::size_t i = 0; i < made.size(); ++i)
      if (cut.is_on_source_side(operation_count + i) &&
          !cut.is_on_source_side(at(value(made[i]).producer) - range.first))
        kept.push_back(made[i]);
    return kept;
  }

 private:
  static constexpr auto kNoNode = static_cast<std::size_t>(-1);
  // A value is neither kept nor recomputed for nothing.
  static constexpr std::int64_t kKeepAtATie = 2, kRunAtATie = 1;

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  const StepTrace::Value& value(std::int32_t id) const { return trace_.values[at(id)]; }

  /// Whole numbers, so that the cut is exact: forward's time is 10^12.
  std::int64_t cost_of(double seconds) const {
    return std::llround(std::min(std::max(seconds, 0.0) * unit_, 1e17));
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;
  std::vector<bool> can_keep_;
  double unit_ = 0;
};

}  // namespace remat

namespace remat {

/// A value that alone connects the operations up to its own to those after it: the end of a layer.
struct CutPoint {
  std::size_t operation = 0;  ///< the last one before the cut
  std::int32_t value = StepTrace::kNone;
};

/// Returns all cut points whose value can be kept, in order of forward.
inline std::vector<CutPoint> cut_points(const StepTrace& trace) {
  const std::vector<bool> can_keep = trace.keepable_values();
  std::vector<std::size_t> last_read(trace.values.size(), 0);
  for (std::size_t i = 0; i < trace.operations.size(); ++i)
    for (const std::int32_t id : trace.operations[i].reads)
      last_read[static_cast<std::size_t>(id)] = i;
  std::vector<CutPoint> points;
  std::vector<std::int32_t> crossing;
  for (std::size_t i = 0; i < trace.operations.size(); ++i) {
    for (const std::int32_t id : trace.operations[i].makes) {
      const StepTrace::Value& made = trace.values[static_cast<std::size_t>(id)];
      if (!made.is_always_kept && made.bytes > 0) crossing.push_back(id);
    }
    std::erase_if(crossing,
                  [&](std::int32_t id) { return last_read[static_cast<std::size_t>(id)] <= i; });
    if (crossing.size() == 1 && can_keep[static_cast<std::size_t>(crossing.front())])
      points.push_back({i, crossing.front()});
  }
  return points;
}

/// Returns at most about `most` of the points, evenly spread, of neighbours the smallest.
inline std::vector<CutPoint> thin_out(const std::vector<CutPoint>& points, const StepTrace& trace,
                                      std::size_t most) {
  const std::size_t window = (trace.operations.size() + most - 1) / most;
  const auto bytes = [&](const CutPoint& point) {
    return trace.values[static_cast<std::size_t>(point.value)].bytes;
  };
  std::vector<CutPoint> chosen;
  for (std::size_t i = 0; i < points.size();) {
    std::size_t end = i, best = i;
    for (; end < points.size() && points[end].operation < points[i].operation + window; ++end)
      if (bytes(points[end]) <= bytes(points[best])) best = end;
    chosen.push_back(points[best]);
    i = end;
  }
  return chosen;
}

}  // namespace remat

namespace remat {

/// The time that backward spends on running operations again, without a simulation: a tenth of its
/// cost.
///
/// @par Threads  one object per thread; it refers to the trace
class RecomputeTime {
 public:
  explicit RecomputeTime(const StepTrace& trace)
      : trace_(trace), seen_(trace.operations.size(), 0) {
    const std::vector<std::int32_t> counts = trace.saved_counts();
    for (std::size_t id = 0; id < counts.size(); ++id)
      if (counts[id] > 0) saved_.push_back(static_cast<std::int32_t>(id));
  }

  /// Returns the seconds of the operations that run again if the given values stay.
  double operator()(const KeptValues& kept) {
    ++round_;
    double seconds = 0;
    todo_ = saved_;
    while (!todo_.empty()) {
      const auto id = static_cast<std::size_t>(todo_.back());
      todo_.pop_back();
      const StepTrace::Value& value = trace_.values[id];
      if (value.producer == StepTrace::kNone || value.is_always_kept || kept[id]) continue;
      const auto producer = static_cast<std::size_t>(value.producer);
      if (seen_[producer] == round_) continue;
      seen_[producer] = round_;
      const StepTrace::Operation& operation = trace_.operations[producer];
      seconds += operation.seconds;
      todo_.insert(todo_.end(), operation.reads.begin(), operation.reads.end());
    }
    return seconds;
  }

 private:
  const StepTrace& trace_;
  std::vector<std::int32_t> saved_, todo_;
  std::vector<std::int64_t> seen_;  // the last round that an operation was in
  std::int64_t round_ = 0;
};

}  // namespace remat

namespace remat {

/// Finds what to keep in a chain of layers by dynamic programming.
///
/// The chain is cut at some of its cut points, whose values stay; between two of them lies a
/// segment. For each segment, a few sets of values to keep are tried, those that are the cheapest
/// at a range of prices. Each has bytes that it keeps until its backward part, seconds, and a peak
/// while that part runs. What was kept before a segment and its own peak must fit together; within
/// that, the program minimises seconds.
///
/// @par Source  the recurrence over a chain is that of rotor (Beaumont et al. 2019, "Optimal
/// checkpointing for heterogeneous chains"), with more to choose from in a segment
/// @par Threads  one object per thread; it refers to the trace and the simulation
class ChainSearch {
 public:
  /// Tries the sets of each segment: some hundred simulations.
  ChainSearch(const StepTrace& trace, StepSimulation& simulation)
      : trace_(trace),
        simulation_(simulation),
        plain_(trace.kept_by_plain()),
        time_(trace),
        cheapest_(trace) {
    for (const CutPoint& point : thin_out(cut_points(trace), trace, kMostCuts))
      ends_.push_back({point.operation + 1, point.value});
    if (ends_.empty() || ends_.back().operation < trace.operations.size())
      ends_.push_back({trace.operations.size(), StepTrace::kNone});
    find_windows();
    plain_peak_ = static_cast<double>(simulation_.run(plain_).peak.count);
    plain_seconds_ = time_(plain_);
    segments_.resize(ends_.size());
    for (std::size_t from = 0; from < ends_.size(); ++from)
      for (std::size_t to = from; to < std::min(ends_.size(), from + kLongest); ++to)
        segments_[from].push_back(try_segment(from, to));
  }

  /// Returns the set that needs the least time within `limit` bytes; empty if there is none.
  ///
  /// The bytes of a segment are counted alone: the true peak may be a little higher.
  KeptValues run(std::int64_t limit) const {
    std::vector<std::vector<Cell>> table(ends_.size() + 1, std::vector<Cell>(kCells + 1));
    table[0][0].seconds = 0;
    const double cell_bytes = static_cast<double>(std::max<std::int64_t>(limit, 1)) / kCells;
    for (std::size_t from = 0; from < ends_.size(); ++from)
      for (std::size_t row = 0; row <= kCells; ++row) {
        const Cell cell = table[from][row];
        if (cell.seconds == kNever) continue;
        for (std::size_t length = 0; length < segments_[from].size(); ++length)
          for (const Choice& choice : segments_[from][length]) {
            if (cell.bytes + std::max(choice.peak, choice.bytes) > limit) continue;
            const std::int64_t bytes = cell.bytes + choice.bytes;
            const auto next_row = static_cast<std::size_t>(static_cast<double>(bytes) / cell_bytes);
            Cell& next = table[from + length + 1][std::min<std::size_t>(next_row, kCells)];
            const double seconds = cell.seconds + choice.seconds;
            if (seconds < next.seconds) next = {seconds, bytes, from, row, &choice};
          }
      }
    return trace_back(table);
  }

 private:
  struct End {
    std::size_t operation = 0;  // the first after the segment
    std::int32_t value = StepTrace::kNone;
  };
  struct Choice {
    std::vector<std::int32_t> kept;
    std::int64_t bytes = 0, peak = 0;  // the peak without what is kept before the segment
    double seconds = 0;
  };
  struct Cell {
    double seconds = kNever;
    std::int64_t bytes = 0;  // kept so far
    std::size_t from = 0, row = 0;
    const Choice* choice = nullptr;
  };
  struct Window {
    std::size_t first = 0, last = 0;  // events, the last one excluded
  };

  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr std::size_t kMostCuts = 48, kLongest = 4, kCells = 400;
  static constexpr int kPrices = 14;
  static constexpr double kLeastPrice = 0.02, kPriceStep = 1.7;  // forward's times for plain's peak

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// In which events each operation runs, and in which ones of backward each value plays a part.
  void find_windows() {
    ran_.assign(trace_.operations.size() + 1, trace_.events.size());
    used_.assign(trace_.values.size(), {trace_.events.size(), 0});
    bool is_backward = false;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      if (event.kind == StepTrace::Kind::ran) ran_[at(event.id)] = i;
      if (event.kind == StepTrace::Kind::ended) ran_.back() = i, is_backward = true;
      const bool is_use =
          event.kind == StepTrace::Kind::asked || event.kind == StepTrace::Kind::released;
      if (!is_backward || !is_use) continue;
      used_[at(event.id)] = {std::min(used_[at(event.id)].first, i), i + 1};
    }
  }

  /// What plain keeps of the operations from `first` on.
  KeptValues plain_from(std::size_t first) const {
    KeptValues kept = plain_;
    for (std::size_t id = 0; id < kept.size(); ++id)
      kept[id] = kept[id] && at(trace_.values[id].producer) >= first;
    return kept;
  }

  std::vector<Choice> try_segment(std::size_t from, std::size_t to) {
    const OperationRange range{from == 0 ? 0 : ends_[from - 1].operation, ends_[to].operation};
    std::vector<Choice> choices;
    std::set<std::vector<std::int32_t>> known;
    double price = 0;
    for (int i = 0; i < kPrices; ++i) {
      std::vector<std::int32_t> kept = cheapest_(range, [&](std::int32_t id) {
        return id == ends_[to].value
                   ? 0.0
                   : price * trace_.seconds() * static_cast<double>(trace_.values[at(id)].bytes) /
                         plain_peak_;
      });
      price = i == 0 ? kLeastPrice : price * kPriceStep;
      if (known.insert(kept).second) choices.push_back(weigh(std::move(kept), from, to, range));
    }
    return choices;
  }

  Choice weigh(std::vector<std::int32_t> kept, std::size_t from, std::size_t to,
               OperationRange range) {
    const std::int32_t start = from == 0 ? StepTrace::kNone : ends_[from - 1].value;
    if (ends_[to].value != StepTrace::kNone) kept.push_back(ends_[to].value);
    std::ranges::sort(kept);
    kept.erase(std::unique(kept.begin(), kept.end()), kept.end());

    KeptValues alone = plain_from(range.last), others = plain_;
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes) others[at(id)] = false;
    if (start != StepTrace::kNone) alone[at(start)] = others[at(start)] = true;
    Choice choice;
    for (const std::int32_t id : kept) {
      alone[at(id)] = others[at(id)] = true;
      choice.bytes += trace_.values[at(id)].bytes;
    }
    choice.kept = std::move(kept);
    choice.seconds = time_(others) - plain_seconds_;
    simulation_.run(alone, &course_);
    const Window forward{ran_[range.first], std::min(ran_[range.last] + 1, course_.size())};
    choice.peak = std::max(peak_in(forward), peak_in(backward_of(range)));
    if (start != StepTrace::kNone) choice.peak -= trace_.values[at(start)].bytes;
    return choice;
  }

  Window backward_of(OperationRange range) const {
    Window window{trace_.events.size(), 0};
    for (std::size_t i = range.first; i < range.last; ++i)
      for (const std::int32_t id : trace_.operations[i].makes) {
        window.first = std::min(window.first, used_[at(id)].first);
        window.last = std::max(window.last, used_[at(id)].last);
      }
    return window;
  }

  std::int64_t peak_in(Window window) const {
    std::int64_t peak = 0;
    for (std::size_t i = window.first; i < window.last; ++i)
      peak = std::max(peak, course_[i].count);
    return peak;
  }

  KeptValues trace_back(const std::vector<std::vector<Cell>>& table) const {
    const auto last = std::ranges::min_element(table.back(), {}, &Cell::seconds);
    if (last->seconds == kNever) return {};
    KeptValues kept(trace_.values.size(), false);
    for (const Cell* cell = &*last; cell->choice != nullptr; cell = &table[cell->from][cell->row])
      for (const std::int32_t id : cell->choice->kept) kept[at(id)] = true;
    return kept;
  }

  const StepTrace& trace_;
  StepSimulation& simulation_;
  KeptValues plain_;
  RecomputeTime time_;
  CheapestKeeps cheapest_;
  std::vector<End> ends_;
  std::vector<std::size_t> ran_;
  std::vector<Window> used_;
  std::vector<std::vector<std::vector<Choice>>> segments_;  // by start and length
  std::vector<Bytes> course_;
  double plain_peak_ = 0, plain_seconds_ = 0;
};

}  // namespace remat

#include <random>

namespace remat {

/// Small random changes of what becomes of values, for a search that goes from one way to run a
/// step to a neighbouring one. The numbers are drawn from a fixed seed.
///
/// @par Threads  one object per thread
class KeepMoves {
 public:
  /// What a change may turn.
  enum class Turn : std::uint8_t {
    kept,                ///< whether a value stays
    kept_and_transient,  ///< and whether it is transient
  };

  explicit KeepMoves(const StepTrace& trace) : overwritten_(trace.values.size()) {
    const std::vector<bool> can_keep = trace.keepable_values();
    for (std::size_t id = 0; id < can_keep.size(); ++id) {
      overwritten_[id] = trace.values[id].takes_over;
      if (can_keep[id]) candidates_.push_back(static_cast<std::int32_t>(id));
    }
  }

  /// Returns the values that may be kept.
  const std::vector<std::int32_t>& candidates() const { return candidates_; }

  /// Turns up to three values that lie close together.
  void move(StepPoint& point, Turn turn) {
    changed_.clear();
    if (turn == Turn::kept_and_transient) point.transient.resize(point.kept.size());
    const auto count = static_cast<std::int64_t>(candidates_.size());
    const std::int64_t first = uniform(count);
    change(point, turn, candidates_[static_cast<std::size_t>(first)]);
    for (std::int64_t more = uniform(3); more > 0; --more) {
      const std::int64_t other =
          uniform() < 0.75 ? first + uniform(2 * kReach + 1) - kReach : uniform(count);
      if (other < 0 || other >= count) continue;
      const std::int32_t id = candidates_[static_cast<std::size_t>(other)];
      if (std::ranges::find(changed_, id, &Change::id) == changed_.end()) change(point, turn, id);
    }
  }

  /// Takes back the last move.
  void undo(StepPoint& point) const {
    for (const Change& change : changed_)
      set(point, change.id, change.was_kept, change.was_transient);
  }

  /// Says what becomes of a value. What a transient one is written over is transient with it: if
  /// it stayed, that would take as much memory.
  void set(StepPoint& point, std::int32_t id, bool is_kept, bool is_transient) const {
    point.kept[at(id)] = is_kept;
    if (point.transient.empty()) return;
    for (; id != StepTrace::kNone; id = overwritten_[at(id)])
      point.transient[at(id)] = is_transient;
  }

  /// Returns a number from 0 up to, and without, 1.
  double uniform() { return static_cast<double>(random_()) / 4294967296.0; }

 private:
  struct Change {
    std::int32_t id = 0;
    bool was_kept = false, was_transient = false;
  };

  static constexpr int kReach = 6;

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  void change(StepPoint& point, Turn turn, std::int32_t id) {
    const bool is_kept = point.kept[at(id)];
    const bool is_transient = !point.transient.empty() && point.transient[at(id)];
    changed_.push_back({id, is_kept, is_transient});
    if (turn == Turn::kept || uniform() < 0.5)
      set(point, id, !is_kept, false);
    else
      set(point, id, false, !is_transient);
  }

  /// A whole number below `count`.
  std::int64_t uniform(std::int64_t count) {
    return static_cast<std::int64_t>(uniform() * static_cast<double>(count));
  }

  std::vector<std::int32_t> candidates_;
  std::vector<std::int32_t> overwritten_;  // per value: what it is written over, in place
  std::vector<Change> changed_;            // by the last move
  std::mt19937 random_{1};
};

}  // namespace remat

namespace remat {

/// Finds what to keep by letting memory cost something where it is short.
///
/// Every event of the step has a price per byte. A set that is the cheapest at these prices is
/// simulated; where it needs more than the limit the prices rise, where it needs less they fall.
/// Good where most values stay: what a recompute needs besides has no price.
///
/// @par Source  Lagrangian relaxation with subgradient steps, textbook
/// @par Threads  one object per thread; it refers to the trace and the simulation
class PriceWalk {
 public:
  PriceWalk(const StepTrace& trace, StepSimulation& simulation, Bytes plain_peak)
      : trace_(trace),
        simulation_(simulation),
        cheapest_(trace),
        plain_peak_(static_cast<double>(plain_peak.count)),
        prices_(trace.events.size(), 0) {
    find_spans();
  }

  /// Returns the next set that is tried on the way to `limit` bytes, and its cost.
  StepPoint step(std::int64_t limit) {
    std::vector<double> sums(prices_.size() + 1, 0);
    for (std::size_t i = 0; i < prices_.size(); ++i) sums[i + 1] = sums[i] + prices_[i];
    const double unit = trace_.seconds() / plain_peak_;
    const auto price = [&](std::int32_t id) {
      const auto [first, last] = spans_[at(id)];
      const double sum = last > first ? sums[last] - sums[first] : 0;
      return sum * unit * static_cast<double>(trace_.values[at(id)].bytes);
    };
    KeptValues kept(trace_.values.size(), false);
    for (const std::int32_t id : cheapest_({0, trace_.operations.size()}, price))
      kept[at(id)] = true;
    const StepCost cost = simulation_.run(kept, &course_);
    const double step = kStep / static_cast<double>(prices_.size());
    for (std::size_t i = 0; i < prices_.size(); ++i) {
      const double excess = static_cast<double>(course_[i].count - limit) / plain_peak_;
      prices_[i] = std::max(0.0, prices_[i] + step * excess);
    }
    return {std::move(kept), cost};
  }

 private:
  static constexpr double kStep = 12;  // forward's times, over all events

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// Finds for each value the events through which it lives only because it is kept.
  void find_spans() {
    const std::size_t count = trace_.values.size();
    std::vector<std::size_t> asked(count, 0), until(count, 0);
    spans_.assign(count, {0, 0});
    bool is_backward = false;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      is_backward = is_backward || event.kind == StepTrace::Kind::ended;
      if (event.kind == StepTrace::Kind::let_go) spans_[at(event.id)].first = i;
      if (is_backward && event.kind == StepTrace::Kind::asked && asked[at(event.id)] == 0)
        asked[at(event.id)] = i;
      if (is_backward && event.kind == StepTrace::Kind::released) until[at(event.id)] = i;
    }
    // Whoever reads a value to recompute another one does so when that one is asked for.
    for (std::size_t i = trace_.operations.size(); i-- > 0;)
      for (const std::int32_t made : trace_.operations[i].makes)
        for (const std::int32_t read : trace_.operations[i].reads)
          until[at(read)] =
              std::max(until[at(read)], asked[at(made)] > 0 ? asked[at(made)] : until[at(made)]);
    for (std::size_t id = 0; id < count; ++id) spans_[id].second = until[id];
  }

  const StepTrace& trace_;
  StepSimulation& simulation_;
  CheapestKeeps cheapest_;
  double plain_peak_;
  std::vector<double> prices_;  // of a byte at each event, in forward's times for plain's peak
  std::vector<Bytes> course_;
  std::vector<std::pair<std::size_t, std::size_t>> spans_;
};

}  // namespace remat

#include <queue>

#include <span>

namespace remat {

/// A run of units, `[first, last)`, that is recomputed as one, or kept.
struct Segment {
  std::size_t first = 0;
  std::size_t last = 0;
  bool is_checkpointed = true;

  /// Returns the number of units in it.
  std::size_t unit_count() const { return last - first; }
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// Says how the units of a chain are grouped into segments, and which of them are checkpointed.
///
/// A value: it prints, for example as `[0,1) checkpoint | [1,8) plain`, and compares. The segments
/// follow each other without a gap, from unit 0 on, and none is empty; a plan for no units has
/// none.
class Plan {
 public:
  Plan() = default;

  /// @throws ArgumentError  if a segment is empty or does not begin where the one before it ends
  explicit Plan(std::vector<Segment> segments) : segments_(std::move(segments)) {
    std::size_t expected = 0;
    for (std::size_t index = 0; index < segments_.size(); ++index) {
      const Segment& segment = segments_[index];
      require(segment.first == expected && segment.last > segment.first, [&] {
        return ErrorMessage("remat.plan.segments")
            .where("remat::Plan")
            .what("segment " + std::to_string(index) + " is " + range(segment) +
                  " where one that begins at unit " + std::to_string(expected) +
                  " and has at least one unit was expected")
            .cure("Give segments that follow each other without a gap, the first from unit 0");
      });
      expected = segment.last;
    }
  }

  /// Makes a plan of checkpointed segments with these numbers of units.
  static Plan from_sizes(std::span<const std::size_t> sizes) {
    std::vector<Segment> segments;
    std::size_t first = 0;
    for (const std::size_t size : sizes) {
      segments.push_back({first, first + size, true});
      first += size;
    }
    return Plan(std::move(segments));
  }
  /// As above, for a list that is written out.
  static Plan from_sizes(std::initializer_list<std::size_t> sizes) {
    return from_sizes(std::span(sizes.begin(), sizes.size()));
  }

  /// Makes a plan of `segment_count` checkpointed segments, as equal in number of units as can be.
  ///
  /// More segments than units means one segment per unit.
  static Plan from_count(std::size_t unit_count, std::size_t segment_count) {
    segment_count = std::min(segment_count, unit_count);
    std::vector<std::size_t> sizes;
    for (std::size_t index = 0; index < segment_count; ++index)
      sizes.push_back(unit_count / segment_count + (index < unit_count % segment_count ? 1 : 0));
    return from_sizes(sizes);
  }

  /// Makes a plan that checkpoints nothing: one plain segment.
  static Plan keep_all(std::size_t unit_count) {
    return unit_count == 0 ? Plan() : Plan({{0, unit_count, false}});
  }

  /// Returns the segments in the order of the units.
  const std::vector<Segment>& segments() const& { return segments_; }
  /// By value, so that a loop over the segments of a temporary plan is right.
  std::vector<Segment> segments() && { return std::move(segments_); }
  /// Returns the number of segments, plain ones included.
  std::size_t segment_count() const { return segments_.size(); }
  /// Returns the number of units in all segments.
  std::size_t unit_count() const { return segments_.empty() ? 0 : segments_.back().last; }
  /// Returns the number of segments that are recomputed.
  std::size_t checkpointed_count() const {
    return static_cast<std::size_t>(std::ranges::count_if(segments_, &Segment::is_checkpointed));
  }

  /// Returns this plan with the given units plain; a segment around such a unit is split there.
  Plan with_plain_units(std::span<const std::size_t> units) const {
    std::vector<Segment> segments;
    for (const Segment& segment : segments_) {
      std::size_t begin = segment.first;
      for (std::size_t unit = segment.first; unit < segment.last; ++unit) {
        if (!segment.is_checkpointed || std::ranges::find(units, unit) == units.end()) continue;
        if (unit > begin) segments.push_back({begin, unit, true});
        segments.push_back({unit, unit + 1, false});
        begin = unit + 1;
      }
      if (begin < segment.last) segments.push_back({begin, segment.last, segment.is_checkpointed});
    }
    return Plan(std::move(segments));
  }

  /// Returns this plan with its last segment plain.
  Plan with_last_plain() const {
    Plan plan = *this;
    if (!plan.segments_.empty()) plan.segments_.back().is_checkpointed = false;
    return plan;
  }

  friend bool operator==(const Plan&, const Plan&) = default;

  /// Writes the plan as `[0,1) checkpoint | [1,8) plain`.
  friend std::string to_string(const Plan& plan) {
    std::string text;
    for (const Segment& segment : plan.segments_)
      text += (text.empty() ? "" : " | ") + range(segment) +
              (segment.is_checkpointed ? " checkpoint" : " plain");
    return text.empty() ? "no units" : text;
  }
  friend std::ostream& operator<<(std::ostream& stream, const Plan& plan) {
    return stream << to_string(plan);
  }

 private:
  static std::string range(const Segment& segment) {
    return "[" + std::to_string(segment.first) + "," + std::to_string(segment.last) + ")";
  }

  std::vector<Segment> segments_;
};

}  // namespace remat

namespace remat {

namespace detail {

inline void require_cost_per_unit(const Plan& plan, std::span<const UnitCost> costs,
                                  std::string_view where) {
  require(plan.unit_count() == costs.size(), [&] {
    return ErrorMessage("remat.plan.costs")
        .where(where)
        .what("the plan has " + std::to_string(plan.unit_count()) +
              " units and there are costs of " + std::to_string(costs.size()))
        .cure("Give one cost per unit");
  });
}

/// Gradients pass a segment in pairs: that of a result while that of an input is made.
inline constexpr std::int64_t kGradientsAlive = 2;

}  // namespace detail

/// Returns the bytes that backward holds at its fullest moment, on paper.
///
/// While a segment is in backward these are alive: the tensors at the segments' borders up to it,
/// what plain segments before it saved, what it saved itself (recomputed, or kept if it is plain),
/// and gradients, counted as twice the largest result in it. Not counted: the chain's input and
/// result, parameters, and what a kernel takes for its own work.
///
/// @throws ArgumentError  if there is not one cost per unit
inline Bytes predicted_peak(const Plan& plan, std::span<const UnitCost> costs) {
  detail::require_cost_per_unit(plan, costs, "remat::predicted_peak");
  Bytes alive;
  Bytes held;  // by a keep policy, in the units so far: later ones have let go of theirs
  Bytes peak;
  bool is_border_kept = false;  // between two plain segments nothing is kept beyond what they saved
  for (const Segment& segment : plan.segments()) {
    if (segment.first > 0 && (is_border_kept || segment.is_checkpointed))
      alive += costs[segment.first - 1].output;
    Bytes saved;
    Bytes largest_output;
    for (const UnitCost& cost : costs.subspan(segment.first, segment.unit_count())) {
      saved += cost.saved;
      held += cost.kept;
      largest_output = std::max(largest_output, cost.output);
    }
    peak = std::max(peak, alive + held + saved + detail::kGradientsAlive * largest_output);
    if (!segment.is_checkpointed) alive += saved;
    is_border_kept = segment.is_checkpointed;
  }
  return peak;
}

/// Returns the bytes that backward computes again, a measure of a plan's extra time.
///
/// @throws ArgumentError  if there is not one cost per unit
inline Bytes recomputed_bytes(const Plan& plan, std::span<const UnitCost> costs) {
  detail::require_cost_per_unit(plan, costs, "remat::recomputed_bytes");
  Bytes recomputed;
  for (const Segment& segment : plan.segments()) {
    if (!segment.is_checkpointed) continue;
    for (const UnitCost& cost : costs.subspan(segment.first, segment.unit_count()))
      recomputed += cost.saved;
  }
  return recomputed;
}

}  // namespace remat

namespace remat {

namespace detail {

/// Finds borders so that the predicted peak of a fixed number of segments is least.
///
/// For a given limit on the peak, less kept before a unit is always better, so one number per
/// (segment count, unit) describes the best choice, and the least limit that can be met is found by
/// bisection over whole bytes. Exact, in O(segments * units * log units) per limit; no set of
/// alternatives is carried along.
class Balancer {
 public:
  Balancer(const std::vector<UnitCost>& costs, std::size_t segment_count)
      : costs_(costs),
        segment_count_(segment_count),
        saved_before_(costs.size() + 1, 0),
        held_before_(costs.size() + 1, 0) {
    for (std::size_t unit = 0; unit < costs.size(); ++unit) {
      saved_before_[unit + 1] = saved_before_[unit] + costs[unit].saved.count;
      held_before_[unit + 1] = held_before_[unit] + costs[unit].kept.count;
    }
    largest_.push_back({});
    for (const UnitCost& cost : costs) largest_[0].push_back(cost.output.count);
    for (std::size_t width = 1; 2 * width <= costs.size(); width *= 2) {
      const auto& half = largest_.back();
      std::vector<std::int64_t> level;
      for (std::size_t unit = 0; unit + width < half.size(); ++unit)
        level.push_back(std::max(half[unit], half[unit + width]));
      largest_.push_back(std::move(level));
    }
  }

  Plan plan() {
    std::int64_t met =
        predicted_peak(Plan::from_count(costs_.size(), segment_count_), costs_).count;
    std::int64_t missed = -1;
    // For chains of a thousand units and more the last per mille of the peak is not worth its time.
    const bool is_exact = costs_.size() * segment_count_ <= kExactUpTo;
    while (met - missed > (is_exact ? 1 : std::max<std::int64_t>(1, met / 1024))) {
      const std::int64_t limit = missed + (met - missed) / 2;
      (is_within(limit) ? met : missed) = limit;
    }
    is_within(met);
    return trace(met);
  }

 private:
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  static constexpr std::size_t kExactUpTo = 100'000;

  std::int64_t largest_output(std::size_t first, std::size_t last) const {
    std::size_t level = 0;
    while (std::size_t{2} << level <= last - first) ++level;
    return std::max(largest_[level][first], largest_[level][last - (std::size_t{1} << level)]);
  }

  /// Bytes of a segment's own backward, and what a keep policy holds up to there.
  std::int64_t work(std::size_t first, std::size_t last) const {
    return held_before_[last] + saved_before_[last] - saved_before_[first] +
           kGradientsAlive * largest_output(first, last);
  }

  std::int64_t border(std::size_t first) const {
    return first == 0 ? 0 : costs_[first - 1].output.count;
  }

  /// Returns the end of the longest segment from `first` that stays within the limit, `first` if
  /// none does.
  std::size_t reach(std::size_t first, std::int64_t kept, std::int64_t limit) const {
    std::size_t low = first;
    std::size_t high = costs_.size();
    while (low < high) {
      const std::size_t middle = low + (high - low + 1) / 2;
      if (kept + work(first, middle) <= limit)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  /// Fills `kept_[k][last]`, the least bytes kept at borders when k segments within the limit end
  /// at `last`.
  bool is_within(std::int64_t limit) {
    const std::size_t unit_count = costs_.size();
    kept_.assign(segment_count_ + 1, std::vector<std::int64_t>(unit_count + 1, kNever));
    begin_.assign(segment_count_ + 1, std::vector<std::size_t>(unit_count + 1, 0));
    kept_[0][0] = 0;
    struct Start {
      std::int64_t kept;
      std::size_t first, reach;
      bool operator>(const Start& other) const { return kept > other.kept; }
    };
    for (std::size_t k = 1; k <= segment_count_; ++k) {
      std::priority_queue<Start, std::vector<Start>, std::greater<>> starts;
      for (std::size_t last = k; last <= unit_count; ++last) {
        const std::size_t first = last - 1;
        if (kept_[k - 1][first] != kNever) {
          const std::int64_t kept = kept_[k - 1][first] + border(first);
          starts.push({kept, first, reach(first, kept, limit)});
        }
        while (!starts.empty() && starts.top().reach < last) starts.pop();
        if (starts.empty()) continue;
        kept_[k][last] = starts.top().kept;
        begin_[k][last] = starts.top().first;
      }
    }
    return kept_[segment_count_][unit_count] != kNever;
  }

  /// Reads the borders back; the last segment, which a pattern may leave plain, is the one with
  /// most saved bytes.
  Plan trace(std::int64_t limit) const {
    const std::size_t unit_count = costs_.size();
    std::vector<std::size_t> borders = {unit_count};
    std::size_t first = segment_count_ - 1;
    while (kept_[segment_count_ - 1][first] == kNever ||
           kept_[segment_count_ - 1][first] + border(first) + work(first, unit_count) > limit)
      ++first;
    for (std::size_t k = segment_count_ - 1; k > 0; --k) {
      borders.push_back(first);
      first = begin_[k][first];
    }
    std::vector<std::size_t> sizes;
    std::size_t begin = 0;
    for (std::size_t index = borders.size(); index-- > 0; begin = borders[index])
      sizes.push_back(borders[index] - begin);
    return Plan::from_sizes(sizes);
  }

  const std::vector<UnitCost>& costs_;
  std::size_t segment_count_;
  std::vector<std::int64_t> saved_before_;  // units + 1
  std::vector<std::int64_t> held_before_;   // units + 1
  std::vector<std::vector<std::int64_t>>
      largest_;  // per power of two: the largest output from a unit on
  std::vector<std::vector<std::int64_t>> kept_;  // (segments + 1, units + 1)
  std::vector<std::vector<std::size_t>> begin_;  // (segments + 1, units + 1)
};

}  // namespace detail

/// Groups a chain into `segment_count` checkpointed segments.
///
/// With measured units the predicted peak is the least that so many segments can have, and among
/// plans with that peak the last segment, which need not be recomputed, holds the most bytes.
/// Without, the segments have equal numbers of units. More segments than units means one segment
/// per unit.
///
/// @throws ArgumentError  if `segment_count` is 0
inline Plan balanced_plan(const Chain& chain, std::size_t segment_count) {
  require(segment_count > 0, [] {
    return ErrorMessage("remat.segments.count")
        .where("remat::balanced_plan")
        .what("0 segments were asked for and at least 1 is needed");
  });
  if (!chain.is_measured() || segment_count == 1 || segment_count >= chain.unit_count)
    return Plan::from_count(chain.unit_count, segment_count);
  return detail::Balancer(chain.unit_costs, segment_count).plan();
}

}  // namespace remat

namespace remat {

/// What stays under a schedule by segments.
struct NamedKeeps {
  std::string name;        ///< "4 segments"
  Plan plan;               ///< of the traced layers
  KeptValues kept;         ///< for `StepSimulation`
  bool is_common = false;  ///< among the few that people compare with
};

namespace detail {

/// The layers of a trace: which operations each has, and the value in which it ends.
class TracedLayers {
 public:
  explicit TracedLayers(const StepTrace& trace)
      : trace_(trace),
        saved_(trace.saved_counts()),
        layer_of_(trace.operations.size(), kOutside),
        is_overwritten_(trace.overwritten_values()) {
    std::int32_t first =
        trace.layers_begin == StepTrace::kNone ? 0 : producer(trace.layers_begin) + 1;
    for (const std::int32_t end : trace.layer_ends) {
      if (producer(end) < first) continue;  // it handed on what a layer before it had made
      for (; first <= producer(end); ++first) layer_of_[at(first)] = count();
      ends_.push_back(end);
    }
  }

  std::size_t count() const { return ends_.size(); }

  /// Returns what the layers cost, as a chain that runs by `plan` measures them.
  std::vector<UnitCost> costs(const Plan& plan) const {
    std::vector<std::size_t> segment_of;
    for (const Segment& segment : plan.segments())
      segment_of.insert(segment_of.end(), segment.unit_count(), segment.first);
    std::vector<UnitCost> costs(count());
    for (std::size_t layer = 0; layer < count(); ++layer) costs[layer].output = bytes(ends_[layer]);
    std::vector<bool> is_counted(trace_.values.size(), false);
    std::size_t running = kOutside;
    for (std::size_t i = 0; i < trace_.events.size(); ++i) {
      const StepTrace::Event& event = trace_.events[i];
      if (event.kind == StepTrace::Kind::ended) break;
      if (event.kind == StepTrace::Kind::ran) running = layer_of_[at(event.id)];
      if (event.kind != StepTrace::Kind::saved || is_counted[at(event.id)]) continue;
      const std::size_t from = layer_of(event.id), by = is_saved_by_next(i) ? running + 1 : running;
      // What a region gets from outside is no cost of its units.
      if (from == kOutside || by >= count() || segment_of[from] != segment_of[by]) continue;
      is_counted[at(event.id)] = true;
      const bool is_kept = trace_.values[at(event.id)].is_always_kept;
      (is_kept ? costs[by].kept : costs[by].saved) += bytes(event.id);
    }
    return costs;
  }

  /// Returns what stays if the layers run by the plan and everything around them is plain.
  KeptValues keeps(const Plan& plan) const {
    std::vector<bool> is_checkpointed;
    for (const Segment& segment : plan.segments())
      is_checkpointed.insert(is_checkpointed.end(), segment.unit_count(), segment.is_checkpointed);
    KeptValues kept(trace_.values.size(), false);
    for (std::size_t id = 0; id < kept.size(); ++id) {
      if (producer(static_cast<std::int32_t>(id)) == StepTrace::kNone) continue;
      const std::size_t layer = layer_of(static_cast<std::int32_t>(id));
      const bool is_plain = layer == kOutside || !is_checkpointed[layer];
      kept[id] = is_plain && saved_[id] > 0;
    }
    // What goes into a region, and what comes out of one.
    if (trace_.layers_begin != StepTrace::kNone) kept[at(trace_.layers_begin)] = true;
    for (const Segment& segment : plan.segments()) {
      if (!segment.is_checkpointed) continue;
      if (segment.first > 0) kept[at(ends_[segment.first - 1])] = true;
      kept[at(ends_[segment.last - 1])] = true;
    }
    for (std::size_t id = 0; id < kept.size(); ++id) kept[id] = kept[id] && !is_overwritten_[id];
    return kept;
  }

 private:
  static constexpr std::size_t kOutside = static_cast<std::size_t>(-2);

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
  std::int32_t producer(std::int32_t id) const { return trace_.values[at(id)].producer; }
  Bytes bytes(std::int32_t id) const { return {trace_.values[at(id)].bytes}; }
  std::size_t layer_of(std::int32_t id) const {
    return producer(id) == StepTrace::kNone ? kOutside : layer_of_[at(producer(id))];
  }

  /// Autograd saves an operation's arguments before it runs and its results afterwards. So what is
  /// saved once between two operations, and read by the second, is the second's argument.
  bool is_saved_by_next(std::size_t index) const {
    const std::int32_t id = trace_.events[index].id;
    if (std::ranges::find(ends_, id) == ends_.end()) return false;
    for (++index; index < trace_.events.size(); ++index) {
      const StepTrace::Event& event = trace_.events[index];
      if (event.kind == StepTrace::Kind::saved && event.id == id) return false;
      if (event.kind == StepTrace::Kind::ended) return false;
      if (event.kind != StepTrace::Kind::ran) continue;
      const auto& reads = trace_.operations[at(event.id)].reads;
      return std::ranges::find(reads, id) != reads.end();
    }
    return false;
  }

  const StepTrace& trace_;
  std::vector<std::int32_t> saved_;    // saved tensors per value when the region ended
  std::vector<std::size_t> layer_of_;  // per operation
  std::vector<bool> is_overwritten_;
  std::vector<std::int32_t> ends_;
};

/// The last segment plain where that does not raise the predicted peak, as `Sequential` has it.
inline Plan with_last_plain_if_free(const Plan& plan, const std::vector<UnitCost>& costs) {
  Plan candidate = plan.with_last_plain();
  return predicted_peak(candidate, costs) <= predicted_peak(plan, costs) ? candidate : plan;
}

}  // namespace detail

/// Returns what stays under the known schedules over a trace's layers: numbers of segments,
/// balanced by bytes and of equal numbers of layers, and one region per layer.
///
/// "n segments" is what a `Checkpointed<Sequential>` of n segments does from its second step on;
/// "n equal segments", the last of them plain, what Python's `checkpoint_sequential` does; the
/// square root of the number of layers has a name of its own. Each plan is there once. What ran
/// before the first layer and after the last one is plain.
///
/// @return  nothing if the trace knows no layers
inline std::vector<NamedKeeps> segment_keeps(const StepTrace& trace) {
  const detail::TracedLayers layers(trace);
  const std::size_t count = layers.count();
  std::vector<NamedKeeps> list;
  const auto add = [&](std::string name, const Plan& plan, bool is_common) {
    if (std::ranges::find(list, plan, &NamedKeeps::plan) == list.end())
      list.push_back({std::move(name), plan, layers.keeps(plan), is_common});
  };
  if (count == 0) return list;
  const Plan finest = Plan::from_count(count, count);
  add("one region per layer", finest, true);
  add("one region per layer, the last plain", finest.with_last_plain(), false);
  const auto root = static_cast<std::size_t>(std::lround(std::sqrt(static_cast<double>(count))));
  for (std::size_t segments = 2; segments < count; ++segments) {
    const bool is_power = (segments & (segments - 1)) == 0;
    if (segments > 8 && !is_power && segments % 12 != 0 && segments != root) continue;
    const Plan equal = Plan::from_count(count, segments);
    const std::vector<UnitCost> costs = layers.costs(equal);
    const Plan balanced = balanced_plan(Chain::of(costs), segments);
    const std::string number = std::to_string(segments);
    const bool is_root = segments == root;
    add(number + " segments" + (is_root ? ", sqrt(" + std::to_string(count) + ")" : ""),
        detail::with_last_plain_if_free(balanced, costs),
        is_root || segments == 2 || segments == 4 || segments == 8);
    add(number + " equal segments", equal.with_last_plain(), false);
  }
  return list;
}

}  // namespace remat

namespace remat {

/// Searches for what to keep, and what to recompute more than once, so that a step needs the least
/// time at each level of memory.
///
/// The known schedules by segments come first, so that no plan is slower than one of these. Then a
/// ladder of levels leads down from plain: at each, `PriceWalk` and `ChainSearch` propose sets.
/// Last, annealing lowers the least memory that was found, first by what is kept alone and then
/// with transient values, and betters the levels for which the chain's program had no proposal. All
/// that is found goes into one list that depends on no budget. Every number is drawn from a fixed
/// seed: the same trace gives the same list. Up to nine values, everything is tried.
class KeepSearch {
 public:
  explicit KeepSearch(const StepTrace& trace)
      : trace_(trace), simulation_(trace), time_(trace), moves_(trace) {}

  /// Returns the list.
  StepPoints run() {
    if (moves_.candidates().size() <= kFewCandidates) {
      try_all();
      return std::move(points_);
    }
    const Bytes plain_peak = evaluate(trace_.kept_by_plain()).peak;
    plain_peak_ = static_cast<double>(plain_peak.count);
    for (const NamedKeeps& schedule : segment_keeps(trace_)) evaluate(schedule.kept);
    std::vector<Level> levels = choose_levels();
    descend(levels, plain_peak);
    lower({keep_cuts(), {}}, kLowerKept);  // the same, however long the operations took
    lower(points_.least(), kLowerKept);
    least_kept_ = points_.least().cost.peak;
    lower(nothing_kept(), kLowerTransient);
    for (const Level& level : levels) polish(level);
    return std::move(points_);
  }

 private:
  using Turn = KeepMoves::Turn;
  struct Level {
    std::int64_t bytes = 0;
    bool is_round = false;  // a budget that somebody is likely to ask for
    bool is_hard = true;    // the chain's program has no proposal
  };
  /// How to look for the least memory.
  struct Lowering {
    Turn turn;
    double swaps, most_events;  // fewer swaps in a step of more events
    double temperature;
    int squarings;  // peaks count with power 2^squarings
  };

  static constexpr std::size_t kFewCandidates = 9;  // 3^9 simulations: less than the search
  static constexpr double kStep = 0.95, kLowestLevel = 0.02;
  static constexpr std::array kRoundParts{0.9, 0.8,     0.75, 0.7,     2.0 / 3, 0.6,
                                          0.5, 0.45,    0.4,  1.0 / 3, 0.3,     1.0 / 4,
                                          0.2, 1.0 / 6, 0.15, 0.125,   0.1};
  static constexpr double kBelowRound = 0.9995;  // room for a small reserve
  static constexpr int kPriceSteps = 10, kMostFailures = 15;
  static constexpr double kFullEffort = 2000;  // events
  static constexpr Lowering kLowerKept{Turn::kept, 2000, kFullEffort, 0.02, 6};
  static constexpr Lowering kLowerTransient{Turn::kept_and_transient, 3000, 3 * kFullEffort, 0.005,
                                            5};
  static constexpr double kRoundSwaps = 200, kHardSwaps = 2000;
  static constexpr double kLowSwaps = 200;       // at levels below what kept values alone reach
  static constexpr double kTemperature = 0.006;  // of forward's time

  static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }

  /// What is kept where a chain is cut at all its cut points.
  KeptValues keep_cuts() const {
    KeptValues kept(trace_.values.size(), false);
    for (const CutPoint& point : cut_points(trace_)) kept[at(point.value)] = true;
    return kept;
  }

  StepPoint nothing_kept() const { return {KeptValues(trace_.values.size(), false), {}}; }

  StepCost evaluate(const KeptValues& kept) { return add({kept, simulation_.run(kept)}); }
  StepCost add(const StepPoint& point) {
    points_.add(point);
    return point.cost;
  }

  /// Tries everything that can become of the values.
  void try_all() {
    const std::vector<std::int32_t>& candidates = moves_.candidates();
    const std::size_t count = candidates.size();
    StepPoint point{
        KeptValues(trace_.values.size(), false), {}, TransientValues(trace_.values.size(), false)};
    for (const int fate_count : {2, 3}) {  // transient values only where they are better
      std::vector<int> fates(count, 0);
      std::size_t i = 0;
      do {
        for (std::size_t k = 0; k < count; ++k)
          moves_.set(point, candidates[k], fates[k] == 1, fates[k] == 2);
        point.cost = simulation_.run(point.kept, point.transient);
        add(point);
        for (i = 0; i < count && ++fates[i] == fate_count; ++i) fates[i] = 0;
      } while (i < count);
    }
  }

  /// A ladder, and the round parts of plain, which are asked for most.
  std::vector<Level> choose_levels() const {
    std::vector<Level> levels;
    for (double part = 1; part > kLowestLevel; part *= kStep)
      levels.push_back({static_cast<std::int64_t>(part * plain_peak_)});
    for (const double part : kRoundParts)
      levels.push_back({static_cast<std::int64_t>(part * kBelowRound * plain_peak_), true});
    std::ranges::sort(levels, std::greater<>(), &Level::bytes);
    return levels;
  }

  /// Takes the proposals for each level, down to the first for which there is none.
  void descend(std::vector<Level>& levels, Bytes plain_peak) {
    PriceWalk walk(trace_, simulation_, plain_peak);
    const ChainSearch chain(trace_, simulation_);
    bool is_met = true;
    for (Level& level : levels) {
      if (!std::exchange(is_met, false)) return;
      for (int i = 0; i < kPriceSteps; ++i)
        is_met = add(walk.step(level.bytes)).peak.count <= level.bytes || is_met;
      const KeptValues kept = chain.run(level.bytes);
      if (kept.empty()) continue;
      level.is_hard = false;
      is_met = true;
      evaluate(kept);
    }
  }

  // --- the least memory ---

  /// Lowers the course of memory wherever it is high, not only where it is highest.
  void lower(StepPoint state, const Lowering& how) {
    double height = height_of(state, how.squarings);
    const int count = scaled(how.swaps, how.most_events);
    for (int i = 0; i < count; ++i) {
      const double temperature = how.temperature * (1 - static_cast<double>(i) / count);
      moves_.move(state, how.turn);
      const double now = height_of(state, how.squarings);
      if (now > height - temperature * std::log(moves_.uniform() + 1e-12))
        moves_.undo(state);
      else
        height = now;
    }
  }

  /// Simulates; the logarithm of a mean of the course with a high power, which is close to its
  /// peak's.
  double height_of(StepPoint& state, int squarings) {
    double sum = 0;
    state.cost = simulation_.run(state.kept, state.transient, &course_);
    points_.add(state);
    for (const Bytes& bytes : course_) {
      double power = static_cast<double>(bytes.count) / plain_peak_;
      for (int i = 0; i < squarings; ++i) power *= power;
      sum += power;
    }
    return std::log(sum);
  }

  // --- the least time ---

  /// Betters what was found for a level.
  void polish(const Level& level) {
    const StepPoint* found = points_.fastest_within({level.bytes});
    if (found == nullptr) return;
    StepPoint state = *found;
    fill(state, level.bytes);
    const bool is_low = level.bytes < least_kept_.count;
    const double swaps = is_low && !level.is_round ? kLowSwaps
                         : level.is_hard           ? kHardSwaps
                         : level.is_round          ? kRoundSwaps
                                                   : 0;
    anneal(state, level.bytes, scaled(swaps), is_low ? Turn::kept_and_transient : Turn::kept);
  }

  /// Keeps what saves time and fits, the most seconds per byte first.
  void fill(StepPoint& state, std::int64_t limit) {
    std::vector<std::pair<double, std::int32_t>> order;
    const double before = time_(state.kept);
    for (const std::int32_t id : moves_.candidates()) {
      if (state.kept[at(id)] || trace_.values[at(id)].bytes > limit) continue;
      state.kept[at(id)] = true;
      const double saved = before - time_(state.kept);
      state.kept[at(id)] = false;
      if (saved > 0)
        order.emplace_back(saved / static_cast<double>(trace_.values[at(id)].bytes), id);
    }
    std::ranges::sort(order, std::greater<>());
    int failures = 0;
    for (const auto& [gain, id] : order) {
      if (failures > kMostFailures) return;
      state.kept[at(id)] = true;
      if (accept(state, limit, state.cost.seconds)) continue;
      state.kept[at(id)] = false;
      ++failures;
    }
  }

  /// Takes the cost of what is kept now, if it fits and is as fast as `bound`.
  bool accept(StepPoint& state, std::int64_t limit, double bound) {
    if (time_(state.kept) > bound) return false;  // without what transient values cost
    const StepCost cost = simulation_.run(state.kept, state.transient);
    add({state.kept, cost, state.transient});
    if (cost.peak.count > limit || cost.seconds > bound) return false;
    state.cost = cost;
    return true;
  }

  /// Takes moves to what fits and is faster, or at first a little slower.
  void anneal(StepPoint& state, std::int64_t limit, int count, Turn turn) {
    const double start = kTemperature * trace_.seconds();
    for (int i = 0; i < count; ++i) {
      const double temperature = start * (1 - static_cast<double>(i) / count);
      moves_.move(state, turn);
      const double luck = temperature * std::log(moves_.uniform() + 1e-12);
      if (!accept(state, limit, state.cost.seconds - luck)) moves_.undo(state);
    }
  }

  /// Fewer swaps where each takes long, in a step of many events.
  int scaled(double swaps, double most_events = kFullEffort) const {
    return static_cast<int>(swaps *
                            std::min(1.0, most_events / static_cast<double>(trace_.events.size())));
  }

  const StepTrace& trace_;
  StepSimulation simulation_;
  RecomputeTime time_;
  KeepMoves moves_;
  StepPoints points_;
  double plain_peak_ = 0;
  Bytes least_kept_;  // of the ways without transient values
  std::vector<Bytes> course_;
};

}  // namespace remat

namespace remat::detail {

/// Traces a step of `forward` and a stand-in for the loss, a gradient of ones.
template <class Forward>
StepTrace trace_forward(torch::nn::Module& module, const torch::Tensor& x, Forward& forward) {
  const auto backward = [](const torch::Tensor& output, const std::vector<torch::Tensor>& leaves) {
    if (!leaves.empty())
      output.backward(torch::ones_like(output), {}, /*create_graph=*/false, at::TensorList(leaves));
  };
  return trace_module(module, x, forward, backward);
}

/// Runs a module's forward as one region that follows a plan: one that was given, or one made for
/// a budget from a trace of the module's own step, anew for each shape of input and each kind of
/// step (`StepKind`).
///
/// @par Threads  any call from any thread; a plan, once handed out, stays as it is
class BudgetedRun {
 public:
  using Target = std::variant<std::monostate, MemoryBudget, std::shared_ptr<const MemoryPlan>>;

  BudgetedRun() = default;
  BudgetedRun(const BudgetedRun& other) { *this = other; }
  BudgetedRun& operator=(const BudgetedRun& other) {
    if (this == &other) return *this;
    const std::scoped_lock lock(mutex_, other.mutex_);
    target_ = other.target_;
    planned_ = other.planned_;
    last_ = other.last_;
    return *this;
  }

  /// Sets a budget or a plan; nothing: the module goes by segments again.
  void set(Target target) {
    const std::lock_guard lock(mutex_);
    target_ = std::move(target);
    planned_.clear();
    last_ = nullptr;
  }

  bool is_set() const {
    const std::lock_guard lock(mutex_);
    return target_.index() != 0;
  }

  /// Returns the plan of the last forward; null before the first.
  std::shared_ptr<const MemoryPlan> plan() const {
    const std::lock_guard lock(mutex_);
    if (const auto* given = std::get_if<std::shared_ptr<const MemoryPlan>>(&target_)) return *given;
    return last_ == nullptr ? nullptr : last_->plan();
  }

  /// Says how the last forward kept to its plan.
  PlanOutcome outcome() const {
    const std::lock_guard lock(mutex_);
    return last_ == nullptr ? PlanOutcome() : last_->outcome();
  }

  std::function<void()> remember() {
    const std::lock_guard lock(mutex_);
    return [this, target = target_, planned = planned_, last = last_] {
      const std::lock_guard lock_again(mutex_);
      target_ = target;
      planned_ = planned;
      last_ = last;
    };
  }

  /// Calls `forward(x)`, and twice more with a stand-in for `x` where there is no plan yet.
  ///
  /// Inside another region there is nothing to plan: that one decides what stays. Nor is there
  /// where nothing requires grad.
  template <class Forward>
  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x, Forward forward) {
    if (!x.requires_grad() && !has_trainable_parameter(module)) return forward(x);
    return run_any(module, x, forward);
  }

  /// As `run`, where the module does not tell whether anything requires grad.
  template <class Forward>
  torch::Tensor run_any(torch::nn::Module& module, const torch::Tensor& x, Forward forward) {
    if (!records_regions() || thread_state().tape) return forward(x);
    RegionOptions options;
    options.name = module.name();
    const Pass pass{*this, follow_plan(options, plan_for(module, x, forward))};
    return run_region(options, [&] { return forward(x); });
  }

 private:
  struct Planned {
    StepKind kind;
    std::vector<std::int64_t> sizes;  // of the input
    std::shared_ptr<const MemoryPlan> plan;
  };
  static constexpr std::size_t kMostPlans = 8;

  /// A forward pass, noted when it is over, whether well or by an exception.
  struct Pass {
    BudgetedRun& owner;
    std::shared_ptr<const PlanFollower> follower;
    ~Pass() {
      const std::lock_guard lock(owner.mutex_);
      // Another thread may have made or used another plan since.
      if (follower->has_deviated()) owner.forget(follower->plan());
      owner.last_ = std::move(follower);
    }
  };

  /// The loss is not traced: it saves, and makes in backward, tensors of the size of what it gets,
  /// besides the gradient that stands in for it.
  static constexpr std::int64_t kLossTensors = 2;

  template <class Forward>
  std::shared_ptr<const MemoryPlan> plan_for(torch::nn::Module& module, const torch::Tensor& x,
                                             Forward& forward) {
    const std::lock_guard lock(mutex_);
    if (const auto* given = std::get_if<std::shared_ptr<const MemoryPlan>>(&target_)) return *given;
    const std::vector<std::int64_t> sizes = x.sizes().vec();
    StepKind kind = StepKind::of(module, x);
    const auto known = std::ranges::find_if(planned_, [&](const Planned& planned) {
      return is_covered(sizes, planned.sizes) && planned.kind == kind;
    });
    if (known != planned_.end()) {
      std::rotate(known, known + 1, planned_.end());
      return planned_.back().plan;
    }
    const StepTrace trace = trace_forward(module, x, forward);
    auto plan = std::make_shared<const MemoryPlan>(
        plan_within(trace, KeepSearch(trace).run(), std::get<MemoryBudget>(target_),
                    trace.result_bytes() * kLossTensors, module.name()));
    if (planned_.size() == kMostPlans) planned_.erase(planned_.begin());
    planned_.push_back({std::move(kind), sizes, plan});
    return plan;
  }

  /// The same shape, or fewer samples of it: the last batch of an epoch.
  static bool is_covered(const std::vector<std::int64_t>& sizes,
                         const std::vector<std::int64_t>& planned) {
    return sizes.size() == planned.size() && !sizes.empty() && sizes.front() <= planned.front() &&
           std::equal(sizes.begin() + 1, sizes.end(), planned.begin() + 1);
  }

  /// The operations differ from those of the trace, so that the next forward makes a new plan.
  void forget(const std::shared_ptr<const MemoryPlan>& plan) {
    std::erase_if(planned_, [&](const Planned& planned) { return planned.plan == plan; });
  }

  // Guards what follows; recursive because a trace remembers and puts back the module's switches.
  mutable std::recursive_mutex mutex_;
  Target target_;
  std::vector<Planned> planned_;              // the one that was used last is the last
  std::shared_ptr<const PlanFollower> last_;  // of the last forward; null: there was none
};

}  // namespace remat::detail

namespace remat::detail {

/// Runs a module's forward within a budget or by a plan.
///
/// Tracing, planning and following a plan are a fifth of what a program with a network would have
/// to compile. Modules reach them only through this interface, so that a program without budgets
/// and plans compiles none of it.
class PlannedForward {
 public:
  using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

  PlannedForward() = default;
  PlannedForward(const PlannedForward&) = delete;
  PlannedForward& operator=(const PlannedForward&) = delete;
  virtual ~PlannedForward() = default;

  virtual bool is_set() const = 0;
  virtual torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                            const Forward& forward) = 0;
  /// Returns the plan of the last forward; null before the first.
  virtual std::shared_ptr<const MemoryPlan> plan() const = 0;
  /// Says how the last forward kept to its plan.
  virtual PlanOutcome outcome() const = 0;
  /// Returns what puts back the present state, while this lives.
  virtual std::function<void()> remember() = 0;
  virtual std::shared_ptr<PlannedForward> copy() const = 0;
};

/// Stands for no budget and no plan.
///
/// A class rather than a null pointer: where the interface has one other implementation, GCC calls
/// that one without looking, and so compiles it.
class UnplannedForward final : public PlannedForward {
 public:
  bool is_set() const override { return false; }
  torch::Tensor run(torch::nn::Module&, const torch::Tensor& x, const Forward& forward) override {
    return forward(x);
  }
  std::shared_ptr<const MemoryPlan> plan() const override { return nullptr; }
  PlanOutcome outcome() const override { return {}; }
  std::function<void()> remember() override {
    return [] {};
  }
  std::shared_ptr<PlannedForward> copy() const override {
    return std::make_shared<UnplannedForward>();
  }
};

/// What a module's forward is planned by: nothing, until a budget or a plan is given.
///
/// @par Threads  any call from any thread
class PlannedForwardSlot {
 public:
  PlannedForwardSlot() = default;
  PlannedForwardSlot(const PlannedForwardSlot& other) : planned_(other.get()->copy()) {}
  PlannedForwardSlot& operator=(const PlannedForwardSlot& other) {
    if (this != &other) set(other.get()->copy());
    return *this;
  }

  void set(std::shared_ptr<PlannedForward> planned) {
    const std::lock_guard lock(mutex_);
    planned_ = std::move(planned);
  }
  /// Lets the module go by segments again.
  void clear() { set(std::make_shared<UnplannedForward>()); }

  bool is_set() const { return get()->is_set(); }
  std::shared_ptr<const MemoryPlan> plan() const { return get()->plan(); }
  PlanOutcome outcome() const { return get()->outcome(); }

  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                    const PlannedForward::Forward& forward) {
    return get()->run(module, x, forward);
  }

  /// Returns what puts back the present state, while this lives.
  std::function<void()> remember() {
    const auto planned = get();
    return [this, planned, put_back = planned->remember()] {
      put_back();
      set(planned);
    };
  }

 private:
  // The owner of what is called: another thread may set another one meanwhile.
  std::shared_ptr<PlannedForward> get() const {
    const std::lock_guard lock(mutex_);
    return planned_;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<PlannedForward> planned_ = std::make_shared<UnplannedForward>();
};

}  // namespace remat::detail

namespace remat {

namespace detail {

/// A toggle whose module can be planned: its forward takes one tensor and returns one.
class BudgetedToggle : public CheckpointToggle {
 public:
  std::shared_ptr<const MemoryPlan> memory_plan() const override { return budgeted_.plan(); }
  PlanOutcome plan_outcome() const override { return budgeted_.outcome(); }

  std::function<void()> remember_checkpointing() override {
    return [put_switch_back = CheckpointToggle::remember_checkpointing(),
            put_budget_back = budgeted_.remember()] {
      put_switch_back();
      put_budget_back();
    };
  }

 protected:
  PlannedForwardSlot budgeted_;

 private:
  void enable_planned(std::shared_ptr<PlannedForward> planned, const char*) override {
    enable_gradient_checkpointing();
    budgeted_.set(std::move(planned));
  }
};

/// A `BudgetedRun` behind the interface.
class BudgetedForward final : public PlannedForward {
 public:
  explicit BudgetedForward(BudgetedRun::Target target) { run_.set(std::move(target)); }
  explicit BudgetedForward(const BudgetedRun& run) : run_(run) {}

  bool is_set() const override { return run_.is_set(); }
  torch::Tensor run(torch::nn::Module& module, const torch::Tensor& x,
                    const Forward& forward) override {
    return run_.run(module, x, std::cref(forward));
  }
  std::shared_ptr<const MemoryPlan> plan() const override { return run_.plan(); }
  PlanOutcome outcome() const override { return run_.outcome(); }
  std::function<void()> remember() override { return run_.remember(); }
  std::shared_ptr<PlannedForward> copy() const override {
    return std::make_shared<BudgetedForward>(run_);
  }

 private:
  BudgetedRun run_;
};

}  // namespace detail

inline void CheckpointToggle::enable_gradient_checkpointing(const MemoryBudget& budget) {
  enable_planned(std::make_shared<detail::BudgetedForward>(budget), "a budget");
}

inline void CheckpointToggle::enable_gradient_checkpointing(const MemoryPlan& plan) {
  enable_planned(
      std::make_shared<detail::BudgetedForward>(std::make_shared<const MemoryPlan>(plan)),
      "a plan");
}

}  // namespace remat

namespace remat {

/// Says what to build; meant for designated initialisers: `{.feature_dim = 128, .in_channels = 1}`.
///
/// A rate that is not set is torchvision's for the model.
struct BackboneOptions {
  Pretrained pretrained{};  ///< load the published weights from torchvision's cache
  WeightsFile weights{};    ///< load this file; empty: initialise as torchvision does
  std::int64_t feature_dim =
      0;  ///< 0: the pooled features as they are; else a linear layer named `projection`
  std::int64_t in_channels = 3;  ///< channels of the images
  std::int64_t image_size =
      0;  ///< height and width that layers are made for, where any are; 0: torchvision's
  std::optional<double> dropout{};            ///< rate in front of the head, or in a transformer
  std::optional<double> attention_dropout{};  ///< rate on attention weights
  std::optional<double> stochastic_depth{};   ///< rate of the last residual block
  std::int64_t num_classes =
      0;  ///< 0: no head; else torchvision's own head, under torchvision's name
};

/// Turns images into features, and into class scores if it was built with a head.
///
/// Names, shapes, initialisation and numbers are those of the torchvision model of the same name.
/// A backbone starts with gradient checkpointing off, and uses it in training mode only.
class Backbone : public torch::nn::Module, public detail::BudgetedToggle {
 public:
  /// Computes one row per image.
  ///
  /// @param images_nchw  (N, in_channels, H, W)
  /// @return  (N, feature_dim()), or (N, num_classes()) with a head
  /// @throws ArgumentError  if `images_nchw` has not this shape
  torch::Tensor forward(const torch::Tensor& images_nchw) {
    check_images(images_nchw);
    check_image_size(images_nchw.size(2), images_nchw.size(3));
    const auto run = [this](const torch::Tensor& images) { return forward_checked(images); };
    if (is_training() && is_gradient_checkpointing_enabled() && budgeted_.is_set())
      return budgeted_.run(*this, images_nchw, run);
    return run(images_nchw);
  }

  /// Computes what comes before pooling: for a convolutional network a map (N, C, h, w).
  virtual torch::Tensor forward_features(const torch::Tensor& images_nchw) = 0;

  /// Returns the size of a row of features.
  std::int64_t feature_dim() const {
    return options_.feature_dim == 0 ? raw_feature_dim_ : options_.feature_dim;
  }

  /// Returns the number of classes of the head, 0 without one.
  std::int64_t num_classes() const { return options_.num_classes; }

  /// Returns what this was built from.
  const BackboneOptions& options() const { return options_; }

  /// Returns how many segments are in effect, with those that need not be recomputed, without the
  /// modules that are exempt; 0 while checkpointing is off.
  virtual std::int64_t segments() const = 0;

  /// Returns the key of the convolution that sees the images.
  virtual std::string first_convolution() const = 0;
  /// Returns what the keys of the layers that know the number of classes begin with.
  virtual std::string head() const = 0;

  /// Makes a stored tensor fit a parameter of another shape: the first convolution for another
  /// number of channels; a family may know more.
  ///
  /// Weights for one channel are the sum over the stored channels; for more, the stored channels
  /// are repeated and scaled so that a constant image gives what it gave before.
  ///
  /// @return  a tensor of that shape; undefined if there is no way
  /// @par Source  timm's `adapt_input_conv`
  virtual torch::Tensor fit_weight(const std::string& key, const torch::Tensor& stored,
                                   at::IntArrayRef shape) const {
    const bool is_foldable = key == first_convolution() && stored.dim() == 4 && shape.size() == 4 &&
                             stored.size(0) == shape[0] && stored.size(1) > 0 && shape[1] > 0 &&
                             stored.size(2) == shape[2] && stored.size(3) == shape[3];
    if (!is_foldable) return {};
    const torch::Tensor weight = stored.to(torch::kFloat32);
    if (shape[1] == 1) return weight.sum(1, /*keepdim=*/true);
    const std::int64_t repeats = (shape[1] + stored.size(1) - 1) / stored.size(1);
    return weight.repeat({1, repeats, 1, 1}).slice(1, 0, shape[1]) *
           (static_cast<double>(stored.size(1)) / static_cast<double>(shape[1]));
  }

  /// Copies the whole backbone: weights, buffers, modes, frozen parameters, checkpointing; nothing
  /// is shared.
  ///
  /// @param device  where the copy lives; empty: each tensor where the original is
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    const std::shared_ptr<Backbone> copy = build_again();
    copy->copy_from(*this, device);
    return copy;
  }

 protected:
  Backbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options)
      : torch::nn::Module(std::move(name)), options_(options), raw_feature_dim_(raw_feature_dim) {
    check_options();
  }

  /// Builds another backbone from the same design and options.
  virtual std::shared_ptr<Backbone> build_again() const = 0;
  /// Takes over switches, segment count and exemptions.
  virtual void copy_checkpointing_from(const Backbone& other) = 0;
  /// Makes one row per image of what `forward_features` returned.
  virtual torch::Tensor pool(torch::Tensor features) = 0;
  /// Applies torchvision's head to pooled features; called only if there is one.
  virtual torch::Tensor forward_head(torch::Tensor pooled) = 0;

  /// Refuses images of a size that the network cannot take; any size is fine by default.
  ///
  /// @throws ArgumentError  with the sizes that would do
  virtual void check_image_size(std::int64_t height, std::int64_t width) const {
    static_cast<void>(height), static_cast<void>(width);
  }

  /// Refuses an option that this family has no use for; unset and 0 are fine.
  void refuse_option(const char* option, const std::optional<double>& value) const {
    require(value.value_or(0) == 0, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + number_text(*value) + ", and this network has none")
          .cure("Leave it unset");
    });
  }

  /// Registers `projection` if the options ask for one; called last, so that its keys come last.
  void register_projection() {
    if (options_.feature_dim == 0) return;
    projection_ =
        register_module("projection", torch::nn::Linear(raw_feature_dim_, options_.feature_dim));
  }

 private:
  torch::Tensor forward_checked(const torch::Tensor& images_nchw) {
    torch::Tensor features = pool(forward_features(images_nchw));  // (N, raw_feature_dim)
    if (!projection_.is_empty()) return projection_->forward(features);
    return options_.num_classes == 0 ? features : forward_head(std::move(features));
  }

  void check_options() const {
    require(!options_.pretrained || options_.weights.empty(), [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what("pretrained = true and weights = \"" + options_.weights.path() +
                "\" were both given, and at most one is expected");
    });
    check_not_negative("feature_dim", options_.feature_dim, 0);
    check_not_negative("num_classes", options_.num_classes, 0);
    check_not_negative("in_channels", options_.in_channels, 1);
    check_not_negative("image_size", options_.image_size, 0);
    check_rate("dropout", options_.dropout);
    check_rate("attention_dropout", options_.attention_dropout);
    check_rate("stochastic_depth", options_.stochastic_depth);
    require(options_.feature_dim == 0 || options_.num_classes == 0, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what("feature_dim = " + std::to_string(options_.feature_dim) +
                " and num_classes = " + std::to_string(options_.num_classes) +
                " were both given, and at most one is expected")
          .cause("A classifier's head works on the raw features")
          .cure("Leave one of them at 0");
    });
  }

  void check_not_negative(const char* option, std::int64_t value, std::int64_t least) const {
    require(value >= least, [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + std::to_string(value) + ", at least " +
                std::to_string(least) + " was expected");
    });
  }

  void check_rate(const char* option, const std::optional<double>& rate) const {
    require(!rate || (*rate >= 0 && *rate <= 1), [&] {
      return ErrorMessage("remat.backbone.options")
          .where(name())
          .what(std::string(option) + " is " + number_text(*rate) +
                ", a rate between 0 and 1 was expected");
    });
  }

  static std::string number_text(double number) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", number);
    return text;
  }

  void check_images(const torch::Tensor& images_nchw) const {
    const bool is_right = images_nchw.defined() && images_nchw.dim() == 4 &&
                          images_nchw.size(1) == options_.in_channels;
    require(is_right, [&] {
      return ErrorMessage("remat.backbone.images")
          .where(name())
          .what("the images are " +
                (images_nchw.defined() ? "of shape " + shape_text(images_nchw) : "undefined") +
                ", (N, " + std::to_string(options_.in_channels) + ", H, W) was expected")
          .cure(
              "Add the batch dimension with unsqueeze(0), or build the backbone with the "
              "in_channels of your images");
    });
  }

  static std::string shape_text(const torch::Tensor& tensor) {
    std::string text;
    for (const std::int64_t size : tensor.sizes())
      text += (text.empty() ? "(" : ", ") + std::to_string(size);
    return text.empty() ? "()" : text + ")";
  }

  void copy_from(const Backbone& other, const OptionalDevice& device) {
    const torch::NoGradGuard no_grad;
    const auto copied = [&](const torch::Tensor& tensor) {
      return device && tensor.device() != *device ? tensor.to(*device) : tensor.clone();
    };
    auto parameters = named_parameters();
    for (const auto& item : other.named_parameters()) {
      torch::Tensor& mine = parameters[item.key()];
      mine.set_data(copied(item.value()));
      mine.set_requires_grad(item.value().requires_grad());
    }
    auto buffers = named_buffers();
    for (const auto& item : other.named_buffers())
      buffers[item.key()].set_data(copied(item.value()));
    // From the root down, since train() reaches everything below.
    train(other.is_training());
    auto modules = named_modules({}, /*include_self=*/false);
    for (const auto& item : other.named_modules({}, /*include_self=*/false))
      modules[item.key()]->train(item.value()->is_training());
    copy_checkpointing_from(other);
  }

  // LibTorch calls this when the backbone is a child of a module that is cloned.
  void clone_(torch::nn::Module& other, const OptionalDevice& device) final {
    copy_from(dynamic_cast<Backbone&>(other), device);
  }

  BackboneOptions options_;
  std::int64_t raw_feature_dim_;
  torch::nn::Linear projection_{nullptr};
};

}  // namespace remat

namespace remat::detail {

/// Holds a string literal, so that it can be a template argument.
template <std::size_t size>
struct Literal {
  char text[size]{};
  constexpr Literal(const char (&words)[size]) {  // NOLINT(*-explicit-*): a literal is to convert
    for (std::size_t index = 0; index < size; ++index) text[index] = words[index];
  }
  constexpr std::string_view view() const { return {text, size - 1}; }
};

}  // namespace remat::detail

namespace remat {

namespace detail {

/// Carries its reason into the compiler's message: where the condition is false, GCC and Clang
/// print the arguments, and so the sentence, word for word.
template <bool condition, Literal sentence>
concept Holds = condition;

template <class Candidate>
inline constexpr bool maps_chain_to_plan = requires(const Candidate& rule, const Chain& chain) {
  { rule(chain) } -> std::same_as<Plan>;
};
template <class Candidate>
inline constexpr bool maps_plan_to_plan =
    requires(const Candidate& pattern, const Plan& plan, const Chain& chain) {
      { pattern(plan, chain) } -> std::same_as<Plan>;
    };
template <class Candidate>
inline constexpr bool shares_out_segments =
    requires(const Candidate& pattern, const Chain& chain, std::size_t segment_count) {
      { pattern.segments(chain, segment_count) } -> std::same_as<Plan>;
    };
template <class Candidate>
inline constexpr bool names_default_rule = requires { typename Candidate::DefaultRule; };
template <class Candidate>
inline constexpr bool answers_keep =
    requires(const Candidate& keep, const keep::Operation& operation, Bytes result) {
      { keep(operation, result) } -> std::convertible_to<bool>;
    };

}  // namespace detail

/// Groups the units of a chain into segments.
///
/// The smallest rule is a struct with one member, `remat::Plan operator()(const remat::Chain&)
/// const`. `Chain::unit_costs` is empty until a first forward has measured the units.
template <class Candidate>
concept Rule =
    detail::Holds<std::default_initializable<Candidate>, "a rule needs a default constructor"> &&
    detail::Holds<detail::maps_chain_to_plan<Candidate>,
                  "a rule needs a member remat::Plan operator()(const remat::Chain&) const">;

/// Says which segments of a rule's plan may be dropped.
///
/// The smallest pattern has a `DefaultRule` and a member
/// `remat::Plan operator()(const remat::Plan&, const remat::Chain&) const`, which returns the plan
/// to use. Before the units are measured `Chain::unit_costs` is empty, and what the pattern leaves
/// plain then is never measured. A member
/// `remat::Plan segments(const remat::Chain&, std::size_t segment_count) const`, if there is one,
/// makes the segments of `enable_gradient_checkpointing(segment_count)`; without it they are
/// balanced over the whole chain.
template <class Candidate>
concept Pattern =
    detail::Holds<std::default_initializable<Candidate>, "a pattern needs a default constructor"> &&
    detail::Holds<detail::names_default_rule<Candidate>,
                  "a pattern needs a member type DefaultRule"> &&
    detail::Holds<detail::maps_plan_to_plan<Candidate>,
                  "a pattern needs a member remat::Plan operator()(const remat::Plan&, const "
                  "remat::Chain&) const">;

/// Decides for each result inside a region whether it stays.
template <class Candidate>
concept KeepPolicy =
    detail::Holds<std::copy_constructible<Candidate>, "a keep policy needs a copy constructor"> &&
    detail::Holds<detail::answers_keep<Candidate>,
                  "a keep policy needs a member bool operator()(const remat::keep::Operation&, "
                  "remat::Bytes) const">;

}  // namespace remat

namespace remat {

namespace detail {

/// The module class behind a holder; a module class is its own.
template <class Type>
struct ImplOf {
  using type = Type;
};
template <class Type>
  requires requires { typename Type::ContainedType; }
struct ImplOf<Type> {
  using type = typename Type::ContainedType;
};
template <class Module>
struct ImplOf<std::shared_ptr<Module>> {
  using type = Module;
};

/// What a forward takes and returns, as a function type: without class and noexcept, with const.
template <class Member>
struct SignatureOf {};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...)> {
  using type = Result(Arguments...);
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) noexcept> {
  using type = Result(Arguments...);
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) const> {
  using type = Result(Arguments...) const;
};
template <class Result, class Class, class... Arguments>
struct SignatureOf<Result (Class::*)(Arguments...) const noexcept> {
  using type = Result(Arguments...) const;
};

template <class Impl>
using ForwardSignature = typename SignatureOf<decltype(&Impl::forward)>::type;

template <class Impl>
inline constexpr bool has_one_forward = requires { typename ForwardSignature<Impl>; };

/// AnyModule, which holds the units, takes no const forward, no reference that can be written, no
/// void.
template <class Signature>
inline constexpr bool suits_any_module = false;
template <class Result, class... Arguments>
inline constexpr bool suits_any_module<Result(Arguments...)> =
    !std::is_void_v<Result> && ((!std::is_lvalue_reference_v<Arguments> ||
                                 std::is_const_v<std::remove_reference_t<Arguments>>) &&
                                ...);

template <class Impl>
constexpr bool has_storable_forward() {
  if constexpr (has_one_forward<Impl>)
    return suits_any_module<ForwardSignature<Impl>>;
  else
    return false;
}

template <class Type>
using UnitImpl = typename ImplOf<std::remove_cvref_t<Type>>::type;

/// Whether `forward` can be called with all but the last of its arguments.
template <class Impl, class... Arguments>
constexpr bool has_default_arguments() {
  if constexpr (sizeof...(Arguments) == 0) {
    return false;
  } else {
    return []<std::size_t... index>(std::index_sequence<index...>) {
      using All = std::tuple<Arguments...>;
      return requires(Impl& impl) {
        impl.forward(std::declval<std::tuple_element_t<index, All>>()...);
      };
    }(std::make_index_sequence<sizeof...(Arguments) - 1>());
  }
}

}  // namespace detail

/// A module class, or the holder of one, of which `Checkpointed` can make a checkpointed one.
template <class Candidate>
concept CheckpointableModule =
    detail::Holds<std::derived_from<detail::UnitImpl<Candidate>, torch::nn::Module>,
                  "a module to checkpoint needs to derive from torch::nn::Module"> &&
    detail::Holds<!std::is_final_v<detail::UnitImpl<Candidate>>,
                  "a module to checkpoint needs to be a class that is not final"> &&
    detail::Holds<
        detail::has_one_forward<detail::UnitImpl<Candidate>>,
        "a module to checkpoint needs a forward that is public, not a template and not overloaded">;

}  // namespace remat

namespace remat {

/// Says that `module` is to run outside of any checkpoint; see `plain`.
template <class Module>
struct PlainModule {
  Module module;
};

/// Exempts a module from checkpointing, while a chain is built: `net(conv, remat::plain(norm),
/// head)`.
///
/// What it saves stays, and its name in the chain does not change.
template <class Module>
PlainModule<std::remove_cvref_t<Module>> plain(Module&& module) {
  return {std::forward<Module>(module)};
}

namespace detail {

template <class Type>
inline constexpr bool is_plain_module = false;
template <class Module>
inline constexpr bool is_plain_module<PlainModule<Module>> = true;

/// The exact class: what derives from it has a forward of its own and is a unit.
template <class Type>
concept NestedSequential = std::same_as<UnitImpl<Type>, torch::nn::SequentialImpl>;

template <class Type>
struct Unmarked {
  using type = Type;
};
template <class Module>
struct Unmarked<PlainModule<Module>> {
  using type = Module;
};
/// The module class of a layer, without marks and holders.
template <class Source>
using LayerImpl = UnitImpl<typename Unmarked<std::remove_cvref_t<Source>>::type>;

/// Needs no further look: LibTorch's erased module has had it, its Sequential is opened.
template <class Source>
inline constexpr bool is_checked_layer =
    std::same_as<LayerImpl<Source>, torch::nn::AnyModule> || NestedSequential<LayerImpl<Source>>;

template <class Source>
inline constexpr bool derives_from_module = std::derived_from<LayerImpl<Source>, torch::nn::Module>;

}  // namespace detail

/// What can be a layer of a chain: a module, its holder or shared_ptr, an AnyModule, or a nested
/// chain; each may be marked with `plain`.
template <class Candidate>
concept ChainLayerSource =
    detail::Holds<detail::is_checked_layer<Candidate> || detail::derives_from_module<Candidate>,
                  "a unit of a chain needs to derive from torch::nn::Module"> &&
    detail::Holds<
        detail::is_checked_layer<Candidate> ||
            detail::has_one_forward<detail::LayerImpl<Candidate>>,
        "a unit of a chain needs a forward that is public, not a template and not overloaded"> &&
    detail::Holds<detail::is_checked_layer<Candidate> ||
                      detail::has_storable_forward<detail::LayerImpl<Candidate>>(),
                  "a unit of a chain needs a forward that is not const, returns something and "
                  "takes no reference to write through">;

/// One layer of a chain: a unit, or a nested chain of which the children are units.
class ChainLayer {
 public:
  template <ChainLayerSource Source>
    requires(!std::same_as<std::remove_cvref_t<Source>, ChainLayer>)
  explicit ChainLayer(Source&& source) {
    assign(std::forward<Source>(source));
  }

  /// Returns the module, whose dynamic type is that of the layer.
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  torch::nn::Module* operator->() const { return module_.get(); }
  torch::nn::Module& operator*() const { return *module_; }

  /// Whether the layer was marked with `remat::plain`.
  bool is_plain() const { return is_plain_; }
  /// The layer if it is a nested `torch::nn::Sequential`, else null.
  const std::shared_ptr<torch::nn::SequentialImpl>& sequential() const { return sequential_; }
  /// The layer as LibTorch's erased module; empty for a nested `torch::nn::Sequential`, which
  /// AnyModule does not take.
  torch::nn::AnyModule& unit() const { return unit_; }

  /// Returns a deep copy; names inside a nested chain stay, also where LibTorch 1.13 would number
  /// them anew.
  ChainLayer clone(const OptionalDevice& device) const {
    ChainLayer copy = *this;
    if (sequential_ == nullptr) {
      copy.unit_ = unit_.clone(device);
      copy.module_ = copy.unit_.ptr();
      return copy;
    }
    copy.sequential_ = std::make_shared<torch::nn::SequentialImpl>();
    copy.sequential_->train(
        sequential_->is_training());  // before the children, which have their own mode
    auto child = sequential_->begin();
    for (const auto& named : sequential_->named_children())
      copy.sequential_->push_back(named.key(), (child++)->clone(device));
    copy.module_ = copy.sequential_;
    return copy;
  }

 private:
  template <class Source>
  void assign(Source&& source) {
    using Type = std::remove_cvref_t<Source>;
    if constexpr (detail::is_plain_module<Type>) {
      assign(std::forward<Source>(source).module);
      is_plain_ = true;
    } else if constexpr (detail::NestedSequential<Source>) {
      sequential_ = pointer(std::forward<Source>(source));
      module_ = sequential_;
    } else if constexpr (std::same_as<Type, torch::nn::AnyModule>) {
      require_module(!source.is_empty());
      unit_ = std::forward<Source>(source);
      module_ = unit_.ptr();
    } else {
      unit_ = torch::nn::AnyModule(pointer(std::forward<Source>(source)));
      module_ = unit_.ptr();
    }
  }

  /// Takes the pointer out of a holder; a module by value moves into one.
  template <class Source>
  static std::shared_ptr<detail::UnitImpl<Source>> pointer(Source&& source) {
    using Impl = detail::UnitImpl<Source>;
    std::shared_ptr<Impl> module;
    if constexpr (std::derived_from<std::remove_cvref_t<Source>, torch::nn::Module>) {
      module = std::make_shared<Impl>(std::forward<Source>(source));
    } else if constexpr (std::constructible_from<std::shared_ptr<Impl>, Source>) {
      module = std::forward<Source>(source);
    } else {
      if (!source.is_empty()) module = source.ptr();
    }
    require_module(module != nullptr);
    return module;
  }

  static void require_module(bool is_given) {
    require(is_given, [] {
      return ErrorMessage("remat.chain.layer")
          .where("remat::Checkpointed<Sequential>")
          .what("an empty holder or null pointer was given where a module was expected")
          .cause("The holder was made with nullptr and never filled")
          .cure("Construct the module first");
    });
  }

  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<torch::nn::SequentialImpl> sequential_;
  mutable torch::nn::AnyModule unit_;  // its forward is not const although it changes nothing here
  bool is_plain_ = false;
};

/// A layer with its name in the chain: `{"conv1", torch::nn::Conv2d(3, 8, 3)}`.
class NamedLayer {
 public:
  // Not constrained: inside braces a constraint would fail without a word.
  template <class Source>
  NamedLayer(std::string name, Source&& source)  // NOLINT(*-explicit-*): `{name, module}` converts
      : name_(std::move(name)), layer_(std::forward<Source>(source)) {}
  // NOLINTNEXTLINE(*-explicit-*): LibTorch's own pair is as good
  NamedLayer(const torch::nn::NamedAnyModule& named)
      : name_(named.name()), layer_(named.module()) {}

  /// Returns the name that the layer gets in the chain.
  const std::string& name() const { return name_; }
  /// Returns the layer itself.
  const ChainLayer& layer() const { return layer_; }

 private:
  std::string name_;
  ChainLayer layer_;
};

}  // namespace remat

namespace remat::detail {

/// A unit of a chain whose nested chains are opened.
struct ChainUnit {
  torch::nn::AnyModule* module;
  const torch::nn::Module* identity;
  bool is_plain;

  friend bool operator==(const ChainUnit& left, const ChainUnit& right) {
    return left.identity == right.identity && left.is_plain == right.is_plain;
  }
};

/// A layer of a chain, counted: a nested chain is a stage of units, anything else a unit alone.
struct ChainStage {
  std::size_t unit_count;
  bool is_nested;
};

/// A checkpointed chain as the chain around it sees it, and as its planner does.
class ChainStructure {
 public:
  virtual ~ChainStructure() = default;

  /// Appends the chain's units; all are plain if `is_plain`.
  virtual void add_units(std::vector<ChainUnit>& units, bool is_plain) const = 0;
  /// Returns the units' names, as `named_modules()` has them below the chain.
  virtual std::vector<std::string> unit_names() const = 0;
  /// Returns the layers that have units.
  virtual std::vector<ChainStage> stages() const = 0;
  /// Returns whether the chain is switched on; one that is not is plain in the chain around it.
  virtual bool is_switched_on() const = 0;
  /// Returns the chain's name for messages.
  virtual std::string title() const = 0;

 protected:
  ChainStructure() = default;
  ChainStructure(const ChainStructure&) = default;
  ChainStructure& operator=(const ChainStructure&) = default;
};

/// Returns the units of the outermost chain.
inline std::vector<ChainUnit> units_of(const ChainStructure& chain) {
  std::vector<ChainUnit> units;
  chain.add_units(units, /*is_plain=*/false);
  return units;
}

inline void add_units_of_module(torch::nn::AnyModule& module, bool is_plain,
                                std::vector<ChainUnit>& units) {
  const auto pointer = module.ptr();
  if (const auto* chain = dynamic_cast<const ChainStructure*>(pointer.get()))
    chain->add_units(units, is_plain || !chain->is_switched_on());
  else
    units.push_back({&module, pointer.get(), is_plain});
}

/// Appends the units of a layer: itself, or those of the chain that it is.
inline void add_units_of_layer(const ChainLayer& layer, bool is_plain,
                               std::vector<ChainUnit>& units) {
  is_plain = is_plain || layer.is_plain();
  if (layer.sequential() == nullptr) return add_units_of_module(layer.unit(), is_plain, units);
  for (auto& module : *layer.sequential()) add_units_of_module(module, is_plain, units);
}

/// Returns the layer as a stage.
inline ChainStage stage_of_layer(const ChainLayer& layer) {
  std::vector<ChainUnit> units;
  add_units_of_layer(layer, /*is_plain=*/false, units);
  const bool is_nested = layer.sequential() != nullptr ||
                         dynamic_cast<const ChainStructure*>(layer.ptr().get()) != nullptr;
  return {units.size(), is_nested};
}

inline void add_unit_names_of_module(const torch::nn::Module& module, const std::string& path,
                                     std::vector<std::string>& names) {
  const auto* chain = dynamic_cast<const ChainStructure*>(&module);
  if (chain == nullptr) return names.push_back(path);
  for (const auto& below : chain->unit_names()) names.push_back(path + "." + below);
}

/// Appends the names of a layer's units, in the order of `add_units_of_layer`.
inline void add_unit_names_of_layer(const ChainLayer& layer, const std::string& path,
                                    std::vector<std::string>& names) {
  if (layer.sequential() == nullptr) return add_unit_names_of_module(*layer.ptr(), path, names);
  for (const auto& child : layer.sequential()->named_children())
    add_unit_names_of_module(*child.value(), path + "." + child.key(), names);
}

}  // namespace remat::detail

namespace remat::detail {

/// Holds a module as `Stored` and calls it as `Direct`, which derives from it.
///
/// AnyModule, and so `torch::nn::Sequential`, takes a module only if its forward is neither a
/// template nor overloaded. People who call it themselves want default and extra arguments. So
/// LibTorch sees `Stored`, with the one forward, and `operator->` shows `Direct`, with the others.
/// Every module in such a holder is made as a `Direct`.
template <class Stored, class Direct>
class LayeredHolder : public torch::nn::ModuleHolder<Stored> {
  using Holder = torch::nn::ModuleHolder<Stored>;

 public:
  using Impl = Direct;

  // NOLINTNEXTLINE(*-explicit-*): as in ModuleHolder
  LayeredHolder(std::nullptr_t) : Holder(nullptr) {}
  // NOLINTNEXTLINE(*-explicit-*): what register_module returns is assigned to a holder
  LayeredHolder(std::shared_ptr<Stored> module) : Holder(std::move(module)) {}

  Direct* get() { return static_cast<Direct*>(Holder::get()); }
  const Direct* get() const { return static_cast<const Direct*>(Holder::get()); }
  Direct* operator->() { return get(); }
  const Direct* operator->() const { return get(); }
  Direct& operator*() { return *get(); }
  const Direct& operator*() const { return *get(); }

  template <class... Arguments>
  auto operator()(Arguments&&... arguments)
      -> decltype(std::declval<Direct&>().forward(std::forward<Arguments>(arguments)...)) {
    return get()->forward(std::forward<Arguments>(arguments)...);
  }
};

}  // namespace remat::detail

namespace remat::detail {

/// Shows whoever listens to allocations where a unit, or a checkpointed module, begins and ends.
///
/// Without a listener it is one look at a thread's own state.
class UnitMark {
 public:
  explicit UnitMark(const torch::nn::Module& module) : listener_(allocation_listener()) {
    if (listener_ != nullptr) listener_->unit_begins(&module);
  }
  ~UnitMark() {
    if (listener_ != nullptr) listener_->unit_ended();
  }
  UnitMark(const UnitMark&) = delete;
  UnitMark& operator=(const UnitMark&) = delete;

 private:
  AllocationListener* listener_;
};

}  // namespace remat::detail

namespace remat {

namespace detail {

template <class What>
struct DefaultPolicy {
  using type = keep::nothing;
};
template <class What>
  requires names_default_rule<What>
struct DefaultPolicy<What> {
  using type = typename What::DefaultRule;
};

template <class Keep>
KeepPredicate make_keep_predicate() {
  if constexpr (std::is_same_v<Keep, keep::nothing>)
    return {};
  else
    return Keep();
}

template <class... Values>
bool any_requires_grad(const Values&... values) {
  bool found = false;
  const auto look = [&](const auto& tensor) {
    found = found || (tensor.defined() && tensor.requires_grad());
  };
  (for_each_tensor_in(values, look), ...);
  return found;
}

/// A forward that takes one tensor, which it does not edit in its caller's hands, and returns one.
template <class Signature>
inline constexpr bool maps_tensor = false;
template <class Argument>
  requires std::same_as<Argument, torch::Tensor> || std::same_as<Argument, const torch::Tensor&>
inline constexpr bool maps_tensor<torch::Tensor(Argument)> = true;
template <class Argument>
  requires std::same_as<Argument, torch::Tensor> || std::same_as<Argument, const torch::Tensor&>
inline constexpr bool maps_tensor<torch::Tensor(Argument) const> = true;

/// Says that a constructor copies an unwrapped clone.
struct FromClone {};

/// The switches that suit the module: only one tensor to one tensor can be planned.
template <class Base>
using ToggleOf =
    std::conditional_t<maps_tensor<ForwardSignature<Base>>, BudgetedToggle, CheckpointToggle>;

/// The module class `Base` with switches, and a way to run its forward as a region.
template <class Base, class Keep>
class CheckpointedModule : public Base, public ToggleOf<Base> {
 public:
  using Base::Base;
  using ToggleOf<Base>::enable_gradient_checkpointing;
  CheckpointedModule() = default;
  CheckpointedModule(FromClone, const Base& clone, const CheckpointedModule& original)
      : Base(clone),
        ToggleOf<Base>(original),
        is_enabled_(original.is_enabled_),
        is_exempt_(original.is_exempt_) {
    // In LibTorch 1.13 Module is a virtual base, which the copy constructor of `Base` leaves to the
    // last class.
    static_cast<torch::nn::Module&>(*this) = clone;
  }

  void enable_gradient_checkpointing() override {
    is_enabled_ = true;
    if constexpr (kCanBePlanned) this->budgeted_.clear();
  }
  /// A module is one unit, so that every number of segments means one.
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    require_segment_count(segment_count, this->name());
    enable_gradient_checkpointing();
  }
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    if (&unit != static_cast<const torch::nn::Module*>(this)) return false;
    is_exempt_ = true;
    return true;
  }

  /// Copies the module as `Base` does; the copy is checkpointed as this one is and runs its own
  /// layers.
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    std::shared_ptr<torch::nn::Module> copy = Base::clone(device);
    if constexpr (std::is_copy_constructible_v<Base>) copy = wrap(dynamic_cast<Base&>(*copy));
    return copy;
  }

 protected:
  /// Makes a module like this one out of an unwrapped clone.
  virtual std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const = 0;

  /// Calls `call()` as a region if there is something to drop.
  template <class Call, class... Arguments>
  decltype(auto) run(Call&& call, const Arguments&... arguments) const {
    const UnitMark mark(*this);
    if (is_exempt_.get()) return call_plain(std::forward<Call>(call));
    if (!should_checkpoint(arguments...)) return std::forward<Call>(call)();
    if constexpr (kCanBePlanned && sizeof...(Arguments) == 1)
      if (this->budgeted_.is_set()) return run_budgeted(arguments...);
    RegionOptions region;
    region.keep = make_keep_predicate<Keep>();
    region.name = this->name();
    return run_region(region, std::forward<Call>(call));
  }

 private:
  template <class... Arguments>
  bool should_checkpoint(const Arguments&... arguments) const {
    return is_enabled_.get() && this->is_training() && autograd_records() &&
           (any_requires_grad(arguments...) || has_trainable_parameter(*this));
  }

  torch::Tensor run_budgeted(const torch::Tensor& x) const {
    // A trace changes the module and puts it back: it stays what it was, as const promises.
    auto& self = const_cast<CheckpointedModule&>(*this);
    return self.budgeted_.run(
        self, x, [&](const torch::Tensor& input) { return self.Base::forward(input); });
  }

  static constexpr bool kCanBePlanned = maps_tensor<ForwardSignature<Base>>;

  Flag is_enabled_{true};
  Flag is_exempt_{false};
};

}  // namespace detail

/// The module behind `Checkpointed<Module>`: `Base` whose forward is a region.
///
/// Use it through the holder. Parameter names, buffers and everything else are those of `Base`. Its
/// forward has the signature of the base, neither template nor overloaded, and is declared in this
/// very class, since AnyModule asks for both. A parent's `clone()` makes its children by its own
/// `reset()`, so that their switches are as there.
template <class Base, class Keep, class Signature = detail::ForwardSignature<Base>>
class CheckpointedImpl;

/// For a forward that is not const.
template <class Base, class Keep, class Result, class... Arguments>
class CheckpointedImpl<Base, Keep, Result(Arguments...)>
    : public detail::CheckpointedModule<Base, Keep> {
 public:
  static constexpr bool kHasDefaultArguments = detail::has_default_arguments<Base, Arguments...>();

  using detail::CheckpointedModule<Base, Keep>::CheckpointedModule;
  CheckpointedImpl() = default;

  Result forward(Arguments... arguments) {
    return this->run(
        [&]() -> Result { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedImpl>(detail::FromClone(), clone, *this);
  }
};

/// For a const forward.
template <class Base, class Keep, class Result, class... Arguments>
class CheckpointedImpl<Base, Keep, Result(Arguments...) const>
    : public detail::CheckpointedModule<Base, Keep> {
 public:
  static constexpr bool kHasDefaultArguments = detail::has_default_arguments<Base, Arguments...>();

  using detail::CheckpointedModule<Base, Keep>::CheckpointedModule;
  CheckpointedImpl() = default;

  Result forward(Arguments... arguments) const {
    return this->run(
        [&]() -> Result { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedImpl>(detail::FromClone(), clone, *this);
  }
};

namespace detail {

/// Adds calls that leave default arguments out, which run as a region, too.
template <class Base, class Keep>
class CheckpointedWithDefaults final : public CheckpointedImpl<Base, Keep> {
 public:
  using CheckpointedImpl<Base, Keep>::CheckpointedImpl;
  CheckpointedWithDefaults() = default;

  using CheckpointedImpl<Base, Keep>::forward;
  template <class... Arguments>
    requires requires(Base& base, Arguments&&... arguments) {
      base.forward(std::forward<Arguments>(arguments)...);
    }
  decltype(auto) forward(Arguments&&... arguments) {
    return this->run(
        [&]() -> decltype(auto) { return Base::forward(std::forward<Arguments>(arguments)...); },
        arguments...);
  }

 protected:
  std::shared_ptr<torch::nn::Module> wrap(const Base& clone) const override {
    return std::make_shared<CheckpointedWithDefaults>(FromClone(), clone, *this);
  }
};

}  // namespace detail

/// Makes a module type, or a chain of modules, checkpointed.
///
/// `Checkpointed<MyBlock>` is MyBlock with a checkpointed forward: same constructors, same
/// signature, same keys; a second argument names a keep policy. `Checkpointed<Sequential, Rule,
/// Keep>` is a drop-in `torch::nn::Sequential`. On where a user writes it; a plain call in eval
/// mode, without grad mode, and where nothing requires grad.
///
/// @tparam What    a module type, its holder, or a pattern
/// @tparam Policy  for a module a keep policy, for a pattern a rule
/// @tparam Keep    for a pattern a keep policy
template <class What, class Policy = typename detail::DefaultPolicy<What>::type,
          class Keep = keep::nothing>
class Checkpointed {
  static_assert(CheckpointableModule<What>,
                "remat::Checkpointed<What> needs a module type, or a pattern such as "
                "remat::Sequential with its "
                "header remat/nn/sequential.hpp");
  static_assert(KeepPolicy<Policy>,
                "remat::Checkpointed<Module, Keep> needs a keep policy as its second argument");
};

/// Holds a checkpointed module.
template <CheckpointableModule What, KeepPolicy Keep>
class Checkpointed<What, Keep, keep::nothing>
    : public torch::nn::ModuleHolder<CheckpointedImpl<detail::UnitImpl<What>, Keep>> {
 public:
  using Impl = CheckpointedImpl<detail::UnitImpl<What>, Keep>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

/// Holds a checkpointed module whose forward has default arguments.
template <CheckpointableModule What, KeepPolicy Keep>
  requires(CheckpointedImpl<detail::UnitImpl<What>, Keep>::kHasDefaultArguments)
class Checkpointed<What, Keep, keep::nothing>
    : public detail::LayeredHolder<CheckpointedImpl<detail::UnitImpl<What>, Keep>,
                                   detail::CheckpointedWithDefaults<detail::UnitImpl<What>, Keep>> {
  using Stored = CheckpointedImpl<detail::UnitImpl<What>, Keep>;
  using Direct = detail::CheckpointedWithDefaults<detail::UnitImpl<What>, Keep>;
  using Holder = detail::LayeredHolder<Stored, Direct>;

 public:
  using Holder::Holder;

  /// Constructs the module from what `What` is constructed from.
  template <class... Arguments>
    requires std::constructible_from<Direct, Arguments...>
  explicit Checkpointed(Arguments&&... arguments)
      : Holder(std::shared_ptr<Stored>(
            std::make_shared<Direct>(std::forward<Arguments>(arguments)...))) {}
};

}  // namespace remat

namespace remat::detail {

/// A pattern, a rule and a keep policy as values: templates end here.
struct ChainPolicy {
  std::function<Plan(const Chain&)> rule;
  std::function<Plan(const Plan&, const Chain&)> pattern;
  std::function<Plan(const Chain&, std::size_t)> segments;
  KeepPredicate keep;

  template <class PatternType, class RuleType, class Keep>
  static ChainPolicy of() {
    ChainPolicy policy{RuleType(), PatternType(), balanced_plan, make_keep_predicate<Keep>()};
    if constexpr (shares_out_segments<PatternType>)
      policy.segments = [pattern = PatternType()](const Chain& chain, std::size_t segment_count) {
        return pattern.segments(chain, segment_count);
      };
    return policy;
  }
};

/// The plan for one structure of a chain, and what it came from; never changed once it is shared.
struct ChainPlan {
  std::vector<ChainUnit> units;
  std::optional<std::int64_t> segment_count;  // as asked for at run time; empty: the rule's
  std::vector<UnitCost> unit_costs;           // empty: not measured yet
  Plan plan;
  std::vector<std::string> segment_names;
  std::size_t counted_segments = 0;  // those with a unit that may be recomputed
  bool is_to_measure = false;
};

/// Plans a chain, anew when its structure, its segment count or its exemptions change.
///
/// @par Threads  any call from any thread; a plan, once handed out, stays as it is
class ChainPlanner {
 public:
  using Shared = std::shared_ptr<const ChainPlan>;

  explicit ChainPlanner(ChainPolicy policy)
      : policy_(std::make_shared<const ChainPolicy>(std::move(policy))) {}

  const ChainPolicy& policy() const { return *policy_; }

  /// Overrides the rule with a number of segments; empty: back to the rule.
  void set_segment_count(std::optional<std::int64_t> segment_count) {
    const std::lock_guard lock(mutex_);
    segment_count_ = segment_count;
  }

  void exempt(const torch::nn::Module& unit) {
    const std::lock_guard lock(mutex_);
    exempted_.push_back(&unit);
  }

  /// Marks the exempted ones among the units from `first` on.
  void mark_exempted(std::vector<ChainUnit>& units, std::size_t first) const {
    const std::lock_guard lock(mutex_);
    if (exempted_.empty()) return;
    for (std::size_t index = first; index < units.size(); ++index)
      if (std::ranges::find(exempted_, units[index].identity) != exempted_.end())
        units[index].is_plain = true;
  }

  /// Returns the plan for `units`, which are those of `chain`.
  Shared plan_for(const ChainStructure& chain, const std::vector<ChainUnit>& units) const {
    const std::lock_guard lock(mutex_);
    if (current_ == nullptr || current_->segment_count != segment_count_ ||
        current_->units != units) {
      // Costs depend on the units and on which of them are plain, not on the number of segments.
      const bool are_costs_valid = current_ != nullptr && current_->units == units;
      current_ =
          make_plan(chain, units, are_costs_valid ? current_->unit_costs : std::vector<UnitCost>());
    }
    return current_;
  }

  /// Plans by what a forward over `measured` has found the units to cost.
  void store_costs(const ChainStructure& chain, const ChainPlan& measured,
                   std::vector<UnitCost> costs) {
    const std::lock_guard lock(mutex_);
    // Another thread, or a change in between, may have been first.
    if (current_.get() == &measured) current_ = make_plan(chain, measured.units, std::move(costs));
  }

  /// Returns what puts the present segment count and plan back, while this planner lives.
  std::function<void()> remember() {
    const std::lock_guard lock(mutex_);
    return [this, segment_count = segment_count_, current = current_] {
      const std::lock_guard lock_again(mutex_);
      segment_count_ = segment_count;
      current_ = current;
    };
  }

  /// Takes over the plan of a chain with the same units, which are `units` here.
  void take_over(const ChainPlan& other, const std::vector<ChainUnit>& units) {
    const std::lock_guard lock(mutex_);
    segment_count_ = other.segment_count;
    exempted_.clear();
    current_ = nullptr;
    if (units.size() != other.units.size()) return;
    auto copy = std::make_shared<ChainPlan>(other);
    copy->units = units;
    for (std::size_t index = 0; index < units.size(); ++index) {
      copy->units[index].is_plain = other.units[index].is_plain;
      if (other.units[index].is_plain) exempted_.push_back(units[index].identity);
    }
    current_ = std::move(copy);
  }

 private:
  Shared make_plan(const ChainStructure& chain, const std::vector<ChainUnit>& units,
                   std::vector<UnitCost> costs) const {
    auto result = std::make_shared<ChainPlan>();
    result->units = units;
    result->segment_count = segment_count_;
    result->unit_costs = costs;
    const Chain known = describe(chain, units.size(), std::move(costs));
    Plan plan = segment_count_ ? policy_->segments(known, static_cast<std::size_t>(*segment_count_))
                               : policy_->rule(known);
    require_all_units(chain, plan, units.size());
    if (!known.is_measured() && plan.checkpointed_count() > 0) {
      // Plain segments are not measured, so the rule's are none in the first forward.
      result->is_to_measure = true;
      std::vector<Segment> segments = plan.segments();
      for (Segment& segment : segments) segment.is_checkpointed = true;
      plan = Plan(std::move(segments));
    }
    plan = policy_->pattern(plan, known);
    require_all_units(chain, plan, units.size());
    std::vector<std::size_t> plain_units;
    for (std::size_t index = 0; index < units.size(); ++index)
      if (units[index].is_plain) plain_units.push_back(index);
    result->plan = plan.with_plain_units(plain_units);
    result->segment_names = segment_names(result->plan, chain.unit_names());
    result->counted_segments = counted_segments(result->plan, known, plain_units);
    return result;
  }

  static Chain describe(const ChainStructure& chain, std::size_t unit_count,
                        std::vector<UnitCost> costs) {
    Chain known{unit_count, std::move(costs), {}};
    std::size_t first = 0;
    for (const ChainStage& stage : chain.stages()) {
      known.stage_sizes.push_back(stage.unit_count);
      if (!stage.is_nested) known.lone_units.push_back(first);
      first += stage.unit_count;
    }
    return known;
  }

  /// What the pattern leaves plain in the finest plan of an unmeasured chain, it leaves plain in
  /// any.
  std::size_t counted_segments(const Plan& plan, const Chain& known,
                               const std::vector<std::size_t>& plain_units) const {
    Chain unmeasured = known;
    unmeasured.unit_costs.clear();
    const std::size_t unit_count = known.unit_count;
    const Plan finest = policy_->pattern(Plan::from_count(unit_count, unit_count), unmeasured)
                            .with_plain_units(plain_units);
    std::vector<bool> may_be_recomputed(unit_count, false);
    for (const Segment& segment : finest.segments())
      for (std::size_t unit = segment.first; segment.is_checkpointed && unit < segment.last; ++unit)
        may_be_recomputed[unit] = true;
    return static_cast<std::size_t>(
        std::ranges::count_if(plan.segments(), [&](const Segment& segment) {
          for (std::size_t unit = segment.first; unit < segment.last; ++unit)
            if (may_be_recomputed[unit]) return true;
          return false;
        }));
  }

  static void require_all_units(const ChainStructure& chain, const Plan& plan,
                                std::size_t unit_count) {
    require(plan.unit_count() == unit_count, [&] {
      return ErrorMessage("remat.plan.units")
          .where(chain.title())
          .what("the rule planned for " + std::to_string(plan.unit_count()) +
                " units and the chain has " + std::to_string(unit_count))
          .cure("Let the rule return segments that cover Chain::unit_count units");
    });
  }

  static std::vector<std::string> segment_names(const Plan& plan,
                                                const std::vector<std::string>& unit_names) {
    std::vector<std::string> texts;
    for (const Segment& segment : plan.segments()) {
      const std::string range =
          segment.unit_count() == 1
              ? "unit " + unit_names[segment.first]
              : "units " + unit_names[segment.first] + " to " + unit_names[segment.last - 1];
      texts.push_back("segment " + std::to_string(texts.size() + 1) + " of " +
                      std::to_string(plan.segment_count()) + " (" + range + ")");
    }
    return texts;
  }

  std::shared_ptr<const ChainPolicy> policy_;
  mutable std::mutex mutex_;  // guards what follows
  std::optional<std::int64_t> segment_count_;
  std::vector<const torch::nn::Module*> exempted_;
  mutable Shared current_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Replaces `value` by what the unit makes of it; `more` goes to every unit.
template <class... More>
void run_unit(const ChainUnit& unit, torch::nn::AnyValue& value, const More&... more) {
  const UnitMark mark(*unit.identity);
  if (const auto* tensor = value.try_get<torch::Tensor>()) begin_layer_while_tracing(*tensor);
  const auto call = [&] { value = unit.module->any_forward(std::move(value), more...); };
  if (unit.is_plain)
    call_plain(call);
  else
    call();
  if (auto* tensor = value.try_get<torch::Tensor>()) keep_while_tracing(*tensor);
}

inline Bytes bytes_of(torch::nn::AnyValue& value) {
  auto* tensor = value.try_get<torch::Tensor>();
  if (tensor == nullptr || !tensor->defined() || !has_plain_storage(*tensor)) return {};
  return {tensor->numel() * static_cast<std::int64_t>(tensor->dtype().itemsize())};
}

/// Runs the units segment by segment: checkpointed ones as regions, plain ones as they are.
///
/// @return  what the units cost, one per unit; empty if the plan did not ask for it, or the engine
/// is missing
template <class... More>
std::vector<UnitCost> run_segments(const ChainPlan& planned, const KeepPredicate& keep,
                                   torch::nn::AnyValue& value, const More&... more) {
  std::vector<UnitCost> costs(planned.is_to_measure ? planned.units.size() : 0);
  bool is_measured = planned.is_to_measure;
  for (std::size_t index = 0; index < planned.plan.segment_count(); ++index) {
    const Segment& segment = planned.plan.segments()[index];
    const auto run_units = [&]() -> torch::Tensor {
      for (std::size_t unit = segment.first; unit < segment.last; ++unit) {
        if (planned.is_to_measure && segment.is_checkpointed) begin_unit();
        run_unit(planned.units[unit], value, more...);
        if (planned.is_to_measure) costs[unit].output = bytes_of(value);
      }
      // Shown to the region as its result, which it keeps. Other types are carried in `value`
      // alone.
      auto* tensor = value.template try_get<torch::Tensor>();
      return tensor == nullptr ? torch::Tensor() : *tensor;
    };
    if (!segment.is_checkpointed) {
      run_units();
      continue;
    }
    std::vector<UnitCost> saved;
    RegionOptions options;
    options.keep = keep;
    options.name = planned.segment_names[index];
    if (planned.is_to_measure) options.unit_costs = &saved;
    run_region(options, run_units);
    is_measured = is_measured && saved.size() == segment.unit_count();
    for (std::size_t unit = 0; is_measured && unit < saved.size(); ++unit) {
      costs[segment.first + unit].saved = saved[unit].saved;
      costs[segment.first + unit].kept = saved[unit].kept;
    }
  }
  return is_measured ? std::move(costs) : std::vector<UnitCost>();
}

}  // namespace remat::detail

namespace remat {

/// The module behind `Checkpointed<Sequential>`, as LibTorch's containers see it: with one forward.
///
/// Children are registered under their names or numbers, so that keys are those of
/// `torch::nn::Sequential`.
/// @par Threads  several threads may call forward at once; adding, exempting and switching is for
/// one thread
class CheckpointedChainImpl : public torch::nn::Module,
                              public detail::BudgetedToggle,
                              public detail::ChainStructure {
 public:
  using Iterator = std::vector<ChainLayer>::const_iterator;

  /// Chains the layers: segments of the plan are checkpointed if the chain is switched on, in
  /// training mode, and something requires grad.
  torch::Tensor forward(torch::Tensor x) { return run(std::move(x)); }

  /// Appends a layer, named by its number.
  template <class Source>
    requires ChainLayerSource<Source> || std::same_as<std::remove_cvref_t<Source>, ChainLayer>
  void push_back(Source&& layer) {
    push_back(std::to_string(size()), std::forward<Source>(layer));
  }
  /// Appends a layer with a name.
  template <class Source>
    requires ChainLayerSource<Source> || std::same_as<std::remove_cvref_t<Source>, ChainLayer>
  void push_back(std::string name, Source&& layer) {
    append(std::move(name), ChainLayer(std::forward<Source>(layer)));
  }
  /// Appends a named layer.
  void push_back(const NamedLayer& named) { append(named.name(), named.layer()); }
  /// Appends every layer of a container, such as another chain.
  template <class Container>
  void extend(const Container& container) {
    for (const auto& layer : container) push_back(layer);
  }

  std::size_t size() const noexcept { return layers_.size(); }
  bool is_empty() const noexcept { return layers_.empty(); }
  Iterator begin() const { return layers_.begin(); }
  Iterator end() const { return layers_.end(); }

  /// @throws ArgumentError  if there is no layer of that index
  std::shared_ptr<torch::nn::Module> ptr(std::size_t index) const {
    require(index < size(), [&] {
      return ErrorMessage("remat.chain.index")
          .where(name())
          .what("layer " + std::to_string(index) + " was asked for, and there are " +
                std::to_string(size()));
    });
    return layers_[index].ptr();
  }
  std::shared_ptr<torch::nn::Module> operator[](std::size_t index) const { return ptr(index); }
  /// @throws ArgumentError  if there is no layer of that index, or it is no `Type`
  template <class Type>
  detail::UnitImpl<Type>& at(std::size_t index) const {
    auto* layer = dynamic_cast<detail::UnitImpl<Type>*>(ptr(index).get());
    require(layer != nullptr, [&] {
      return ErrorMessage("remat.chain.type")
          .where(name())
          .what("layer " + std::to_string(index) + " is a " + ptr(index)->name() +
                " and was asked for as another type");
    });
    return *layer;
  }

  void enable_gradient_checkpointing() override { set_segment_count(std::nullopt); }
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    detail::require_segment_count(segment_count, name());
    set_segment_count(segment_count);
  }
  using detail::BudgetedToggle::enable_gradient_checkpointing;
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    const auto units = detail::units_of(*this);
    if (std::ranges::find(units, &unit, &detail::ChainUnit::identity) == units.end()) return false;
    planner_.exempt(unit);
    return true;
  }

  std::string unit_name(const torch::nn::Module* unit) const override {
    const auto units = detail::units_of(*this);
    const auto found = std::ranges::find(units, unit, &detail::ChainUnit::identity);
    if (found == units.end()) return "";
    return unit_names()[static_cast<std::size_t>(found - units.begin())];
  }

  /// Returns what puts the present switch, segment count and measurements back.
  std::function<void()> remember_checkpointing() override {
    return [this, is_on = is_enabled_.get(), put_back = planner_.remember(),
            put_budget_back = budgeted_.remember()] {
      put_back();
      put_budget_back();
      is_enabled_ = is_on;
    };
  }

  /// Returns the plan of the next training forward: by unit count until the units are measured,
  /// then by bytes.
  Plan plan() const {
    const auto units = detail::units_of(*this);
    return is_enabled_.get() ? planner_.plan_for(*this, units)->plan : Plan::keep_all(units.size());
  }
  /// Returns how many segments of that plan have a unit that may be recomputed: those that consist
  /// of units marked as plain, or left alone by the pattern, do not count. 0 while switched off.
  std::size_t segment_count() const {
    return is_enabled_.get() ? planner_.plan_for(*this, detail::units_of(*this))->counted_segments
                             : 0;
  }
  /// Returns what each unit was measured to cost; empty before the first checkpointed forward.
  std::vector<UnitCost> unit_costs() const {
    return planner_.plan_for(*this, detail::units_of(*this))->unit_costs;
  }

  /// Takes over switch, segment count, exemptions and measurements of a chain with the same units.
  void copy_checkpointing_from(const CheckpointedChainImpl& other) {
    is_enabled_ = other.is_enabled_;
    budgeted_ = other.budgeted_;
    planner_.take_over(*other.planner_.plan_for(other, detail::units_of(other)),
                       detail::units_of(*this));
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "remat::Checkpointed<remat::Sequential>";
  }

 protected:
  explicit CheckpointedChainImpl(detail::ChainPolicy policy) : planner_(std::move(policy)) {}

  /// Returns pattern, rule and keep policy as values.
  const detail::ChainPolicy& policy() const { return planner_.policy(); }

  /// Runs the chain; `more` goes to every unit.
  template <class... More>
  torch::Tensor run(torch::Tensor x, const More&... more) {
    const auto units = detail::units_of(*this);
    require(!units.empty(), [&] {
      return ErrorMessage("remat.chain.empty")
          .where(name())
          .what("forward was called on a chain of no layers")
          .cure("Add layers first");
    });
    const bool is_on = should_checkpoint(units, x, more...);
    if (is_on && budgeted_.is_set())
      return budgeted_.run(*this, x, [&](const torch::Tensor& input) {
        torch::nn::AnyValue value(input);
        for (const auto& unit : units) detail::run_unit(unit, value, more...);
        return take_result(value);
      });
    torch::nn::AnyValue value(std::move(x));
    if (is_on) {
      const auto planned = planner_.plan_for(*this, units);
      auto costs = detail::run_segments(*planned, policy().keep, value, more...);
      if (!costs.empty()) planner_.store_costs(*this, *planned, std::move(costs));
    } else {
      for (const auto& unit : units) detail::run_unit(unit, value, more...);
    }
    return take_result(value);
  }

  /// Returns the tensor in `value`, which is what the last unit returned.
  torch::Tensor take_result(torch::nn::AnyValue& value) const {
    auto* result = value.try_get<torch::Tensor>();
    require(result != nullptr, [&] {
      return ErrorMessage("remat.chain.result")
          .where(name())
          .what("the last layer returned " + std::string(c10::demangle(value.type_info().name())) +
                ", a tensor was expected")
          .cure("End the chain with a layer that returns a tensor");
    });
    return std::move(*result);
  }

  /// Takes over clones of another chain's layers, and its switches.
  void become_clone_of(const CheckpointedChainImpl& other, const OptionalDevice& device) {
    for (const auto& child : named_children().keys()) unregister_module(child);
    layers_.clear();
    train(other.is_training());  // before the children, which have their own mode
    std::map<const torch::nn::Module*, ChainLayer>
        clones;  // a layer that appears twice stays one layer
    const auto names = other.named_children().keys();
    for (std::size_t index = 0; index < other.size(); ++index) {
      const ChainLayer& layer = other.layers_[index];
      auto found = clones.find(layer.ptr().get());
      if (found == clones.end())
        found = clones.emplace(layer.ptr().get(), layer.clone(device)).first;
      append(names[index], found->second);
    }
    copy_checkpointing_from(other);
  }

 private:
  // LibTorch calls this when the chain is a child of a module that is cloned.
  void clone_(torch::nn::Module& other, const OptionalDevice& device) final {
    become_clone_of(dynamic_cast<CheckpointedChainImpl&>(other), device);
  }

  void append(std::string layer_name, ChainLayer layer) {
    register_module(std::move(layer_name), layer.ptr());
    layers_.push_back(std::move(layer));
  }

  void set_segment_count(std::optional<std::int64_t> segment_count) {
    is_enabled_ = true;
    budgeted_.clear();
    planner_.set_segment_count(segment_count);
  }

  void add_units(std::vector<detail::ChainUnit>& units, bool is_plain) const override {
    const std::size_t first = units.size();
    for (const ChainLayer& layer : layers_) detail::add_units_of_layer(layer, is_plain, units);
    planner_.mark_exempted(units, first);
  }

  std::vector<std::string> unit_names() const override {
    std::vector<std::string> names;
    const auto keys = named_children().keys();
    for (std::size_t index = 0; index < layers_.size(); ++index)
      detail::add_unit_names_of_layer(layers_[index], keys[index], names);
    return names;
  }

  std::vector<detail::ChainStage> stages() const override {
    std::vector<detail::ChainStage> stages;
    for (const ChainLayer& layer : layers_) {
      const detail::ChainStage stage = detail::stage_of_layer(layer);
      if (stage.unit_count != 0) stages.push_back(stage);
    }
    return stages;
  }

  bool is_switched_on() const override { return is_enabled_.get(); }
  std::string title() const override { return name(); }

  template <class... Inputs>
  bool should_checkpoint(const std::vector<detail::ChainUnit>& units,
                         const Inputs&... inputs) const {
    return is_enabled_.get() && is_training() && detail::autograd_records() &&
           (detail::any_requires_grad(inputs...) ||
            std::ranges::any_of(units, [](const auto& unit) {
              return detail::has_trainable_parameter(*unit.identity);
            }));
  }

  std::vector<ChainLayer> layers_;
  detail::Flag is_enabled_{true};
  detail::ChainPlanner planner_;
};

/// The module behind `Checkpointed<Sequential>`, as its users see it: forward takes extra
/// arguments, too.
class CheckpointedSequentialImpl final : public CheckpointedChainImpl {
 public:
  explicit CheckpointedSequentialImpl(detail::ChainPolicy policy)
      : CheckpointedChainImpl(std::move(policy)) {}

  using CheckpointedChainImpl::forward;
  /// Chains the layers and hands `more`, a mask for example, to every one of them.
  template <class... More>
    requires(sizeof...(More) > 0)
  torch::Tensor forward(torch::Tensor x, More&&... more) {
    return this->run(std::move(x), more...);
  }

  /// Copies the chain with its switches; names stay, and the copy runs its own layers.
  std::shared_ptr<torch::nn::Module> clone(const OptionalDevice& device = {}) const override {
    const auto copy = empty_copy();
    copy->become_clone_of(*this, device);
    return copy;
  }

  /// Returns a chain of no layers with the same pattern, rule and keep policy.
  std::shared_ptr<CheckpointedSequentialImpl> empty_copy() const {
    return std::make_shared<CheckpointedSequentialImpl>(policy());
  }
};

/// Holds a checkpointed chain of any pattern, rule and keep policy: what code takes that is no
/// template. Every `Checkpointed<Pattern, Rule, Keep>` converts to it and shares its module.
class CheckpointedChain
    : public detail::LayeredHolder<CheckpointedChainImpl, CheckpointedSequentialImpl> {
 public:
  using LayeredHolder::LayeredHolder;
};

}  // namespace remat

#include <numeric>

namespace remat::detail {

/// Returns the least number of inserted, deleted and replaced characters between two words.
inline std::size_t edit_distance(std::string_view left, std::string_view right) {
  std::vector<std::size_t> row(right.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < left.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < right.size(); ++j) {
      const std::size_t replaced = diagonal + (left[i] == right[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

/// Returns the `count` candidates that are spelled most like `name`, nearest first.
inline std::vector<std::string> nearest_names(std::string_view name,
                                              std::vector<std::string> candidates,
                                              std::size_t count = 3) {
  std::stable_sort(candidates.begin(), candidates.end(), [&](const auto& left, const auto& right) {
    return edit_distance(name, left) < edit_distance(name, right);
  });
  candidates.resize(std::min(count, candidates.size()));
  return candidates;
}

/// Returns the names in quotes, joined by commas.
inline std::string quoted_list(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

}  // namespace remat::detail

namespace remat {

namespace detail {

/// Exempts `part` and everything below it, wherever something inside `root` checkpoints it.
inline bool exempt_part(torch::nn::Module& root, torch::nn::Module& part) {
  std::vector<const torch::nn::Module*> units = {&part};
  for (const auto& below : part.modules(/*include_self=*/false)) units.push_back(below.get());
  bool is_found = false;
  for_each_toggle(root, [&](CheckpointToggle& toggle) {
    for (const torch::nn::Module* unit : units) is_found = toggle.exempt_unit(*unit) || is_found;
  });
  return is_found;
}

}  // namespace detail

/// Exempts a part of `root` from checkpointing by its name: a unit of a chain, a checkpointed
/// module, or a module that contains such, of which all are exempted.
///
/// What it saves stays in memory from now on. Names do not change.
///
/// @param name  as in `root.named_modules()`: "layer1.0"
/// @throws ArgumentError  if there is no such module, or it is only a part of something that is
/// recomputed as one
inline void plain(torch::nn::Module& root, std::string_view name) {
  const auto modules = root.named_modules(/*name_prefix=*/{}, /*include_self=*/false);
  const auto* part = modules.find(std::string(name));
  require(part != nullptr, [&] {
    const auto nearest = detail::nearest_names(name, modules.keys());
    return ErrorMessage("remat.plain.name")
        .where("remat::plain")
        .what("\"" + std::string(name) + "\" was given, and " + root.name() +
              " has no module of that name")
        .cure(nearest.empty() ? "It contains no modules"
                              : "The nearest names are " + detail::quoted_list(nearest));
  });
  require(detail::exempt_part(root, **part), [&] {
    return ErrorMessage("remat.plain.unit")
        .where("remat::plain")
        .what("\"" + std::string(name) +
              "\" was given, and a unit of a checkpointed chain or a checkpointed module was "
              "expected")
        .cause(
            "It is a part of a unit, which is recomputed as one, or nothing here is checkpointed")
        .cure("Exempt the unit around it");
  });
}

/// As for a module; takes a holder.
template <class Impl>
void plain(const torch::nn::ModuleHolder<Impl>& root, std::string_view name) {
  plain(static_cast<torch::nn::Module&>(*root.ptr()), name);
}

}  // namespace remat

namespace remat {

/// A backbone whose features come out of one chain of units.
///
/// The chain holds the units but is no registered child: the units are registered by the backbone
/// under torchvision's names, and a second registration would give each weight a second name.
class ChainBackbone : public Backbone {
 public:
  /// Runs the chain, segment by segment if checkpointing is on.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return chain_->forward(images_nchw);
  }

  /// Switches checkpointing on with the policy's own rule.
  void enable_gradient_checkpointing() override {
    budgeted_.clear();
    chain_->enable_gradient_checkpointing();
  }
  /// Switches checkpointing on with `segment_count` segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    budgeted_.clear();
    chain_->enable_gradient_checkpointing(segment_count);
  }
  using Backbone::enable_gradient_checkpointing;
  void disable_gradient_checkpointing() override { chain_->disable_gradient_checkpointing(); }
  bool is_gradient_checkpointing_enabled() const override {
    return chain_->is_gradient_checkpointing_enabled();
  }

  std::int64_t segments() const override {
    return static_cast<std::int64_t>(chain_->segment_count());
  }

  /// Returns the plan of the next forward pass.
  Plan plan() const { return chain_->plan(); }

  /// Returns the chain: its units, and what they were measured to cost.
  const CheckpointedChain& chain() const { return chain_; }

  bool exempt_unit(const torch::nn::Module& unit) override { return chain_->exempt_unit(unit); }
  std::string unit_name(const torch::nn::Module* unit) const override {
    return chain_->unit_name(unit);
  }

  std::function<void()> remember_checkpointing() override {
    return [chain = chain_->remember_checkpointing(), budget = budgeted_.remember()] {
      chain();
      budget();
    };
  }

  void train(bool on = true) override {
    Backbone::train(on);
    chain_->train(on);
  }

 protected:
  /// @param chain  without layers; says by its type how the features are checkpointed
  ChainBackbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options,
                CheckpointedChain chain)
      : Backbone(std::move(name), raw_feature_dim, options), chain_(std::move(chain)) {
    chain_->disable_gradient_checkpointing();
  }

  /// Appends a layer that is registered elsewhere in this backbone: a unit, a
  /// `torch::nn::Sequential` of units, which is a stage, or either marked with `plain`.
  ///
  /// @param name  for messages and plans; without dots, which LibTorch refuses
  template <ChainLayerSource Layer>
  void append(std::string name, Layer&& layer) {
    chain_->push_back(std::move(name), std::forward<Layer>(layer));
  }

 private:
  void copy_checkpointing_from(const Backbone& other) override {
    const auto& original = dynamic_cast<const ChainBackbone&>(other);
    budgeted_ = original.budgeted_;
    chain_->copy_checkpointing_from(*original.chain_);
  }

  CheckpointedChain chain_;
};

}  // namespace remat

#include <filesystem>

namespace remat {

/// How an image is made smaller: torchvision's `InterpolationMode`, with antialiasing.
enum class Interpolation { kBilinear, kBicubic };

/// What was done to the images that published weights were evaluated on; with other figures the
/// same weights lose up to ten points of accuracy.
///
/// The shorter side is resized to `resize_size`, a square of `crop_size` is cut from the centre,
/// values are scaled to [0, 1], and each channel has `mean` subtracted and is divided by `std`.
struct Preprocessing {
  std::int64_t resize_size;
  std::int64_t crop_size;
  Interpolation interpolation;
  std::array<double, 3> mean;  ///< red, green, blue
  std::array<double, 3> std;   ///< likewise
};

/// What is known about a network of torchvision's and its published weights.
struct PublishedModel {
  std::string_view name;             ///< torchvision's, which is ours
  std::int64_t parameters;           ///< with the head for 1,000 classes
  std::int64_t feature_dim;          ///< width of the pooled features, before any layer of the head
  std::string_view weights_file;     ///< in torchvision's cache; ends in the start of its SHA-256
  std::string_view weights_version;  ///< which of the model's weights the file holds
  Preprocessing preprocessing;

  /// Returns the Python line that puts the file into torchvision's cache.
  std::string python_line() const {
    return "torchvision.models." + std::string(name) + "(weights=\"" +
           std::string(weights_version) + "\")";
  }
};

namespace detail {

/// Means and standard deviations of ImageNet's channels.
inline constexpr std::array<double, 3> kImageNetMean{0.485, 0.456, 0.406};
inline constexpr std::array<double, 3> kImageNetStd{0.229, 0.224, 0.225};
/// Of EfficientNetV2-L alone, whose weights were ported from the paper's own.
inline constexpr std::array<double, 3> kHalf{0.5, 0.5, 0.5};

constexpr Preprocessing imagenet(std::int64_t resize_size, std::int64_t crop_size,
                                 Interpolation interpolation = Interpolation::kBilinear) {
  return {resize_size, crop_size, interpolation, kImageNetMean, kImageNetStd};
}

/// torchvision 0.28 says this of its `DEFAULT` weights; `tests/data/make_published.py` asks it.
inline constexpr auto kPublishedModels = std::to_array<PublishedModel>({
    {"resnet18", 11'689'512, 512, "resnet18-f37072fd.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"resnet34", 21'797'672, 512, "resnet34-b627a593.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"resnet50", 25'557'032, 2048, "resnet50-11ad3fa6.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"resnet101", 44'549'160, 2048, "resnet101-cd907fc2.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"resnet152", 60'192'808, 2048, "resnet152-f82ba261.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"mobilenet_v2", 3'504'872, 1280, "mobilenet_v2-7ebf99e0.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"mobilenet_v3_small", 2'542'856, 576, "mobilenet_v3_small-047dcff4.pth", "IMAGENET1K_V1",
     imagenet(256, 224)},
    {"mobilenet_v3_large", 5'483'032, 960, "mobilenet_v3_large-5c1a4163.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"efficientnet_b0", 5'288'548, 1280, "efficientnet_b0_rwightman-7f5810bc.pth", "IMAGENET1K_V1",
     imagenet(256, 224, Interpolation::kBicubic)},
    {"efficientnet_b1", 7'794'184, 1280, "efficientnet_b1-c27df63c.pth", "IMAGENET1K_V2",
     imagenet(255, 240)},
    {"efficientnet_b2", 9'109'994, 1408, "efficientnet_b2_rwightman-c35c1473.pth", "IMAGENET1K_V1",
     imagenet(288, 288, Interpolation::kBicubic)},
    {"efficientnet_v2_s", 21'458'488, 1280, "efficientnet_v2_s-dd5fe13b.pth", "IMAGENET1K_V1",
     imagenet(384, 384)},
    {"efficientnet_v2_m", 54'139'356, 1280, "efficientnet_v2_m-dc08266a.pth", "IMAGENET1K_V1",
     imagenet(480, 480)},
    {"efficientnet_v2_l",
     118'515'272,
     1280,
     "efficientnet_v2_l-59c71312.pth",
     "IMAGENET1K_V1",
     {480, 480, Interpolation::kBicubic, kHalf, kHalf}},
    {"regnet_y_400mf", 4'344'144, 440, "regnet_y_400mf-e6988f5f.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_800mf", 6'432'512, 784, "regnet_y_800mf-58fc7688.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_1_6gf", 11'202'430, 888, "regnet_y_1_6gf-0d7bc02a.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_3_2gf", 19'436'338, 1512, "regnet_y_3_2gf-9180c971.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_8gf", 39'381'472, 2016, "regnet_y_8gf-dc2b1b54.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_16gf", 83'590'140, 3024, "regnet_y_16gf-3e4a00f9.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_32gf", 145'046'770, 3712, "regnet_y_32gf-8db6d4b5.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"vit_b_16", 86'567'656, 768, "vit_b_16-c867db91.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"vit_b_32", 88'224'232, 768, "vit_b_32-d86f8d99.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"vit_l_16", 304'326'632, 1024, "vit_l_16-852ce7e3.pth", "IMAGENET1K_V1", imagenet(242, 224)},
    {"vit_l_32", 306'535'400, 1024, "vit_l_32-c7638314.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"swin_t", 28'288'354, 768, "swin_t-704ceda3.pth", "IMAGENET1K_V1",
     imagenet(232, 224, Interpolation::kBicubic)},
    {"swin_s", 49'606'258, 768, "swin_s-5e29d889.pth", "IMAGENET1K_V1",
     imagenet(246, 224, Interpolation::kBicubic)},
    {"swin_b", 87'768'224, 1024, "swin_b-68c6b09e.pth", "IMAGENET1K_V1",
     imagenet(238, 224, Interpolation::kBicubic)},
    {"convnext_tiny", 28'589'128, 768, "convnext_tiny-983f1562.pth", "IMAGENET1K_V1",
     imagenet(236, 224)},
    {"convnext_small", 50'223'688, 768, "convnext_small-0c510722.pth", "IMAGENET1K_V1",
     imagenet(230, 224)},
    {"convnext_base", 88'591'464, 1024, "convnext_base-6075fbad.pth", "IMAGENET1K_V1",
     imagenet(232, 224)},
    {"convnext_large", 197'767'336, 1536, "convnext_large-ea097f82.pth", "IMAGENET1K_V1",
     imagenet(232, 224)},
    {"maxvit_t", 30'919'624, 512, "maxvit_t-bc5ab103.pth", "IMAGENET1K_V1",
     imagenet(224, 224, Interpolation::kBicubic)},
});

/// Spellings without an underscore that people use as well.
inline constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kBackboneAliases{{
    {"mobilenetv2", "mobilenet_v2"},
    {"mobilenetv3_small", "mobilenet_v3_small"},
    {"mobilenetv3_large", "mobilenet_v3_large"},
}};

}  // namespace detail

/// Returns what torchvision publishes under that name.
///
/// @throws ArgumentError  with the nearest names if there is no such model
inline const PublishedModel& published_model(std::string_view name) {
  const auto* const found =
      std::ranges::find(detail::kPublishedModels, name, &PublishedModel::name);
  require(found != detail::kPublishedModels.end(), [&] {
    std::vector<std::string> names;
    for (const PublishedModel& model : detail::kPublishedModels) names.emplace_back(model.name);
    return ErrorMessage("remat.backbone.unknown")
        .where("remat::published_model")
        .what("there is no published model \"" + std::string(name) + "\"; the nearest names are " +
              detail::quoted_list(detail::nearest_names(name, names)))
        .cure("remat::list_backbones() has the full list");
  });
  return *found;
}

}  // namespace remat

#include <unordered_map>
#include <unordered_set>

#include <fstream>

namespace remat::detail {

// Weight files hold little-endian numbers, and tensors are filled with the bytes as they are.
static_assert(std::endian::native == std::endian::little,
              "remat reads weight files on little-endian machines only");

/// Returns a text from a file so that it can stand in a message: one line, printable, not too long.
inline std::string printable(std::string_view text, std::size_t longest = 120) {
  std::string result;
  for (const char letter : text.substr(0, longest)) {
    const auto code = static_cast<unsigned char>(letter);
    result += code < 0x20 || code == 0x7f ? '?' : letter;
  }
  return text.size() > longest ? result + "..." : result;
}

/// Reports that a name, which a state dict has once, is there twice.
///
/// @param where  the file or value, as a message shows it
[[noreturn]] inline void throw_duplicate(std::string_view where, std::string_view name) {
  throw WeightsError(
      ErrorMessage("remat.weights.duplicate")
          .where(where)
          .what("two tensors are called \"" + printable(name) + "\", and a name occurs once")
          .cure("Give each tensor a name of its own"));
}

/// The bytes of a weight file, wherever they are, and the name to call them by in messages.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  std::uint64_t size() const { return size_; }
  const std::string& name() const { return name_; }

  /// Fills `count` bytes at `into`.
  ///
  /// @throws WeightsError  if they are not all there
  void read(std::uint64_t offset, void* into, std::size_t count) const {
    if (count > size_ || offset > size_ - count)
      damaged("it ends at byte " + std::to_string(size_) + ", and " + std::to_string(count) +
              " bytes at " + std::to_string(offset) + " are needed");
    if (count != 0) read_inside(offset, into, count);
  }

  /// Reports that the content contradicts itself or its format.
  [[noreturn]] void damaged(std::string_view what) const {
    throw WeightsError(
        ErrorMessage("remat.weights.damaged")
            .where("\"" + name_ + "\"")
            .what(what)
            .cause("the file is damaged, or was cut short when it was fetched or copied")
            .cure("Fetch it again or write it anew"));
  }

 protected:
  ByteSource(std::string name, std::uint64_t size) : name_(std::move(name)), size_(size) {}

 private:
  virtual void read_inside(std::uint64_t offset, void* into, std::size_t count) const = 0;

  std::string name_;
  std::uint64_t size_;
};

/// Bytes that somebody else holds in memory, for as long as this lives.
class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string name, std::string_view bytes)
      : ByteSource(std::move(name), bytes.size()), bytes_(bytes) {}

 private:
  void read_inside(std::uint64_t offset, void* into, std::size_t count) const override {
    std::memcpy(into, bytes_.data() + offset, count);
  }

  std::string_view bytes_;
};

/// A file that stays open, so that replacing it by another one while it is read does no harm.
class FileSource final : public ByteSource {
 public:
  /// @throws WeightsError  if it is no file or may not be read
  explicit FileSource(const std::filesystem::path& path)
      : ByteSource(path.string(), size_of(path)), stream_(path, std::ios::binary) {
    if (!stream_) refuse(name(), "the file cannot be opened for reading", "Check its permissions");
  }

 private:
  [[noreturn]] static void refuse(const std::string& path, std::string_view what,
                                  std::string_view cure) {
    throw WeightsError(
        ErrorMessage("remat.weights.file").where("\"" + path + "\"").what(what).cure(cure));
  }

  static std::uint64_t size_of(const std::filesystem::path& path) {
    std::error_code error;
    const auto status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status))
      refuse(path.string(), "there is no such file", "Check the path");
    if (!std::filesystem::is_regular_file(status))
      refuse(path.string(), "a file was expected, and this is a directory or a device",
             "Give the path of the file itself");
    const std::uintmax_t size = std::filesystem::file_size(path, error);
    if (error) refuse(path.string(), error.message(), "Check the path");
    return size;
  }

  void read_inside(std::uint64_t offset, void* into, std::size_t count) const override {
    stream_.clear();
    stream_.seekg(static_cast<std::streamoff>(offset));
    stream_.read(static_cast<char*>(into), static_cast<std::streamsize>(count));
    if (!stream_)
      refuse(name(),
             std::to_string(count) + " bytes at " + std::to_string(offset) +
                 " cannot be read although the file had them when it was opened",
             "Check the disk, and that nothing else writes the file");
  }

  mutable std::ifstream stream_;
};

}  // namespace remat::detail

namespace remat {

/// A key whose tensor in the file cannot be copied into the module's.
struct KeyMismatch {
  std::string key;
  std::vector<std::int64_t> stored, expected;  ///< shapes: the file's and the module's
  at::ScalarType stored_dtype, expected_dtype;
};

inline std::ostream& operator<<(std::ostream& out, const KeyMismatch& mismatch) {
  out << '"' << detail::printable(mismatch.key) << "\" is " << at::IntArrayRef(mismatch.stored);
  if (mismatch.stored == mismatch.expected) out << ' ' << detail::dtype_name(mismatch.stored_dtype);
  out << " in the file and " << at::IntArrayRef(mismatch.expected);
  if (mismatch.stored == mismatch.expected)
    out << ' ' << detail::dtype_name(mismatch.expected_dtype);
  return out << " in the module";
}

/// What became of each key of a file and of a module. Prints.
struct LoadReport {
  std::vector<std::string> matched;     ///< in both, and loaded
  std::vector<std::string> fitted;      ///< in both, and loaded after LoadOptions::fit
  std::vector<std::string> skipped;     ///< left alone because of LoadOptions::skip
  std::vector<std::string> tolerated;   ///< in one only, and right all the same (see load_weights)
  std::vector<std::string> missing;     ///< in the module only
  std::vector<std::string> unexpected;  ///< in the file only
  std::vector<KeyMismatch> mismatched;  ///< in both, with another shape
  std::string removed_prefix;           ///< what was taken off all names of the file

  /// Returns how many keys of the module have their numbers from the file now.
  std::size_t loaded_count() const { return matched.size() + fitted.size(); }
};

namespace detail {

/// Prints up to eight items, and how many more there are.
template <class Items, class Print>
void print_some(std::ostream& out, const Items& items, Print print) {
  constexpr std::size_t kShown = 8;
  std::size_t shown = 0;
  for (const auto& item : items) {
    if (shown == kShown) break;
    out << (shown++ == 0 ? ": " : ", ");
    print(item);
  }
  if (items.size() > shown) out << " and " << items.size() - shown << " more";
}

inline void print_keys(std::ostream& out, const std::vector<std::string>& keys,
                       std::string_view title) {
  if (keys.empty()) return;
  out << "; " << keys.size() << ' ' << title;
  print_some(out, keys, [&](const std::string& key) { out << '"' << printable(key) << '"'; });
}

inline void print_problems(std::ostream& out, const LoadReport& report) {
  print_keys(out, report.missing, "missing");
  print_keys(out, report.unexpected, "unexpected");
  if (report.mismatched.empty()) return;
  out << "; " << report.mismatched.size() << " of another shape";
  print_some(out, report.mismatched, [&](const KeyMismatch& mismatch) { out << mismatch; });
}

}  // namespace detail

inline std::ostream& operator<<(std::ostream& out, const LoadReport& report) {
  out << report.matched.size() << " keys matched";
  detail::print_keys(out, report.fitted, "fitted");
  detail::print_keys(out, report.skipped, "skipped");
  detail::print_keys(out, report.tolerated, "tolerated");
  detail::print_problems(out, report);
  if (!report.removed_prefix.empty())
    out << "; \"" << report.removed_prefix << "\" taken off all names of the file";
  return out;
}

}  // namespace remat

namespace remat {

/// Named tensors in an order, as Python's state dict: what a weight file holds.
///
/// A value; its tensors are handles, so that a copy refers to the same numbers.
class StateDict {
 public:
  using Item = std::pair<std::string, at::Tensor>;

  /// Appends a tensor.
  ///
  /// @throws WeightsError  if there is one of that name
  void add(std::string name, at::Tensor tensor) {
    if (!indices_.emplace(name, items_.size()).second)
      detail::throw_duplicate("remat::StateDict", name);
    items_.emplace_back(std::move(name), std::move(tensor));
  }

  /// Returns the tensor of that name, or null.
  const at::Tensor* find(const std::string& name) const {
    const auto found = indices_.find(name);
    return found == indices_.end() ? nullptr : &items_[found->second].second;
  }

  /// Returns the tensor of that name.
  ///
  /// @throws ArgumentError  if there is none; the message lists the nearest names
  const at::Tensor& at(const std::string& name) const {
    const at::Tensor* tensor = find(name);
    require(tensor != nullptr, [&] {
      ErrorMessage message("remat.weights.name");
      message.where("remat::StateDict")
          .what("none of its " + std::to_string(size()) + " tensors is called \"" +
                detail::printable(name) + "\"");
      if (!items_.empty())
        message.cure("The nearest names are " +
                     detail::quoted_list(detail::nearest_names(name, names())));
      return message;
    });
    return *tensor;
  }

  /// Returns whether there is a tensor of that name.
  bool contains(const std::string& name) const { return find(name) != nullptr; }
  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

  /// Returns all names, in their order.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : items_) result.push_back(name);
    return result;
  }

 private:
  std::vector<Item> items_;
  std::unordered_map<std::string, std::size_t> indices_;
};

/// What a file says about one of its tensors before it is read.
struct TensorEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::uint64_t bytes = 0;  ///< of its elements
};

/// Reads the tensors of a weight file one at a time, so that no more of them than wanted are in
/// memory. For one thread.
class StateDictReader {
 public:
  virtual ~StateDictReader() = default;
  StateDictReader(const StateDictReader&) = delete;
  StateDictReader& operator=(const StateDictReader&) = delete;

  /// Returns what there is, in the file's order; names are as in the file and occur once.
  const std::vector<TensorEntry>& entries() const { return entries_; }
  /// Returns what the file is called in messages.
  const std::string& source_name() const { return source_name_; }

  /// Reads one tensor to the CPU. Tensors that shared their numbers when they were saved share them
  /// again, as long as one of them is alive.
  ///
  /// @param index  into `entries()`
  /// @throws WeightsError  if the file does not give what it announced
  virtual at::Tensor read(std::size_t index) = 0;

 protected:
  explicit StateDictReader(std::string source_name) : source_name_(std::move(source_name)) {}

  /// Takes over what the file announces.
  ///
  /// @throws WeightsError  if a name occurs twice
  void announce(std::vector<TensorEntry> entries) {
    std::vector<std::string_view> names;
    for (const TensorEntry& entry : entries) names.push_back(entry.name);
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) detail::throw_duplicate("\"" + source_name_ + "\"", *twice);
    entries_ = std::move(entries);
  }

 private:
  std::string source_name_;
  std::vector<TensorEntry> entries_;
};

namespace detail {

/// Returns the type that LibTorch has for a dtype of a file.
///
/// @throws WeightsError  if tensors cannot have it here
inline at::ScalarType supported_type(const std::string& source_name, std::string_view tensor_name,
                                     std::string_view dtype) {
  const auto type = scalar_type(dtype);
  if (!type)
    throw WeightsError(
        ErrorMessage("remat.weights.dtype")
            .where("\"" + source_name + "\"")
            .what("its tensor \"" + printable(tensor_name) + "\" has the dtype " +
                  printable(dtype) + ", which tensors of this LibTorch cannot have")
            .cure("In Python, convert it before saving, for example with tensor.float()"));
  return *type;
}

/// Bools are bytes 0 and 1; with any other in it, a tensor would break the compiler's assumptions.
///
/// @throws WeightsError  if there is another one
inline void require_bools(const ByteSource& source, const void* bytes, std::size_t count) {
  const auto* begin = static_cast<const unsigned char*>(bytes);
  if (std::any_of(begin, begin + count, [](unsigned char byte) { return byte > 1; }))
    source.damaged("one of its tensors of bools has a byte that is neither 0 nor 1");
}

}  // namespace detail

}  // namespace remat

namespace remat {

namespace detail {

using NamedTensor = std::pair<std::string, at::Tensor>;

/// Appends the module's parameters, its buffers, and then what its children have.
inline void append_tensors(const torch::nn::Module& module, const std::string& prefix,
                           std::vector<NamedTensor>& tensors) {
  for (const auto& own : module.named_parameters(/*recurse=*/false))
    tensors.emplace_back(prefix + own.key(), own.value());
  for (const auto& own : module.named_buffers(/*recurse=*/false))
    tensors.emplace_back(prefix + own.key(), own.value());
  for (const auto& child : module.named_children())
    append_tensors(*child.value(), prefix + child.key() + ".", tensors);
}

/// Returns parameters and buffers in the order of Python's `state_dict()`; a module that is
/// registered twice comes twice, as there.
inline std::vector<NamedTensor> module_tensors(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  append_tensors(module, "", tensors);
  return tensors;
}

}  // namespace detail

/// Returns the module's parameters and buffers under Python's names, in the order of Python's
/// `state_dict()`: views of the module's own numbers, without gradients.
inline StateDict state_dict(const torch::nn::Module& module) {
  StateDict result;
  for (auto& [name, tensor] : detail::module_tensors(module)) result.add(name, tensor.detach());
  return result;
}

/// As for a module; takes a holder.
template <class Impl>
StateDict state_dict(const torch::nn::ModuleHolder<Impl>& module) {
  return state_dict(static_cast<const torch::nn::Module&>(*module.ptr()));
}

}  // namespace remat

namespace remat {

/// Says what may differ between a file and the module it is loaded into.
struct LoadOptions {
  /// Whether each key must be in both. Without it, keys of one side only are left alone; another
  /// shape is an error all the same.
  bool is_strict = true;
  /// Keys that are left alone on both sides: "fc" stands for fc and for all that begins with "fc.".
  std::vector<std::string> skip = {};
  /// Asked for each key whose shapes differ; what it returns is loaded. An undefined tensor, or one
  /// of another shape than the given one, means that they do not fit.
  std::function<at::Tensor(const std::string& key, const at::Tensor& stored, at::IntArrayRef shape)>
      fit = {};
};

namespace detail {

/// A tensor of the module and what goes into it: an entry of the file, or numbers that are here.
struct Planned {
  at::Tensor target;
  std::optional<std::size_t> entry;
  at::Tensor source;
  bool is_counter = false;
};

/// Compares what a file announces with what a module has, and plans what goes where. Changes
/// nothing.
class LoadComparison {
 public:
  /// @throws WeightsError  with all problems at once
  LoadComparison(const torch::nn::Module& module, StateDictReader& reader,
                 const LoadOptions& options)
      : reader_(reader), options_(options), targets_(module_tensors(module)) {
    remove_common_prefix();
    compare();
    tolerate_counters();
    tolerate_shared();
    refuse_problems();
  }

  const LoadReport& report() const { return report_; }
  std::vector<Planned>& plan() { return plan_; }

 private:
  static constexpr std::string_view kParallelPrefix = "module.";
  static constexpr std::string_view kCounter = "num_batches_tracked";

  /// DataParallel wraps the module in another one, whose only child is called "module". A module
  /// that has such a child itself keeps its names.
  void remove_common_prefix() {
    const auto begins = [](const auto& name) { return name.starts_with(kParallelPrefix); };
    const auto& entries = reader_.entries();
    const bool is_common = !entries.empty() &&
                           std::all_of(entries.begin(), entries.end(),
                                       [&](const auto& e) { return begins(e.name); }) &&
                           std::none_of(targets_.begin(), targets_.end(),
                                        [&](const auto& t) { return begins(t.first); });
    if (is_common) report_.removed_prefix = kParallelPrefix;
    for (const TensorEntry& entry : entries)
      names_.push_back(entry.name.substr(report_.removed_prefix.size()));
  }

  bool is_skipped(std::string_view key) const {
    return std::any_of(options_.skip.begin(), options_.skip.end(), [&](const std::string& prefix) {
      return key.starts_with(prefix) && !prefix.empty() &&
             (key.size() == prefix.size() || prefix.back() == '.' || key[prefix.size()] == '.');
    });
  }

  void compare() {
    std::unordered_map<std::string_view, std::size_t> stored;
    for (std::size_t i = 0; i < names_.size(); ++i) stored.emplace(names_[i], i);
    std::unordered_set<std::string_view> known;
    for (const auto& [key, target] : targets_) {
      known.insert(key);
      const auto found = stored.find(key);
      if (is_skipped(key))
        report_.skipped.push_back(key);
      else if (found == stored.end())
        report_.missing.push_back(key);
      else
        compare_one(key, target, found->second);
    }
    for (const std::string& name : names_) {
      if (known.contains(name)) continue;
      (is_skipped(name) ? report_.skipped : report_.unexpected).push_back(name);
    }
  }

  void compare_one(const std::string& key, const at::Tensor& target, std::size_t index) {
    const TensorEntry& entry = reader_.entries()[index];
    const bool is_complex = at::isComplexType(entry.dtype);
    const bool fits_kind = !is_complex || at::isComplexType(target.scalar_type());
    // Before PyTorch 0.4 there were no tensors without dimensions.
    const bool is_old_scalar = target.dim() == 0 && entry.shape == std::vector<std::int64_t>{1};
    if (fits_kind && (target.sizes() == entry.shape || is_old_scalar)) {
      report_.matched.push_back(key);
      plan_.push_back({target, index, {}, is_counter(key)});
      return;
    }
    at::Tensor fitted;
    if (fits_kind && options_.fit) fitted = options_.fit(key, reader_.read(index), target.sizes());
    if (fitted.defined() && fitted.sizes() == target.sizes()) {
      report_.fitted.push_back(key);
      plan_.push_back({target, std::nullopt, fitted, is_counter(key)});
    } else {
      report_.mismatched.push_back(
          {key, entry.shape, target.sizes().vec(), entry.dtype, target.scalar_type()});
    }
  }

  static bool is_counter(std::string_view key) {
    return key == kCounter || key.ends_with("." + std::string(kCounter));
  }

  /// Batch normalisation counts since PyTorch 0.4.1: older files have no counters, and modules
  /// that count nothing need none.
  void tolerate_counters() {
    std::erase_if(report_.unexpected, [&](const std::string& key) {
      if (is_counter(key)) report_.tolerated.push_back(key);
      return is_counter(key);
    });
    for (const auto& [key, target] : targets_)
      if (is_counter(key) && std::erase(report_.missing, key) != 0) {
        report_.tolerated.push_back(key);
        plan_.push_back({target, std::nullopt, target.detach().clone().zero_(), true});
      }
  }

  /// A tensor with two names may be in a file under one of them: safetensors drops the other.
  void tolerate_shared() {
    std::unordered_set<const c10::TensorImpl*> loaded;
    for (const Planned& planned : plan_) loaded.insert(planned.target.unsafeGetTensorImpl());
    for (const auto& [key, target] : targets_)
      if (loaded.contains(target.unsafeGetTensorImpl()) && std::erase(report_.missing, key) != 0)
        report_.tolerated.push_back(key);
  }

  void refuse_problems() const {
    const auto is_wanted = [&](const NamedTensor& t) {
      return !is_counter(t.first) && !is_skipped(t.first);
    };
    const auto is_loaded = [&](const Planned& planned) { return !planned.is_counter; };
    const auto wanted = std::count_if(targets_.begin(), targets_.end(), is_wanted);
    const bool is_any_loaded = std::any_of(plan_.begin(), plan_.end(), is_loaded);
    if (wanted != 0 && !is_any_loaded && report_.mismatched.empty())
      refuse_all(static_cast<std::size_t>(wanted));
    const bool has_one_sided = !report_.missing.empty() || !report_.unexpected.empty();
    if (!report_.mismatched.empty() || (options_.is_strict && has_one_sided)) refuse_some();
  }

  [[noreturn]] void refuse_all(std::size_t wanted) const {
    std::ostringstream what;
    what << "0 of " << wanted << " keys of the module are among the " << names_.size()
         << " of the file";
    print_keys(what, report_.missing, "keys of the module");
    print_keys(what, report_.unexpected, "keys of the file");
    throw WeightsError(ErrorMessage("remat.weights.none")
                           .where(quoted_source())
                           .what(what.str())
                           .cause("it belongs to another network, or its names have another prefix")
                           .cure("Build the module that the file belongs to, or give its tensors "
                                 "the module's names in a remat::StateDict"));
  }

  [[noreturn]] void refuse_some() const {
    std::ostringstream what;
    what << report_.loaded_count() << " of " << targets_.size() << " keys match";
    print_problems(what, report_);
    what << "; nothing was changed";
    throw WeightsError(
        ErrorMessage("remat.weights.keys")
            .where(quoted_source())
            .what(what.str())
            .cause(likeness())
            .cure(
                "Build the module that the file belongs to; LoadOptions has is_strict = false for "
                "keys of one side only, skip for keys to leave alone, fit for other shapes"));
  }

  /// Says which unexpected names are spelled like missing ones.
  std::string likeness() const {
    constexpr std::size_t kAsked = 3, kCandidates = 300, kLongest = 200;
    std::vector<std::string> candidates;
    for (const std::string& name : report_.unexpected)
      if (name.size() <= kLongest && candidates.size() < kCandidates) candidates.push_back(name);
    std::string text;
    if (candidates.empty()) return text;
    for (std::size_t i = 0; i < std::min(kAsked, report_.missing.size()); ++i) {
      const std::string nearest = nearest_names(report_.missing[i], candidates, 1).front();
      text += (i == 0 ? "most like \"" : ", most like \"") + printable(report_.missing[i]) +
              "\" is \"" + printable(nearest) + "\"";
    }
    return text;
  }

  std::string quoted_source() const { return "\"" + reader_.source_name() + "\""; }

  StateDictReader& reader_;
  const LoadOptions& options_;
  std::vector<NamedTensor> targets_;
  std::vector<std::string> names_;
  std::vector<Planned> plan_;
  LoadReport report_;
};

}  // namespace detail

}  // namespace remat

#include <cctype>

namespace remat::detail {

/// A kind of file that is found under the name of a weight file, and is none that can be read.
struct ForeignKind {
  std::string_view begins_with;  ///< at `offset`, in lower case
  std::size_t offset;
  std::string_view what;
  std::string_view cure;
};

inline constexpr std::string_view kSaveAgain =
    "In Python, load it and write torch.save(model.state_dict(), path)";
inline constexpr std::string_view kFetchAgain =
    "Open the address in a browser to see what it answers, and fetch the file itself";
inline constexpr std::string_view kUnpack = "Unpack it first";

inline constexpr std::array kForeignKinds{
    ForeignKind{"version https://git-lfs", 0, "a pointer of Git LFS, not the file it stands for",
                "Run git lfs pull where the file came from"},
    ForeignKind{"<!doctype html", 0, "a web page", kFetchAgain},
    ForeignKind{"<html", 0, "a web page", kFetchAgain},
    ForeignKind{"<?xml", 0, "an XML document, perhaps a server's message", kFetchAgain},
    ForeignKind{"ustar", 257, "a tar archive: unpack it, or, if torch.save wrote it before 2017,",
                kSaveAgain},
    ForeignKind{"\x1f\x8b", 0, "compressed by gzip", kUnpack},
    ForeignKind{"bzh", 0, "compressed by bzip2", kUnpack},
    ForeignKind{"\xfd"
                "7zxz",
                0, "compressed by xz", kUnpack},
    ForeignKind{"7z\xbc\xaf", 0, "compressed by 7-zip", kUnpack},
    ForeignKind{"\x89hdf", 0, "an HDF5 file, as Keras writes it", kSaveAgain},
    ForeignKind{"\x93numpy", 0, "a NumPy array", kSaveAgain},
    ForeignKind{"gguf", 0, "a GGUF file", kSaveAgain},
};

/// Reports that a file is of a kind that is not read, and what to do about it.
[[noreturn]] inline void throw_kind(const ByteSource& source, std::string_view what,
                                    std::string_view cure) {
  throw WeightsError(ErrorMessage("remat.weights.kind")
                         .where("\"" + source.name() + "\"")
                         .what("it is " + std::string(what) +
                               ", and a state dict was expected, written by Python's torch.save or "
                               "as safetensors")
                         .cure(cure));
}

/// Returns the first bytes of a file, by which kinds are told apart.
inline std::string head_of(const ByteSource& source) {
  std::string head(static_cast<std::size_t>(std::min<std::uint64_t>(source.size(), 512)), '\0');
  source.read(0, head.data(), head.size());
  return head;
}

/// Names the kind of a file that no reader recognised.
[[noreturn]] inline void throw_foreign(const ByteSource& source, std::string_view head) {
  if (head.empty()) throw_kind(source, "empty", "Fetch it again");
  std::string lower(head);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  });
  const std::size_t text_begin = std::min(lower.find_first_not_of(" \t\r\n"), lower.size());
  for (const ForeignKind& kind : kForeignKinds) {
    const bool begins = lower.compare(std::min(kind.offset, lower.size()), kind.begins_with.size(),
                                      kind.begins_with) == 0;
    const bool begins_as_text =
        kind.offset == 0 &&
        lower.compare(text_begin, kind.begins_with.size(), kind.begins_with) == 0;
    if (begins || begins_as_text) throw_kind(source, kind.what, kind.cure);
  }
  if (head[0] == '\x80') throw_kind(source, "a pickle that pickle.dump wrote", kSaveAgain);
  throw_kind(source, "of an unknown kind, and begins with \"" + printable(head, 16) + "\"",
             kSaveAgain);
}

}  // namespace remat::detail

namespace remat::detail {

/// Reads a source from front to back through a small buffer.
class ByteCursor {
 public:
  explicit ByteCursor(const ByteSource& source, std::uint64_t position = 0)
      : source_(source), position_(std::min(position, source.size())) {}

  const ByteSource& source() const { return source_; }
  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return source_.size() - position_; }

  void skip(std::uint64_t count) {
    require_more(count);
    position_ += count;
  }

  /// Reads an unsigned number of `ByteCount` bytes, least significant byte first.
  template <std::size_t ByteCount>
    requires(ByteCount >= 1 && ByteCount <= 8)
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < ByteCount; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(next())} << (8 * i);
    return value;
  }

  /// Appends `count` bytes to `text`.
  void append_to(std::string& text, std::uint64_t count) {
    require_more(count);  // before memory is asked for: a count may be anything
    const std::size_t begin = text.size();
    text.resize(begin + static_cast<std::size_t>(count));
    source_.read(position_, text.data() + begin, static_cast<std::size_t>(count));
    position_ += count;
  }

  char next() {
    if (position_ < buffer_begin_ || position_ >= buffer_begin_ + buffer_.size()) fill();
    return buffer_[static_cast<std::size_t>(position_++ - buffer_begin_)];
  }

 private:
  static constexpr std::uint64_t kBufferBytes = 1 << 16;

  void require_more(std::uint64_t count) const {
    if (count > remaining())
      source_.damaged("it ends at byte " + std::to_string(source_.size()) + ", where " +
                      std::to_string(count) + " bytes from " + std::to_string(position_) +
                      " on are announced");
  }

  void fill() {
    require_more(1);
    buffer_.resize(static_cast<std::size_t>(std::min(remaining(), kBufferBytes)));
    source_.read(position_, buffer_.data(), buffer_.size());
    buffer_begin_ = position_;
  }

  const ByteSource& source_;
  std::uint64_t position_;
  std::uint64_t buffer_begin_ = 0;
  std::string buffer_;
};

}  // namespace remat::detail

namespace remat::detail {

/// What Python and the file formats call one kind of number.
struct ElementType {
  std::string_view dtype;          ///< Python's name without `torch.`
  std::string_view storage_class;  ///< torch.save's name, or empty: then the dtype is written out
  std::string_view safetensors;    ///< safetensors' name, or empty
  std::uint64_t byte_count;        ///< of one element
};

/// @par Source  torch/storage.py (`_dtype_to_storage_type_map`), torch/_utils.py
/// (`_rebuild_tensor_v3`), safetensors/src/tensor.rs (`Dtype`)
inline constexpr std::array kElementTypes{
    ElementType{"float32", "FloatStorage", "F32", 4},
    ElementType{"float64", "DoubleStorage", "F64", 8},
    ElementType{"float16", "HalfStorage", "F16", 2},
    ElementType{"bfloat16", "BFloat16Storage", "BF16", 2},
    ElementType{"int64", "LongStorage", "I64", 8},
    ElementType{"int32", "IntStorage", "I32", 4},
    ElementType{"int16", "ShortStorage", "I16", 2},
    ElementType{"int8", "CharStorage", "I8", 1},
    ElementType{"uint8", "ByteStorage", "U8", 1},
    ElementType{"bool", "BoolStorage", "BOOL", 1},
    ElementType{"complex64", "ComplexFloatStorage", "C64", 8},
    ElementType{"complex128", "ComplexDoubleStorage", "", 16},
    ElementType{"complex32", "", "", 4},
    ElementType{"uint16", "", "U16", 2},
    ElementType{"uint32", "", "U32", 4},
    ElementType{"uint64", "", "U64", 8},
    ElementType{"float8_e4m3fn", "", "F8_E4M3", 1},
    ElementType{"float8_e5m2", "", "F8_E5M2", 1},
    ElementType{"float8_e4m3fnuz", "", "F8_E4M3FNUZ", 1},
    ElementType{"float8_e5m2fnuz", "", "F8_E5M2FNUZ", 1},
    ElementType{"float8_e8m0fnu", "", "F8_E8M0", 1},
    ElementType{"qint8", "QInt8Storage", "", 1},
    ElementType{"quint8", "QUInt8Storage", "", 1},
    ElementType{"qint32", "QInt32Storage", "", 4},
    ElementType{"quint4x2", "QUInt4x2Storage", "", 1},
    ElementType{"quint2x4", "QUInt2x4Storage", "", 1},
};

/// Returns the row whose `column` is `name`, or null.
constexpr const ElementType* find_element_type(std::string_view ElementType::* column,
                                               std::string_view name) {
  if (name.empty()) return nullptr;
  for (const ElementType& type : kElementTypes)
    if (type.*column == name) return &type;
  return nullptr;
}

}  // namespace remat::detail

namespace remat::detail {

/// What a name in a pickle stands for. Python would import and call it; here it only says how its
/// arguments are to be read.
enum class PickleRole : std::uint8_t {
  kDictionary,     ///< makes a dictionary, empty or from a list of pairs
  kTensor,         ///< makes a tensor from a storage, an offset, sizes and strides
  kFirstArgument,  ///< wraps its first argument: a parameter, a tuple, a typed list
  kTypedTensor,    ///< calls its first argument with its third: a tensor of a subclass
  kStorage,        ///< the class of a storage
  kDtype,          ///< a dtype; it is never called
  kIgnored,        ///< makes something that holds no weights
};

struct PickleGlobal {
  std::string_view module;
  std::string_view name;
  PickleRole role;
};

/// All names that a pickle may contain, beside the storage classes and dtypes of `kElementTypes`.
///
/// @par Source  torch/_utils.py, torch/_tensor.py, torch/storage.py; Python's and NumPy's
/// `__reduce__` for the data that training scripts keep beside the weights
inline constexpr std::array kPickleGlobals{
    PickleGlobal{"collections", "OrderedDict", PickleRole::kDictionary},
    PickleGlobal{"collections", "defaultdict", PickleRole::kIgnored},
    PickleGlobal{"collections", "Counter", PickleRole::kIgnored},
    PickleGlobal{"torch._utils", "_rebuild_tensor", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_tensor_v2", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_tensor_v3", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_parameter", PickleRole::kFirstArgument},
    PickleGlobal{"torch._utils", "_rebuild_parameter_with_state", PickleRole::kFirstArgument},
    PickleGlobal{"torch.nn.parameter", "Parameter", PickleRole::kFirstArgument},
    PickleGlobal{"torch.nn.parameter", "Buffer", PickleRole::kFirstArgument},
    PickleGlobal{"torch._tensor", "_rebuild_from_type_v2", PickleRole::kTypedTensor},
    PickleGlobal{"torch", "Tensor", PickleRole::kIgnored},
    PickleGlobal{"torch", "Size", PickleRole::kFirstArgument},
    PickleGlobal{"torch", "device", PickleRole::kIgnored},
    PickleGlobal{"torch.storage", "UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch.storage", "_UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch", "UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch.jit._pickle", "restore_type_tag", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_intlist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_doublelist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_boollist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_tensorlist", PickleRole::kFirstArgument},
    PickleGlobal{"builtins", "set", PickleRole::kIgnored},
    PickleGlobal{"builtins", "frozenset", PickleRole::kIgnored},
    PickleGlobal{"builtins", "complex", PickleRole::kIgnored},
    PickleGlobal{"builtins", "slice", PickleRole::kIgnored},
    PickleGlobal{"builtins", "range", PickleRole::kIgnored},
    PickleGlobal{"builtins", "bytearray", PickleRole::kIgnored},
    PickleGlobal{"builtins", "object", PickleRole::kIgnored},
    PickleGlobal{"builtins", "int", PickleRole::kIgnored},
    PickleGlobal{"builtins", "float", PickleRole::kIgnored},
    PickleGlobal{"builtins", "list", PickleRole::kIgnored},
    PickleGlobal{"builtins", "dict", PickleRole::kIgnored},
    PickleGlobal{"copyreg", "_reconstructor", PickleRole::kIgnored},
    PickleGlobal{"_codecs", "encode", PickleRole::kIgnored},
    PickleGlobal{"argparse", "Namespace", PickleRole::kIgnored},
    PickleGlobal{"types", "SimpleNamespace", PickleRole::kIgnored},
    PickleGlobal{"pathlib", "PosixPath", PickleRole::kIgnored},
    PickleGlobal{"pathlib", "WindowsPath", PickleRole::kIgnored},
    PickleGlobal{"datetime", "datetime", PickleRole::kIgnored},
    PickleGlobal{"datetime", "date", PickleRole::kIgnored},
    PickleGlobal{"datetime", "timedelta", PickleRole::kIgnored},
    PickleGlobal{"numpy", "dtype", PickleRole::kIgnored},
    PickleGlobal{"numpy", "ndarray", PickleRole::kIgnored},
    PickleGlobal{"numpy.core.multiarray", "scalar", PickleRole::kIgnored},
    PickleGlobal{"numpy.core.multiarray", "_reconstruct", PickleRole::kIgnored},
    PickleGlobal{"numpy._core.multiarray", "scalar", PickleRole::kIgnored},
    PickleGlobal{"numpy._core.multiarray", "_reconstruct", PickleRole::kIgnored},
};

/// Returns what the name stands for; nothing if it is not in the table.
constexpr std::optional<PickleRole> find_role(std::string_view module, std::string_view name) {
  // Python 2's names of two modules.
  if (module == "__builtin__") module = "builtins";
  if (module == "copy_reg") module = "copyreg";
  for (const PickleGlobal& global : kPickleGlobals)
    if (global.module == module && global.name == name) return global.role;
  const bool is_torch = module == "torch" || module == "torch.cuda";
  if (is_torch && find_element_type(&ElementType::storage_class, name)) return PickleRole::kStorage;
  if (module == "torch" && find_element_type(&ElementType::dtype, name)) return PickleRole::kDtype;
  return std::nullopt;
}

/// Reports a name that is not in the table: nothing that a file names is ever imported or run.
[[noreturn]] inline void throw_unknown_global(const ByteSource& source, std::string_view module,
                                              std::string_view name) {
  ErrorMessage message("remat.weights.global");
  message.where("\"" + source.name() + "\"")
      .what("it holds an object of Python's " + printable(module) + "." + printable(name) +
            ", and only tensors in dictionaries, numbers and texts are read");
  if (name == "_load_from_bytes")
    message.cause("it was written by pickle, not by torch.save");
  else if (name == "_rebuild_qtensor" || name.find("sparse") != std::string_view::npos)
    message.cause("quantized and sparse tensors are not read");
  else
    message.cause(
        "it was saved as a whole module, or with other Python objects beside the weights");
  throw WeightsError(
      message.cure("In Python, load it and write torch.save(model.state_dict(), path)"));
}

}  // namespace remat::detail

namespace remat::detail {

using PickleId = std::uint32_t;

enum class PickleKind : std::uint8_t {
  kNone,
  kBool,
  kInteger,
  kBigInteger,  ///< more than 64 bits: its bytes are the text
  kReal,        ///< no state dict needs the value of one
  kText,
  kSequence,    ///< a list, tuple or set
  kDictionary,  ///< the items are key, value, key, value, ...
  kGlobal,      ///< a name from the table
  kStorage,     ///< a reference to bytes elsewhere in the file; the items say which
  kTensor,      ///< the items are the arguments of its making
  kOpaque,      ///< something without weights
};

/// The values of a pickle, in one list; they refer to each other by index.
///
/// A hostile pickle may make a value contain itself. So nothing here owns anything else, and nobody
/// may walk the values without a limit of depth.
class PickleValues {
 public:
  explicit PickleValues(const ByteSource& source) : source_(source) {}

  PickleKind kind(PickleId id) const { return values_[id].kind; }
  bool is(PickleId id, PickleKind kind) const { return values_[id].kind == kind; }
  /// The number of an integer or bool.
  std::int64_t number(PickleId id) const { return values_[id].number; }
  /// The role of a global.
  PickleRole role(PickleId id) const { return static_cast<PickleRole>(values_[id].number); }
  /// The text of a text, the bytes of a big integer, the name of a global; valid until a value is
  /// added.
  std::string_view text(PickleId id) const {
    const Slice& slice = slices_[values_[id].index];
    return std::string_view(letters_).substr(slice.begin, slice.size);
  }
  /// The items of a sequence, dictionary, storage or tensor; valid until a value is added.
  std::span<const PickleId> items(PickleId id) const { return lists_[values_[id].index]; }
  PickleId size() const { return static_cast<PickleId>(values_.size()); }
  const ByteSource& source() const { return source_; }

  PickleId add(PickleKind kind, std::int64_t number = 0) {
    charge(1);
    values_.push_back({kind, 0, number});
    return size() - 1;
  }

  /// Adds a value whose text is what has been appended to `letters()` since it had `begin` letters.
  PickleId add_text(PickleKind kind, std::size_t begin, std::int64_t number = 0) {
    const PickleId id = add(kind, number);
    values_[id].index = static_cast<std::uint32_t>(slices_.size());
    slices_.push_back({begin, letters_.size() - begin});
    return id;
  }
  std::string& letters() { return letters_; }

  PickleId add_list(PickleKind kind, std::vector<PickleId> items = {}) {
    charge(items.size());
    const PickleId id = add(kind);
    values_[id].index = static_cast<std::uint32_t>(lists_.size());
    lists_.push_back(std::move(items));
    return id;
  }

  void append(PickleId list, std::span<const PickleId> items) {
    charge(items.size());
    auto& to = lists_[values_[list].index];
    to.insert(to.end(), items.begin(), items.end());
  }

 private:
  struct Value {
    PickleKind kind;
    std::uint32_t index;
    std::int64_t number;
  };
  struct Slice {
    std::size_t begin, size;
  };

  // Far above any state dict (10,000 tensors need 400,000), far below what fills a memory.
  static constexpr std::size_t kMostValues = std::size_t{1} << 23;

  void charge(std::size_t count) {
    charged_ += count;
    if (charged_ > kMostValues)
      source_.damaged("its pickle has more than " + std::to_string(kMostValues) + " values");
  }

  const ByteSource& source_;
  std::vector<Value> values_;
  std::vector<std::vector<PickleId>> lists_;
  std::vector<Slice> slices_;
  std::string letters_;
  std::size_t charged_ = 0;
};

}  // namespace remat::detail

namespace remat::detail {

/// Reports that the opcodes of a pickle make no sense.
[[noreturn]] inline void refuse_pickle(const ByteCursor& cursor, std::string_view what) {
  cursor.source().damaged("before byte " + std::to_string(cursor.position()) + " its pickle " +
                          std::string(what));
}

/// The stack on which a pickle puts its values together, with marks where groups begin.
class PickleStack {
 public:
  /// @param cursor  where the pickle is read, for messages
  explicit PickleStack(const ByteCursor& cursor) : cursor_(cursor) {}

  void push(PickleId id) { values_.push_back(id); }

  PickleId top() const {
    if (values_.size() <= floor()) refuse_pickle(cursor_, "takes a value where there is none");
    return values_.back();
  }

  PickleId pop() {
    const PickleId id = top();
    values_.pop_back();
    return id;
  }

  void mark() {
    if (marks_.size() == kMostNested) refuse_pickle(cursor_, "is nested too deeply");
    marks_.push_back(values_.size());
  }

  std::vector<PickleId> take(std::size_t count) {
    if (values_.size() < floor() + count)
      refuse_pickle(cursor_, "takes more values than there are");
    return take_from(values_.size() - count);
  }

  std::vector<PickleId> take_to_mark() {
    if (marks_.empty()) refuse_pickle(cursor_, "ends a group that it never began");
    const std::size_t begin = floor();
    marks_.pop_back();
    return take_from(begin);
  }

 private:
  static constexpr std::size_t kMostNested = 1000;

  /// Values below the last mark belong to the group around it.
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }

  std::vector<PickleId> take_from(std::size_t begin) {
    const auto first = values_.begin() + static_cast<std::ptrdiff_t>(begin);
    std::vector<PickleId> taken(first, values_.end());
    values_.erase(first, values_.end());
    return taken;
  }

  const ByteCursor& cursor_;
  std::vector<PickleId> values_;
  std::vector<std::size_t> marks_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Reads one pickle into values: protocol 2, as torch.save writes it, and what later protocols add
/// for data. Nothing is imported, called or constructed.
///
/// @par Source  Python's Lib/pickletools.py, which describes each opcode
class Pickle {
 public:
  /// Reads from the cursor's position to the end of the pickle.
  ///
  /// @return  the value of the whole pickle
  /// @throws WeightsError  if the bytes are no pickle, or use what is not in the table of names
  static PickleId read(ByteCursor& cursor, PickleValues& values) {
    return Pickle(cursor, values).run();
  }

 private:
  static constexpr std::size_t kLongestName = 300;

  Pickle(ByteCursor& cursor, PickleValues& values)
      : cursor_(cursor), values_(values), stack_(cursor) {}

  PickleId run() {
    for (;;) {
      const auto opcode = static_cast<unsigned char>(cursor_.next());
      if (opcode == '.') return stack_.pop();
      if (push_number(opcode) || push_text(opcode) || arrange(opcode) || build_sequence(opcode) ||
          build_dictionary(opcode) || remember(opcode) || apply(opcode))
        continue;
      refuse("has the opcode " + std::to_string(opcode) + ", which torch.save does not write");
    }
  }

  bool push_number(unsigned char opcode) {
    switch (opcode) {
      case 'N':
        stack_.push(values_.add(PickleKind::kNone));
        return true;
      case 0x88:
        stack_.push(values_.add(PickleKind::kBool, 1));
        return true;
      case 0x89:
        stack_.push(values_.add(PickleKind::kBool, 0));
        return true;
      case 'K':
        push_integer(static_cast<std::int64_t>(cursor_.number<1>()));
        return true;
      case 'M':
        push_integer(static_cast<std::int64_t>(cursor_.number<2>()));
        return true;
      case 'J':
        push_integer(static_cast<std::int32_t>(cursor_.number<4>()));
        return true;
      case 0x8a:
        push_long(cursor_.number<1>());
        return true;
      case 0x8b:
        push_long(cursor_.number<4>());
        return true;
      case 'G':
        cursor_.skip(8);
        stack_.push(values_.add(PickleKind::kReal));
        return true;
      default:
        return false;
    }
  }

  bool push_text(unsigned char opcode) {
    switch (opcode) {
      case 'U':
      case 'C':
      case 0x8c:
        push_text_of(cursor_.number<1>());
        return true;
      case 'T':
      case 'X':
      case 'B':
        push_text_of(cursor_.number<4>());
        return true;
      case 0x8d:
      case 0x8e:
      case 0x96:
        push_text_of(cursor_.number<8>());
        return true;
      default:
        return false;
    }
  }

  bool arrange(unsigned char opcode) {
    switch (opcode) {
      case 0x80:
        if (const auto protocol = cursor_.number<1>(); protocol < 2 || protocol > 5)
          refuse("has protocol " + std::to_string(protocol) + ", 2 to 5 were expected");
        return true;
      case 0x95:
        cursor_.number<8>();
        return true;  // a frame: only says how much to buffer
      case '(':
        stack_.mark();
        return true;
      case '0':
        stack_.pop();
        return true;
      case '1':
        stack_.take_to_mark();
        return true;
      case '2':
        stack_.push(stack_.top());
        return true;
      default:
        return false;
    }
  }

  bool build_sequence(unsigned char opcode) {
    constexpr auto kSequence = PickleKind::kSequence;
    switch (opcode) {
      case ')':
      case ']':
      case 0x8f:
        stack_.push(values_.add_list(kSequence));
        return true;
      case 't':
      case 'l':
      case 0x91:
        stack_.push(values_.add_list(kSequence, stack_.take_to_mark()));
        return true;
      case 0x85:
        stack_.push(values_.add_list(kSequence, stack_.take(1)));
        return true;
      case 0x86:
        stack_.push(values_.add_list(kSequence, stack_.take(2)));
        return true;
      case 0x87:
        stack_.push(values_.add_list(kSequence, stack_.take(3)));
        return true;
      case 'a':
        extend(kSequence, stack_.take(1));
        return true;
      case 'e':
      case 0x90:
        extend(kSequence, stack_.take_to_mark());
        return true;
      default:
        return false;
    }
  }

  bool build_dictionary(unsigned char opcode) {
    constexpr auto kDictionary = PickleKind::kDictionary;
    switch (opcode) {
      case '}':
        stack_.push(values_.add_list(kDictionary));
        return true;
      case 'd':
        stack_.push(values_.add_list(kDictionary, in_pairs(stack_.take_to_mark())));
        return true;
      case 's':
        extend(kDictionary, stack_.take(2));
        return true;
      case 'u':
        extend(kDictionary, in_pairs(stack_.take_to_mark()));
        return true;
      default:
        return false;
    }
  }

  bool remember(unsigned char opcode) {
    switch (opcode) {
      case 'q':
        memo_[cursor_.number<1>()] = stack_.top();
        return true;
      case 'r':
        memo_[cursor_.number<4>()] = stack_.top();
        return true;
      case 0x94:
        memo_[memo_.size()] = stack_.top();
        return true;
      case 'h':
        recall(cursor_.number<1>());
        return true;
      case 'j':
        recall(cursor_.number<4>());
        return true;
      default:
        return false;
    }
  }

  bool apply(unsigned char opcode) {
    switch (opcode) {
      case 'c': {
        const std::string module = line();
        push_global(module, line());
        return true;
      }
      case 0x93: {
        const std::string name = text_of(stack_.pop());
        push_global(text_of(stack_.pop()), name);
        return true;
      }
      case 'Q':
        push_storage(stack_.pop());
        return true;
      case 'R':
      case 0x81:
        call(stack_.take(2));
        return true;
      case 0x92:
        call(stack_.take(3));
        return true;
      // Attributes: a dictionary's `_metadata`, a tensor's own. None of them is a weight.
      case 'b':
        stack_.pop();
        stack_.top();
        return true;
      default:
        return false;
    }
  }

  void push_integer(std::int64_t number) { stack_.push(values_.add(PickleKind::kInteger, number)); }

  void push_long(std::uint64_t byte_count) {
    const std::size_t begin = values_.letters().size();
    cursor_.append_to(values_.letters(), byte_count);
    if (byte_count > 8) return stack_.push(values_.add_text(PickleKind::kBigInteger, begin));
    // Two's complement, least significant byte first, as short as it can be.
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < byte_count; ++i)
      bits |= std::uint64_t{static_cast<unsigned char>(values_.letters()[begin + i])} << (8 * i);
    const bool is_negative = byte_count != 0 && (bits >> (8 * byte_count - 1) & 1) != 0;
    if (is_negative && byte_count < 8) bits |= ~std::uint64_t{0} << (8 * byte_count);
    values_.letters().resize(begin);
    push_integer(static_cast<std::int64_t>(bits));
  }

  void push_text_of(std::uint64_t byte_count) {
    const std::size_t begin = values_.letters().size();
    cursor_.append_to(values_.letters(), byte_count);
    stack_.push(values_.add_text(PickleKind::kText, begin));
  }

  void push_global(const std::string& module, const std::string& name) {
    const auto role = find_role(module, name);
    if (!role) throw_unknown_global(values_.source(), module, name);
    const std::size_t begin = values_.letters().size();
    values_.letters() += name;
    stack_.push(values_.add_text(PickleKind::kGlobal, begin, static_cast<std::int64_t>(*role)));
  }

  void push_storage(PickleId reference) {
    const bool is_storage = values_.is(reference, PickleKind::kSequence) &&
                            values_.items(reference).size() >= 5 &&
                            is_text(values_.items(reference)[0], "storage");
    if (!is_storage) refuse("refers to something outside that is no storage, perhaps a module");
    const auto items = values_.items(reference);
    stack_.push(values_.add_list(PickleKind::kStorage, {items.begin(), items.end()}));
  }

  void call(const std::vector<PickleId>& callee_and_arguments) {
    stack_.push(result_of(callee_and_arguments[0], callee_and_arguments[1], 0));
  }

  PickleId result_of(PickleId callee, PickleId arguments, int depth) {
    if (!values_.is(callee, PickleKind::kGlobal) || !values_.is(arguments, PickleKind::kSequence))
      refuse("calls something that cannot be called");
    // Copied only where the copy is counted: a hostile pickle may pass one long list many times.
    const auto items = values_.items(arguments);
    switch (values_.role(callee)) {
      case PickleRole::kDictionary:
        return items.empty() ? values_.add_list(PickleKind::kDictionary) : dictionary_of(items[0]);
      case PickleRole::kTensor:
        return values_.add_list(PickleKind::kTensor, {items.begin(), items.end()});
      case PickleRole::kFirstArgument:
        if (items.empty()) refuse("wraps nothing");
        return items[0];
      case PickleRole::kTypedTensor:
        if (items.size() < 3 || depth > 0) refuse("makes a tensor of a subclass from too little");
        return result_of(items[0], items[2], depth + 1);
      default:
        return values_.add(PickleKind::kOpaque);
    }
  }

  /// What Python 2 wrote: OrderedDict([[key, value], ...]).
  PickleId dictionary_of(PickleId pairs) {
    if (!values_.is(pairs, PickleKind::kSequence)) refuse("makes a dictionary of no list");
    const PickleId dictionary = values_.add_list(PickleKind::kDictionary);
    for (std::size_t i = 0; i < values_.items(pairs).size(); ++i) {
      const PickleId pair = values_.items(pairs)[i];
      if (!values_.is(pair, PickleKind::kSequence) || values_.items(pair).size() != 2)
        refuse("makes a dictionary of something else than pairs");
      values_.append(dictionary, values_.items(pair));
    }
    return dictionary;
  }

  void extend(PickleKind kind, const std::vector<PickleId>& items) {
    const PickleId target = stack_.top();
    if (values_.is(target, PickleKind::kOpaque)) return;
    if (!values_.is(target, kind)) refuse("adds items to something that has none");
    values_.append(target, items);
  }

  std::vector<PickleId> in_pairs(std::vector<PickleId> items) const {
    if (items.size() % 2 != 0) refuse("has a key without a value");
    return items;
  }

  void recall(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("recalls a value that it never remembered");
    stack_.push(found->second);
  }

  std::string line() {
    std::string text;
    for (char letter = cursor_.next(); letter != '\n'; letter = cursor_.next()) {
      if (text.size() == kLongestName) refuse("has a name that does not end");
      text += letter;
    }
    return text;
  }

  std::string text_of(PickleId id) const {
    if (!values_.is(id, PickleKind::kText) || values_.text(id).size() > kLongestName)
      refuse("has a name that is none");
    return std::string(values_.text(id));
  }

  bool is_text(PickleId id, std::string_view text) const {
    return values_.is(id, PickleKind::kText) && values_.text(id) == text;
  }

  [[noreturn]] void refuse(std::string_view what) const { refuse_pickle(cursor_, what); }

  ByteCursor& cursor_;
  PickleValues& values_;
  PickleStack stack_;
  std::unordered_map<std::uint64_t, PickleId> memo_;
};

}  // namespace remat::detail

namespace remat::detail {

// Numbers from files may be anything. Counts stay below 2^62, so that sums of two and signed copies
// of them cannot overflow either.
inline constexpr std::uint64_t kMostCounted = std::uint64_t{1} << 62;

/// Returns `a` times `b`, or nothing if that is no count.
constexpr std::optional<std::uint64_t> checked_product(std::uint64_t a, std::uint64_t b) {
  if (a != 0 && b > kMostCounted / a) return std::nullopt;
  return a * b;
}

/// Returns `a` plus `b`, or nothing if that is no count.
constexpr std::optional<std::uint64_t> checked_sum(std::uint64_t a, std::uint64_t b) {
  if (a > kMostCounted || b > kMostCounted - a) return std::nullopt;
  return a + b;
}

/// Returns how many elements a tensor of these sizes has; nothing if that is no count, not even
/// without its sizes of 0: LibTorch multiplies them, too, when it makes strides.
constexpr std::optional<std::uint64_t> element_count(std::span<const std::int64_t> sizes) {
  std::optional<std::uint64_t> count = 1;
  bool is_empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    count = checked_product(*count, size == 0 ? 1 : static_cast<std::uint64_t>(size));
    if (!count) return std::nullopt;
  }
  return is_empty ? 0 : count;
}

/// Returns the index after the last element that a tensor reaches in its storage; nothing if that
/// is no count. Strides are not negative.
constexpr std::optional<std::uint64_t> end_of_elements(std::uint64_t offset,
                                                       std::span<const std::int64_t> sizes,
                                                       std::span<const std::int64_t> strides) {
  std::optional<std::uint64_t> end = checked_sum(offset, 1);
  for (std::size_t i = 0; i < sizes.size() && end; ++i) {
    if (sizes[i] < 2) continue;
    const auto reach = checked_product(static_cast<std::uint64_t>(sizes[i] - 1),
                                       static_cast<std::uint64_t>(strides[i]));
    end = reach ? checked_sum(*end, *reach) : std::nullopt;
  }
  return end;
}

}  // namespace remat::detail

namespace remat::detail {

/// Bytes that one or more tensors of a pickle lie in.
struct PickledStorage {
  std::string key;
  std::uint64_t byte_count = 0;       ///< what the pickle says it has
  const ElementType* type = nullptr;  ///< null if it is only bytes
  std::uint64_t view_offset = 0;      ///< in bytes: the old form had storages that begin in others
};

/// A tensor of a pickle: which bytes, and how it lies in them. All of it has been checked: the last
/// element lies inside the storage, and no product overflows.
struct PickledTensor {
  PickledStorage storage;
  const ElementType* type = nullptr;
  std::int64_t offset = 0;  ///< in elements
  std::vector<std::int64_t> sizes, strides;
  bool is_conjugate = false;
  bool is_negative = false;

  /// Bytes of its elements, each counted once.
  std::uint64_t byte_count() const { return *element_count(sizes) * type->byte_count; }
};

/// Understands the arguments from which Python would make a tensor.
///
/// @par Source  torch/_utils.py: `_rebuild_tensor`, `_rebuild_tensor_v2`, `_rebuild_tensor_v3`
class PickledTensorReader {
 public:
  /// @param name  what the tensor is called in messages
  PickledTensorReader(const PickleValues& values, std::string_view name)
      : values_(values), name_(name) {}

  /// @throws WeightsError  if the arguments do not describe a tensor inside its storage
  PickledTensor read(PickleId id) const {
    const auto arguments = values_.items(id);
    if (arguments.size() < 4) refuse("is made from too few arguments");
    PickledTensor tensor;
    tensor.storage = read_storage(arguments[0]);
    tensor.type = tensor.storage.type;
    tensor.offset = read_integer(arguments[1]);
    tensor.sizes = read_integers(arguments[2]);
    tensor.strides = read_integers(arguments[3]);
    // Beyond requires_grad and hooks: the dtype of the third form, and marks of the second.
    for (const PickleId extra : arguments.subspan(std::min<std::size_t>(arguments.size(), 6))) {
      if (is_dtype(extra))
        tensor.type = find_element_type(&ElementType::dtype, values_.text(extra));
      if (values_.is(extra, PickleKind::kDictionary)) read_marks(extra, tensor);
    }
    if (tensor.type == nullptr) refuse("has no dtype");
    check_layout(tensor);
    return tensor;
  }

  PickledStorage read_storage(PickleId id) const {
    if (!values_.is(id, PickleKind::kStorage)) refuse("has no storage");
    const auto items = values_.items(id);  // "storage", class, key, device, element count, view
    const bool is_known = values_.is(items[1], PickleKind::kGlobal) &&
                          values_.role(items[1]) == PickleRole::kStorage &&
                          values_.is(items[2], PickleKind::kText) &&
                          values_.text(items[2]).size() <= kLongestKey;
    if (!is_known) refuse("has a storage without class or key");
    PickledStorage storage;
    storage.key = values_.text(items[2]);
    storage.type = find_element_type(&ElementType::storage_class, values_.text(items[1]));
    const std::uint64_t element_bytes = storage.type == nullptr ? 1 : storage.type->byte_count;
    storage.byte_count = checked_bytes(items[4], element_bytes);
    if (items.size() > 5 && values_.is(items[5], PickleKind::kSequence))
      narrow(storage, values_.items(items[5]), element_bytes);
    return storage;
  }

 private:
  static constexpr std::size_t kMostDimensions = 64;
  static constexpr std::size_t kLongestKey = 256;

  /// A view of a storage: its own key, offset and size, in elements.
  void narrow(PickledStorage& storage, std::span<const PickleId> view,
              std::uint64_t element_bytes) const {
    if (view.size() != 3) refuse("has a storage that is an incomplete view of another");
    const std::uint64_t offset = checked_bytes(view[1], element_bytes);
    const std::uint64_t count = checked_bytes(view[2], element_bytes);
    if (offset > storage.byte_count || count > storage.byte_count - offset)
      refuse("has a storage that reaches past the one it lies in");
    storage.view_offset = offset;
    storage.byte_count = count;
  }

  void check_layout(const PickledTensor& tensor) const {
    if (tensor.sizes.size() != tensor.strides.size()) refuse("has not one stride for each size");
    const auto count = element_count(tensor.sizes);
    if (!count || !checked_product(*count, tensor.type->byte_count))
      refuse("has more elements than can be counted");
    const auto end =
        end_of_elements(static_cast<std::uint64_t>(tensor.offset), tensor.sizes, tensor.strides);
    const auto end_byte = end ? checked_product(*end, tensor.type->byte_count) : std::nullopt;
    if (!end_byte || (*count != 0 && *end_byte > tensor.storage.byte_count))
      refuse("reaches past the end of its storage of " + std::to_string(tensor.storage.byte_count) +
             " bytes");
  }

  /// `{"conj": True}` and `{"neg": True}`.
  void read_marks(PickleId dictionary, PickledTensor& tensor) const {
    const auto items = values_.items(dictionary);
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!values_.is(items[i], PickleKind::kText)) continue;
      const bool is_set =
          values_.is(items[i + 1], PickleKind::kBool) && values_.number(items[i + 1]);
      if (values_.text(items[i]) == "conj") tensor.is_conjugate = is_set;
      if (values_.text(items[i]) == "neg") tensor.is_negative = is_set;
    }
  }

  bool is_dtype(PickleId id) const {
    return values_.is(id, PickleKind::kGlobal) && values_.role(id) == PickleRole::kDtype;
  }

  std::uint64_t checked_bytes(PickleId count, std::uint64_t element_bytes) const {
    const auto bytes =
        checked_product(static_cast<std::uint64_t>(read_integer(count)), element_bytes);
    if (!bytes) refuse("has a storage of more bytes than can be counted");
    return *bytes;
  }

  std::int64_t read_integer(PickleId id) const {
    if (!values_.is(id, PickleKind::kInteger) || values_.number(id) < 0)
      refuse("has a size, stride or offset that is no count");
    return values_.number(id);
  }

  std::vector<std::int64_t> read_integers(PickleId id) const {
    if (!values_.is(id, PickleKind::kSequence) || values_.items(id).size() > kMostDimensions)
      refuse("has sizes or strides that are no short list");
    std::vector<std::int64_t> integers;
    for (const PickleId item : values_.items(id)) integers.push_back(read_integer(item));
    return integers;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    values_.source().damaged("its tensor \"" + printable(name_) + "\" " + std::string(what));
  }

  const PickleValues& values_;
  std::string_view name_;
};

}  // namespace remat::detail

namespace remat::detail {

using NamedPickledTensor = std::pair<std::string, PickledTensor>;

/// Finds the state dict among the values of a pickle and understands its tensors.
class PickledStateDict {
 public:
  /// @return  names and tensors in the file's order; everything else beside them is left out
  /// @throws WeightsError  if there is no dictionary of tensors, or one of them cannot be right
  static std::vector<NamedPickledTensor> find(const PickleValues& values, PickleId root) {
    return PickledStateDict(values).tensors_of(root);
  }

 private:
  /// Where training scripts put the weights among epochs, optimizer states and the like.
  static constexpr std::array<std::string_view, 3> kNestedUnder{"state_dict", "model",
                                                                "model_state_dict"};
  static constexpr int kDeepest = 3;
  static constexpr std::size_t kMostTensors = std::size_t{1} << 18;

  explicit PickledStateDict(const PickleValues& values) : values_(values) {}

  std::vector<NamedPickledTensor> tensors_of(PickleId root) const {
    if (!values_.is(root, PickleKind::kDictionary))
      refuse(root_kind(root) + ", a dictionary of tensors was expected");
    PickleId dictionary = root;
    for (int depth = 0; depth < kDeepest; ++depth) {
      const auto nested = nested_in(dictionary);
      if (!nested) break;
      dictionary = *nested;
    }
    auto tensors = read(dictionary);
    if (tensors.empty()) refuse("its dictionary holds no tensors, but " + keys_of(dictionary));
    return tensors;
  }

  /// A best score may be a tensor, too: so a dictionary inside goes before tensors beside it.
  std::optional<PickleId> nested_in(PickleId dictionary) const {
    const auto items = values_.items(dictionary);
    for (const std::string_view name : kNestedUnder)
      for (std::size_t i = 0; i + 1 < items.size(); i += 2)
        if (values_.is(items[i], PickleKind::kText) && values_.text(items[i]) == name &&
            values_.is(items[i + 1], PickleKind::kDictionary))
          return items[i + 1];
    return std::nullopt;
  }

  std::vector<NamedPickledTensor> read(PickleId dictionary) const {
    std::vector<NamedPickledTensor> tensors;
    // Found before they are copied: a hostile pickle may use one long name many times.
    std::unordered_set<std::string_view> names;
    const auto items = values_.items(dictionary);
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!values_.is(items[i + 1], PickleKind::kTensor)) continue;
      if (!values_.is(items[i], PickleKind::kText))
        refuse("a tensor of its dictionary has a key that is no text");
      const std::string_view name = values_.text(items[i]);
      if (!names.insert(name).second) throw_duplicate("\"" + values_.source().name() + "\"", name);
      if (names.size() > kMostTensors)
        values_.source().damaged("it has more than " + std::to_string(kMostTensors) + " tensors");
      tensors.emplace_back(name, PickledTensorReader(values_, name).read(items[i + 1]));
    }
    return tensors;
  }

  std::string root_kind(PickleId root) const {
    switch (values_.kind(root)) {
      case PickleKind::kTensor:
        return "it holds one tensor without a name";
      case PickleKind::kSequence:
        return "it holds a list";
      default:
        return "it holds a single value";
    }
  }

  std::string keys_of(PickleId dictionary) const {
    constexpr std::size_t kShown = 5;
    const auto items = values_.items(dictionary);
    std::string keys;
    for (std::size_t i = 0; i + 1 < std::min(items.size(), 2 * kShown); i += 2)
      if (values_.is(items[i], PickleKind::kText))
        keys += (keys.empty() ? "\"" : ", \"") + printable(values_.text(items[i])) + "\"";
    return std::to_string(items.size() / 2) + " other values" + (keys.empty() ? keys : ": " + keys);
  }

  [[noreturn]] void refuse(std::string_view what) const {
    throw WeightsError(
        ErrorMessage("remat.weights.content")
            .where("\"" + values_.source().name() + "\"")
            .what(what)
            .cure(
                "In Python, write torch.save(model.state_dict(), path); a state dict may also lie "
                "under the key state_dict, model or model_state_dict"));
  }

  const PickleValues& values_;
};

}  // namespace remat::detail

namespace remat::detail {

/// What the two forms of torch.save have in common: a pickle that says how tensors lie in storages,
/// which are elsewhere in the file.
class PickledReader : public StateDictReader {
 public:
  at::Tensor read(std::size_t index) final {
    const PickledTensor& pickled = tensors_.at(index);
    const TensorEntry& entry = entries()[index];
    // Nothing to fetch, and strides of empty tensors may be anything.
    if (pickled.byte_count() == 0) return at::empty(entry.shape, entry.dtype);
    at::Tensor tensor = at::empty({0}, entry.dtype);
    const auto shift =
        static_cast<std::int64_t>(pickled.storage.view_offset / pickled.type->byte_count);
    tensor.set_(storage_of(pickled), pickled.offset + shift, pickled.sizes, pickled.strides);
    if (pickled.is_conjugate) tensor = tensor.conj();
    if (pickled.is_negative) tensor = tensor._neg_view();
    return tensor;
  }

 protected:
  explicit PickledReader(std::shared_ptr<const ByteSource> source)
      : StateDictReader(source->name()), source_(std::move(source)) {}

  const ByteSource& source() const { return *source_; }

  /// Takes over the tensors that the pickle describes.
  void take(std::vector<NamedPickledTensor> tensors) {
    std::vector<TensorEntry> entries;
    std::unordered_set<std::string_view> keys;
    for (const auto& [name, tensor] : tensors)
      if (!keys.insert(tensor.storage.key).second)
        shared_.try_emplace(tensor.storage.key, c10::intrusive_ptr<c10::StorageImpl>());
    for (auto& [name, tensor] : tensors) {
      const at::ScalarType type = supported_type(source().name(), name, tensor.type->dtype);
      entries.push_back({std::move(name), tensor.sizes, type, tensor.byte_count()});
      tensors_.push_back(std::move(tensor));
    }
    announce(std::move(entries));
  }

 private:
  /// Fetches all bytes of a storage.
  virtual c10::Storage fetch(const std::string& key) = 0;

  c10::Storage storage_of(const PickledTensor& pickled) {
    const auto shared = shared_.find(pickled.storage.key);
    auto alive =
        shared == shared_.end() ? c10::intrusive_ptr<c10::StorageImpl>() : shared->second.lock();
    const c10::Storage storage =
        alive ? c10::Storage(std::move(alive)) : fetch(pickled.storage.key);
    const std::uint64_t announced = pickled.storage.view_offset + pickled.storage.byte_count;
    if (storage.nbytes() < announced || pickled.storage.view_offset % pickled.type->byte_count != 0)
      source().damaged("a tensor's bytes are " + std::to_string(storage.nbytes()) +
                       ", and its pickle announces " + std::to_string(announced));
    if (pickled.type->dtype == "bool") require_bools(source(), storage.data(), storage.nbytes());
    if (shared != shared_.end()) shared->second = storage.getWeakStorageImpl();
    return storage;
  }

  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::shared_ptr<const ByteSource> source_;
  std::vector<PickledTensor> tensors_;
  // Of storages that several tensors lie in. The others have no entry: a weak pointer keeps a
  // little memory, and little pieces between freed tensors keep their memory from being used again.
  std::unordered_map<std::string, WeakStorage> shared_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Reads what torch.save wrote before PyTorch 1.6, and still does when asked to: five pickles (a
/// magic number, the version, facts about the machine, the object, the keys of the storages) and
/// then the storages, each after its number of elements.
///
/// @par Source  torch/serialization.py: `_legacy_save`
class LegacyReader final : public PickledReader {
 public:
  /// The magic number with the opcode before it; later protocols put a frame before that.
  static bool recognises(std::string_view head) {
    constexpr std::string_view kMagic{"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 12};
    return head.starts_with('\x80') && head.substr(0, 24).find(kMagic) != std::string_view::npos;
  }

  explicit LegacyReader(std::shared_ptr<const ByteSource> bytes) : PickledReader(std::move(bytes)) {
    PickleValues values(source());
    ByteCursor cursor(source());
    Pickle::read(cursor, values);
    require_version(values, Pickle::read(cursor, values));
    Pickle::read(cursor, values);
    const PickleId root = Pickle::read(cursor, values);
    const PickleId keys = Pickle::read(cursor, values);
    locate_storages(values, keys, cursor);
    take(PickledStateDict::find(values, root));
  }

 private:
  struct Extent {
    std::uint64_t begin, size;
  };

  void require_version(const PickleValues& values, PickleId version) const {
    constexpr std::int64_t kVersion = 1001;
    if (!values.is(version, PickleKind::kInteger) || values.number(version) != kVersion)
      source().damaged("it has another protocol version than 1001");
  }

  /// The file gives elements, and only the pickle says how large they are.
  std::unordered_map<std::string, std::uint64_t> element_sizes(const PickleValues& values) const {
    std::unordered_map<std::string, std::uint64_t> sizes;
    for (PickleId id = 0; id < values.size(); ++id) {
      if (!values.is(id, PickleKind::kStorage)) continue;
      const PickledStorage storage = PickledTensorReader(values, "").read_storage(id);
      sizes.emplace(storage.key, storage.type == nullptr ? 1 : storage.type->byte_count);
    }
    return sizes;
  }

  void locate_storages(const PickleValues& values, PickleId keys, ByteCursor& cursor) {
    if (!values.is(keys, PickleKind::kSequence)) source().damaged("it has no list of storages");
    const auto sizes = element_sizes(values);
    for (const PickleId id : values.items(keys)) {
      const auto known =
          values.is(id, PickleKind::kText) ? sizes.find(std::string(values.text(id))) : sizes.end();
      if (known == sizes.end()) source().damaged("it lists a storage that nothing refers to");
      const auto size = checked_product(cursor.number<8>(), known->second);
      if (!size) source().damaged("it has a storage of more bytes than can be counted");
      extents_[known->first] = {cursor.position(), *size};
      cursor.skip(*size);
    }
  }

  c10::Storage fetch(const std::string& key) override {
    const auto found = extents_.find(key);
    if (found == extents_.end())
      source().damaged("it lacks the storage \"" + printable(key) + "\"");
    const auto [begin, size] = found->second;
    const at::Tensor bytes = at::empty({static_cast<std::int64_t>(size)}, at::ScalarType::Byte);
    source().read(begin, bytes.data_ptr(), static_cast<std::size_t>(size));
    return bytes.storage();
  }

  std::unordered_map<std::string, Extent> extents_;
};

}  // namespace remat::detail

namespace remat::detail {

/// What the directory of a zip file says about one entry.
struct ZipEntry {
  std::uint64_t size = 0;         ///< of the content
  std::uint64_t packed_size = 0;  ///< in the file
  bool is_packed = false;
};

/// The directory of a zip file, checked against the size of the file.
///
/// LibTorch's reader, which fetches the contents, asks for the memory that an entry claims before
/// it looks whether the file has that much, and its older versions do not tell the size. So the
/// claims are read and checked here first.
///
/// @par Source  PKWARE's APPNOTE.TXT, sections 4.3.12 to 4.3.16 and 4.5.3
class ZipDirectory {
 public:
  /// @throws WeightsError  if it is no directory, or claims what the file cannot hold
  explicit ZipDirectory(const ByteSource& source) : source_(source) { read(find_directory()); }

  /// Entries by name; the folder around all of them, which torch.save makes, is left out.
  const std::map<std::string, ZipEntry, std::less<>>& entries() const { return entries_; }

  const ZipEntry* find(std::string_view name) const {
    const auto found = entries_.find(name);
    return found == entries_.end() ? nullptr : &found->second;
  }

 private:
  struct Extent {
    std::uint64_t begin, size, count;
  };

  static constexpr std::uint64_t kEndBytes = 22;
  static constexpr std::uint64_t kLocatorBytes = 20;
  static constexpr std::uint64_t kBigEndBytes = 56;
  static constexpr std::uint64_t kEntryBytes = 46;
  static constexpr std::uint64_t kLocalBytes = 30;
  static constexpr std::uint64_t kMostEntries = 1 << 20;

  static std::uint64_t number(std::string_view bytes, std::size_t begin, std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(bytes[begin + i])} << (8 * i);
    return value;
  }

  std::string fetch(std::uint64_t begin, std::uint64_t count) const {
    std::string bytes(static_cast<std::size_t>(count), '\0');
    source_.read(begin, bytes.data(), bytes.size());
    return bytes;
  }

  /// The end record is the last thing in the file, before a comment of at most 64 KiB.
  Extent find_directory() const {
    const std::uint64_t tail_size = std::min(source_.size(), kEndBytes + 0xffff);
    const std::uint64_t tail_begin = source_.size() - tail_size;
    const std::string tail = fetch(tail_begin, tail_size);
    const std::size_t at = tail_size < kEndBytes
                               ? std::string::npos
                               : tail.rfind("PK\x05\x06", tail.size() - kEndBytes);
    if (at == std::string::npos) refuse("is a zip file without its directory, which ends the file");
    Extent extent{number(tail, at + 16, 4), number(tail, at + 12, 4), number(tail, at + 10, 2)};
    const std::uint64_t end = tail_begin + at;
    if (end >= kLocatorBytes)
      if (const auto locator = fetch(end - kLocatorBytes, kLocatorBytes);
          locator.starts_with("PK\x06\x07"))
        extent = big_directory(number(locator, 8, 8), end);
    if (extent.size > end || extent.begin > end - extent.size ||
        extent.count > extent.size / kEntryBytes || extent.count > kMostEntries)
      refuse("has a zip directory that does not fit into the file");
    return extent;
  }

  Extent big_directory(std::uint64_t begin, std::uint64_t end) const {
    if (end < kBigEndBytes || begin > end - kBigEndBytes)
      refuse("has a zip directory that lies outside of the file");
    const std::string record = fetch(begin, kBigEndBytes);
    if (!record.starts_with("PK\x06\x06")) refuse("has a damaged zip directory");
    return {number(record, 48, 8), number(record, 40, 8), number(record, 32, 8)};
  }

  void read(const Extent& extent) {
    const std::string bytes = fetch(extent.begin, extent.size);
    std::string_view rest = bytes;
    std::string folder;
    for (std::uint64_t i = 0; i < extent.count; ++i) {
      if (rest.size() < kEntryBytes || !rest.starts_with("PK\x01\x02"))
        refuse("has a damaged zip directory");
      const std::size_t name_size = number(rest, 28, 2);
      const std::size_t extra_size = number(rest, 30, 2);
      const std::size_t total = kEntryBytes + name_size + extra_size + number(rest, 32, 2);
      if (rest.size() < total) refuse("has a zip directory that is cut short");
      const std::string_view name = rest.substr(kEntryBytes, name_size);
      // LibTorch's reader takes the first entry's folder for that of all.
      if (i == 0) folder = name.substr(0, name.find('/') + 1);
      if (!name.starts_with(folder)) refuse("has zip entries that are not in one folder");
      add(std::string(name.substr(folder.size())), rest.substr(0, kEntryBytes),
          rest.substr(kEntryBytes + name_size, extra_size), extent.begin);
      rest.remove_prefix(total);
    }
  }

  void add(std::string name, std::string_view fixed, std::string_view extra, std::uint64_t limit) {
    constexpr std::uint64_t kElsewhere = 0xffffffff;
    ZipEntry entry{number(fixed, 24, 4), number(fixed, 20, 4), number(fixed, 10, 2) != 0};
    std::uint64_t local = number(fixed, 42, 4);
    std::string_view big = big_numbers(extra);
    for (std::uint64_t* value : {&entry.size, &entry.packed_size, &local}) {
      if (*value != kElsewhere) continue;
      if (big.size() < 8) refuse("has a zip entry without its size");
      *value = number(big, 0, 8);
      big.remove_prefix(8);
    }
    check(name, entry, local, limit, number(fixed, 8, 2));
    if (!entries_.emplace(name, entry).second)
      refuse("has two zip entries of the name \"" + printable(name) + "\"");
  }

  void check(std::string_view name, const ZipEntry& entry, std::uint64_t local, std::uint64_t limit,
             std::uint64_t flags) {
    // What deflate can make of one byte at the very best.
    constexpr std::uint64_t kBestRatio = 1032;
    const bool is_inside = local < limit && limit - local >= kLocalBytes &&
                           entry.packed_size <= limit - local - kLocalBytes;
    const bool is_possible = entry.is_packed ? entry.size / kBestRatio <= entry.packed_size
                                             : entry.size == entry.packed_size;
    // Entries that share their bytes would let a small file fill any memory.
    total_packed_ += entry.packed_size;
    if (!is_inside || !is_possible || total_packed_ > limit)
      refuse("has the zip entry \"" + printable(name) + "\" of " + std::to_string(entry.size) +
             " bytes, which the file cannot hold");
    if ((flags & 1) != 0) refuse("has encrypted zip entries");
  }

  /// The content of the extra field that holds numbers of 64 bits, or nothing.
  static std::string_view big_numbers(std::string_view extra) {
    while (extra.size() >= 4) {
      const std::size_t size = number(extra, 2, 2);
      if (size > extra.size() - 4) break;
      if (number(extra, 0, 2) == 1) return extra.substr(4, size);
      extra.remove_prefix(4 + size);
    }
    return {};
  }

  [[noreturn]] void refuse(std::string_view what) const {
    source_.damaged("it " + std::string(what));
  }

  const ByteSource& source_;
  std::map<std::string, ZipEntry, std::less<>> entries_;
  std::uint64_t total_packed_ = 0;
};

}  // namespace remat::detail

#include <exception>

#include <c10/core/CPUAllocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

namespace remat::detail {

/// Fetches contents from a zip file through LibTorch's own reader, one at a time.
class Archive {
 public:
  /// Fills `count` bytes at `into` from `offset`, or throws.
  using ReadBytes = std::function<void(std::uint64_t offset, void* into, std::size_t count)>;

  Archive(std::uint64_t size, ReadBytes read)
      : adapter_(std::make_shared<Adapter>(size, std::move(read))) {
    reader_ = guarded([&] { return std::make_unique<Reader>(adapter_); });
  }

  /// Returns the content of one entry, as bytes aligned as LibTorch aligns those of tensors.
  ///
  /// @param name  without the folder around all entries
  /// @throws std::runtime_error  if LibTorch's reader cannot make sense of the file
  c10::Storage fetch(const std::string& name) {
    auto [bytes, size] = guarded([&] { return reader_->getRecord(name); });
    return c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(bytes),
                        c10::GetCPUAllocator(), /*resizable=*/false);
  }

 private:
  using Reader = caffe2::serialize::PyTorchStreamReader;

  /// C code calls this: an exception waits here until it is past.
  class Adapter final : public caffe2::serialize::ReadAdapterInterface {
   public:
    Adapter(std::uint64_t size, ReadBytes read) : size_(size), read_(std::move(read)) {}

    std::size_t size() const override { return static_cast<std::size_t>(size_); }

    std::size_t read(std::uint64_t offset, void* into, std::size_t count,
                     const char*) const override {
      try {
        read_(offset, into, count);
        return count;
      } catch (...) {
        failure_ = std::current_exception();
        return 0;
      }
    }

    void rethrow_failure() const {
      if (auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
    }

   private:
    std::uint64_t size_;
    ReadBytes read_;
    mutable std::exception_ptr failure_;
  };

  /// Lets exceptions of `read` through, and turns LibTorch's into their first line.
  template <class Call>
  std::invoke_result_t<Call> guarded(Call call) {
    try {
      return call();
    } catch (const c10::Error& error) {
      adapter_->rethrow_failure();
      const std::string text = error.what_without_backtrace();
      throw std::runtime_error(text.substr(0, text.find('\n')));
    }
  }

  std::shared_ptr<Adapter> adapter_;
  std::unique_ptr<Reader> reader_;
};

}  // namespace remat::detail

namespace remat::detail {

/// Reads what torch.save has written since PyTorch 1.6: a zip file with a pickle, `data.pkl`, and
/// one entry for each storage.
class ZipReader final : public PickledReader {
 public:
  ZipReader(std::shared_ptr<const ByteSource> bytes, ZipDirectory directory)
      : PickledReader(std::move(bytes)),
        directory_(std::move(directory)),
        archive_(open_archive()) {
    const c10::Storage pickle = entry("data.pkl");
    const MemorySource pickle_source(source().name(), view(pickle));
    PickleValues values(pickle_source);
    ByteCursor cursor(pickle_source);
    const PickleId root = Pickle::read(cursor, values);
    require_little_endian();
    take(PickledStateDict::find(values, root));
  }

 private:
  static std::string_view view(const c10::Storage& storage) {
    return {static_cast<const char*>(storage.data()), storage.nbytes()};
  }

  c10::Storage fetch(const std::string& key) override { return entry("data/" + key); }

  Archive open_archive() const {
    return translated([&] {
      return Archive(source().size(), [this](std::uint64_t offset, void* into, std::size_t count) {
        source().read(offset, into, count);
      });
    });
  }

  c10::Storage entry(const std::string& name) {
    const ZipEntry* known = directory_.find(name);
    if (known == nullptr) source().damaged("it has no entry \"" + printable(name) + "\"");
    c10::Storage storage = translated([&] { return archive_.fetch(name); });
    if (storage.nbytes() != known->size)
      source().damaged("its entry \"" + printable(name) + "\" has another size than announced");
    return storage;
  }

  void require_little_endian() {
    if (directory_.find("byteorder") == nullptr) return;
    const c10::Storage order = entry("byteorder");
    if (view(order) == "little") return;
    throw WeightsError(ErrorMessage("remat.weights.kind")
                           .where("\"" + source().name() + "\"")
                           .what("its numbers have the byte order \"" + printable(view(order), 20) +
                                 "\", and only \"little\" is read")
                           .cure("In Python, load it and save it on a little-endian machine"));
  }

  template <class Call>
  std::invoke_result_t<Call> translated(Call call) const {
    try {
      return call();
    } catch (const WeightsError&) {
      throw;
    } catch (const std::exception& error) {
      source().damaged("LibTorch's zip reader reports: " + printable(error.what(), 300));
    }
  }

  ZipDirectory directory_;
  Archive archive_;
};

}  // namespace remat::detail

namespace remat {

namespace detail {

/// A file format whose reader lives in a header of its own, which registers it when it is included.
struct WeightFormat {
  bool (*recognises)(const ByteSource& source, std::string_view head);
  std::unique_ptr<StateDictReader> (*open)(std::shared_ptr<const ByteSource> source);
  WeightFormat* next = nullptr;
};

// Constant, so that formats may register before anything else in the process is initialised.
inline constinit std::atomic<WeightFormat*> first_weight_format{nullptr};

/// Makes `open_state_dict` know a format from now on. It must live as long as the process.
inline bool register_format(WeightFormat& format) {
  format.next = first_weight_format.load();
  while (!first_weight_format.compare_exchange_weak(format.next, &format)) {
  }
  return true;
}

inline bool looks_like_safetensors(const ByteSource& source, std::string_view head) {
  constexpr std::size_t kLengthBytes = 8;
  if (head.size() <= kLengthBytes || head[kLengthBytes] != '{') return false;
  std::uint64_t header_size = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    header_size |= std::uint64_t{static_cast<unsigned char>(head[i])} << (8 * i);
  // Texts of eight bytes are far larger numbers than any header has bytes.
  return header_size < (std::uint64_t{1} << 40) && source.size() > kLengthBytes;
}

inline std::unique_ptr<StateDictReader> open_zip(std::shared_ptr<const ByteSource> source) {
  ZipDirectory directory(*source);
  if (directory.find("constants.pkl") != nullptr)
    throw_kind(
        *source, "an archive of TorchScript, as torch.jit.save and torch::save of C++ write it",
        "Read it with torch::load(module, path) if C++ wrote it, else with torch::jit::load; "
        "or in Python write torch.save(torch.jit.load(path).state_dict(), other)");
  if (directory.find("data.pkl") == nullptr)
    throw_kind(*source, "a zip file that torch.save did not write", kUnpack);
  return std::make_unique<ZipReader>(std::move(source), std::move(directory));
}

/// Opens what lies in `source`, by its first bytes.
inline std::unique_ptr<StateDictReader> open_source(std::shared_ptr<const ByteSource> source) {
  const std::string head = head_of(*source);
  if (head.starts_with("PK\x03\x04") || head.starts_with("PK\x05\x06"))
    return open_zip(std::move(source));
  if (LegacyReader::recognises(head)) return std::make_unique<LegacyReader>(std::move(source));
  for (auto* format = first_weight_format.load(); format != nullptr; format = format->next)
    if (format->recognises(*source, head)) return format->open(std::move(source));
  if (looks_like_safetensors(*source, head))
    throw_kind(*source,
               "a safetensors file, whose reader needs nlohmann-json and is not compiled in",
               "Add #include \"remat/weights/safetensors.hpp\" to one source of the program");
  throw_foreign(*source, head);
}

}  // namespace detail

/// Opens a weight file for reading its tensors one at a time.
///
/// Formats are told apart by their first bytes, never by the file's name: what Python's torch.save
/// wrote, in the zip form and the one before it, and, if `remat/weights/safetensors.hpp` is
/// included anywhere in the program, safetensors. Nothing in a file is ever executed.
///
/// @throws WeightsError  if the file cannot be read, is of another kind, is damaged or holds what
/// is
///                       not in the table of allowed names; the message says which, and the cure
inline std::unique_ptr<StateDictReader> open_state_dict(const std::filesystem::path& path) {
  return detail::open_source(std::make_shared<detail::FileSource>(path));
}

/// Reads all tensors of a weight file to the CPU, under the names that the file gives them.
///
/// @throws WeightsError  as `open_state_dict`
inline StateDict read_state_dict(const std::filesystem::path& path) {
  const auto reader = open_state_dict(path);
  StateDict state_dict;
  for (std::size_t i = 0; i < reader->entries().size(); ++i)
    state_dict.add(reader->entries()[i].name, reader->read(i));
  return state_dict;
}

}  // namespace remat

namespace remat {

namespace detail {

/// A state dict as something to read from.
class StateDictView final : public StateDictReader {
 public:
  explicit StateDictView(const StateDict& state_dict)
      : StateDictReader("a remat::StateDict"), state_dict_(state_dict) {
    std::vector<TensorEntry> entries;
    for (const auto& [name, tensor] : state_dict_)
      entries.push_back({name, tensor.sizes().vec(), tensor.scalar_type(), tensor.nbytes()});
    announce(std::move(entries));
  }

  at::Tensor read(std::size_t index) override {
    return (state_dict_.begin() + static_cast<std::ptrdiff_t>(index))->second;
  }

 private:
  const StateDict& state_dict_;
};

/// Puts back what was there before; a tensor that refuses keeps the others from nothing.
inline void restore(std::span<const Planned> changed) noexcept {
  for (const Planned& planned : changed) {
    try {
      planned.target.copy_(planned.source);
    } catch (...) {
    }
  }
}

/// Everything that a file can cause has happened before. What is left, a device without memory
/// for instance, must not leave half of a module either.
inline void copy_planned(std::vector<Planned>& plan) {
  at::NoGradGuard no_grad;
  std::size_t done = 0;
  try {
    for (Planned& planned : plan) {
      // On the CPU, where the file's numbers are: a device may have no room for a second module.
      at::Tensor before = planned.target.detach().to(at::kCPU, planned.target.scalar_type(),
                                                     /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor source = std::exchange(planned.source, std::move(before));
      ++done;
      planned.target.copy_(source.reshape(planned.target.sizes()));
    }
  } catch (...) {
    restore(std::span(plan).first(done));
    throw;
  }
}

}  // namespace detail

/// Copies the tensors of a weight file into a module: parameters and buffers, by Python's names.
///
/// All is compared and read before anything is changed, so that a file that does not fit, or turns
/// out damaged, leaves the module as it was. Values are converted to the dtype of the module's
/// tensor, whose device and `requires_grad` stay; the tensors themselves stay, too, so that
/// optimizers keep them. Meanwhile the file's tensors are in memory once.
///
/// "module." is taken off the file's names if all of them begin with it and none of the module's
/// does. A `num_batches_tracked` may be missing (then it becomes 0) or be there without need, and a
/// tensor that the module has under two names may be in the file under one.
///
/// @param reader  for one module after the other from the same file
/// @return        what became of each key
/// @throws WeightsError  if keys differ (listing all of them) or the file cannot be read, and, even
///                       when not strict, if no key of the module is in the file
inline LoadReport load_weights(torch::nn::Module& module, StateDictReader& reader,
                               const LoadOptions& options = {}) {
  detail::LoadComparison comparison(module, reader, options);
  for (detail::Planned& planned : comparison.plan())
    if (planned.entry) planned.source = reader.read(*planned.entry);
  detail::copy_planned(comparison.plan());
  return comparison.report();
}

/// As from a reader; opens the file.
inline LoadReport load_weights(torch::nn::Module& module, const std::filesystem::path& path,
                               const LoadOptions& options = {}) {
  return load_weights(module, *open_state_dict(path), options);
}

/// As from a reader; takes tensors that are in memory.
inline LoadReport load_weights(torch::nn::Module& module, const StateDict& state_dict,
                               const LoadOptions& options = {}) {
  detail::StateDictView view(state_dict);
  return load_weights(module, view, options);
}

/// As for a module; takes a holder.
template <class Impl, class Source>
  requires requires(torch::nn::Module& module, Source&& source) {
    load_weights(module, std::forward<Source>(source));
  }
LoadReport load_weights(const torch::nn::ModuleHolder<Impl>& module, Source&& source,
                        const LoadOptions& options = {}) {
  return load_weights(static_cast<torch::nn::Module&>(*module.ptr()), std::forward<Source>(source),
                      options);
}

}  // namespace remat

namespace remat {

namespace detail {

/// Returns the folder in which torchvision keeps what it has fetched.
///
/// @par Source  PyTorch's `torch.hub.get_dir`: TORCH_HOME, else `torch` in XDG_CACHE_HOME or
/// ~/.cache
inline std::filesystem::path torchvision_cache() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here sets it
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  std::filesystem::path home = variable("TORCH_HOME");
  if (home.empty()) {
    const std::filesystem::path cache = variable("XDG_CACHE_HOME");
    home = (cache.empty() ? variable("HOME") / ".cache" : cache) / "torch";
  }
  return home / "hub" / "checkpoints";
}

/// Whether the stored head has the shapes of the backbone's; a file without one counts as fitting.
inline bool does_head_fit(const Backbone& backbone, const StateDictReader& file) {
  const auto parameters = backbone.named_parameters();
  return std::ranges::all_of(file.entries(), [&](const TensorEntry& entry) {
    std::string_view name = entry.name;
    if (name.starts_with("module.")) name.remove_prefix(7);
    if (!name.starts_with(backbone.head())) return true;
    const torch::Tensor* mine = parameters.find(std::string(name));
    return mine != nullptr && mine->sizes() == at::IntArrayRef(entry.shape);
  });
}

inline bool has_projection(const StateDictReader& file) {
  return std::ranges::any_of(file.entries(), [](const TensorEntry& entry) {
    return entry.name.find("projection.") != std::string::npos;
  });
}

}  // namespace detail

/// Loads a weight file of the same network, published or saved by us, into a backbone.
///
/// As `load_weights`, and besides: the first convolution is folded if the file is for another
/// number of channels, position embeddings are resized for another image size, a head for another
/// number of classes is left as it is with a warning, or passed over if the backbone has none, and
/// a `projection` that the file does not know stays as initialised.
///
/// @return  what became of each key
/// @throws WeightsError  if anything else differs; then nothing has changed
inline LoadReport load_backbone_weights(Backbone& backbone, const std::filesystem::path& path) {
  const auto file = open_state_dict(path);
  LoadOptions options;
  options.fit = [&backbone](const std::string& key, const torch::Tensor& stored,
                            at::IntArrayRef shape) {
    return backbone.fit_weight(key, stored, shape);
  };
  const bool is_head_skipped =
      backbone.num_classes() == 0 || !detail::does_head_fit(backbone, *file);
  if (is_head_skipped) options.skip.push_back(backbone.head());
  if (!detail::has_projection(*file)) options.skip.emplace_back("projection.");
  const LoadReport report = load_weights(backbone, *file, options);
  if (is_head_skipped && backbone.num_classes() != 0)
    TORCH_WARN("remat: ", backbone.name(), ": the head in ", path.string(), " is not for ",
               backbone.num_classes(), " classes: \"", backbone.head(),
               "*\" stays as it was initialised");
  return report;
}

namespace detail {

/// Returns the published file in torchvision's cache.
///
/// @throws WeightsError  with the Python line that fetches it, if it is not there
inline std::filesystem::path published_weights(std::string_view name) {
  const PublishedModel& model = published_model(name);
  std::filesystem::path path = torchvision_cache() / model.weights_file;
  if (!std::filesystem::exists(path))
    throw WeightsError(
        ErrorMessage("remat.weights.not_cached")
            .where(name)
            .what("pretrained = true was given, and there is no " + path.string())
            .cause("The published weights have not been fetched to this machine")
            .cure("Fetch them with Python's `import torchvision; " + model.python_line() +
                  "`, set TORCH_HOME to where they are, or give the file as weights"));
  return path;
}

/// Loads what the options ask for, if they do.
inline void load_initial_weights(Backbone& backbone) {
  backbone.options().pretrained.load_into(backbone);
  backbone.options().weights.load_into(backbone);
}

}  // namespace detail

inline Pretrained::Pretrained(bool is_wanted) {
  if (is_wanted)
    load_ = [](Backbone& backbone) {
      load_backbone_weights(backbone, detail::published_weights(backbone.name()));
    };
}

template <std::convertible_to<std::string> Path>
  requires(!std::same_as<std::remove_cvref_t<Path>, WeightsFile>)
WeightsFile::WeightsFile(Path&& path)
    : path_(std::forward<Path>(path)), load_([](Backbone& backbone, const std::string& file) {
        load_backbone_weights(backbone, file);
      }) {}

}  // namespace remat

namespace remat {

/// A backbone that is built from one row of its family's table.
///
/// @tparam Impl        the class that derives from this, constructible from a design, options and
/// an empty chain; `Impl::kFamily` names the family, `Impl::designs()` is the table
/// @tparam DesignType  a row: the network's `name` and its numbers
template <class Impl, class DesignType>
class FamilyBackbone : public ChainBackbone {
 public:
  using Design = DesignType;

  /// Returns the numbers that this was built from.
  const Design& design() const { return design_; }

 protected:
  FamilyBackbone(const Design& design, std::int64_t raw_feature_dim, const BackboneOptions& options,
                 CheckpointedChain chain)
      : ChainBackbone(std::string(design.name), raw_feature_dim, options, std::move(chain)),
        design_(design) {}

 private:
  std::shared_ptr<Backbone> build_again() const final {
    return std::make_shared<Impl>(design_, options(), CheckpointedChain(chain()->empty_copy()));
  }

  Design design_;
};

namespace detail {

[[noreturn]] inline void refuse_backbone_name(std::string_view where, std::string_view given,
                                              const std::vector<std::string>& names,
                                              std::string_view cure) {
  throw ArgumentError(ErrorMessage("remat.backbone.unknown")
                          .where(where)
                          .what("there is no backbone \"" + std::string(given) +
                                "\"; the nearest names are " +
                                quoted_list(nearest_names(given, names)))
                          .cure(cure));
}

/// Returns the row of the family's table.
///
/// @throws ArgumentError  with the nearest names if there is none
template <class Impl>
const typename Impl::Design& find_design(std::string_view name) {
  std::vector<std::string> names;
  for (const typename Impl::Design& design : Impl::designs()) {
    if (design.name == name) return design;
    names.emplace_back(design.name);
  }
  refuse_backbone_name("remat::" + std::string(Impl::kFamily), name, names,
                       "remat::create_backbone builds those of the other families");
}

/// Builds a network and gives it the weights that its options ask for.
template <class Impl>
std::shared_ptr<Impl> build_backbone(const typename Impl::Design& design,
                                     const BackboneOptions& options, CheckpointedChain chain) {
  const auto backbone = std::make_shared<Impl>(design, options, std::move(chain));
  load_initial_weights(*backbone);
  return backbone;
}

}  // namespace detail

/// Holds a backbone of one family whose features are checkpointed by `PolicyType`.
///
/// The policy's pattern, rule and keep policy are values from here on: the modules behind are no
/// templates.
template <class Impl, class PolicyType>
class BackboneHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using Design = typename Impl::Design;
  using Policy = PolicyType;

  /// Makes a holder of nothing, to be assigned later.
  BackboneHolder(std::nullptr_t)  // NOLINT(*-explicit-*): as LibTorch's holders
      : torch::nn::ModuleHolder<Impl>(nullptr) {}
  /// Holds what is there, as `register_module` returns it.
  BackboneHolder(std::shared_ptr<Impl> module)  // NOLINT(*-explicit-*): as LibTorch's holders
      : torch::nn::ModuleHolder<Impl>(std::move(module)) {}
  /// Builds the network of that name.
  ///
  /// @throws ArgumentError  for a name that the family has not, and for options that cannot be
  explicit BackboneHolder(std::string_view name, const BackboneOptions& options = {})
      : BackboneHolder(detail::find_design<Impl>(name), options) {}
  /// Builds a network by a design of one's own.
  explicit BackboneHolder(const Design& design, const BackboneOptions& options = {})
      : torch::nn::ModuleHolder<Impl>(detail::build_backbone<Impl>(design, options, Policy())) {}
};

/// A network whose name is in the type.
template <class Family, detail::Literal name>
class NamedBackbone : public Family {
  static_assert(std::ranges::any_of(Family::ContainedType::designs(),
                                    [](const auto& design) { return design.name == name.view(); }),
                "remat::NamedBackbone<Family, name> needs a name from the family's table");

 public:
  NamedBackbone(std::nullptr_t) : Family(nullptr) {}  // NOLINT(*-explicit-*): as LibTorch's holders
  NamedBackbone(
      std::shared_ptr<typename Family::ContainedType> module)  // NOLINT(*-explicit-*): likewise
      : Family(std::move(module)) {}
  explicit NamedBackbone(const BackboneOptions& options = {}) : Family(name.view(), options) {}
};

}  // namespace remat

namespace remat::blocks {

/// A function of one tensor, element by element; null stands for none.
///
/// The type holds no state, so that a block can copy and clone it.
using Activation = torch::Tensor (*)(torch::Tensor);

/// The activations of the backbones. A name that ends in `_` writes into its argument, as
/// LibTorch's: which of the two a network uses decides how much memory it needs, and is
/// torchvision's choice.
namespace activations {

/// Computes max(x, 0).
inline torch::Tensor relu(torch::Tensor x) { return x.relu(); }
/// Computes max(x, 0), in place.
inline torch::Tensor relu_(torch::Tensor x) { return x.relu_(); }
/// Computes min(max(x, 0), 6), in place.
inline torch::Tensor relu6_(torch::Tensor x) { return at::relu6_(x); }
/// Computes x * sigmoid(x).
inline torch::Tensor silu(torch::Tensor x) { return at::silu(x); }
/// Computes x * sigmoid(x), in place.
inline torch::Tensor silu_(torch::Tensor x) { return at::silu_(x); }
/// Computes x times the normal distribution function of x.
inline torch::Tensor gelu(torch::Tensor x) { return at::gelu(x); }
/// Computes x * hardsigmoid(x), in place.
inline torch::Tensor hardswish_(torch::Tensor x) { return at::hardswish_(x); }
/// Computes 1 / (1 + exp(-x)).
inline torch::Tensor sigmoid(torch::Tensor x) { return x.sigmoid(); }
/// Computes min(max(x + 3, 0), 6) / 6.
inline torch::Tensor hardsigmoid(torch::Tensor x) { return at::hardsigmoid(x); }

}  // namespace activations

}  // namespace remat::blocks

namespace remat::blocks {

/// Zeroes whole samples of a batch, each with probability `rate`, and divides the others by the
/// probability to survive, so that the mean stays.
///
/// Without training, or with rate 0, it returns `x` itself and draws nothing.
///
/// @param x     (N, ...); meant for the residual branch of a block
/// @param rate  in [0, 1]
/// @par Source  Huang et al., Deep Networks with Stochastic Depth (2016); torchvision's
/// `stochastic_depth` in mode "row", whose random numbers it draws
inline torch::Tensor stochastic_depth(const torch::Tensor& x, double rate, bool is_training) {
  if (!is_training || rate == 0.0) return x;
  std::vector<std::int64_t> size(static_cast<std::size_t>(x.dim()), 1);
  size[0] = x.size(0);
  const double survival = 1.0 - rate;
  torch::Tensor noise = at::empty(size, at::device(x.device()).dtype(x.dtype()));
  noise.bernoulli_(survival);                // (N, 1, ...)
  if (survival > 0.0) noise.div_(survival);  // nobody survives rate 1, and 0 / 0 is no number
  return x * noise;
}

/// `stochastic_depth` as a module: without parameters, active while it trains.
///
/// @par Source  torchvision's `StochasticDepth` in mode "row"
class StochasticDepthImpl : public torch::nn::Cloneable<StochasticDepthImpl> {
 public:
  /// @throws ArgumentError  if `rate` is no probability
  explicit StochasticDepthImpl(double rate) : rate_(rate) {
    require(rate >= 0.0 && rate <= 1.0, [&] {
      return ErrorMessage("remat.stochastic_depth.rate")
          .where("remat::blocks::StochasticDepth")
          .what("the rate is " + std::to_string(rate) + ", a probability in [0, 1] was expected");
    });
  }

  void reset() override {}

  torch::Tensor forward(const torch::Tensor& x) {
    return stochastic_depth(x, rate_, is_training());
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "StochasticDepth(rate=" << rate_ << ")";
  }

  /// Returns the probability with which a sample is dropped.
  double rate() const { return rate_; }

 private:
  double rate_;
};
TORCH_MODULE(StochasticDepth);

}  // namespace remat::blocks

namespace remat::blocks {

/// A depthwise 7×7 convolution and a two-layer perceptron at each place, scaled channel by channel,
/// around which the input is added.
///
/// The perceptron works with the channels last, which is where linear layers have them.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), figure 4, and appendix A.1 for the
/// scale; torchvision's `CNBlock`
class ConvNeXtBlockImpl : public torch::nn::Cloneable<ConvNeXtBlockImpl> {
 public:
  static constexpr double kLayerNormEps = 1e-6;       // torchvision's; LibTorch's own is 1e-5
  static constexpr double kInitialLayerScale = 1e-6;  // a new block is nearly the identity

  /// @param drop_rate  with which probability stochastic depth drops a sample's branch
  ConvNeXtBlockImpl(std::int64_t channels, double drop_rate)
      : channels_(channels), drop_rate_(drop_rate) {
    reset();
  }

  void reset() override {
    const auto depthwise =
        torch::nn::Conv2dOptions(channels_, channels_, 7).padding(3).groups(channels_);
    block = register_module(
        "block",
        torch::nn::Sequential(
            torch::nn::Conv2d(depthwise), torch::nn::Functional(channels_last),
            torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels_}).eps(kLayerNormEps)),
            torch::nn::Linear(channels_, 4 * channels_), torch::nn::Functional(activations::gelu),
            torch::nn::Linear(4 * channels_, channels_), torch::nn::Functional(channels_first)));
    layer_scale =
        register_parameter("layer_scale", at::full({channels_, 1, 1}, kInitialLayerScale));
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(drop_rate_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = layer_scale * block->forward(x_nchw);  // (N, channels, h, w)
    y = stochastic_depth->forward(y);
    return y += x_nchw;
  }

  torch::nn::Sequential block{nullptr};
  torch::Tensor layer_scale;
  StochasticDepth stochastic_depth{nullptr};

 private:
  static torch::Tensor channels_last(const torch::Tensor& x_nchw) {
    return x_nchw.permute({0, 2, 3, 1});
  }
  static torch::Tensor channels_first(const torch::Tensor& x_nhwc) {
    return x_nhwc.permute({0, 3, 1, 2});
  }

  std::int64_t channels_;
  double drop_rate_;
};
TORCH_MODULE(ConvNeXtBlock);

}  // namespace remat::blocks

namespace remat::blocks {

/// Normalises a map over its channels, at each place by itself.
///
/// `torch::nn::LayerNorm` normalises the last dimensions, and the channels of a map are none of
/// them. The result is laid out in memory with the channels last.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.5; torchvision's
/// `LayerNorm2d`
class LayerNorm2dImpl : public torch::nn::Cloneable<LayerNorm2dImpl> {
 public:
  /// @param eps  added to the variance; torchvision's for ConvNeXt
  explicit LayerNorm2dImpl(std::int64_t channels, double eps = 1e-6)
      : channels_(channels), eps_(eps) {
    reset();
  }

  void reset() override {
    weight = register_parameter("weight", at::ones({channels_}));
    bias = register_parameter("bias", at::zeros({channels_}));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor y_nhwc =
        at::layer_norm(x_nchw.permute({0, 2, 3, 1}), {channels_}, weight, bias, eps_);
    return y_nhwc.permute({0, 3, 1, 2});  // (N, channels, h, w)
  }

  /// Returns what is added to the variance.
  double eps() const { return eps_; }

  torch::Tensor weight, bias;

 private:
  std::int64_t channels_;
  double eps_;
};
TORCH_MODULE(LayerNorm2d);

}  // namespace remat::blocks

namespace remat::blocks {

/// Draws `weights` from a normal distribution that ends at -2 and 2.
///
/// The bounds are absolute, as torchvision uses them: at the usual deviation of 0.02 they are a
/// hundred deviations away and cut off nothing. What lies outside is drawn again, as newer PyTorch
/// does: the inverse error function, which it used before, gives minus infinity once in 2^24 draws
/// of single precision, and clamped to -2 that is a weight a hundred times too large.
///
/// @param mean  inside the bounds
/// @par Source  `torch.nn.init.trunc_normal_` of PyTorch 2.13, whose random numbers it draws;
/// LibTorch has none
inline void trunc_normal_(torch::Tensor weights, double mean, double standard_deviation) {
  constexpr double kBound = 2;
  const torch::NoGradGuard no_grad;
  weights.normal_(mean, standard_deviation);
  while (true) {
    const torch::Tensor is_outside = weights.abs() > kBound;
    if (!is_outside.any().item<bool>()) return;
    weights.copy_(
        at::where(is_outside, at::empty_like(weights).normal_(mean, standard_deviation), weights));
  }
}

}  // namespace remat::blocks

namespace remat {

/// Makes `Count` segments: of equal unit counts until the units are measured, then of least
/// predicted peak.
///
/// @tparam Count  at least 1; more than there are units means one segment per unit
template <int Count>
struct Segments {
  static_assert(Count >= 1,
                "remat::Segments<N> needs N >= 1; to checkpoint nothing, use remat::KeepAll");

  Plan operator()(const Chain& chain) const {
    return balanced_plan(chain, static_cast<std::size_t>(Count));
  }
};

}  // namespace remat

namespace remat {

/// The pattern of a chain of modules: each child is a unit, nested chains are opened.
///
/// Any unit may be dropped. The last segment stays plain when dropping it would not lower the
/// predicted peak: backward begins with it, so all that it saved would be recomputed at once.
struct Sequential {
  using DefaultRule = Segments<4>;

  Plan operator()(const Plan& plan, const Chain& chain) const {
    if (!chain.is_measured()) return plan;
    const Plan candidate = plan.with_last_plain();
    return predicted_peak(candidate, chain.unit_costs) <= predicted_peak(plan, chain.unit_costs)
               ? candidate
               : plan;
  }
};

}  // namespace remat

namespace remat {

/// A drop-in `torch::nn::Sequential` that is checkpointed segment by segment.
///
/// ```cpp
/// remat::Checkpointed<remat::Sequential, remat::Segments<4>> net(conv, norm, act, head);
/// remat::Checkpointed<remat::TransformerLayers> encoder(layer1, layer2, layer3);
/// remat::Checkpointed<remat::StagedHybrid> staged(stem, stage1, downsample, stage2);
/// ```
/// Each child is a unit; a nested `torch::nn::Sequential` or checkpointed chain is opened, so that
/// a stage of blocks counts as its blocks; switch, rule and keep policy are then those of the outer
/// chain. `forward(x, more...)` hands extra arguments to every layer.
/// @par Keeps  the tensors between segments, what the keep policy chooses, and all of a plain
/// segment
template <Pattern PatternType, class RuleType, class Keep>
class Checkpointed<PatternType, RuleType, Keep> : public CheckpointedChain {
  static_assert(Rule<RuleType>,
                "remat::Checkpointed<Pattern, Rule, Keep> needs a rule as its second argument");
  static_assert(
      KeepPolicy<Keep>,
      "remat::Checkpointed<Pattern, Rule, Keep> needs a keep policy as its third argument");

 public:
  using CheckpointedChain::CheckpointedChain;

  /// Constructs an empty chain, to be filled with `push_back`.
  Checkpointed()
      : CheckpointedChain(
            std::shared_ptr<CheckpointedChainImpl>(std::make_shared<CheckpointedSequentialImpl>(
                detail::ChainPolicy::of<PatternType, RuleType, Keep>()))) {}

  /// Constructs a chain of modules, numbered from 0.
  template <class First, class... Rest>
    requires ChainLayerSource<First> && (ChainLayerSource<Rest> && ...)
  explicit Checkpointed(First&& first, Rest&&... rest) : Checkpointed() {
    (*this)->push_back(std::forward<First>(first));
    ((*this)->push_back(std::forward<Rest>(rest)), ...);
  }

  /// Constructs a chain of named modules: `net({{"conv1", conv}, {"bn1", norm}})`.
  Checkpointed(std::initializer_list<NamedLayer> layers) : Checkpointed() {
    for (const NamedLayer& layer : layers) (*this)->push_back(layer);
  }

  /// Constructs a chain of named modules, as `torch::nn::Sequential` does.
  explicit Checkpointed(torch::OrderedDict<std::string, torch::nn::AnyModule>&& layers)
      : Checkpointed() {
    for (auto& item : layers) (*this)->push_back(item.key(), std::move(item.value()));
  }
};

}  // namespace remat

namespace remat {

/// Makes one segment per unit: the least memory inside a segment, a border tensor for each.
struct EachUnit {
  Plan operator()(const Chain& chain) const {
    return Plan::from_count(chain.unit_count, chain.unit_count);
  }
};

}  // namespace remat

namespace remat {

/// Makes one segment per stage; a chain that names no stages is one.
struct EachStage {
  /// @throws ArgumentError  if the sizes of the stages do not add up to the number of units
  Plan operator()(const Chain& chain) const {
    if (chain.stage_sizes.empty()) return Plan::from_count(chain.unit_count, 1);
    Plan plan = Plan::from_sizes(chain.stage_sizes);
    require(plan.unit_count() == chain.unit_count, [&] {
      return ErrorMessage("remat.plan.stages")
          .where("remat::EachStage")
          .what("the stages have " + std::to_string(plan.unit_count()) +
                " units and the chain has " + std::to_string(chain.unit_count))
          .cure("Give stage sizes that add up to the number of units");
    });
    return plan;
  }
};

}  // namespace remat

namespace remat {

namespace detail {

/// Shares segments out to stages, one to each and every further one to the stage with the most
/// units per segment, the first of equals.
///
/// @return  for each stage its number of segments, never more than its units
inline std::vector<std::size_t> shared_out(const std::vector<std::size_t>& stage_sizes,
                                           std::size_t segment_count) {
  std::vector<std::size_t> shares(stage_sizes.size(), 1);
  for (std::size_t given = shares.size(); given < segment_count; ++given) {
    std::size_t neediest = stage_sizes.size();
    for (std::size_t stage = 0; stage < stage_sizes.size(); ++stage) {
      if (shares[stage] == stage_sizes[stage]) continue;
      // Compares units per segment, as products to stay with whole numbers.
      if (neediest == stage_sizes.size() ||
          stage_sizes[stage] * shares[neediest] > stage_sizes[neediest] * shares[stage])
        neediest = stage;
    }
    if (neediest == stage_sizes.size()) break;
    ++shares[neediest];
  }
  return shares;
}

}  // namespace detail

/// The pattern of a network in stages, between which single modules change the resolution.
///
/// The blocks of a stage, a nested `torch::nn::Sequential`, are checkpointed. Modules outside of
/// stages, such as the stem and the transitions, are plain: they are few and their results are the
/// borders anyway. A number of segments given at run time is shared out by depth: one for each
/// stage, the others where most blocks are.
struct StagedHybrid {
  using DefaultRule = EachStage;

  /// @throws ArgumentError  if the chain has modules and no stage
  Plan operator()(const Plan& plan, const Chain& chain) const {
    require(chain.unit_count == 0 || chain.lone_units.size() < chain.unit_count, [&] {
      return ErrorMessage("remat.plan.no_stage")
          .where("remat::StagedHybrid")
          .what("the chain has " + std::to_string(chain.unit_count) +
                " modules and no stage, and at least one stage was expected: there is nothing to "
                "checkpoint")
          .cure(
              "Put the blocks of a stage into a torch::nn::Sequential, or use the pattern "
              "remat::Sequential");
    });
    return plan.with_plain_units(chain.lone_units);
  }

  /// Shares `segment_count` segments out to the stages; each stage has at least one.
  Plan segments(const Chain& chain, std::size_t segment_count) const {
    std::vector<std::size_t> layers = chain.stage_sizes;  // lone modules are layers of one unit
    if (layers.empty()) layers.push_back(chain.unit_count);
    const auto is_lone = [&](std::size_t unit) {
      return std::ranges::find(chain.lone_units, unit) != chain.lone_units.end();
    };
    std::vector<std::size_t> stages;
    std::size_t first = 0;
    for (const std::size_t size : layers) {
      if (!is_lone(first)) stages.push_back(size);
      first += size;
    }
    const std::vector<std::size_t> shares = detail::shared_out(stages, segment_count);
    std::vector<std::size_t> sizes;
    first = 0;
    for (std::size_t layer = 0, stage = 0; layer < layers.size(); first += layers[layer++]) {
      const std::size_t share = is_lone(first) ? 1 : shares[stage++];
      for (const Segment& segment : Plan::from_count(layers[layer], share).segments())
        sizes.push_back(segment.unit_count());
    }
    return Plan::from_sizes(sizes);
  }
};

}  // namespace remat

namespace remat {

/// The numbers of one ConvNeXt.
struct ConvNeXtDesign {
  std::string_view name;
  std::array<std::int64_t, 4> widths;        ///< channels of each stage
  std::array<std::int64_t, 4> block_counts;  ///< blocks of each stage
  double stochastic_depth;                   ///< torchvision's rate for the last block
};

// The paper's section 3 and table 9.
inline constexpr std::array kConvNeXtDesigns{
    ConvNeXtDesign{"convnext_tiny", {96, 192, 384, 768}, {3, 3, 9, 3}, 0.1},
    ConvNeXtDesign{"convnext_small", {96, 192, 384, 768}, {3, 3, 27, 3}, 0.4},
    ConvNeXtDesign{"convnext_base", {128, 256, 512, 1024}, {3, 3, 27, 3}, 0.5},
    ConvNeXtDesign{"convnext_large", {192, 384, 768, 1536}, {3, 3, 27, 3}, 0.5},
};

namespace blocks {

/// Cuts images into patches of 4×4 and embeds each; in front of the first stage.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.2
class ConvNeXtStemImpl : public torch::nn::Cloneable<ConvNeXtStemImpl> {
 public:
  ConvNeXtStemImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    conv = register_module(
        "0", torch::nn::Conv2d(torch::nn::Conv2dOptions(in_channels_, width_, 4).stride(4)));
    norm = register_module("1", LayerNorm2d(width_));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return norm->forward(conv->forward(images_nchw));  // (N, width, H / 4, W / 4)
  }

  torch::nn::Conv2d conv{nullptr};
  LayerNorm2d norm{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(ConvNeXtStem);

/// Halves height and width and changes the number of channels; between two stages.
///
/// @par Source  Liu et al., A ConvNet for the 2020s (2022), section 2.6
class ConvNeXtDownsamplingImpl : public torch::nn::Cloneable<ConvNeXtDownsamplingImpl> {
 public:
  ConvNeXtDownsamplingImpl(std::int64_t in, std::int64_t out) : in_(in), out_(out) { reset(); }

  void reset() override {
    norm = register_module("0", LayerNorm2d(in_));
    conv =
        register_module("1", torch::nn::Conv2d(torch::nn::Conv2dOptions(in_, out_, 2).stride(2)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    return conv->forward(norm->forward(x_nchw));  // (N, out, h / 2, w / 2)
  }

  LayerNorm2d norm{nullptr};
  torch::nn::Conv2d conv{nullptr};

 private:
  std::int64_t in_, out_;
};
TORCH_MODULE(ConvNeXtDownsampling);

}  // namespace blocks

/// The module behind `ConvNeXt`.
///
/// The last normalisation, which torchvision has in `classifier`, belongs to the features: it is
/// there without a head, too.
class ConvNeXtImpl : public FamilyBackbone<ConvNeXtImpl, ConvNeXtDesign> {
 public:
  static constexpr std::string_view kFamily = "ConvNeXt";
  static constexpr std::span<const ConvNeXtDesign> designs() { return kConvNeXtDesigns; }

  ConvNeXtImpl(const ConvNeXtDesign& design, const BackboneOptions& options,
               CheckpointedChain chain)
      : FamilyBackbone(design, design.widths.back(), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    build_classifier();
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.2."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    const torch::Tensor pooled = at::adaptive_avg_pool2d(features_nchw, {1, 1});  // (N, C, 1, 1)
    return norm_->forward(pooled).flatten(1);                                     // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return linear_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    constexpr std::int64_t kLeast = 32;  // the stem divides by 4, each downsampling by 2
    require(height >= kLeast && width >= kLeast, [&] {
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + std::to_string(height) + "x" + std::to_string(width) +
                ", at least 32x32 was expected")
          .cause("Five halvings leave nothing of smaller ones")
          .cure("Resize the images");
    });
  }

 private:
  void build_features() {
    const auto& widths = design().widths;
    const double rate = options().stochastic_depth.value_or(design().stochastic_depth);
    std::int64_t block_count = 0, block_index = 0;
    for (const std::int64_t count : design().block_counts) block_count += count;
    append_feature(blocks::ConvNeXtStem(options().in_channels, widths[0]));
    for (std::size_t stage = 0; stage < widths.size(); ++stage) {
      if (stage > 0) append_feature(blocks::ConvNeXtDownsampling(widths[stage - 1], widths[stage]));
      torch::nn::Sequential row;
      for (std::int64_t i = 0; i < design().block_counts[stage]; ++i)
        row->push_back(
            blocks::ConvNeXtBlock(widths[stage], drop_rate(rate, block_index++, block_count)));
      append_feature(row);
    }
  }

  /// Grows along the network from 0 to the full rate of the last block.
  static double drop_rate(double last, std::int64_t block_index, std::int64_t block_count) {
    if (block_count == 1) return 0;
    return last * static_cast<double>(block_index) / static_cast<double>(block_count - 1);
  }

  void build_classifier() {
    const std::int64_t width = design().widths.back();
    norm_ = blocks::LayerNorm2d(width);
    const auto classifier = register_module("classifier", torch::nn::ModuleDict());
    classifier->update({{"0", norm_.ptr()}});
    if (options().num_classes == 0) return;
    linear_ = torch::nn::Linear(width, options().num_classes);
    classifier->update({{"2", linear_.ptr()}});
  }

  /// As torchvision: a narrow normal distribution without its tails; normalisations and the scales
  /// of the blocks as they are made.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* convolution = module->as<torch::nn::Conv2d>()) {
        blocks::trunc_normal_(convolution->weight, /*mean=*/0, /*std=*/0.02);
        torch::nn::init::zeros_(convolution->bias);
      } else if (auto* linear = module->as<torch::nn::Linear>()) {
        blocks::trunc_normal_(linear->weight, /*mean=*/0, /*std=*/0.02);
        torch::nn::init::zeros_(linear->bias);
      }
    }
  }

  /// Appends a layer, or a stage, to the features and to the chain.
  template <class Layer>
  void append_feature(const Layer& layer) {
    append("features_" + std::to_string(features_->size()), layer);
    features_->push_back(layer);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the layers; the chain runs them
  blocks::LayerNorm2d norm_{nullptr};
  torch::nn::Linear linear_{nullptr};
};

/// A convolutional network made after the image of a transformer; its units are the blocks, in four
/// stages. Stem and downsampling are plain under the default policy, which recomputes block by
/// block: a region for each stage would hold more at its peak and take no less time.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Liu et al., A ConvNet for the 2020s (2022); torchvision's `convnext_*`
template <class Policy = Checkpointed<StagedHybrid, EachUnit>>
class ConvNeXt : public BackboneHolder<ConvNeXtImpl, Policy> {
 public:
  using BackboneHolder<ConvNeXtImpl, Policy>::BackboneHolder;
};

using ConvNeXtTiny = NamedBackbone<ConvNeXt<>, "convnext_tiny">;
using ConvNeXtSmall = NamedBackbone<ConvNeXt<>, "convnext_small">;
using ConvNeXtBase = NamedBackbone<ConvNeXt<>, "convnext_base">;
using ConvNeXtLarge = NamedBackbone<ConvNeXt<>, "convnext_large">;

}  // namespace remat

namespace remat::blocks {

/// Returns the options of a convolution that keeps the size at stride 1, and that has no bias since
/// the normalisation behind it would take it away again.
///
/// Chain what differs: `padded_convolution(32, 64, 3).stride(2).groups(32)`.
///
/// @param kernel  odd
inline torch::nn::Conv2dOptions padded_convolution(std::int64_t in, std::int64_t out,
                                                   std::int64_t kernel) {
  return torch::nn::Conv2dOptions(in, out, kernel).padding((kernel - 1) / 2).bias(false);
}

/// The constants of a batch normalisation; LibTorch's and PyTorch's unless a family says otherwise.
struct BatchNormConstants {
  double eps = 1e-5;
  double momentum = 0.1;  ///< the weight of the *new* batch; some frameworks count it the other way
};

/// Makes a batch normalisation with these constants.
inline torch::nn::BatchNorm2d batch_norm(std::int64_t channels, BatchNormConstants constants) {
  return torch::nn::BatchNorm2d(
      torch::nn::BatchNorm2dOptions(channels).eps(constants.eps).momentum(constants.momentum));
}

/// A convolution, a batch normalisation and, if there is one, an activation. The children are `0`
/// and `1`; one unit of a chain.
///
/// @par Source  torchvision's `Conv2dNormActivation`
class ConvNormActImpl : public torch::nn::Cloneable<ConvNormActImpl> {
 public:
  explicit ConvNormActImpl(torch::nn::Conv2dOptions convolution, BatchNormConstants constants = {},
                           Activation activation = nullptr)
      : options_(std::move(convolution)), constants_(constants), activation_(activation) {
    reset();
  }

  void reset() override {
    conv = register_module("0", torch::nn::Conv2d(options_));
    norm = register_module("1", batch_norm(options_.out_channels(), constants_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = norm->forward(conv->forward(x_nchw));  // (N, out, h / stride, w / stride)
    return activation_ == nullptr ? y : activation_(std::move(y));
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};

 private:
  torch::nn::Conv2dOptions options_;
  BatchNormConstants constants_;
  Activation activation_;
};
TORCH_MODULE(ConvNormAct);

}  // namespace remat::blocks

namespace remat::blocks {

/// Draws the weights of every convolution inside `module` from a normal distribution of variance
/// 2 / fan out, where the fan out is the kernel's area times the output channels, also of a grouped
/// convolution. Biases stay.
///
/// @par Source  He et al., Delving Deep into Rectifiers (2015), equation 14; torchvision's
/// convolutional networks
inline void init_convolutions_by_fan_out(torch::nn::Module& module) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* convolution = part->as<torch::nn::Conv2d>())
      torch::nn::init::kaiming_normal_(convolution->weight, /*a=*/0, torch::kFanOut, torch::kReLU);
}

/// Sets the biases of every convolution inside `module` to zero.
inline void zero_convolution_biases(torch::nn::Module& module) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* convolution = part->as<torch::nn::Conv2d>();
        convolution && convolution->bias.defined())
      torch::nn::init::zeros_(convolution->bias);
}

/// Draws the weights of every linear layer inside `module` from a normal distribution around 0 and
/// sets the biases to zero.
inline void init_linear_normal(torch::nn::Module& module, double standard_deviation) {
  for (const auto& part : module.modules(/*include_self=*/false))
    if (auto* linear = part->as<torch::nn::Linear>()) {
      torch::nn::init::normal_(linear->weight, /*mean=*/0, standard_deviation);
      torch::nn::init::zeros_(linear->bias);
    }
}

}  // namespace remat::blocks

namespace remat::blocks {

/// Returns the multiple of `divisor` next to a scaled channel count, one more where rounding down
/// would lose over a tenth of it.
///
/// @par Source  the rule of the MobileNet papers' code; torchvision's `_make_divisible`
constexpr std::int64_t rounded_width(double width, std::int64_t divisor = 8) {
  const auto half = static_cast<double>(divisor) / 2;
  const std::int64_t nearest = static_cast<std::int64_t>(width + half) / divisor * divisor;
  const std::int64_t rounded = std::max(divisor, nearest);
  return static_cast<double>(rounded) < 0.9 * width ? rounded + divisor : rounded;
}

}  // namespace remat::blocks

namespace remat::blocks {

/// Scales each channel by a number in [0, 1] that it computes from the means of all channels.
///
/// @par Source  Hu et al., Squeeze-and-Excitation Networks (2017), figure 1 and equation 3, whose
/// delta is `inner` and whose sigma is `gate`; torchvision's `SqueezeExcitation`
class SqueezeExcitationImpl : public torch::nn::Cloneable<SqueezeExcitationImpl> {
 public:
  /// @param squeezed  the width in between; what it is a fraction of differs between families
  /// @param inner     behind `fc1`
  /// @param gate      behind `fc2`; sigmoid or a cheaper stand-in
  SqueezeExcitationImpl(std::int64_t channels, std::int64_t squeezed, Activation inner,
                        Activation gate)
      : channels_(channels), squeezed_(squeezed), inner_(inner), gate_(gate) {
    reset();
  }

  void reset() override {
    fc1 = register_module("fc1", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels_, squeezed_,
                                                                            /*kernel_size=*/1)));
    fc2 = register_module("fc2", torch::nn::Conv2d(torch::nn::Conv2dOptions(squeezed_, channels_,
                                                                            /*kernel_size=*/1)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor scale = at::adaptive_avg_pool2d(x_nchw, {1, 1});  // (N, channels, 1, 1)
    scale = inner_(fc1->forward(scale));                            // (N, squeezed, 1, 1)
    scale = gate_(fc2->forward(scale));                             // (N, channels, 1, 1)
    return scale * x_nchw;                                          // (N, channels, h, w)
  }

  torch::nn::Conv2d fc1{nullptr}, fc2{nullptr};

 private:
  std::int64_t channels_, squeezed_;
  Activation inner_, gate_;
};
TORCH_MODULE(SqueezeExcitation);

}  // namespace remat::blocks

namespace remat::blocks {

/// How the wide part of an `MBConv` is made.
enum class MBConvKind {
  kDepthwise,  ///< a 1×1 convolution widens, a depthwise one mixes places, squeeze-and-excitation
  kFused,      ///< one full convolution does both: more arithmetic, quicker where maps are large
};

/// What an `MBConv` is built from; meant for designated initialisers.
struct MBConvOptions {
  MBConvKind kind = MBConvKind::kDepthwise;
  std::int64_t in = 0;         ///< channels of the block's input
  std::int64_t out = 0;        ///< channels of its result
  std::int64_t expansion = 1;  ///< how many times wider it is inside
  std::int64_t kernel = 3;
  std::int64_t stride = 1;
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
  BatchNormConstants norm = {};

  /// Returns the width inside.
  std::int64_t wide() const { return rounded_width(static_cast<double>(in * expansion)); }
  /// Returns whether the input can be added to the result.
  bool has_shortcut() const { return stride == 1 && in == out; }
};

/// An inverted residual: a branch that is wide inside and narrow at its ends, where the input is
/// added.
///
/// The squeeze is a quarter of the block's *input*, not of the wide part that it scales.
///
/// @par Source  Tan and Le, EfficientNet (2019), section 4, and EfficientNetV2 (2021), figure 2;
/// torchvision's `MBConv` and `FusedMBConv`
class MBConvImpl : public torch::nn::Cloneable<MBConvImpl> {
 public:
  explicit MBConvImpl(const MBConvOptions& options) : options_(options) { reset(); }

  void reset() override {
    block = register_module(
        "block", options_.kind == MBConvKind::kFused ? fused_branch() : depthwise_branch());
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = block->forward(x_nchw);  // (N, out, h / stride, w / stride)
    if (!options_.has_shortcut()) return y;
    y = stochastic_depth->forward(y);
    return y += x_nchw;
  }

  /// Returns what this was built from.
  const MBConvOptions& options() const { return options_; }

  torch::nn::Sequential block{nullptr};
  StochasticDepth stochastic_depth{nullptr};

 private:
  torch::nn::Sequential depthwise_branch() const {
    const std::int64_t wide = options_.wide();
    torch::nn::Sequential branch;
    if (wide != options_.in) branch->push_back(activated(padded_convolution(options_.in, wide, 1)));
    branch->push_back(activated(
        padded_convolution(wide, wide, options_.kernel).stride(options_.stride).groups(wide)));
    branch->push_back(SqueezeExcitation(wide, std::max<std::int64_t>(1, options_.in / 4),
                                        activations::silu_, activations::sigmoid));
    branch->push_back(projection());
    return branch;
  }

  torch::nn::Sequential fused_branch() const {
    const std::int64_t wide = options_.wide();
    torch::nn::Sequential branch(
        activated(padded_convolution(options_.in, wide, options_.kernel).stride(options_.stride)));
    // Where nothing is widened, the full convolution has the right width already.
    if (wide != options_.in) branch->push_back(projection());
    return branch;
  }

  ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    return ConvNormAct(convolution, options_.norm, activations::silu_);
  }
  ConvNormAct projection() const {
    return ConvNormAct(padded_convolution(options_.wide(), options_.out, 1), options_.norm);
  }

  MBConvOptions options_;
};
TORCH_MODULE(MBConv);

}  // namespace remat::blocks

namespace remat {

/// One row of the papers' tables: `blocks` MBConvs, of which the first has the stride.
struct EfficientNetStage {
  blocks::MBConvKind kind;
  std::int64_t expansion;  ///< how many times wider a block is inside
  std::int64_t kernel;     ///< of the convolution that is not 1×1
  std::int64_t stride;
  std::int64_t width;   ///< channels of the result, before scaling
  std::int64_t blocks;  ///< before scaling
};

/// An EfficientNet, or an EfficientNetV2.
struct EfficientNetDesign {
  std::string_view name;
  std::span<const EfficientNetStage> stages;  ///< outlive the backbone, as the tables below do
  std::int64_t stem_width;                    ///< before scaling
  double width_factor;                        ///< channels are multiplied by it and rounded to 8s
  double depth_factor;                        ///< block counts are multiplied by it and rounded up
  std::int64_t last_width;  ///< channels of the last convolution; 0: 4 times those before it
  double dropout;           ///< torchvision's, in front of the classifier
  double norm_eps;          ///< torchvision's, of every batch normalisation
};

// EfficientNet's table 1, whose rows B0 scales by 1.
// kind, expansion, kernel, stride, width, blocks
inline constexpr std::array kEfficientNetStages{
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 1, 3, 1, 16, 1},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 24, 2},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 2, 40, 2},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 80, 3},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 1, 112, 3},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 5, 2, 192, 4},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 320, 1},
};
// EfficientNetV2's table 4, and the larger two as its authors' code has them.
inline constexpr std::array kEfficientNetV2SStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 24, 2},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 48, 4},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 64, 4},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 128, 6},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 160, 9},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 256, 15},
};
inline constexpr std::array kEfficientNetV2MStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 24, 3},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 48, 5},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 80, 5},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 160, 7},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 176, 14},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 304, 18},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 512, 5},
};
inline constexpr std::array kEfficientNetV2LStages{
    EfficientNetStage{blocks::MBConvKind::kFused, 1, 3, 1, 32, 4},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 64, 7},
    EfficientNetStage{blocks::MBConvKind::kFused, 4, 3, 2, 96, 7},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 4, 3, 2, 192, 10},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 224, 19},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 2, 384, 25},
    EfficientNetStage{blocks::MBConvKind::kDepthwise, 6, 3, 1, 640, 7},
};

// name, stages, stem, width and depth factor, last width, dropout, eps
inline constexpr std::array kEfficientNetDesigns{
    EfficientNetDesign{"efficientnet_b0", kEfficientNetStages, 32, 1.0, 1.0, 0, 0.2, 1e-5},
    EfficientNetDesign{"efficientnet_b1", kEfficientNetStages, 32, 1.0, 1.1, 0, 0.2, 1e-5},
    EfficientNetDesign{"efficientnet_b2", kEfficientNetStages, 32, 1.1, 1.2, 0, 0.3, 1e-5},
    EfficientNetDesign{"efficientnet_v2_s", kEfficientNetV2SStages, 24, 1.0, 1.0, 1280, 0.2, 1e-3},
    EfficientNetDesign{"efficientnet_v2_m", kEfficientNetV2MStages, 24, 1.0, 1.0, 1280, 0.3, 1e-3},
    EfficientNetDesign{"efficientnet_v2_l", kEfficientNetV2LStages, 32, 1.0, 1.0, 1280, 0.4, 1e-3},
};
inline constexpr double kEfficientNetStochasticDepth = 0.2;  // torchvision's, for all of them

namespace detail {

inline std::int64_t scaled_width(const EfficientNetDesign& design, std::int64_t width) {
  return blocks::rounded_width(static_cast<double>(width) * design.width_factor);
}
inline std::int64_t scaled_depth(const EfficientNetDesign& design, std::int64_t block_count) {
  return static_cast<std::int64_t>(
      std::ceil(static_cast<double>(block_count) * design.depth_factor));
}
inline std::int64_t last_width(const EfficientNetDesign& design) {
  return design.last_width != 0 ? design.last_width
                                : 4 * scaled_width(design, design.stages.back().width);
}

}  // namespace detail

/// The module behind `EfficientNet`.
class EfficientNetImpl : public FamilyBackbone<EfficientNetImpl, EfficientNetDesign> {
 public:
  static constexpr std::string_view kFamily = "EfficientNet";
  static constexpr std::span<const EfficientNetDesign> designs() { return kEfficientNetDesigns; }

  EfficientNetImpl(const EfficientNetDesign& design, const BackboneOptions& options,
                   CheckpointedChain chain)
      : FamilyBackbone(design, detail::last_width(design), options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    blocks::init_convolutions_by_fan_out(*features_);
    blocks::zero_convolution_biases(*features_);
    if (options.num_classes != 0) build_classifier();
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return classifier_->forward(std::move(pooled));
  }
  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.1."; }

 private:
  void build_features() {
    const blocks::BatchNormConstants norm{.eps = design().norm_eps};
    std::int64_t in = detail::scaled_width(design(), design().stem_width);
    append_feature(activated(blocks::padded_convolution(options().in_channels, in, 3).stride(2)));
    std::int64_t block_count = 0, block_index = 0;
    for (const EfficientNetStage& stage : design().stages)
      block_count += detail::scaled_depth(design(), stage.blocks);
    for (const EfficientNetStage& row : design().stages) {
      const std::int64_t out = detail::scaled_width(design(), row.width);
      torch::nn::Sequential stage;
      for (std::int64_t i = 0; i < detail::scaled_depth(design(), row.blocks); ++i) {
        stage->push_back(
            blocks::MBConv(blocks::MBConvOptions{.kind = row.kind,
                                                 .in = in,
                                                 .out = out,
                                                 .expansion = row.expansion,
                                                 .kernel = row.kernel,
                                                 .stride = i == 0 ? row.stride : 1,
                                                 .drop_rate = drop_rate(block_index++, block_count),
                                                 .norm = norm}));
        in = out;
      }
      append_feature(stage);
    }
    append_feature(activated(blocks::padded_convolution(in, detail::last_width(design()), 1)));
  }

  /// Grows along the network from 0, and never reaches the full rate: torchvision divides by the
  /// count of blocks.
  double drop_rate(std::int64_t block_index, std::int64_t block_count) const {
    return options().stochastic_depth.value_or(kEfficientNetStochasticDepth) *
           static_cast<double>(block_index) / static_cast<double>(block_count);
  }

  /// Linear layers begin uniform within 1 / sqrt(classes), as torchvision's.
  void build_classifier() {
    const double dropout = options().dropout.value_or(design().dropout);
    const torch::nn::Linear linear(detail::last_width(design()), options().num_classes);
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Dropout(torch::nn::DropoutOptions(dropout).inplace(true)),
                              linear));
    const double bound = 1.0 / std::sqrt(static_cast<double>(options().num_classes));
    torch::nn::init::uniform_(linear->weight, -bound, bound);
    torch::nn::init::zeros_(linear->bias);
  }

  blocks::ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    return blocks::ConvNormAct(convolution, blocks::BatchNormConstants{.eps = design().norm_eps},
                               blocks::activations::silu_);
  }

  /// Appends a layer, or a stage, to the features and to the chain.
  template <class Layer>
  void append_feature(const Layer& layer) {
    append("features_" + std::to_string(features_->size()), layer);
    features_->push_back(layer);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of MBConvs whose depth and width were scaled together; its units are the stem, each
/// block and the last convolution. Five segments and not the usual four: EfficientNetV2-S, 42 units
/// deep, saves 75 % of its activations with them where four save 70 %.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Tan and Le, EfficientNet: Rethinking Model Scaling (2019), table 1, and
/// EfficientNetV2: Smaller Models and Faster Training (2021), table 4; torchvision's
/// `efficientnet_*`
template <class Policy = Checkpointed<Sequential, Segments<5>>>
class EfficientNet : public BackboneHolder<EfficientNetImpl, Policy> {
 public:
  using BackboneHolder<EfficientNetImpl, Policy>::BackboneHolder;
};

using EfficientNetB0 = NamedBackbone<EfficientNet<>, "efficientnet_b0">;
using EfficientNetB1 = NamedBackbone<EfficientNet<>, "efficientnet_b1">;
using EfficientNetB2 = NamedBackbone<EfficientNet<>, "efficientnet_b2">;
using EfficientNetV2S = NamedBackbone<EfficientNet<>, "efficientnet_v2_s">;
using EfficientNetV2M = NamedBackbone<EfficientNet<>, "efficientnet_v2_m">;
using EfficientNetV2L = NamedBackbone<EfficientNet<>, "efficientnet_v2_l">;

}  // namespace remat

namespace remat::blocks {

/// Cuts a map into windows of neighbours.
///
/// @param x_nchw  height and width are multiples of `size`
/// @return  (N, h / size * w / size, size * size, C): windows row by row, and in each its places
/// row by row
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022), figure 3, block attention
inline torch::Tensor partition_windows(const torch::Tensor& x_nchw, std::int64_t size) {
  const std::int64_t rows = x_nchw.size(2) / size;
  const std::int64_t columns = x_nchw.size(3) / size;
  return x_nchw.reshape({x_nchw.size(0), x_nchw.size(1), rows, size, columns, size})
      .permute({0, 2, 4, 3, 5, 1})  // (N, rows, columns, size, size, C)
      .reshape({x_nchw.size(0), rows * columns, size * size, x_nchw.size(1)});
}

/// Puts the windows of `partition_windows` together again.
///
/// @return  (N, C, height, width)
inline torch::Tensor join_windows(const torch::Tensor& windows, std::int64_t size,
                                  std::int64_t height, std::int64_t width) {
  const std::int64_t batch = windows.size(0);
  const std::int64_t channels = windows.size(3);
  return windows.reshape({batch, height / size, width / size, size, size, channels})
      .permute({0, 5, 1, 3, 2, 4})  // (N, C, rows, size, columns, size)
      .reshape({batch, channels, height, width});
}

/// Shares a map out to groups that each see all of it: a group has `size * size` places in a grid
/// over the whole map, and the next group the places beside them.
///
/// @param x_nchw  height and width are multiples of `size`
/// @return  (N, h / size * w / size, size * size, C)
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022), figure 3, grid attention
inline torch::Tensor partition_grid(const torch::Tensor& x_nchw, std::int64_t size) {
  const std::int64_t down = x_nchw.size(2) / size;
  const std::int64_t right = x_nchw.size(3) / size;
  return x_nchw.reshape({x_nchw.size(0), x_nchw.size(1), size, down, size, right})
      .permute({0, 3, 5, 2, 4, 1})  // (N, down, right, size, size, C)
      .reshape({x_nchw.size(0), down * right, size * size, x_nchw.size(1)});
}

/// Puts the groups of `partition_grid` together again.
///
/// @return  (N, C, height, width)
inline torch::Tensor join_grid(const torch::Tensor& groups, std::int64_t size, std::int64_t height,
                               std::int64_t width) {
  const std::int64_t batch = groups.size(0);
  const std::int64_t channels = groups.size(3);
  return groups.reshape({batch, height / size, width / size, size, size, channels})
      .permute({0, 5, 3, 1, 4, 2})  // (N, C, size, down, size, right)
      .reshape({batch, channels, height, width});
}

}  // namespace remat::blocks

namespace remat::blocks {

/// Height and width of a window of tokens, or of a map of them.
struct WindowSize {
  std::int64_t height = 0;
  std::int64_t width = 0;

  /// Returns how many tokens there are.
  std::int64_t area() const { return height * width; }
  /// Returns how many distances there are between two tokens, which is how many rows a table of
  /// biases has.
  std::int64_t distance_count() const { return (2 * height - 1) * (2 * width - 1); }

  friend bool operator==(const WindowSize&, const WindowSize&) = default;
};

/// Returns for each pair of tokens of a window the row of their distance in a table of biases.
///
/// @return  (area, area), 64-bit integers; Swin registers it flattened, MaxViT as it is
/// @par Source  torchvision's `define_relative_position_index` and
/// `_get_relative_position_index`
inline torch::Tensor relative_position_index(WindowSize window) {
  const auto distances = [&](std::int64_t first, std::int64_t second, std::int64_t length) {
    const torch::Tensor place = at::arange(length, at::device(at::kCPU).dtype(at::kLong));
    const torch::Tensor along =
        place.view({first, second}).expand({window.height, window.width}).reshape({-1});  // (area)
    return along.unsqueeze(1) - along.unsqueeze(0) + (length - 1);  // (area, area), from 0 on
  };
  const torch::Tensor down = distances(window.height, 1, window.height);
  const torch::Tensor right = distances(1, window.width, window.width);
  return down * (2 * window.width - 1) + right;
}

/// Returns what is to be added to the products of queries and keys inside a window.
///
/// @param table  (window.distance_count(), heads), learned
/// @param index  as `relative_position_index` gives it, of any shape; made again if it is of
/// another type, because LibTorch's `Module::to(dtype)` converts buffers of integers too, and half
/// precision cannot count far
/// @return  (1, heads, area, area), contiguous
/// @par Source  Liu et al., Swin Transformer (2021), equation 4; torchvision's
/// `get_relative_position_bias` and `get_relative_positional_bias`
inline torch::Tensor relative_position_bias(const torch::Tensor& table, const torch::Tensor& index,
                                            WindowSize window) {
  const torch::Tensor rows = index.scalar_type() == at::kLong
                                 ? index.reshape({-1})
                                 : relative_position_index(window).reshape({-1}).to(table.device());
  return table.index({rows})
      .view({window.area(), window.area(), -1})
      .permute({2, 0, 1})
      .contiguous()
      .unsqueeze(0);
}

}  // namespace remat::blocks

namespace remat::blocks {

/// Attention inside groups of places, with a learned bias for each distance between two of them.
///
/// Products are scaled by the root of the whole width, not of a head's, as torchvision does.
///
/// @par Source  Tu et al., MaxViT (2022), equation 2; torchvision's
/// `RelativePositionalMultiHeadAttention`
class GroupAttentionImpl : public torch::nn::Cloneable<GroupAttentionImpl> {
 public:
  /// @param channels    a multiple of `head_width`
  /// @param group_size  a group is a square of that many places a side
  /// @throws ArgumentError  if heads of that width do not fill the channels
  GroupAttentionImpl(std::int64_t channels, std::int64_t head_width, std::int64_t group_size)
      : channels_(channels), head_width_(head_width), group_size_(group_size) {
    require(head_width > 0 && channels % head_width == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::GroupAttention")
          .what("there are " + std::to_string(channels) + " channels for heads of " +
                std::to_string(head_width) + ", a multiple of that was expected");
    });
    reset();
  }

  void reset() override {
    relative_position_bias_table =
        register_parameter("relative_position_bias_table",
                           at::zeros({window().distance_count(), channels_ / head_width_}));
    trunc_normal_(relative_position_bias_table, /*mean=*/0, /*standard_deviation=*/0.02);
    relative_position_index =
        register_buffer("relative_position_index", blocks::relative_position_index(window()));
    to_qkv = register_module("to_qkv", torch::nn::Linear(channels_, 3 * channels_));
    merge = register_module("merge", torch::nn::Linear(channels_, channels_));
  }

  /// @param x  (N, groups, group_size squared, channels)
  torch::Tensor forward(const torch::Tensor& x) {
    const auto parts = to_qkv->forward(x).chunk(3, /*dim=*/-1);
    const torch::Tensor query = by_head(parts[0]);
    const torch::Tensor key = by_head(parts[1]) * std::pow(static_cast<double>(channels_), -0.5);
    torch::Tensor weights =
        at::einsum("nghid,nghjd->nghij", {query, key}) +
        relative_position_bias(relative_position_bias_table, relative_position_index, window());
    weights = weights.softmax(-1);  // (N, groups, heads, places, places)
    const torch::Tensor mixed = at::einsum("nghij,nghjd->nghid", {weights, by_head(parts[2])});
    return merge->forward(mixed.permute({0, 1, 3, 2, 4}).reshape(x.sizes()));
  }

  torch::Tensor relative_position_bias_table, relative_position_index;
  torch::nn::Linear to_qkv{nullptr}, merge{nullptr};

 private:
  WindowSize window() const { return {group_size_, group_size_}; }

  /// Returns (N, groups, heads, places, head_width).
  torch::Tensor by_head(const torch::Tensor& x) const {
    return x.reshape({x.size(0), x.size(1), x.size(2), channels_ / head_width_, head_width_})
        .permute({0, 1, 3, 2, 4});
  }

  std::int64_t channels_, head_width_, group_size_;
};
TORCH_MODULE(GroupAttention);

/// Which places of a map attend to each other.
enum class Partition {
  kWindow,  ///< neighbours
  kGrid,    ///< places spread over the whole map
};

/// What a `PartitionAttention` is built from; meant for designated initialisers.
struct PartitionAttentionOptions {
  Partition partition = Partition::kWindow;
  std::int64_t channels = 0;
  std::int64_t head_width = 32;     ///< channels of one attention head
  std::int64_t partition_size = 7;  ///< a group is a square of that many places a side
  double dropout = 0;               ///< rate behind the perceptron
  double attention_dropout = 0;     ///< rate behind the attention
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
};

/// Attention and a perceptron inside the groups of a map, each with the input added.
///
/// Any map is fine of which `partition_size` divides height and width.
///
/// @par Source  Tu et al., MaxViT (2022), section 3.2; torchvision's `PartitionAttentionLayer`
class PartitionAttentionImpl : public torch::nn::Cloneable<PartitionAttentionImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;  // how many times wider the perceptron is inside

  explicit PartitionAttentionImpl(const PartitionAttentionOptions& options) : options_(options) {
    reset();
  }

  void reset() override {
    const std::int64_t channels = options_.channels;
    attn_layer = register_module(
        "attn_layer", torch::nn::Sequential(
                          torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels})),
                          GroupAttention(channels, options_.head_width, options_.partition_size),
                          torch::nn::Dropout(options_.attention_dropout)));
    mlp_layer = register_module(
        "mlp_layer",
        torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels})),
                              torch::nn::Linear(channels, kExpansion * channels),
                              torch::nn::Functional(activations::gelu),
                              torch::nn::Linear(kExpansion * channels, channels),
                              torch::nn::Dropout(options_.dropout)));
    stochastic_dropout = register_module("stochastic_dropout", StochasticDepth(options_.drop_rate));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const bool is_grid = options_.partition == Partition::kGrid;
    const std::int64_t size = options_.partition_size;
    torch::Tensor x = is_grid ? partition_grid(x_nchw, size) : partition_windows(x_nchw, size);
    x = x + stochastic_dropout->forward(attn_layer->forward(x));
    x = x + stochastic_dropout->forward(mlp_layer->forward(x));  // (N, groups, places, channels)
    return is_grid ? join_grid(x, size, x_nchw.size(2), x_nchw.size(3))
                   : join_windows(x, size, x_nchw.size(2), x_nchw.size(3));
  }

  /// Returns what this was built from.
  const PartitionAttentionOptions& options() const { return options_; }

  torch::nn::Sequential attn_layer{nullptr}, mlp_layer{nullptr};
  StochasticDepth stochastic_dropout{nullptr};

 private:
  PartitionAttentionOptions options_;
};
TORCH_MODULE(PartitionAttention);

}  // namespace remat::blocks

namespace remat::blocks {

/// MaxViT's batch normalisations, as torchvision has them.
inline constexpr BatchNormConstants kMaxViTNorm{.eps = 1e-3, .momentum = 0.01};

/// What a `MaxViTLayer` is built from; meant for designated initialisers.
struct MaxViTLayerOptions {
  std::int64_t in = 0;      ///< channels of the layer's input
  std::int64_t out = 0;     ///< channels of its result
  std::int64_t stride = 1;  ///< 2 halves height and width, rounding up
  std::int64_t head_width = 32;
  std::int64_t partition_size = 7;
  double dropout = 0;
  double attention_dropout = 0;
  double drop_rate = 0;  ///< with which probability stochastic depth drops a sample's branch
};

/// A normalised inverted residual, around which the input is added, pooled and projected where the
/// layer changes shape.
///
/// Unlike EfficientNet's it normalises first, its last convolution has a bias and no normalisation,
/// and the squeeze is a quarter of the *result's* width.
///
/// @par Source  Tu et al., MaxViT (2022), section 3.3 and appendix A.1; torchvision's `MBConv` of
/// MaxViT
class MaxViTMBConvImpl : public torch::nn::Cloneable<MaxViTMBConvImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;
  static constexpr std::int64_t kSqueeze = 4;

  explicit MaxViTMBConvImpl(const MaxViTLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    proj = nullptr;
    if (options_.stride != 1 || options_.in != options_.out)
      proj = register_module("proj", shortcut());
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
    layers = register_module("layers", branch());
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor shortcut =
        proj.is_empty() ? x_nchw : proj->forward(x_nchw);  // (N, out, h / stride, w / stride)
    return shortcut + stochastic_depth->forward(layers->forward(x_nchw));
  }

  torch::nn::Sequential proj{nullptr};
  StochasticDepth stochastic_depth{nullptr};
  torch::nn::Sequential layers{nullptr};

 private:
  static torch::Tensor halved(const torch::Tensor& x_nchw) {
    return at::avg_pool2d(x_nchw, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
  }

  torch::nn::Sequential shortcut() const {
    torch::nn::Sequential sequence;
    if (options_.stride == 2) sequence->push_back(torch::nn::Functional(halved));
    sequence->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(options_.in, options_.out, 1)));
    return sequence;
  }

  torch::nn::Sequential branch() const {
    const std::int64_t wide = kExpansion * options_.out;
    torch::nn::Sequential sequence;
    sequence->push_back("pre_norm", batch_norm(options_.in, kMaxViTNorm));
    sequence->push_back("conv_a", ConvNormAct(padded_convolution(options_.in, wide, 1), kMaxViTNorm,
                                              activations::gelu));
    sequence->push_back(
        "conv_b",
        ConvNormAct(padded_convolution(wide, wide, 3).stride(options_.stride).groups(wide),
                    kMaxViTNorm, activations::gelu));
    sequence->push_back(
        "squeeze_excitation",
        SqueezeExcitation(wide, options_.out / kSqueeze, activations::silu, activations::sigmoid));
    sequence->push_back("conv_c",
                        torch::nn::Conv2d(torch::nn::Conv2dOptions(wide, options_.out, 1)));
    return sequence;
  }

  MaxViTLayerOptions options_;
};
TORCH_MODULE(MaxViTMBConv);

/// Mixes neighbours, then the places of each window, then places from all over the map; one unit of
/// a chain.
///
/// @par Source  Tu et al., MaxViT (2022), figure 2; torchvision's `MaxVitLayer`
class MaxViTLayerImpl : public torch::nn::Cloneable<MaxViTLayerImpl> {
 public:
  explicit MaxViTLayerImpl(const MaxViTLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    torch::nn::Sequential sequence;
    sequence->push_back("MBconv", MaxViTMBConv(options_));
    sequence->push_back("window_attention", attention(Partition::kWindow));
    sequence->push_back("grid_attention", attention(Partition::kGrid));
    layers = register_module("layers", sequence);
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    return layers->forward(x_nchw);  // (N, out, h / stride, w / stride)
  }

  /// Returns what this was built from.
  const MaxViTLayerOptions& options() const { return options_; }

  torch::nn::Sequential layers{nullptr};

 private:
  PartitionAttention attention(Partition partition) const {
    return PartitionAttention(
        PartitionAttentionOptions{.partition = partition,
                                  .channels = options_.out,
                                  .head_width = options_.head_width,
                                  .partition_size = options_.partition_size,
                                  .dropout = options_.dropout,
                                  .attention_dropout = options_.attention_dropout,
                                  .drop_rate = options_.drop_rate});
  }

  MaxViTLayerOptions options_;
};
TORCH_MODULE(MaxViTLayer);

}  // namespace remat::blocks

namespace remat {

/// The pattern of a transformer: each layer is a segment, and all of them are recomputed.
///
/// What layers save is large beside the tokens that pass between them, and equal for all of them,
/// so that one border per layer is nearly the least memory. The last layer is recomputed, too: one
/// plain layer would hold as much as all borders of a dozen. Embeddings and merging layers are
/// exempted with `remat::plain`. `forward(tokens, mask...)` hands extra arguments to every layer.
struct TransformerLayers {
  using DefaultRule = EachUnit;

  Plan operator()(const Plan& plan, const Chain&) const { return plan; }
};

}  // namespace remat

namespace remat {

/// The numbers of one MaxViT.
struct MaxViTDesign {
  std::string_view name;
  std::int64_t stem_width;                   ///< channels in front of the first block
  std::array<std::int64_t, 4> widths;        ///< channels of each block
  std::array<std::int64_t, 4> layer_counts;  ///< layers of each block, the first of which halves
  std::int64_t head_width;                   ///< channels of one attention head
  std::int64_t partition_size;               ///< places a side of a window, and of a grid
  double stochastic_depth;                   ///< torchvision's rate for the last layer
};

// The paper's table 1, column MaxViT-T.
inline constexpr std::array kMaxViTDesigns{
    MaxViTDesign{"maxvit_t", 64, {64, 128, 256, 512}, {2, 2, 5, 2}, 32, 7, 0.2},
};

namespace blocks {

/// Two convolutions in front of the first block; the first halves height and width.
///
/// @par Source  Tu et al., MaxViT (2022), table 1; torchvision's `maxvit_t`
class MaxViTStemImpl : public torch::nn::Cloneable<MaxViTStemImpl> {
 public:
  MaxViTStemImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    first = register_module("0", ConvNormAct(padded_convolution(in_channels_, width_, 3).stride(2),
                                             kMaxViTNorm, activations::gelu));
    second = register_module(
        "1",
        torch::nn::Sequential(torch::nn::Conv2d(padded_convolution(width_, width_, 3).bias(true))));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return second->forward(first->forward(images_nchw));  // (N, width, H / 2, W / 2)
  }

  ConvNormAct first{nullptr};
  torch::nn::Sequential second{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(MaxViTStem);

}  // namespace blocks

/// The module behind `MaxViT`.
///
/// Weights do not depend on the size of the images: any height and width is fine whose maps the
/// partition divides. `BackboneOptions::image_size` is only checked, when the network is built.
class MaxViTImpl : public FamilyBackbone<MaxViTImpl, MaxViTDesign> {
 public:
  static constexpr std::string_view kFamily = "MaxViT";
  static constexpr std::span<const MaxViTDesign> designs() { return kMaxViTDesigns; }

  MaxViTImpl(const MaxViTDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, design.widths.back(), options, std::move(chain)) {
    if (options.image_size != 0) check_image_size(options.image_size, options.image_size);
    const blocks::MaxViTStem stem(options.in_channels, design.stem_width);
    register_module("stem", stem);
    append("stem", stem);
    build_blocks();
    if (options.num_classes != 0) build_classifier();
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "stem.0.0.weight"; }
  std::string head() const override { return "classifier.5."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return last_linear_->forward(linear_->forward(norm_->forward(pooled)).tanh());
  }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(is_valid_length(height) && is_valid_length(width), [&] {
      const std::string window = size_text(design().partition_size, design().partition_size);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + size_text(height, width) + ", and windows of " + window +
                " must tile the map of every block: these are " + maps_text(height, width))
          .cure("The nearest heights that do are " + nearest_lengths(height) +
                ", the nearest widths " + nearest_lengths(width) +
                "; another partition_size in the design goes with other sizes");
    });
  }

 private:
  void build_blocks() {
    const auto list = register_module("blocks", torch::nn::ModuleList());
    const double rate = options().stochastic_depth.value_or(design().stochastic_depth);
    std::int64_t layer_count = 0, layer_index = 0;
    for (const std::int64_t count : design().layer_counts) layer_count += count;
    std::int64_t in = design().stem_width;
    for (std::size_t block = 0; block < design().widths.size(); ++block) {
      torch::nn::Sequential layers;
      for (std::int64_t i = 0; i < design().layer_counts[block]; ++i) {
        layers->push_back(blocks::MaxViTLayer(
            blocks::MaxViTLayerOptions{.in = in,
                                       .out = design().widths[block],
                                       .stride = i == 0 ? 2 : 1,
                                       .head_width = design().head_width,
                                       .partition_size = design().partition_size,
                                       .dropout = options().dropout.value_or(0),
                                       .attention_dropout = options().attention_dropout.value_or(0),
                                       .drop_rate = drop_rate(rate, layer_index++, layer_count)}));
        in = design().widths[block];
      }
      torch::nn::ModuleDict holder;  // gives the layers the names of torchvision's block
      holder->update({{"layers", layers.ptr()}});
      list->push_back(holder);
      append("blocks_" + std::to_string(block), layers);
    }
  }

  /// Grows along the network from 0 to the full rate of the last layer.
  static double drop_rate(double last, std::int64_t layer_index, std::int64_t layer_count) {
    if (layer_count == 1) return 0;
    return last * static_cast<double>(layer_index) / static_cast<double>(layer_count - 1);
  }

  void build_classifier() {
    const std::int64_t width = design().widths.back();
    norm_ = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
    linear_ = torch::nn::Linear(width, width);
    last_linear_ =
        torch::nn::Linear(torch::nn::LinearOptions(width, options().num_classes).bias(false));
    register_module("classifier", torch::nn::ModuleDict())
        ->update({{"2", norm_.ptr()}, {"3", linear_.ptr()}, {"5", last_linear_.ptr()}});
  }

  /// As torchvision: a narrow normal distribution; normalisations as they are made.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      if (auto* convolution = module->as<torch::nn::Conv2d>())
        initialise(convolution->weight, convolution->bias);
      else if (auto* linear = module->as<torch::nn::Linear>())
        initialise(linear->weight, linear->bias);
    }
  }
  static void initialise(const torch::Tensor& weight, const torch::Tensor& bias) {
    torch::nn::init::normal_(weight, /*mean=*/0, /*std=*/0.02);
    if (bias.defined()) torch::nn::init::zeros_(bias);
  }

  /// Returns the lengths of the maps of the blocks: the stem and each block halve, rounding up.
  static std::array<std::int64_t, 4> map_lengths(std::int64_t length) {
    std::array<std::int64_t, 4> lengths{};
    length = (length + 1) / 2;
    for (std::int64_t& map : lengths) map = length = (length + 1) / 2;
    return lengths;
  }

  bool is_valid_length(std::int64_t length) const {
    if (length < 1) return false;
    for (const std::int64_t map : map_lengths(length))
      if (map % design().partition_size != 0) return false;
    return true;
  }

  static std::string size_text(std::int64_t height, std::int64_t width) {
    return std::to_string(height) + "x" + std::to_string(width);
  }

  static std::string maps_text(std::int64_t height, std::int64_t width) {
    const auto heights = map_lengths(height);
    const auto widths = map_lengths(width);
    std::string text;
    for (std::size_t block = 0; block < heights.size(); ++block)
      text += (text.empty() ? "" : ", ") + size_text(heights[block], widths[block]);
    return text;
  }

  /// Names the multiples of the partition below and above, as they come out of five halvings.
  std::string nearest_lengths(std::int64_t length) const {
    if (is_valid_length(length)) return std::to_string(length);
    const std::int64_t step = 32 * design().partition_size;
    const std::int64_t below = length / step * step;
    const std::string above = std::to_string(below + step);
    return below == 0 ? above : std::to_string(below) + " and " + above;
  }

  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear linear_{nullptr}, last_linear_{nullptr};
};

/// A network of inverted residuals and attention in windows and in grids; its units are the stem
/// and each layer.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Tu et al., MaxViT: Multi-Axis Vision Transformer (2022); torchvision's `maxvit_t`
template <class Policy = Checkpointed<TransformerLayers>>
class MaxViT : public BackboneHolder<MaxViTImpl, Policy> {
 public:
  using BackboneHolder<MaxViTImpl, Policy>::BackboneHolder;
};

using MaxViTT = NamedBackbone<MaxViT<>, "maxvit_t">;

}  // namespace remat

namespace remat {

/// One row of the paper's table 2: `blocks` inverted residuals, of which the first has the stride.
struct MobileNetV2Stage {
  std::int64_t expansion;  ///< the paper's t: how many times wider a block is inside
  std::int64_t width;      ///< c: channels of the result
  std::int64_t blocks;     ///< n
  std::int64_t stride;     ///< s
};

/// A MobileNetV2; there is one.
struct MobileNetV2Design {
  std::string_view name;
  std::int64_t stem_width;  ///< channels of the first convolution
  std::array<MobileNetV2Stage, 7> stages;
  std::int64_t head_width;  ///< channels of the last convolution
};

inline constexpr std::array kMobileNetV2Designs{MobileNetV2Design{
    "mobilenet_v2",
    /*stem_width=*/32,
    // t, c, n, s
    {{{1, 16, 1, 1},
      {6, 24, 2, 2},
      {6, 32, 3, 2},
      {6, 64, 4, 2},
      {6, 96, 3, 1},
      {6, 160, 3, 2},
      {6, 320, 1, 1}}},
    /*head_width=*/1280,
}};
inline constexpr double kMobileNetV2Dropout = 0.2;  // torchvision's, in front of the classifier
inline constexpr double kMobileNetV2LinearDeviation = 0.01;  // torchvision's, of initial weights

namespace blocks {

/// An inverted residual: widen by a 1×1 convolution, mix places by a depthwise one, narrow by a
/// linear 1×1 one; around it the input is added where shapes allow.
///
/// @par Source  Sandler et al., MobileNetV2 (2018), table 1 and figure 4; torchvision's
/// `InvertedResidual`
class MobileNetV2BlockImpl : public torch::nn::Cloneable<MobileNetV2BlockImpl> {
 public:
  MobileNetV2BlockImpl(std::int64_t in, std::int64_t out, std::int64_t expansion,
                       std::int64_t stride)
      : in_(in), out_(out), expansion_(expansion), stride_(stride) {
    reset();
  }

  void reset() override {
    const std::int64_t wide = in_ * expansion_;
    conv = register_module("conv", torch::nn::Sequential());
    if (wide != in_)
      conv->push_back(
          ConvNormAct(padded_convolution(in_, wide, 1), BatchNormConstants{}, activations::relu6_));
    conv->push_back(ConvNormAct(padded_convolution(wide, wide, 3).stride(stride_).groups(wide),
                                BatchNormConstants{}, activations::relu6_));
    conv->push_back(torch::nn::Conv2d(padded_convolution(wide, out_, 1)));
    conv->push_back(torch::nn::BatchNorm2d(out_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor y = conv->forward(x_nchw);  // (N, out, h / stride, w / stride)
    return stride_ == 1 && in_ == out_ ? x_nchw + y : y;
  }

  torch::nn::Sequential conv{nullptr};

 private:
  std::int64_t in_, out_, expansion_, stride_;
};
TORCH_MODULE(MobileNetV2Block);

}  // namespace blocks

/// The module behind `MobileNetV2`.
class MobileNetV2Impl : public FamilyBackbone<MobileNetV2Impl, MobileNetV2Design> {
 public:
  static constexpr std::string_view kFamily = "MobileNetV2";
  static constexpr std::span<const MobileNetV2Design> designs() { return kMobileNetV2Designs; }

  MobileNetV2Impl(const MobileNetV2Design& design, const BackboneOptions& options,
                  CheckpointedChain chain)
      : FamilyBackbone(design, design.head_width, options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    blocks::init_convolutions_by_fan_out(*features_);
    if (options.num_classes != 0) build_classifier();
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return classifier_->forward(std::move(pooled));
  }
  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.1."; }

 private:
  void build_features() {
    std::int64_t in = design().stem_width;
    append_feature(
        blocks::ConvNormAct(blocks::padded_convolution(options().in_channels, in, 3).stride(2),
                            blocks::BatchNormConstants{}, blocks::activations::relu6_));
    for (const MobileNetV2Stage& stage : design().stages)
      for (std::int64_t index = 0; index < stage.blocks; ++index) {
        append_feature(blocks::MobileNetV2Block(in, stage.width, stage.expansion,
                                                index == 0 ? stage.stride : 1));
        in = stage.width;
      }
    append_feature(blocks::ConvNormAct(blocks::padded_convolution(in, design().head_width, 1),
                                       blocks::BatchNormConstants{}, blocks::activations::relu6_));
  }

  void build_classifier() {
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Dropout(options().dropout.value_or(kMobileNetV2Dropout)),
                              torch::nn::Linear(design().head_width, options().num_classes)));
    blocks::init_linear_normal(*classifier_, kMobileNetV2LinearDeviation);
  }

  template <class Unit>
  void append_feature(const Unit& unit) {
    append("features_" + std::to_string(features_->size()), unit);
    features_->push_back(unit);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of inverted residuals for mobile processors; its units are the stem, each block and
/// the last convolution.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks (2018);
/// torchvision's `mobilenet_v2`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class MobileNetV2 : public BackboneHolder<MobileNetV2Impl, Policy> {
 public:
  using BackboneHolder<MobileNetV2Impl, Policy>::BackboneHolder;
  /// Builds the one network of the paper.
  ///
  /// @throws ArgumentError  for options that cannot be
  explicit MobileNetV2(const BackboneOptions& options = {})
      : BackboneHolder<MobileNetV2Impl, Policy>(kMobileNetV2Designs[0], options) {}
};

}  // namespace remat

namespace remat {

/// The nonlinearities of a MobileNetV3, named as in the paper's tables: ReLU, hard swish.
enum class MobileNetV3Activation { RE, HS };

/// One row of the paper's tables 1 and 2: one block.
struct MobileNetV3Row {
  std::int64_t kernel;               ///< of the depthwise convolution
  std::int64_t expanded;             ///< the paper's "exp size": channels inside
  std::int64_t out;                  ///< #out: channels of the result
  bool has_squeeze;                  ///< SE
  MobileNetV3Activation activation;  ///< NL
  std::int64_t stride;               ///< s
};

/// A MobileNetV3.
struct MobileNetV3Design {
  std::string_view name;
  std::span<const MobileNetV3Row> rows;  ///< outlive the backbone, as the tables below do
  std::int64_t last_width;               ///< channels of the last convolution, and of the features
  std::int64_t head_width;               ///< in the middle of the classifier
};

// kernel, exp size, #out, SE, NL, s
inline constexpr std::array kMobileNetV3LargeRows{
    MobileNetV3Row{3, 16, 16, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{3, 64, 24, false, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 72, 24, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 72, 40, true, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{5, 120, 40, true, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 120, 40, true, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{3, 240, 80, false, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{3, 200, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 184, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 184, 80, false, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 480, 112, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{3, 672, 112, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 672, 160, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 960, 160, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 960, 160, true, MobileNetV3Activation::HS, 1},
};
inline constexpr std::array kMobileNetV3SmallRows{
    MobileNetV3Row{3, 16, 16, true, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 72, 24, false, MobileNetV3Activation::RE, 2},
    MobileNetV3Row{3, 88, 24, false, MobileNetV3Activation::RE, 1},
    MobileNetV3Row{5, 96, 40, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 240, 40, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 240, 40, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 120, 48, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 144, 48, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 288, 96, true, MobileNetV3Activation::HS, 2},
    MobileNetV3Row{5, 576, 96, true, MobileNetV3Activation::HS, 1},
    MobileNetV3Row{5, 576, 96, true, MobileNetV3Activation::HS, 1},
};
inline constexpr std::array kMobileNetV3Designs{
    MobileNetV3Design{"mobilenet_v3_small", kMobileNetV3SmallRows, 576, 1024},
    MobileNetV3Design{"mobilenet_v3_large", kMobileNetV3LargeRows, 960, 1280},
};
inline constexpr std::int64_t kMobileNetV3StemWidth = 16;
// torchvision's: normalisation, dropout in the classifier, initial weights of linear layers.
inline constexpr blocks::BatchNormConstants kMobileNetV3Norm{.eps = 1e-3, .momentum = 0.01};
inline constexpr double kMobileNetV3Dropout = 0.2;
inline constexpr double kMobileNetV3LinearDeviation = 0.01;

namespace blocks {

/// An inverted residual with, in some rows, squeeze-and-excitation before the last convolution.
///
/// The squeeze is a quarter of the block's width *inside*, rounded to a multiple of 8.
///
/// @par Source  Howard et al., Searching for MobileNetV3 (2019), figure 4; torchvision's
/// `InvertedResidual` of `mobilenetv3.py`
class MobileNetV3BlockImpl : public torch::nn::Cloneable<MobileNetV3BlockImpl> {
 public:
  MobileNetV3BlockImpl(std::int64_t in, const MobileNetV3Row& row) : in_(in), row_(row) { reset(); }

  void reset() override {
    const std::int64_t wide = row_.expanded;
    block = register_module("block", torch::nn::Sequential());
    if (wide != in_) block->push_back(activated(padded_convolution(in_, wide, 1)));
    block->push_back(
        activated(padded_convolution(wide, wide, row_.kernel).stride(row_.stride).groups(wide)));
    if (row_.has_squeeze)
      block->push_back(SqueezeExcitation(wide, rounded_width(static_cast<double>(wide / 4)),
                                         activations::relu, activations::hardsigmoid));
    block->push_back(ConvNormAct(padded_convolution(wide, row_.out, 1), kMobileNetV3Norm));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = block->forward(x_nchw);  // (N, out, h / stride, w / stride)
    if (row_.stride == 1 && in_ == row_.out) y += x_nchw;
    return y;
  }

  torch::nn::Sequential block{nullptr};

 private:
  ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) const {
    const bool is_relu = row_.activation == MobileNetV3Activation::RE;
    return ConvNormAct(convolution, kMobileNetV3Norm,
                       is_relu ? activations::relu_ : activations::hardswish_);
  }

  std::int64_t in_;
  MobileNetV3Row row_;
};
TORCH_MODULE(MobileNetV3Block);

}  // namespace blocks

/// The module behind `MobileNetV3`.
class MobileNetV3Impl : public FamilyBackbone<MobileNetV3Impl, MobileNetV3Design> {
 public:
  static constexpr std::string_view kFamily = "MobileNetV3";
  static constexpr std::span<const MobileNetV3Design> designs() { return kMobileNetV3Designs; }

  MobileNetV3Impl(const MobileNetV3Design& design, const BackboneOptions& options,
                  CheckpointedChain chain)
      : FamilyBackbone(design, design.last_width, options, std::move(chain)) {
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    features_ = register_module("features", torch::nn::ModuleList());
    build_features();
    blocks::init_convolutions_by_fan_out(*features_);
    blocks::zero_convolution_biases(*features_);
    if (options.num_classes != 0) build_classifier();
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override {
    return classifier_->forward(std::move(pooled));
  }
  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "classifier.3."; }

 private:
  void build_features() {
    std::int64_t in = kMobileNetV3StemWidth;
    append_feature(activated(blocks::padded_convolution(options().in_channels, in, 3).stride(2)));
    for (const MobileNetV3Row& row : design().rows) {
      append_feature(blocks::MobileNetV3Block(in, row));
      in = row.out;
    }
    append_feature(activated(blocks::padded_convolution(in, design().last_width, 1)));
  }

  /// The features end before it: its first layer belongs to the classifier, as in torchvision.
  void build_classifier() {
    const double dropout = options().dropout.value_or(kMobileNetV3Dropout);
    classifier_ = register_module(
        "classifier",
        torch::nn::Sequential(torch::nn::Linear(design().last_width, design().head_width),
                              torch::nn::Functional(blocks::activations::hardswish_),
                              torch::nn::Dropout(torch::nn::DropoutOptions(dropout).inplace(true)),
                              torch::nn::Linear(design().head_width, options().num_classes)));
    blocks::init_linear_normal(*classifier_, kMobileNetV3LinearDeviation);
  }

  static blocks::ConvNormAct activated(const torch::nn::Conv2dOptions& convolution) {
    return blocks::ConvNormAct(convolution, kMobileNetV3Norm, blocks::activations::hardswish_);
  }

  template <class Unit>
  void append_feature(const Unit& unit) {
    append("features_" + std::to_string(features_->size()), unit);
    features_->push_back(unit);
  }

  torch::nn::ModuleList features_{nullptr};  // holds the units; the chain runs them
  torch::nn::Sequential classifier_{nullptr};
};

/// A network of inverted residuals that was found by search; its units are the stem, each block and
/// the last convolution.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Howard et al., Searching for MobileNetV3 (2019), tables 1 and 2; torchvision's
/// `mobilenet_v3_small` and `mobilenet_v3_large`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class MobileNetV3 : public BackboneHolder<MobileNetV3Impl, Policy> {
 public:
  using BackboneHolder<MobileNetV3Impl, Policy>::BackboneHolder;
};

using MobileNetV3Small = NamedBackbone<MobileNetV3<>, "mobilenet_v3_small">;
using MobileNetV3Large = NamedBackbone<MobileNetV3<>, "mobilenet_v3_large">;

}  // namespace remat

namespace remat {

/// How many tokens an image is cut into, in a column and in a row.
struct TokenGrid {
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  /// Returns how many there are.
  std::int64_t area() const { return rows * columns; }

  friend bool operator==(const TokenGrid&, const TokenGrid&) = default;
};

/// Makes position embeddings of one grid of patches fit another, by bicubic interpolation whose
/// corners stay where they are.
///
/// The class token's embedding, which comes first, is not touched; nor is anything if the grids are
/// equal.
///
/// @param embedding  (1, 1 + from.area(), width)
/// @return           (1, 1 + to.area(), width), of the same type
/// @throws ArgumentError  if the embedding is not one of the grid `from`, or a grid is empty
/// @par Source  torchvision's `interpolate_embeddings`, which knows square grids only
inline torch::Tensor resize_position_embedding(const torch::Tensor& embedding, TokenGrid from,
                                               TokenGrid to) {
  const auto text = [](TokenGrid grid) {
    return std::to_string(grid.rows) + "x" + std::to_string(grid.columns);
  };
  const bool is_right = embedding.defined() && embedding.dim() == 3 && embedding.size(0) == 1 &&
                        from.rows > 0 && from.columns > 0 && to.rows > 0 && to.columns > 0 &&
                        embedding.size(1) == 1 + from.area();
  require(is_right, [&] {
    return ErrorMessage("remat.position_embedding.shape")
        .where("remat::resize_position_embedding")
        .what("the embedding is " +
              (embedding.defined()
                   ? detail::describe(detail::Geometry::of(embedding), embedding.device())
                   : "undefined") +
              " and is to go from a grid of " + text(from) + " to one of " + text(to) +
              ", an embedding (1, 1 + rows * columns, width) of the first grid was expected");
  });
  if (from == to) return embedding;
  const std::int64_t width = embedding.size(2);
  const torch::Tensor map =
      embedding.slice(1, 1).transpose(1, 2).reshape({1, width, from.rows, from.columns});
  // Some devices interpolate no half precision, and where they do they round each step.
  const torch::Tensor precise = map.scalar_type() == at::kDouble ? map : map.to(at::kFloat);
  const torch::Tensor resized =
      at::upsample_bicubic2d(precise, {to.rows, to.columns}, /*align_corners=*/true)
          .to(embedding.scalar_type())
          .flatten(2)
          .transpose(1, 2);  // (1, to.area(), width)
  return at::cat({embedding.slice(1, 0, 1), resized}, 1);
}

}  // namespace remat

namespace remat {

/// A RegNetY: what the paper's linear rule (d, w_0, w_a, w_m) gives after rounding.
struct RegNetDesign {
  std::string_view name;
  std::array<std::int64_t, 4> block_count;  ///< blocks of each stage
  std::array<std::int64_t, 4> width;        ///< channels of each stage
  std::int64_t group_width;                 ///< channels of a group of the 3×3 convolutions
};

// name, blocks, widths, group width
inline constexpr std::array kRegNetYDesigns{
    RegNetDesign{"regnet_y_400mf", {1, 3, 6, 6}, {48, 104, 208, 440}, 8},
    RegNetDesign{"regnet_y_800mf", {1, 3, 8, 2}, {64, 144, 320, 784}, 16},
    RegNetDesign{"regnet_y_1_6gf", {2, 6, 17, 2}, {48, 120, 336, 888}, 24},
    RegNetDesign{"regnet_y_3_2gf", {2, 5, 13, 1}, {72, 216, 576, 1512}, 24},
    RegNetDesign{"regnet_y_8gf", {2, 4, 10, 1}, {224, 448, 896, 2016}, 56},
    RegNetDesign{"regnet_y_16gf", {2, 4, 11, 1}, {224, 448, 1232, 3024}, 112},
    RegNetDesign{"regnet_y_32gf", {2, 5, 12, 1}, {232, 696, 1392, 3712}, 232},
};
inline constexpr std::int64_t kRegNetStemWidth = 32;
inline constexpr double kRegNetLinearDeviation = 0.01;  // torchvision's, of initial weights

namespace blocks {

/// The branch of a RegNetY block: a grouped 3×3 convolution between two 1×1 ones, with
/// squeeze-and-excitation before the last. Nothing is narrowed: the bottleneck ratio is 1.
///
/// The squeeze is a quarter of the block's *input*.
///
/// @par Source  torchvision's `BottleneckTransform`
class RegNetBranchImpl : public torch::nn::Cloneable<RegNetBranchImpl> {
 public:
  RegNetBranchImpl(std::int64_t in, std::int64_t out, std::int64_t stride, std::int64_t group_width)
      : in_(in), out_(out), stride_(stride), group_width_(group_width) {
    reset();
  }

  void reset() override {
    a = register_module("a", ConvNormAct(padded_convolution(in_, out_, 1), BatchNormConstants{},
                                         activations::relu_));
    b = register_module(
        "b",
        ConvNormAct(padded_convolution(out_, out_, 3).stride(stride_).groups(out_ / group_width_),
                    BatchNormConstants{}, activations::relu_));
    se = register_module("se",
                         SqueezeExcitation(out_, in_ / 4, activations::relu, activations::sigmoid));
    c = register_module("c", ConvNormAct(padded_convolution(out_, out_, 1)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = a->forward(x_nchw);  // (N, out, h, w)
    y = b->forward(y);                     // (N, out, h / stride, w / stride)
    return c->forward(se->forward(y));     // (N, out, h / stride, w / stride)
  }

  ConvNormAct a{nullptr}, b{nullptr}, c{nullptr};
  SqueezeExcitation se{nullptr};

 private:
  std::int64_t in_, out_, stride_, group_width_;
};
TORCH_MODULE(RegNetBranch);

/// A residual block of a RegNetY; where the shape changes, a strided 1×1 convolution projects the
/// input.
///
/// @par Source  Radosavovic et al., Designing Network Design Spaces (2020), figure 4 with
/// squeeze-and-excitation; torchvision's `ResBottleneckBlock`
class RegNetBlockImpl : public torch::nn::Cloneable<RegNetBlockImpl> {
 public:
  RegNetBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride, std::int64_t group_width)
      : in_(in), out_(out), stride_(stride), group_width_(group_width) {
    reset();
  }

  void reset() override {
    proj = nullptr;
    if (in_ != out_ || stride_ != 1)
      proj = register_module("proj", ConvNormAct(padded_convolution(in_, out_, 1).stride(stride_)));
    f = register_module("f", RegNetBranch(in_, out_, stride_, group_width_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor shortcut = proj.is_empty() ? x_nchw : proj->forward(x_nchw);
    return (shortcut + f->forward(x_nchw)).relu_();  // (N, out, h / stride, w / stride)
  }

  ConvNormAct proj{nullptr};
  RegNetBranch f{nullptr};

 private:
  std::int64_t in_, out_, stride_, group_width_;
};
TORCH_MODULE(RegNetBlock);

}  // namespace blocks

/// The module behind `RegNet`.
class RegNetImpl : public FamilyBackbone<RegNetImpl, RegNetDesign> {
 public:
  static constexpr std::string_view kFamily = "RegNet";
  static constexpr std::span<const RegNetDesign> designs() { return kRegNetYDesigns; }

  RegNetImpl(const RegNetDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, design.width.back(), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    build_stem();
    build_stages();
    if (options.num_classes != 0)
      fc_ = register_module("fc", torch::nn::Linear(design.width.back(), options.num_classes));
    // Biases of squeeze-and-excitation stay as LibTorch draws them, as in torchvision.
    blocks::init_convolutions_by_fan_out(*this);
    blocks::init_linear_normal(*this, kRegNetLinearDeviation);
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return fc_->forward(pooled); }
  std::string first_convolution() const override { return "stem.0.weight"; }
  std::string head() const override { return "fc."; }

 private:
  void build_stem() {
    const blocks::ConvNormAct stem(
        blocks::padded_convolution(options().in_channels, kRegNetStemWidth, 3).stride(2),
        blocks::BatchNormConstants{}, blocks::activations::relu_);
    append("stem", register_module("stem", stem));
  }

  void build_stages() {
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> stages;
    std::int64_t in = kRegNetStemWidth;
    for (std::size_t index = 0; index < design().width.size(); ++index) {
      const std::string name = "block" + std::to_string(index + 1);
      const std::int64_t width = design().width[index];
      torch::nn::Sequential stage;
      for (std::int64_t i = 0; i < design().block_count[index]; ++i) {
        stage->push_back(name + "-" + std::to_string(i),
                         blocks::RegNetBlock(in, width, i == 0 ? 2 : 1, design().group_width));
        in = width;
      }
      append(name, stage);
      stages.emplace_back(name, stage.ptr());
    }
    register_module("trunk_output", torch::nn::ModuleDict(stages));
  }

  torch::nn::Linear fc_{nullptr};
};

/// A network of residual blocks whose widths and depths follow a linear rule; its units are the
/// stem and each block.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Radosavovic et al., Designing Network Design Spaces (2020), figure 15 and table 4;
/// torchvision's `regnet_y_*`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class RegNet : public BackboneHolder<RegNetImpl, Policy> {
 public:
  using BackboneHolder<RegNetImpl, Policy>::BackboneHolder;
};

using RegNetY400MF = NamedBackbone<RegNet<>, "regnet_y_400mf">;
using RegNetY800MF = NamedBackbone<RegNet<>, "regnet_y_800mf">;
using RegNetY1_6GF = NamedBackbone<RegNet<>, "regnet_y_1_6gf">;
using RegNetY3_2GF = NamedBackbone<RegNet<>, "regnet_y_3_2gf">;
using RegNetY8GF = NamedBackbone<RegNet<>, "regnet_y_8gf">;
using RegNetY16GF = NamedBackbone<RegNet<>, "regnet_y_16gf">;
using RegNetY32GF = NamedBackbone<RegNet<>, "regnet_y_32gf">;

}  // namespace remat

namespace remat {

/// The two residual blocks of the paper's figure 5.
enum class ResNetBlock { kBasic, kBottleneck };

/// One row of the paper's table 1.
struct ResNetDesign {
  std::string_view name;                    ///< torchvision's
  int depth;                                ///< layers with weights, as in the name
  ResNetBlock block;                        ///< which block the stages repeat
  std::array<std::int64_t, 4> block_count;  ///< blocks in each of the four stages
};

inline constexpr std::array kResNetDesigns{
    ResNetDesign{"resnet18", 18, ResNetBlock::kBasic, {2, 2, 2, 2}},
    ResNetDesign{"resnet34", 34, ResNetBlock::kBasic, {3, 4, 6, 3}},
    ResNetDesign{"resnet50", 50, ResNetBlock::kBottleneck, {3, 4, 6, 3}},
    ResNetDesign{"resnet101", 101, ResNetBlock::kBottleneck, {3, 4, 23, 3}},
    ResNetDesign{"resnet152", 152, ResNetBlock::kBottleneck, {3, 8, 36, 3}},
};
inline constexpr std::int64_t kResNetStemWidth = 64;
inline constexpr std::array<std::int64_t, 4> kResNetStageWidths{64, 128, 256, 512};

/// Returns the design of that depth.
///
/// @throws ArgumentError  if there is none
inline const ResNetDesign& resnet_design(int depth) {
  std::string depths;
  for (const ResNetDesign& design : kResNetDesigns) {
    if (design.depth == depth) return design;
    depths += (depths.empty() ? "" : ", ") + std::to_string(design.depth);
  }
  throw ArgumentError(
      ErrorMessage("remat.backbone.depth")
          .where("remat::ResNet")
          .what("the depth is " + std::to_string(depth) + ", one of " + depths + " was expected"));
}

namespace blocks {

/// Makes a convolution without bias, padded so that stride 1 keeps the size.
inline torch::nn::Conv2d resnet_convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                            std::int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Makes the projection of a shortcut: a 1×1 convolution and its normalisation (the paper's option
/// B).
inline torch::nn::Sequential resnet_projection(std::int64_t in, std::int64_t out,
                                               std::int64_t stride) {
  return torch::nn::Sequential(resnet_convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out));
}

/// Two 3×3 convolutions around which the input is added.
///
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), figure 5, left;
/// torchvision's `BasicBlock`
class BasicBlockImpl : public torch::nn::Cloneable<BasicBlockImpl> {
 public:
  static constexpr std::int64_t kExpansion = 1;

  BasicBlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : in_(in), width_(width), stride_(stride) {
    reset();
  }

  void reset() override {
    conv1 = register_module("conv1", resnet_convolution(in_, width_, 3, stride_));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(width_));
    conv2 = register_module("conv2", resnet_convolution(width_, width_, 3, 1));
    bn2 = register_module("bn2", torch::nn::BatchNorm2d(width_));
    downsample = nullptr;
    if (stride_ != 1 || in_ != width_)
      downsample = register_module("downsample", resnet_projection(in_, width_, stride_));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y =
        bn1->forward(conv1->forward(x)).relu_();  // (N, width, h / stride, w / stride)
    y = bn2->forward(conv2->forward(y));          // (N, width, h / stride, w / stride)
    y += downsample.is_empty() ? x : downsample->forward(x);
    return y.relu_();
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  torch::nn::Sequential downsample{nullptr};

 private:
  std::int64_t in_, width_, stride_;
};
TORCH_MODULE(BasicBlock);

/// A 3×3 convolution between two 1×1 ones that narrow and widen, around which the input is added.
///
/// The stride belongs to the 3×3, as in torchvision; the paper has it on the first 1×1, which is
/// less accurate.
///
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), figure 5, right;
/// torchvision's `Bottleneck`
class BottleneckImpl : public torch::nn::Cloneable<BottleneckImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;

  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : in_(in), width_(width), stride_(stride) {
    reset();
  }

  void reset() override {
    const std::int64_t out = kExpansion * width_;
    conv1 = register_module("conv1", resnet_convolution(in_, width_, 1, 1));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(width_));
    conv2 = register_module("conv2", resnet_convolution(width_, width_, 3, stride_));
    bn2 = register_module("bn2", torch::nn::BatchNorm2d(width_));
    conv3 = register_module("conv3", resnet_convolution(width_, out, 1, 1));
    bn3 = register_module("bn3", torch::nn::BatchNorm2d(out));
    downsample = nullptr;
    if (stride_ != 1 || in_ != out)
      downsample = register_module("downsample", resnet_projection(in_, out, stride_));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = bn1->forward(conv1->forward(x)).relu_();  // (N, width, h, w)
    y = bn2->forward(conv2->forward(y)).relu_();  // (N, width, h / stride, w / stride)
    y = bn3->forward(conv3->forward(y));          // (N, 4 width, h / stride, w / stride)
    y += downsample.is_empty() ? x : downsample->forward(x);
    return y.relu_();
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  torch::nn::Sequential downsample{nullptr};

 private:
  std::int64_t in_, width_, stride_;
};
TORCH_MODULE(Bottleneck);

/// The layers in front of the first block, as one unit: a strided 7×7 convolution and a strided
/// pooling.
class ResNetStemImpl : public torch::nn::Cloneable<ResNetStemImpl> {
 public:
  explicit ResNetStemImpl(std::int64_t in_channels) : in_channels_(in_channels) { reset(); }

  void reset() override {
    conv1 = register_module("conv1", resnet_convolution(in_channels_, kResNetStemWidth, 7, 2));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(kResNetStemWidth));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    const torch::Tensor x =
        bn1->forward(conv1->forward(images_nchw)).relu_();  // (N, 64, H / 2, W / 2)
    return at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2,
                          /*padding=*/1);  // (N, 64, H / 4, W / 4)
  }

  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};

 private:
  std::int64_t in_channels_;
};
TORCH_MODULE(ResNetStem);

}  // namespace blocks

/// The module behind `ResNet`.
class ResNetImpl : public FamilyBackbone<ResNetImpl, ResNetDesign> {
 public:
  static constexpr std::string_view kFamily = "ResNet";
  static constexpr std::span<const ResNetDesign> designs() { return kResNetDesigns; }

  ResNetImpl(const ResNetDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, raw_width(design), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    blocks::ResNetStem stem(options.in_channels);
    register_module("conv1", stem->conv1);
    register_module("bn1", stem->bn1);
    append("stem", stem);
    if (design.block == ResNetBlock::kBasic)
      register_stages<blocks::BasicBlock>(design);
    else
      register_stages<blocks::Bottleneck>(design);
    if (options.num_classes != 0)
      fc_ = register_module("fc", torch::nn::Linear(raw_width(design), options.num_classes));
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "conv1.weight"; }
  std::string head() const override { return "fc."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return fc_->forward(pooled); }

 private:
  static std::int64_t raw_width(const ResNetDesign& design) {
    return kResNetStageWidths.back() * (design.block == ResNetBlock::kBasic
                                            ? blocks::BasicBlockImpl::kExpansion
                                            : blocks::BottleneckImpl::kExpansion);
  }

  template <class Block>
  void register_stages(const ResNetDesign& design) {
    std::int64_t in = kResNetStemWidth;
    for (std::size_t stage = 0; stage < design.block_count.size(); ++stage) {
      const std::string name = "layer" + std::to_string(stage + 1);
      torch::nn::Sequential layer;
      for (std::int64_t index = 0; index < design.block_count[stage]; ++index) {
        const std::int64_t stride = stage > 0 && index == 0 ? 2 : 1;
        layer->push_back(Block(in, kResNetStageWidths[stage], stride));
        in = kResNetStageWidths[stage] * Block::ContainedType::kExpansion;
      }
      register_module(name, layer);
      append(name, layer);
    }
  }

  /// As torchvision: He et al., Delving Deep into Rectifiers (2015), normal, by the fan out, for
  /// convolutions; normalisations and linear layers as LibTorch makes them (scale 1 and shift 0).
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false))
      if (auto* convolution = module->as<torch::nn::Conv2d>())
        torch::nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
  }

  torch::nn::Linear fc_{nullptr};
};

/// A residual network; its units are the stem and each residual block.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), table 1;
/// torchvision's `resnet*`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class ResNet : public BackboneHolder<ResNetImpl, Policy> {
 public:
  using BackboneHolder<ResNetImpl, Policy>::BackboneHolder;

  /// @param depth  18, 34, 50, 101 or 152
  /// @throws ArgumentError  for another depth, or options that cannot be
  explicit ResNet(int depth, const BackboneOptions& options = {})
      : BackboneHolder<ResNetImpl, Policy>(resnet_design(depth), options) {}
};

using ResNet18 = NamedBackbone<ResNet<>, "resnet18">;
using ResNet34 = NamedBackbone<ResNet<>, "resnet34">;
using ResNet50 = NamedBackbone<ResNet<>, "resnet50">;
using ResNet101 = NamedBackbone<ResNet<>, "resnet101">;
using ResNet152 = NamedBackbone<ResNet<>, "resnet152">;

}  // namespace remat

namespace remat::blocks {

/// Multiplies the last dimension of `x` by a matrix and adds a bias, as one operation, which a keep
/// policy then finds whole.
///
/// The forward of LibTorch's linear layer adds the bias in a pass of its own, in place, where the
/// input has more than two dimensions, and so does LibTorch 1.13 where it has more than three.
///
/// @param weight  (out, in)
/// @param bias    (out), or undefined
inline torch::Tensor linear(const torch::Tensor& x, const torch::Tensor& weight,
                            const torch::Tensor& bias) {
  std::vector<std::int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return at::linear(x.reshape({-1, x.size(-1)}), weight, bias).view(shape);
}

/// Applies a linear layer so.
inline torch::Tensor linear(const torch::nn::Linear& layer, const torch::Tensor& x) {
  return linear(x, layer->weight, layer->bias);
}

}  // namespace remat::blocks

namespace remat::blocks {

/// Makes one token of every 2×2 tokens: half the height and width, twice the channels.
///
/// A map of odd height or width is padded with zeros at the bottom or on the right.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.1; torchvision's `PatchMerging`
class PatchMergingImpl : public torch::nn::Cloneable<PatchMergingImpl> {
 public:
  PatchMergingImpl(std::int64_t width, double norm_eps) : width_(width), norm_eps_(norm_eps) {
    reset();
  }

  void reset() override {
    reduction = register_module(
        "reduction",
        torch::nn::Linear(torch::nn::LinearOptions(4 * width_, 2 * width_).bias(false)));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4 * width_}).eps(norm_eps_)));
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const std::int64_t odd_rows = map_nhwc.size(1) % 2, odd_columns = map_nhwc.size(2) % 2;
    const torch::Tensor even =
        odd_rows + odd_columns == 0
            ? map_nhwc
            : at::constant_pad_nd(map_nhwc, {0, 0, 0, odd_columns, 0, odd_rows});
    const auto corner = [&](std::int64_t row, std::int64_t column) {
      return even.slice(1, row, even.size(1), 2).slice(2, column, even.size(2), 2);
    };
    // Column by column, as the published weights expect it.
    const torch::Tensor merged = at::cat({corner(0, 0), corner(1, 0), corner(0, 1), corner(1, 1)},
                                         -1);         // (N, H / 2, W / 2, 4 C)
    return linear(reduction, norm->forward(merged));  // (N, H / 2, W / 2, 2 C)
  }

  torch::nn::Linear reduction{nullptr};
  torch::nn::LayerNorm norm{nullptr};

 private:
  std::int64_t width_;
  double norm_eps_;
};
TORCH_MODULE(PatchMerging);

}  // namespace remat::blocks

namespace remat::blocks {

/// Two linear layers with a GELU between, on the last dimension; dropout behind each.
///
/// Children are `0` and `3`, the linear layers, and `2` and `4`, the dropouts; `1` would be the
/// activation.
///
/// @par Source  Vaswani et al., Attention Is All You Need (2017), section 3.3, with the GELU of
/// BERT; torchvision's `MLP`
class MlpImpl : public torch::nn::Cloneable<MlpImpl> {
 public:
  /// @param width    channels of the input and of the result
  /// @param hidden   channels in between
  /// @param dropout  rate
  MlpImpl(std::int64_t width, std::int64_t hidden, double dropout)
      : width_(width), hidden_(hidden), rate_(dropout) {
    reset();
  }

  /// Makes the layers anew, initialised as torchvision's transformers do: Glorot's uniform
  /// distribution for weights, almost zero for biases.
  void reset() override {
    widen = register_module("0", torch::nn::Linear(width_, hidden_));
    inner_dropout = register_module("2", torch::nn::Dropout(rate_));
    narrow = register_module("3", torch::nn::Linear(hidden_, width_));
    outer_dropout = register_module("4", torch::nn::Dropout(rate_));
    for (const auto& linear : {widen, narrow}) {
      torch::nn::init::xavier_uniform_(linear->weight);
      torch::nn::init::normal_(linear->bias, /*mean=*/0, /*std=*/1e-6);
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor wide = inner_dropout->forward(at::gelu(linear(widen, x)));  // (..., hidden)
    return outer_dropout->forward(linear(narrow, wide));                            // (..., width)
  }

  torch::nn::Linear widen{nullptr}, narrow{nullptr};
  torch::nn::Dropout inner_dropout{nullptr}, outer_dropout{nullptr};

 private:
  std::int64_t width_, hidden_;
  double rate_;
};
TORCH_MODULE(Mlp);

}  // namespace remat::blocks

namespace remat::blocks {

/// Cuts a map into windows that do not overlap.
///
/// @param map_nhwc  (N, H, W, C), H and W multiples of the window's
/// @return          (N * windows, window.area(), C), windows of a row one after the other
inline torch::Tensor to_windows(const torch::Tensor& map_nhwc, WindowSize window) {
  const std::int64_t rows = map_nhwc.size(1) / window.height;
  const std::int64_t columns = map_nhwc.size(2) / window.width;
  const std::int64_t channels = map_nhwc.size(3);
  return map_nhwc.view({map_nhwc.size(0), rows, window.height, columns, window.width, channels})
      .permute({0, 1, 3, 2, 4, 5})
      .reshape({map_nhwc.size(0) * rows * columns, window.area(), channels});
}

/// Puts the windows of `to_windows` together again.
///
/// @param map  size of the map
inline torch::Tensor from_windows(const torch::Tensor& windows, WindowSize window, WindowSize map) {
  const std::int64_t rows = map.height / window.height;
  const std::int64_t columns = map.width / window.width;
  return windows.view({-1, rows, columns, window.height, window.width, windows.size(2)})
      .permute({0, 1, 3, 2, 4, 5})
      .reshape({-1, map.height, map.width, windows.size(2)});
}

/// Returns what keeps tokens apart that only a cyclic shift has brought into one window: -100
/// between them, 0 elsewhere.
///
/// @param shift  by how many places the map was moved up and to the left
/// @return       (windows, window.area(), window.area())
/// @par Source  Liu et al., Swin Transformer (2021), figure 4
inline torch::Tensor shift_mask(WindowSize map, WindowSize window, WindowSize shift,
                                const torch::TensorOptions& options) {
  constexpr double kApart = -100;  // of softmax's exponent: e^-100 is nothing beside e^0
  const auto came_around = [&](std::int64_t length, std::int64_t places) {
    return (at::arange(length, options.dtype(at::kLong)) >= length - places).to(at::kLong);
  };
  // The map falls into four parts, whose borders lie inside the last windows.
  const torch::Tensor parts = 2 * came_around(map.height, shift.height).unsqueeze(1) +
                              came_around(map.width, shift.width);  // (H, W)
  const torch::Tensor windows =
      to_windows(parts.view({1, map.height, map.width, 1}), window);  // (windows, area, 1)
  return (windows != windows.transpose(1, 2)).to(options.dtype()) * kApart;
}

/// What a `ShiftedWindowAttention` is built from; meant for designated initialisers.
struct WindowAttentionOptions {
  std::int64_t width = 0;       ///< channels of a token
  std::int64_t head_count = 1;  ///< they divide the width
  WindowSize window = {};
  WindowSize shift = {};         ///< by how much windows are moved against the map; 0: not
  double dropout = 0;            ///< rate behind the projection
  double attention_dropout = 0;  ///< rate on the attention's weights
};

/// Self-attention inside windows, with a learned bias for each distance between two tokens.
///
/// Maps that are no multiples of the window are padded at the bottom and on the right, before the
/// shift, and cut to size again. Where one window covers the padded map, nothing is shifted.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.2; torchvision's
/// `ShiftedWindowAttention`
class ShiftedWindowAttentionImpl : public torch::nn::Cloneable<ShiftedWindowAttentionImpl> {
 public:
  explicit ShiftedWindowAttentionImpl(const WindowAttentionOptions& options) : options_(options) {
    require(options.head_count > 0 && options.width % options.head_count == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::ShiftedWindowAttention")
          .what("the width is " + std::to_string(options.width) + " and there are " +
                std::to_string(options.head_count) +
                " heads, a width that the heads divide was expected");
    });
    reset();
  }

  void reset() override {
    relative_position_bias_table =
        register_parameter("relative_position_bias_table",
                           at::zeros({options_.window.distance_count(), options_.head_count}));
    relative_position_index = register_buffer(
        "relative_position_index", blocks::relative_position_index(options_.window).flatten());
    qkv = register_module("qkv", torch::nn::Linear(options_.width, 3 * options_.width));
    proj = register_module("proj", torch::nn::Linear(options_.width, options_.width));
    trunc_normal_(relative_position_bias_table, /*mean=*/0, /*standard_deviation=*/0.02);
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const WindowSize map = {map_nhwc.size(1), map_nhwc.size(2)};
    const WindowSize padded = {rounded_up(map.height, options_.window.height),
                               rounded_up(map.width, options_.window.width)};
    const WindowSize shift = {options_.window.height < padded.height ? options_.shift.height : 0,
                              options_.window.width < padded.width ? options_.shift.width : 0};
    const bool is_shifted = shift != WindowSize{};

    torch::Tensor x = map_nhwc;
    if (padded != map)
      x = at::constant_pad_nd(x,
                              {0, 0, 0, padded.width - map.width, 0, padded.height - map.height});
    if (is_shifted) x = at::roll(x, {-shift.height, -shift.width}, {1, 2});
    x = to_windows(x, options_.window);  // (N * windows, area, C)
    x = attend(
        x, is_shifted ? shift_mask(padded, options_.window, shift, x.options()) : torch::Tensor());
    x = from_windows(x, options_.window, padded);
    if (is_shifted) x = at::roll(x, {shift.height, shift.width}, {1, 2});
    return x.slice(1, 0, map.height).slice(2, 0, map.width).contiguous();  // (N, H, W, C)
  }

  /// Returns what this was built from.
  const WindowAttentionOptions& options() const { return options_; }

  torch::Tensor relative_position_bias_table, relative_position_index;
  torch::nn::Linear qkv{nullptr}, proj{nullptr};

 private:
  static std::int64_t rounded_up(std::int64_t length, std::int64_t window) {
    return (length + window - 1) / window * window;
  }

  /// @param mask  undefined, or (windows, area, area)
  torch::Tensor attend(const torch::Tensor& windows, const torch::Tensor& mask) {
    torch::Tensor x = mix(windows, mask);
    x = linear(proj, x);
    return at::dropout(x, options_.dropout, is_training());  // (N * windows, area, C)
  }

  torch::Tensor mix(const torch::Tensor& windows, const torch::Tensor& mask) {
    const std::int64_t batch = windows.size(0), area = windows.size(1);
    const std::int64_t heads = options_.head_count, depth = options_.width / heads;
    const auto parts = linear(qkv, windows)
                           .view({batch, area, 3, heads, depth})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);  // query, key, value, each (N * windows, heads, area, depth)
    const torch::Tensor query = parts[0] * std::pow(static_cast<double>(depth), -0.5);
    torch::Tensor weights = query.matmul(parts[1].transpose(-2, -1)) +
                            relative_position_bias(relative_position_bias_table,
                                                   relative_position_index, options_.window);
    if (mask.defined())
      weights = (weights.view({-1, mask.size(0), heads, area, area}) + mask.unsqueeze(1))
                    .view({batch, heads, area, area});
    weights = at::dropout(weights.softmax(-1), options_.attention_dropout, is_training());
    return weights.matmul(parts[2]).transpose(1, 2).reshape({batch, area, options_.width});
  }

  WindowAttentionOptions options_;
};
TORCH_MODULE(ShiftedWindowAttention);

}  // namespace remat::blocks

namespace remat::blocks {

/// What a `SwinBlock` is built from; meant for designated initialisers.
struct SwinBlockOptions {
  WindowAttentionOptions attention = {};
  std::int64_t hidden = 0;  ///< channels inside the MLP
  double drop_rate = 0;     ///< with which probability stochastic depth drops a sample's branch
  double norm_eps = 1e-5;   ///< of both layer normalisations
};

/// A transformer layer on a map of tokens: attention in windows, and an MLP.
///
/// @par Source  Liu et al., Swin Transformer (2021), figure 3b and equation 3; torchvision's
/// `SwinTransformerBlock`
class SwinBlockImpl : public torch::nn::Cloneable<SwinBlockImpl> {
 public:
  explicit SwinBlockImpl(const SwinBlockOptions& options) : options_(options) { reset(); }

  void reset() override {
    const std::int64_t width = options_.attention.width;
    const auto norm = [&] {
      return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}).eps(options_.norm_eps));
    };
    norm1 = register_module("norm1", norm());
    attn = register_module("attn", ShiftedWindowAttention(options_.attention));
    stochastic_depth = register_module("stochastic_depth", StochasticDepth(options_.drop_rate));
    norm2 = register_module("norm2", norm());
    mlp = register_module("mlp", Mlp(width, options_.hidden, options_.attention.dropout));
  }

  torch::Tensor forward(const torch::Tensor& map_nhwc) {
    const torch::Tensor x =
        map_nhwc + stochastic_depth->forward(attn->forward(norm1->forward(map_nhwc)));
    return x + stochastic_depth->forward(mlp->forward(norm2->forward(x)));  // (N, H, W, C)
  }

  /// Returns what this was built from.
  const SwinBlockOptions& options() const { return options_; }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  ShiftedWindowAttention attn{nullptr};
  StochasticDepth stochastic_depth{nullptr};
  Mlp mlp{nullptr};

 private:
  SwinBlockOptions options_;
};
TORCH_MODULE(SwinBlock);

}  // namespace remat::blocks

namespace remat {

/// One variant of the paper's section 3.3.
struct SwinDesign {
  std::string_view name;                    ///< torchvision's
  std::int64_t width;                       ///< channels of the first stage; each next has twice
  std::array<std::int64_t, 4> block_count;  ///< blocks in each of the four stages
  std::array<std::int64_t, 4> head_count;   ///< heads of each stage's attention
  double stochastic_depth;                  ///< rate of the last block, as torchvision trained it
};

inline constexpr std::array kSwinDesigns{
    SwinDesign{"swin_t", 96, {2, 2, 6, 2}, {3, 6, 12, 24}, 0.2},
    SwinDesign{"swin_s", 96, {2, 2, 18, 2}, {3, 6, 12, 24}, 0.3},
    SwinDesign{"swin_b", 128, {2, 2, 18, 2}, {4, 8, 16, 32}, 0.5},
};
inline constexpr std::int64_t kSwinPatchSize = 4;
inline constexpr std::int64_t kSwinWindow = 7;
inline constexpr std::int64_t kSwinMlpRatio = 4;
inline constexpr double kSwinNormEps = 1e-5;

namespace blocks {

/// Makes a map of tokens of an image: a strided convolution and a layer normalisation. The children
/// are `0` and `2`.
///
/// @par Source  Liu et al., Swin Transformer (2021), section 3.1
class SwinEmbeddingImpl : public torch::nn::Cloneable<SwinEmbeddingImpl> {
 public:
  SwinEmbeddingImpl(std::int64_t in_channels, std::int64_t width)
      : in_channels_(in_channels), width_(width) {
    reset();
  }

  void reset() override {
    conv = register_module(
        "0",
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(in_channels_, width_, kSwinPatchSize).stride(kSwinPatchSize)));
    norm = register_module(
        "2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width_}).eps(kSwinNormEps)));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    return norm->forward(
        conv->forward(images_nchw).permute({0, 2, 3, 1}));  // (N, H / 4, W / 4, width)
  }

  torch::nn::Conv2d conv{nullptr};
  torch::nn::LayerNorm norm{nullptr};

 private:
  std::int64_t in_channels_, width_;
};
TORCH_MODULE(SwinEmbedding);

}  // namespace blocks

/// The module behind `SwinTransformer`.
class SwinTransformerImpl : public FamilyBackbone<SwinTransformerImpl, SwinDesign> {
 public:
  static constexpr std::string_view kFamily = "SwinTransformer";
  static constexpr std::span<const SwinDesign> designs() { return kSwinDesigns; }

  SwinTransformerImpl(const SwinDesign& design, const BackboneOptions& options,
                      CheckpointedChain chain)
      : FamilyBackbone(design, stage_width(design, 3), options, std::move(chain)) {
    register_features();
    const auto norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({raw_width()}).eps(kSwinNormEps)));
    append("norm", plain(norm));
    if (options.num_classes != 0)
      head_ = register_module("head", torch::nn::Linear(raw_width(), options.num_classes));
    register_projection();
    initialise();
  }

  /// Computes the last map of tokens, normalised, as (N, C, H / 32, W / 32), rounded up.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return FamilyBackbone::forward_features(images_nchw).permute({0, 3, 1, 2});
  }

  std::string first_convolution() const override { return "features.0.0.weight"; }
  std::string head() const override { return "head."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return head_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(height >= kSwinPatchSize && width >= kSwinPatchSize, [&] {
      const std::string least = std::to_string(kSwinPatchSize);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + std::to_string(height) + "x" + std::to_string(width) +
                " pixels, at least " + least + "x" + least + " was expected")
          .cause("A token is made of that many pixels")
          .cure("Any larger size will do, whatever it is a multiple of");
    });
  }

 private:
  static std::int64_t stage_width(const SwinDesign& design, std::size_t stage) {
    return design.width << stage;
  }
  std::int64_t raw_width() const { return stage_width(design(), 3); }

  void register_features() {
    const auto features = register_module("features", torch::nn::ModuleList());
    blocks::SwinEmbedding embedding(options().in_channels, design().width);
    features->push_back(embedding);
    // A unit like a layer: left plain, its normalisation would hold a map as large as a layer's.
    append("embedding", embedding);
    std::int64_t first = 0;
    for (std::size_t stage = 0; stage < design().block_count.size(); ++stage) {
      const std::string number = std::to_string(stage + 1);
      if (stage > 0) {
        const blocks::PatchMerging merging(stage_width(design(), stage - 1), kSwinNormEps);
        features->push_back(merging);
        append("merging" + number, plain(merging));
      }
      const torch::nn::Sequential layers = make_stage(stage, first);
      features->push_back(layers);
      append("stage" + number, layers);
      first += design().block_count[stage];
    }
  }

  /// @param first  how many blocks come before the stage
  torch::nn::Sequential make_stage(std::size_t stage, std::int64_t first) const {
    const std::int64_t width = stage_width(design(), stage);
    std::int64_t block_count = 0;
    for (const std::int64_t count : design().block_count) block_count += count;
    const double last_rate = options().stochastic_depth.value_or(design().stochastic_depth);
    torch::nn::Sequential layers;
    for (std::int64_t index = 0; index < design().block_count[stage]; ++index) {
      const std::int64_t shift = index % 2 == 0 ? 0 : kSwinWindow / 2;
      layers->push_back(blocks::SwinBlock(blocks::SwinBlockOptions{
          .attention = {.width = width,
                        .head_count = design().head_count[stage],
                        .window = {kSwinWindow, kSwinWindow},
                        .shift = {shift, shift},
                        .dropout = options().dropout.value_or(0),
                        .attention_dropout = options().attention_dropout.value_or(0)},
          .hidden = kSwinMlpRatio * width,
          .drop_rate =
              last_rate * static_cast<double>(first + index) / static_cast<double>(block_count - 1),
          .norm_eps = kSwinNormEps,
      }));
    }
    return layers;
  }

  /// As torchvision: linear layers from a truncated normal distribution and without bias; the
  /// convolution as LibTorch makes it.
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false)) {
      auto* linear = module->as<torch::nn::Linear>();
      if (linear == nullptr) continue;
      blocks::trunc_normal_(linear->weight, /*mean=*/0, /*standard_deviation=*/0.02);
      if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
    }
  }

  torch::nn::Linear head_{nullptr};
};

/// A transformer whose attention looks at windows, which every other layer shifts; its units are
/// the embedding and the blocks.
///
/// The merging between stages and the last normalisation are plain. Images of any size will do.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Liu et al., Swin Transformer: Hierarchical Vision Transformer using Shifted Windows
/// (2021), section 3.3; torchvision's `swin_*`
template <class Policy = Checkpointed<TransformerLayers>>
class SwinTransformer : public BackboneHolder<SwinTransformerImpl, Policy> {
 public:
  using BackboneHolder<SwinTransformerImpl, Policy>::BackboneHolder;
};

using SwinT = NamedBackbone<SwinTransformer<>, "swin_t">;
using SwinS = NamedBackbone<SwinTransformer<>, "swin_s">;
using SwinB = NamedBackbone<SwinTransformer<>, "swin_b">;

}  // namespace remat

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

namespace remat::blocks {

/// Self-attention of all tokens to all, in several heads, by LibTorch's fused kernel.
///
/// Keys are those of `nn.MultiheadAttention`. LibTorch's own module computes the weights to return
/// their mean as well, and so can use no fused kernel.
///
/// @par Source  Vaswani et al., Attention Is All You Need (2017), section 3.2; PyTorch's
/// `nn.MultiheadAttention` with `batch_first` and without `need_weights`
class SelfAttentionImpl : public torch::nn::Cloneable<SelfAttentionImpl> {
 public:
  /// @param dropout  rate at which attention weights are zeroed in training
  /// @throws ArgumentError  if `width` cannot be shared out to `head_count` heads
  SelfAttentionImpl(std::int64_t width, std::int64_t head_count, double dropout)
      : width_(width), head_count_(head_count), dropout_(dropout) {
    require(head_count > 0 && width % head_count == 0, [&] {
      return ErrorMessage("remat.attention.heads")
          .where("remat::blocks::SelfAttention")
          .what("the width is " + std::to_string(width) + " and there are " +
                std::to_string(head_count) + " heads, a width that the heads divide was expected");
    });
    reset();
  }

  void reset() override {
    in_proj_weight = register_parameter("in_proj_weight", at::empty({3 * width_, width_}));
    in_proj_bias = register_parameter("in_proj_bias", at::zeros({3 * width_}));
    out_proj = register_module("out_proj", torch::nn::Linear(width_, width_));
    torch::nn::init::xavier_uniform_(in_proj_weight);
    torch::nn::init::zeros_(out_proj->bias);
  }

  torch::Tensor forward(const torch::Tensor& tokens_nlc) {
    // Tokens come first in memory, as behind nn.MultiheadAttention: dropout draws its numbers in
    // that order, and from one seed it is to draw torchvision's.
    return linear(out_proj, mix(tokens_nlc))
        .view({tokens_nlc.size(1), tokens_nlc.size(0), width_})
        .transpose(0, 1);  // (N, L, C)
  }

  /// Returns the rate at which attention weights are zeroed in training.
  double dropout() const { return dropout_; }

  torch::Tensor in_proj_weight, in_proj_bias;
  torch::nn::Linear out_proj{nullptr};

 private:
  torch::Tensor mix(const torch::Tensor& tokens_nlc) const {
    const std::int64_t batch = tokens_nlc.size(0);
    const std::int64_t length = tokens_nlc.size(1);
    const auto parts = linear(tokens_nlc, in_proj_weight, in_proj_bias)
                           .view({batch, length, 3, head_count_, width_ / head_count_})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);  // query, key, value, each (N, heads, L, d)
    return remat::detail::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                                       is_training() ? dropout_ : 0.0)
        .permute({2, 0, 1, 3})
        .reshape({length * batch, width_});  // (L * N, C)
  }

  std::int64_t width_, head_count_;
  double dropout_;
};
TORCH_MODULE(SelfAttention);

}  // namespace remat::blocks

namespace remat::blocks {

/// What an `EncoderLayer` is built from; meant for designated initialisers.
struct EncoderLayerOptions {
  std::int64_t width = 0;        ///< channels of a token
  std::int64_t head_count = 1;   ///< heads of the attention
  std::int64_t hidden = 0;       ///< channels inside the MLP
  double dropout = 0;            ///< rate behind the attention, and twice in the MLP
  double attention_dropout = 0;  ///< rate on the attention's weights
  double norm_eps = 1e-6;        ///< of both layer normalisations
};

/// A transformer layer that normalises in front of its two branches, attention and MLP.
///
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), equations 2 and 3;
/// torchvision's `EncoderBlock`
class EncoderLayerImpl : public torch::nn::Cloneable<EncoderLayerImpl> {
 public:
  explicit EncoderLayerImpl(const EncoderLayerOptions& options) : options_(options) { reset(); }

  void reset() override {
    const auto norm = [&] {
      return torch::nn::LayerNorm(
          torch::nn::LayerNormOptions({options_.width}).eps(options_.norm_eps));
    };
    ln_1 = register_module("ln_1", norm());
    self_attention = register_module(
        "self_attention",
        SelfAttention(options_.width, options_.head_count, options_.attention_dropout));
    dropout = register_module("dropout", torch::nn::Dropout(options_.dropout));
    ln_2 = register_module("ln_2", norm());
    mlp = register_module("mlp", Mlp(options_.width, options_.hidden, options_.dropout));
  }

  torch::Tensor forward(const torch::Tensor& tokens_nlc) {
    const torch::Tensor x =
        dropout->forward(self_attention->forward(ln_1->forward(tokens_nlc))) + tokens_nlc;
    return x + mlp->forward(ln_2->forward(x));  // (N, L, C), as all in between
  }

  /// Returns what this was built from.
  const EncoderLayerOptions& options() const { return options_; }

  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  SelfAttention self_attention{nullptr};
  torch::nn::Dropout dropout{nullptr};
  Mlp mlp{nullptr};

 private:
  EncoderLayerOptions options_;
};
TORCH_MODULE(EncoderLayer);

}  // namespace remat::blocks

namespace remat {

/// One row of the paper's table 1, with a patch size.
struct VisionTransformerDesign {
  std::string_view name;     ///< torchvision's
  std::int64_t patch_size;   ///< height and width of a patch in pixels
  std::int64_t layer_count;  ///< transformer layers
  std::int64_t head_count;   ///< heads of each attention
  std::int64_t width;        ///< channels of a token
  std::int64_t mlp_width;    ///< channels inside an MLP
};

inline constexpr std::array kVisionTransformerDesigns{
    VisionTransformerDesign{"vit_b_16", 16, 12, 12, 768, 3072},
    VisionTransformerDesign{"vit_b_32", 32, 12, 12, 768, 3072},
    VisionTransformerDesign{"vit_l_16", 16, 24, 16, 1024, 4096},
    VisionTransformerDesign{"vit_l_32", 32, 24, 16, 1024, 4096},
};
/// Height and width of the images that torchvision makes position embeddings for by default.
inline constexpr std::int64_t kVisionTransformerImageSize = 224;
/// The paper's code has this in place of LibTorch's 1e-5, and torchvision followed.
inline constexpr double kVisionTransformerNormEps = 1e-6;

namespace blocks {

/// Makes tokens of an image: one per patch and a learned one in front, each with a learned
/// embedding of its position.
///
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), equation 1; torchvision's
/// `VisionTransformer._process_input`
class VisionTransformerEmbeddingImpl : public torch::nn::Cloneable<VisionTransformerEmbeddingImpl> {
 public:
  /// @param grid  patches in a column and in a row
  VisionTransformerEmbeddingImpl(std::int64_t in_channels, std::int64_t width,
                                 std::int64_t patch_size, TokenGrid grid, double dropout_rate)
      : in_channels_(in_channels),
        width_(width),
        patch_size_(patch_size),
        grid_(grid),
        rate_(dropout_rate) {
    reset();
  }

  /// Makes the layers anew, initialised as torchvision does.
  void reset() override {
    class_token = register_parameter("class_token", at::zeros({1, 1, width_}));
    pos_embedding = register_parameter("pos_embedding", at::empty({1, 1 + grid_.area(), width_}));
    conv_proj = register_module(
        "conv_proj",
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(in_channels_, width_, patch_size_).stride(patch_size_)));
    dropout = register_module("dropout", torch::nn::Dropout(rate_));
    torch::nn::init::normal_(pos_embedding, /*mean=*/0, /*std=*/0.02);
    const auto fan_in = static_cast<double>(in_channels_ * patch_size_ * patch_size_);
    trunc_normal_(conv_proj->weight, /*mean=*/0, std::sqrt(1 / fan_in));
    torch::nn::init::zeros_(conv_proj->bias);
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    const torch::Tensor patches =
        conv_proj->forward(images_nchw).flatten(2).transpose(1, 2);  // (N, rows * columns, width)
    const torch::Tensor class_tokens =
        class_token.expand({images_nchw.size(0), -1, -1});  // (N, 1, width)
    return dropout->forward(at::cat({class_tokens, patches}, 1) + pos_embedding);
  }

  torch::Tensor class_token, pos_embedding;
  torch::nn::Conv2d conv_proj{nullptr};
  torch::nn::Dropout dropout{nullptr};

 private:
  std::int64_t in_channels_, width_, patch_size_;
  TokenGrid grid_;
  double rate_;
};
TORCH_MODULE(VisionTransformerEmbedding);

}  // namespace blocks

/// The module behind `VisionTransformer`.
class VisionTransformerImpl
    : public FamilyBackbone<VisionTransformerImpl, VisionTransformerDesign> {
 public:
  static constexpr std::string_view kFamily = "VisionTransformer";
  static constexpr std::span<const VisionTransformerDesign> designs() {
    return kVisionTransformerDesigns;
  }

  VisionTransformerImpl(const VisionTransformerDesign& design, const BackboneOptions& options,
                        CheckpointedChain chain)
      : FamilyBackbone(design, design.width, options, std::move(chain)) {
    refuse_option("stochastic_depth", options.stochastic_depth);
    check_option_image_size();
    blocks::VisionTransformerEmbedding embedding(
        options.in_channels, design.width, design.patch_size, grid(), options.dropout.value_or(0));
    register_parameter("class_token", embedding->class_token);
    register_module("conv_proj", embedding->conv_proj);
    append("embedding", plain(embedding));
    register_encoder(embedding);
    if (options.num_classes != 0) register_head();
    register_projection();
  }

  /// Returns the height and width of the images that this takes.
  std::int64_t image_size() const {
    return options().image_size == 0 ? kVisionTransformerImageSize : options().image_size;
  }
  /// Returns how many patches there are in a column and in a row.
  TokenGrid grid() const {
    return {image_size() / design().patch_size, image_size() / design().patch_size};
  }

  std::string first_convolution() const override { return "conv_proj.weight"; }
  std::string head() const override { return "heads.head."; }

  /// As `Backbone`; position embeddings for another square grid are resized, too.
  torch::Tensor fit_weight(const std::string& key, const torch::Tensor& stored,
                           at::IntArrayRef shape) const override {
    if (key != "encoder.pos_embedding") return Backbone::fit_weight(key, stored, shape);
    const bool is_embedding = stored.dim() == 3 && stored.size(0) == 1 && shape.size() == 3 &&
                              shape[0] == 1 && stored.size(1) > 1 && stored.size(2) == shape[2];
    if (!is_embedding || shape[1] != 1 + grid().area()) return {};
    const auto side = std::llround(std::sqrt(static_cast<double>(stored.size(1) - 1)));
    if (side * side != stored.size(1) - 1) return {};
    return resize_position_embedding(stored, {side, side}, grid());
  }

 protected:
  /// Takes the class token of (N, 1 + patches, width).
  torch::Tensor pool(torch::Tensor tokens_nlc) override { return tokens_nlc.select(1, 0); }
  torch::Tensor forward_head(torch::Tensor pooled) override { return head_->forward(pooled); }

  void check_image_size(std::int64_t height, std::int64_t width) const override {
    require(height == image_size() && width == image_size(), [&] {
      const std::int64_t nearest = nearest_size(std::max(height, width));
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("the images are " + size_text(height, width) + " pixels, " +
                size_text(image_size(), image_size()) + " was expected")
          .cause("Each patch has a learned embedding of its position")
          .cure("Resize the images, or build the network with .image_size = " +
                std::to_string(nearest) +
                " for images of that height and width; loading weights then resizes the position "
                "embeddings, as remat::resize_position_embedding does");
    });
  }

 private:
  static std::string size_text(std::int64_t height, std::int64_t width) {
    return std::to_string(height) + "x" + std::to_string(width);
  }

  std::int64_t nearest_size(std::int64_t size) const {
    const std::int64_t patch = design().patch_size;
    return std::max(patch, (size + patch / 2) / patch * patch);
  }

  void check_option_image_size() const {
    require(image_size() % design().patch_size == 0, [&] {
      const std::int64_t below = image_size() / design().patch_size * design().patch_size;
      const std::string above = std::to_string(below + design().patch_size);
      return ErrorMessage("remat.backbone.image_size")
          .where(name())
          .what("image_size is " + std::to_string(image_size()) +
                ", a multiple of the patch size " + std::to_string(design().patch_size) +
                " was expected")
          .cure("The nearest are " + (below == 0 ? "" : std::to_string(below) + " and ") + above);
    });
  }

  void register_encoder(const blocks::VisionTransformerEmbedding& embedding) {
    const auto encoder = register_module("encoder", std::make_shared<torch::nn::Module>("Encoder"));
    encoder->register_parameter("pos_embedding", embedding->pos_embedding);
    encoder->register_module("dropout", embedding->dropout);
    torch::nn::Sequential layers;
    for (std::int64_t index = 0; index < design().layer_count; ++index)
      layers->push_back("encoder_layer_" + std::to_string(index),
                        blocks::EncoderLayer(blocks::EncoderLayerOptions{
                            .width = design().width,
                            .head_count = design().head_count,
                            .hidden = design().mlp_width,
                            .dropout = options().dropout.value_or(0),
                            .attention_dropout = options().attention_dropout.value_or(0),
                            .norm_eps = kVisionTransformerNormEps,
                        }));
    encoder->register_module("layers", layers);
    append("layers", layers);
    const auto norm = encoder->register_module(
        "ln", torch::nn::LayerNorm(
                  torch::nn::LayerNormOptions({design().width}).eps(kVisionTransformerNormEps)));
    append("norm", plain(norm));
  }

  void register_head() {
    const auto heads = register_module("heads", std::make_shared<torch::nn::Module>("Heads"));
    head_ =
        heads->register_module("head", torch::nn::Linear(design().width, options().num_classes));
    torch::nn::init::zeros_(head_->weight);
    torch::nn::init::zeros_(head_->bias);
  }

  torch::nn::Linear head_{nullptr};
};

/// A vision transformer; its units are the transformer layers, and its features are all tokens,
/// normalised, of which the first stands for the image.
///
/// The embedding of the patches and the last normalisation are plain: they save little.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Dosovitskiy et al., An Image Is Worth 16x16 Words (2020), table 1; torchvision's
/// `vit_*`
template <class Policy = Checkpointed<TransformerLayers>>
class VisionTransformer : public BackboneHolder<VisionTransformerImpl, Policy> {
 public:
  using BackboneHolder<VisionTransformerImpl, Policy>::BackboneHolder;
};

using ViTB16 = NamedBackbone<VisionTransformer<>, "vit_b_16">;
using ViTB32 = NamedBackbone<VisionTransformer<>, "vit_b_32">;
using ViTL16 = NamedBackbone<VisionTransformer<>, "vit_l_16">;
using ViTL32 = NamedBackbone<VisionTransformer<>, "vit_l_32">;

}  // namespace remat

namespace remat {

/// One line of the list of backbones.
struct BackboneInfo {
  std::string name;          ///< what `create_backbone` takes
  std::string family;        ///< "ResNet"
  std::int64_t parameters;   ///< with torchvision's head for 1,000 classes
  std::int64_t feature_dim;  ///< size of the pooled features
};

namespace detail {

struct BackboneEntry {
  BackboneInfo info;
  CheckpointedChain (*default_chain)();
  std::function<std::shared_ptr<Backbone>(const BackboneOptions&, CheckpointedChain)> create;
};

/// Appends each row of a family's table.
template <class Family>
void add_family(std::vector<BackboneEntry>& entries) {
  using Impl = typename Family::ContainedType;
  for (const auto& design : Impl::designs()) {
    const PublishedModel& facts = published_model(design.name);
    entries.push_back({{std::string(design.name), std::string(Impl::kFamily), facts.parameters,
                        facts.feature_dim},
                       []() -> CheckpointedChain { return typename Family::Policy(); },
                       [&design](const BackboneOptions& options,
                                 CheckpointedChain chain) -> std::shared_ptr<Backbone> {
                         return build_backbone<Impl>(design, options, std::move(chain));
                       }});
  }
}

inline const std::vector<BackboneEntry>& backbone_entries() {
  static const std::vector<BackboneEntry> entries = [] {
    std::vector<BackboneEntry> all;
    add_family<ResNet<>>(all);
    add_family<MobileNetV2<>>(all);
    add_family<MobileNetV3<>>(all);
    add_family<EfficientNet<>>(all);
    add_family<RegNet<>>(all);
    add_family<VisionTransformer<>>(all);
    add_family<SwinTransformer<>>(all);
    add_family<MaxViT<>>(all);
    add_family<ConvNeXt<>>(all);
    return all;
  }();
  return entries;
}

/// Returns the entry of that name or alias.
///
/// @throws ArgumentError  with the nearest names if there is none
inline const BackboneEntry& find_backbone(std::string_view name) {
  for (const auto& [alias, full_name] : kBackboneAliases)
    if (name == alias) name = full_name;
  std::vector<std::string> names;
  for (const BackboneEntry& entry : backbone_entries()) {
    if (entry.info.name == name) return entry;
    names.push_back(entry.info.name);
  }
  refuse_backbone_name("remat::create_backbone", name, names,
                       "remat::list_backbones() has the full list");
}

}  // namespace detail

/// Lists every backbone that `create_backbone` knows, family by family.
inline std::vector<BackboneInfo> list_backbones() {
  std::vector<BackboneInfo> list;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) list.push_back(entry.info);
  return list;
}

/// Builds a backbone by name, checkpointing off, with the default policy of its family.
///
/// @throws ArgumentError  for an unknown name, with the nearest ones, and for options that cannot
/// be
inline std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                                 const BackboneOptions& options = {}) {
  const detail::BackboneEntry& entry = detail::find_backbone(name);
  return entry.create(options, entry.default_chain());
}

/// Builds a backbone by name, checkpointing off, with a policy of one's choice:
/// `create_backbone<Checkpointed<Sequential, EachUnit>>("resnet50")`.
///
/// @throws ArgumentError  as above
template <class Policy>
  requires std::convertible_to<Policy, CheckpointedChain>
std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                          const BackboneOptions& options = {}) {
  return detail::find_backbone(name).create(options, Policy());
}

/// Builds a backbone with torchvision's own head for `num_classes` classes: its keys are
/// torchvision's, key for key.
///
/// @return  a backbone whose forward gives (N, num_classes)
/// @throws ArgumentError  as `create_backbone`, and if `num_classes` is below 1
inline std::shared_ptr<Backbone> create_classifier(std::string_view name, std::int64_t num_classes,
                                                   BackboneOptions options = {}) {
  require(num_classes >= 1, [&] {
    return ErrorMessage("remat.backbone.options")
        .where("remat::create_classifier")
        .what("num_classes is " + std::to_string(num_classes) + ", at least 1 was expected");
  });
  options.num_classes = num_classes;
  return create_backbone(name, options);
}

}  // namespace remat

namespace remat {

/// A region's step as plain numbers: which operations ran, what they read and made, and what became
/// of it.
///
/// Knows no LibTorch, so that planning on it is arithmetic.
struct Graph {
  /// No producer, or no position.
  static constexpr std::int32_t kNone = -1;

  /// What becomes of a value between forward and backward.
  enum class Fate : std::uint8_t {
    external,  ///< existed before: inputs, parameters, buffers, what was made unrecorded
    kept,      ///< made here and kept: by a policy, because it is tiny, or as a result
    dropped,   ///< made here, let go, and recomputed if backward needs it
    unneeded,  ///< made here, and backward does not need it
  };

  /// The content of one storage at one time.
  struct Value {
    Bytes bytes;
    Fate fate = Fate::dropped;
    std::int32_t producer = kNone;  ///< the operation that made it
    std::int32_t last_read =
        kNone;  ///< the last operation that reads it: with `producer`, its lifetime in forward
    bool is_saved = false;   ///< autograd saved it for backward
    bool is_result = false;  ///< a region returned it
  };

  /// One operation, in the order of forward.
  struct Operation {
    std::string name;  ///< "aten::convolution"
    std::int32_t region = kNone;
    double seconds = 0;               ///< 0 if it was not measured
    std::vector<std::int32_t> reads;  ///< values
    std::vector<std::int32_t> makes;  ///< values
    bool is_random = false;
    bool is_recomputed = false;  ///< backward has to run it again
  };

  /// A region: its name, and the one around it.
  struct Region {
    std::string name;
    std::int32_t parent = kNone;
  };

  std::vector<Value> values;
  std::vector<Operation> operations;
  std::vector<Region> regions;
  std::optional<PlanOutcome> plan_outcome{};  ///< how the region kept to its plan, if it had one

  /// Returns the bytes of all values of that fate; for `dropped` only what autograd saved, which
  /// plain would hold.
  Bytes bytes(Fate fate) const {
    Bytes sum;
    for (const Value& value : values)
      if (value.fate == fate && (fate != Fate::dropped || value.is_saved)) sum += value.bytes;
    return sum;
  }

  /// Returns how many operations backward runs again if it asks for everything.
  std::size_t recomputed_count() const {
    return static_cast<std::size_t>(std::ranges::count_if(operations, &Operation::is_recomputed));
  }

  /// Returns the measured time of those.
  double recomputed_seconds() const {
    double sum = 0;
    for (const Operation& operation : operations)
      sum += operation.is_recomputed ? operation.seconds : 0;
    return sum;
  }

  /// Returns the measured time of all operations.
  double seconds() const {
    double sum = 0;
    for (const Operation& operation : operations) sum += operation.seconds;
    return sum;
  }
};

/// Writes a table: for each kind of operation how often it ran, what was kept and dropped of it,
/// and what running it again costs; for a region that had a plan, whether that was followed.
inline std::string to_string(const Graph& graph) {
  struct Row {
    std::size_t count = 0, recomputed = 0;
    Bytes kept, dropped;
    double seconds = 0;
  };
  std::map<std::string, Row> rows;
  for (const Graph::Operation& operation : graph.operations) {
    Row& row = rows[operation.name];
    ++row.count;
    if (operation.is_recomputed) ++row.recomputed, row.seconds += operation.seconds;
    for (const std::int32_t id : operation.makes) {
      const Graph::Value& value = graph.values[static_cast<std::size_t>(id)];
      if (value.fate == Graph::Fate::kept) row.kept += value.bytes;
      if (value.fate == Graph::Fate::dropped && value.is_saved) row.dropped += value.bytes;
    }
  }

  const auto line = [](const std::string& name, const Row& row) {
    char text[160];
    std::snprintf(text, sizeof text, "%-36s %8zu %12s %12s %10zu %10.2f ms\n",
                  name.substr(0, 36).c_str(), row.count, to_string(row.kept).c_str(),
                  to_string(row.dropped).c_str(), row.recomputed, row.seconds * 1e3);
    return std::string(text);
  };
  char head[160];
  std::snprintf(head, sizeof head, "%-36s %8s %12s %12s %10s %13s\n", "operation", "runs", "kept",
                "dropped", "recomputed", "at a cost of");
  std::string table = head;
  Row total;
  for (const auto& [name, row] : rows) {
    table += line(name, row);
    total.count += row.count, total.recomputed += row.recomputed, total.seconds += row.seconds;
    total.kept += row.kept, total.dropped += row.dropped;
  }
  table += line("all", total);
  char foot[160];
  std::snprintf(foot, sizeof foot,
                "from outside: %s; recomputing takes %.0f %% of the forward's %.2f ms\n",
                to_string(graph.bytes(Graph::Fate::external)).c_str(),
                graph.seconds() > 0 ? 100 * graph.recomputed_seconds() / graph.seconds() : 0.0,
                graph.seconds() * 1e3);
  table += foot;
  return graph.plan_outcome ? table + to_string(*graph.plan_outcome) + "\n" : table;
}

inline std::ostream& operator<<(std::ostream& stream, const Graph& graph) {
  return stream << to_string(graph);
}

}  // namespace remat

namespace remat::detail {

/// Marks the operations behind the saved tensors that were dropped: backward runs those and no
/// others.
inline void mark_recomputed(Graph& graph) {
  std::vector<std::int32_t> todo;
  for (std::size_t i = 0; i < graph.values.size(); ++i)
    if (graph.values[i].is_saved && graph.values[i].fate == Graph::Fate::dropped)
      todo.push_back(static_cast<std::int32_t>(i));
  while (!todo.empty()) {
    const Graph::Value& value = graph.values[static_cast<std::size_t>(todo.back())];
    todo.pop_back();
    if (value.fate != Graph::Fate::dropped || value.producer == none) continue;
    Graph::Operation& operation = graph.operations[static_cast<std::size_t>(value.producer)];
    if (operation.is_recomputed) continue;
    operation.is_recomputed = true;
    todo.insert(todo.end(), operation.reads.begin(), operation.reads.end());
  }
}

/// What a tape knows now, as a value of its own. Asked when a region ends, before the backward pass
/// changes anything.
inline Graph graph_of(Tape& tape) {
  std::lock_guard<std::recursive_mutex> lock(tape.mutex);
  Graph graph;
  for (std::size_t i = 0; i < tape.regions.size(); ++i)
    graph.regions.push_back({tape.regions[i].name, tape.regions[i].parent});
  for (std::size_t i = 0; i < tape.values.size(); ++i) {
    const Value& value = tape.values[i];
    Graph::Value& copy = graph.values.emplace_back();
    copy.bytes = Bytes{value.nbytes};
    copy.producer = value.producer;
    copy.is_saved = value.is_saved;
    copy.is_result = value.is_result;
    copy.fate = value.producer == none ? Graph::Fate::external
                : value.held           ? Graph::Fate::kept
                : value.need > 0       ? Graph::Fate::dropped
                                       : Graph::Fate::unneeded;
  }
  for (std::size_t index = 0; index < tape.operations.size(); ++index) {
    const Operation& operation = tape.operations[index];
    Graph::Operation& copy = graph.operations.emplace_back();
    copy.name = operation.traits->name;
    copy.region = operation.region;
    copy.seconds = static_cast<double>(operation.seconds);
    copy.is_random = operation.random != nullptr;
    for (std::size_t i = 0; i < operation.use_count; ++i) {
      const Use& use = tape.uses[operation.first_use + i];
      if (!use.needs_content) continue;
      copy.reads.push_back(use.value);
      graph.values[static_cast<std::size_t>(use.value)].last_read =
          static_cast<std::int32_t>(index);
    }
    for (std::size_t i = 0; i < operation.result_count; ++i)
      copy.makes.push_back(tape.results[operation.first_result + i].value);
  }
  mark_recomputed(graph);
  return graph;
}

}  // namespace remat::detail

namespace remat {

/// Runs `fn(inputs...)` once as a checkpointed region and returns its graph: what it keeps, drops
/// and would cost to recompute.
///
/// Printed, it is a table by kind of operation. The call has the effects of a forward pass
/// (buffers, random numbers); its results are let go. With grad mode off nothing is recorded and
/// the graph is empty.
///
/// @param keep    a keep policy, as for `checkpoint`
/// @param fn      any callable
/// @param inputs  handed to `fn`
template <class Keep, class Function, class... Inputs>
  requires std::predicate<const Keep&, const keep::Operation&, Bytes> &&
           std::invocable<Function, Inputs...>
Graph explain(Keep keep, Function&& fn, Inputs&&... inputs) {
  Graph graph;
  detail::RegionOptions options;
  if constexpr (!std::is_same_v<Keep, keep::nothing>) options.keep = std::move(keep);
  options.measures_time = true;
  options.at_end = [&graph](detail::Tape& tape) { graph = detail::graph_of(tape); };
  static_cast<void>(
      detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  return graph;
}

/// As above, with nothing kept.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
Graph explain(Function&& fn, Inputs&&... inputs) {
  return explain(keep::nothing{}, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// As above, keeping what a plan says; the graph, and so the table, says whether the region
/// followed the plan to its end, or where it left it.
///
/// A module that has a budget of its own follows the region around it here, as in any region: hand
/// over its `memory_plan()`.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
Graph explain(const MemoryPlan& plan, Function&& fn, Inputs&&... inputs) {
  Graph graph;
  detail::RegionOptions options;
  options.measures_time = true;
  const auto follower = detail::follow_plan(options, std::make_shared<const MemoryPlan>(plan));
  options.at_end = [&graph, compare = std::move(options.at_end)](detail::Tape& tape) {
    compare(tape);
    graph = detail::graph_of(tape);
  };
  static_cast<void>(
      detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...));
  if (follower->has_ended()) graph.plan_outcome = follower->outcome();
  return graph;
}

}  // namespace remat

namespace remat {

/// Live bytes at a moment.
struct MemorySample {
  double seconds;  ///< since the measurement began
  Bytes live;

  friend bool operator==(const MemorySample&, const MemorySample&) = default;
};

/// Returns about `count` of the samples, or all if there are no more: of each run of neighbours the
/// lowest and the highest, and the first and the last of all, so that peaks stay what they are.
inline std::vector<MemorySample> thinned(const std::vector<MemorySample>& samples,
                                         std::size_t count = 800) {
  if (samples.size() <= count || count < 2) return samples;
  const std::size_t runs = count / 2;
  std::vector<MemorySample> kept{samples.front()};
  const auto keep = [&](const MemorySample& sample) {
    if (!(sample == kept.back())) kept.push_back(sample);
  };
  for (std::size_t run = 0; run < runs; ++run) {
    const auto at = [&](std::size_t index) {
      return samples.begin() + static_cast<std::ptrdiff_t>(index * samples.size() / runs);
    };
    auto [low, high] = std::minmax_element(
        at(run), at(run + 1),
        [](const MemorySample& left, const MemorySample& right) { return left.live < right.live; });
    if (high < low) std::swap(low, high);
    keep(*low), keep(*high);
  }
  keep(samples.back());
  return kept;
}

}  // namespace remat

namespace remat {

/// Measures the bytes of tensors that are allocated while it lives, exact and the same in every
/// run.
///
/// It counts what LibTorch's allocators report on the thread that made it and on the threads of
/// backward passes started there, above the level at its construction; what is freed that was
/// allocated before counts as negative only on accelerators. It does not see memory that operators
/// take from elsewhere (oneDNN's scratch), nor the process's size, which allocators keep high.
///
/// @par Threads  made and destroyed on one thread, in the order of a stack; read from anywhere
class MemoryMeter {
 public:
  using Sample = MemorySample;

  MemoryMeter() : count_(std::make_shared<Count>()), guard_(count_) {}
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Returns the live bytes.
  Bytes current() const { return {count_->live}; }
  /// Returns the most bytes that were alive at once since construction or `reset_peak()`.
  Bytes peak() const { return {count_->peak}; }
  /// Sets the peak to the live bytes.
  void reset_peak() { count_->peak = count_->live.load(); }
  /// Takes the present level as zero for what follows.
  void reset() { count_->live = 0, count_->peak = 0; }

  /// Switches on a sample at every allocation and release.
  void record_timeline(bool enabled) { count_->has_timeline = enabled; }
  /// Returns the samples so far.
  std::vector<Sample> timeline() const {
    std::lock_guard<std::mutex> lock(count_->mutex);
    return count_->timeline;
  }

 private:
  struct Count final : detail::AllocationListener {
    std::atomic<std::int64_t> live{0}, peak{0};
    std::atomic<bool> has_timeline{false};
    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    std::mutex mutex;
    std::vector<Sample> timeline;

    void changed(const void*, std::int64_t bytes, c10::Device) override {
      const std::int64_t now = live += bytes;
      std::int64_t before = peak;
      while (now > before && !peak.compare_exchange_weak(before, now)) {
      }
      if (!has_timeline) return;
      std::lock_guard<std::mutex> lock(mutex);
      timeline.push_back(
          {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), {now}});
    }
  };

  std::shared_ptr<Count> count_;
  detail::AllocationListenerGuard guard_;
};

}  // namespace remat

#include <c10/core/Device.h>

#if REMAT_LIBTORCH_AT_LEAST(2, 9)
#include <ATen/DeviceAccelerator.h>
#endif

namespace remat::detail {

struct DeviceMemory {
  std::int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
};

/// The caching allocator's figures of an accelerator, without its headers; nothing where LibTorch
/// (before 2.9, or built for the CPU) does not offer them.
inline std::optional<DeviceMemory> device_memory([[maybe_unused]] c10::Device device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && *accelerator == device.type()) {
    const auto stats =
        at::accelerator::getDeviceStats(device.has_index() ? device.index() : c10::DeviceIndex{0});
    return DeviceMemory{stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak,
                        stats.reserved_bytes[0].current, stats.reserved_bytes[0].peak};
  }
#endif
  return std::nullopt;
}

/// The process's accelerator, or the CPU where there is none or LibTorch does not say.
inline c10::Device device_with_memory() {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  if (const auto accelerator = at::getAccelerator(false)) return {*accelerator, 0};
#endif
  return c10::kCPU;
}

/// Sets the peaks to the current figures.
inline void reset_device_peak([[maybe_unused]] c10::Device device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && *accelerator == device.type())
    at::accelerator::resetPeakStats(device.has_index() ? device.index() : c10::DeviceIndex{0});
#endif
}

}  // namespace remat::detail

#include <iostream>

namespace remat {

/// An accelerator's memory: what tensors occupy, and what the caching allocator holds for them (at
/// least as much).
struct MemoryStats {
  Bytes allocated, allocated_peak, reserved, reserved_peak;
};

/// Returns the allocator's figures of a device, or nothing where LibTorch does not count them: on
/// the CPU (use `MemoryMeter`), and on accelerators before LibTorch 2.9. "Not available" is never
/// shown as zero.
inline std::optional<MemoryStats> memory_stats(c10::Device device) {
  const auto memory = detail::device_memory(device);
  if (!memory) return std::nullopt;
  return MemoryStats{
      {memory->allocated}, {memory->allocated_peak}, {memory->reserved}, {memory->reserved_peak}};
}

/// Sets a device's peaks to its current figures; does nothing where there are none.
inline void reset_peak_memory_stats(c10::Device device) { detail::reset_device_peak(device); }

/// Writes "allocated 1.2 GiB (peak 3.4 GiB), reserved 4.0 GiB (peak 4.0 GiB)".
inline std::ostream& operator<<(std::ostream& stream, const MemoryStats& stats) {
  return stream << "allocated " << stats.allocated << " (peak " << stats.allocated_peak
                << "), reserved " << stats.reserved << " (peak " << stats.reserved_peak << ')';
}

/// Returns one line for a log: the figures, or that there are none and what to use instead.
inline std::string describe_memory(c10::Device device) {
  std::ostringstream out;
  out << device << ": ";
  if (const auto stats = memory_stats(device))
    out << *stats;
  else
    out << "not available from this LibTorch; remat::MemoryMeter counts the tensors of a scope";
  return out.str();
}

/// Writes that line with its end.
///
/// @param device  by default the accelerator, or the CPU where there is none
inline void print_memory_stats(c10::Device device = detail::device_with_memory(),
                               std::ostream& stream = std::cout) {
  stream << describe_memory(device) << '\n';
}

}  // namespace remat

namespace remat::blocks {

/// Makes one row of a set of rows: their mean, weighted by what a small network thinks of each.
///
/// The weights do not depend on the order of the rows, nor on how many there are.
///
/// @par Source  Ilse, Tomczak and Welling, Attention-based Deep Multiple Instance Learning (2018),
/// equations 7 and 9, where `content` is V, `gate` is U and `score` is w
class GatedAttentionImpl : public torch::nn::Cloneable<GatedAttentionImpl> {
 public:
  /// @param width   of a row
  /// @param hidden  width in between; the paper's experiments have 128
  explicit GatedAttentionImpl(std::int64_t width, std::int64_t hidden = 128)
      : width_(width), hidden_(hidden) {
    reset();
  }

  void reset() override {
    content = register_module("content", torch::nn::Linear(width_, hidden_));
    gate = register_module("gate", torch::nn::Linear(width_, hidden_));
    // Without a bias, which the softmax would take away again.
    score = register_module("score",
                            torch::nn::Linear(torch::nn::LinearOptions(hidden_, 1).bias(false)));
  }

  /// Returns how much each row counts; the weights of a set sum up to 1.
  ///
  /// @param rows        (N, L, width)
  /// @param is_present  (N, L), boolean; rows that are not get weight 0; undefined: all are
  /// @return            (N, L)
  torch::Tensor weights(const torch::Tensor& rows, const torch::Tensor& is_present = {}) {
    const torch::Tensor hidden = content->forward(rows).tanh() * gate->forward(rows).sigmoid();
    torch::Tensor scores = score->forward(hidden).squeeze(-1);  // (N, L)
    if (is_present.defined())
      scores =
          scores.masked_fill(is_present.logical_not(), -std::numeric_limits<double>::infinity());
    return scores.softmax(/*dim=*/1);
  }

  /// Returns the weighted mean of each set, (N, width); arguments as for `weights`, absent rows
  /// finite.
  torch::Tensor forward(const torch::Tensor& rows, const torch::Tensor& is_present = {}) {
    return (weights(rows, is_present).unsqueeze(-1) * rows).sum(/*dim=*/1);
  }

  torch::nn::Linear content{nullptr}, gate{nullptr}, score{nullptr};

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  std::int64_t width_, hidden_;
};
TORCH_MODULE(GatedAttention);

}  // namespace remat::blocks

namespace remat {

/// How the features of several views become those of one object. None depends on the order of the
/// views.
enum class ViewAggregation {
  kAttention,  ///< a mean with learned weights, `blocks::GatedAttention`
  kMean,       ///< every view counts alike
  kMax,        ///< each feature from the view where it is strongest
};

namespace detail {

inline constexpr std::array<std::pair<std::string_view, ViewAggregation>, 3> kViewAggregations{{
    {"attention", ViewAggregation::kAttention},
    {"mean", ViewAggregation::kMean},
    {"max", ViewAggregation::kMax},
}};

}  // namespace detail

/// Returns the aggregation of that name: `attention`, `mean` or `max`.
///
/// @throws ArgumentError  for another name
inline ViewAggregation view_aggregation(std::string_view name) {
  std::vector<std::string> names;
  for (const auto& [known, aggregation] : detail::kViewAggregations) {
    if (known == name) return aggregation;
    names.emplace_back(known);
  }
  throw ArgumentError(ErrorMessage("remat.multi_view.options")
                          .where("remat::MultiViewClassifier")
                          .what("the aggregation is \"" + std::string(name) + "\", one of " +
                                detail::quoted_list(names) + " was expected"));
}

/// What a `MultiViewClassifier` can be told besides; meant for designated initialisers.
struct MultiViewOptions {
  BackboneOptions backbone;            ///< the head is not the backbone's: `num_classes` stays 0
  std::int64_t attention_width = 128;  ///< between features and the weight of a view
};

/// The module behind `MultiViewClassifier`.
class MultiViewClassifierImpl : public torch::nn::Cloneable<MultiViewClassifierImpl> {
 public:
  /// @param backbone_name  as for `create_backbone`
  /// @param num_views      the most views that an object has
  /// @throws ArgumentError  as `create_backbone`, and for counts below 1
  MultiViewClassifierImpl(std::string_view backbone_name, std::int64_t num_classes,
                          std::int64_t num_views,
                          ViewAggregation aggregation = ViewAggregation::kAttention,
                          const MultiViewOptions& options = {})
      : MultiViewClassifierImpl(create_backbone(backbone_name, options.backbone), num_classes,
                                num_views, aggregation, options.attention_width) {}
  /// As above, the aggregation by name.
  MultiViewClassifierImpl(std::string_view backbone_name, std::int64_t num_classes,
                          std::int64_t num_views, std::string_view aggregation,
                          const MultiViewOptions& options = {})
      : MultiViewClassifierImpl(backbone_name, num_classes, num_views,
                                view_aggregation(aggregation), options) {}
  /// Takes a backbone that is there already, with a policy of one's own, for example.
  MultiViewClassifierImpl(std::shared_ptr<Backbone> backbone, std::int64_t num_classes,
                          std::int64_t num_views, ViewAggregation aggregation,
                          std::int64_t attention_width = 128)
      : num_classes_(num_classes),
        num_views_(num_views),
        attention_width_(attention_width),
        aggregation_(aggregation),
        backbone_(std::move(backbone)) {
    check_options();
    register_layers();
  }

  /// Makes the head anew, on a copy of the backbone: LibTorch calls this on what is to be a clone.
  void reset() override {
    backbone_ = std::dynamic_pointer_cast<Backbone>(backbone_->clone());
    register_layers();
  }

  /// Classifies objects by their views.
  ///
  /// All views go through the backbone as one batch, so that its batch statistics are those of all
  /// views. Views that are absent do not: whatever their place in `images` holds, not a number
  /// included, has no influence on result, gradients or buffers.
  ///
  /// @param images_bvchw   (B, V, C, H, W); V may be less than `num_views()`, since no aggregation
  /// depends on it
  /// @param is_present_bv  (B, V), boolean: which views there are, at least one of each object;
  /// undefined: all
  /// @return  (B, num_classes())
  /// @throws ArgumentError  for other shapes, and for an object without a view
  torch::Tensor forward(const torch::Tensor& images_bvchw,
                        const torch::Tensor& is_present_bv = {}) {
    return classifier_->forward(fused_features(images_bvchw, is_present_bv));
  }

  /// Returns one row of features per object, (B, feature size); arguments as for `forward`.
  torch::Tensor fused_features(const torch::Tensor& images_bvchw,
                               const torch::Tensor& is_present_bv = {}) {
    check_images(images_bvchw);
    if (!is_present_bv.defined()) return aggregate(features_of_all(images_bvchw), {});
    check_mask(images_bvchw, is_present_bv);
    const torch::Tensor is_present = is_present_bv.to(images_bvchw.device());
    return aggregate(features_of_present(images_bvchw, is_present), is_present);
  }

  /// Returns the network that all views share.
  const std::shared_ptr<Backbone>& backbone() const { return backbone_; }
  /// Returns the size of a row that `forward` gives.
  std::int64_t num_classes() const { return num_classes_; }
  /// Returns the most views that an object may have.
  std::int64_t num_views() const { return num_views_; }
  /// Returns how the features of the views become one.
  ViewAggregation aggregation() const { return aggregation_; }

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(torch::Tensor())})

 private:
  void register_layers() {
    register_module("backbone", backbone_);
    if (aggregation_ == ViewAggregation::kAttention)
      attention_ = register_module(
          "attention", blocks::GatedAttention(backbone_->feature_dim(), attention_width_));
    classifier_ =
        register_module("classifier", torch::nn::Linear(backbone_->feature_dim(), num_classes_));
  }

  torch::Tensor features_of_all(const torch::Tensor& images_bvchw) {
    return backbone_->forward(images_bvchw.flatten(0, 1))
        .view({images_bvchw.size(0), images_bvchw.size(1), backbone_->feature_dim()});
  }

  /// Returns (B, V, F), zero where there is no view.
  torch::Tensor features_of_present(const torch::Tensor& images_bvchw,
                                    const torch::Tensor& is_present_bv) {
    const std::int64_t batch = images_bvchw.size(0);
    const std::int64_t views = images_bvchw.size(1);
    const torch::Tensor places = is_present_bv.flatten().nonzero().squeeze(1);  // (present)
    const torch::Tensor features =
        backbone_->forward(images_bvchw.flatten(0, 1).index_select(0, places));  // (present, F)
    return features.new_zeros({batch * views, backbone_->feature_dim()})
        .index_copy(0, places, features)
        .view({batch, views, backbone_->feature_dim()});
  }

  /// @param features_bvf  zero where there is no view
  torch::Tensor aggregate(const torch::Tensor& features_bvf, const torch::Tensor& is_present_bv) {
    switch (aggregation_) {
      case ViewAggregation::kAttention:
        return attention_->forward(features_bvf, is_present_bv);
      case ViewAggregation::kMean: {
        const torch::Tensor sum = features_bvf.sum(/*dim=*/1);
        if (!is_present_bv.defined()) return sum / features_bvf.size(1);
        return sum / is_present_bv.sum(/*dim=*/1, /*keepdim=*/true);
      }
      case ViewAggregation::kMax:
        break;
    }
    // amax and not max: views that are equal share the gradient, whatever their order.
    if (!is_present_bv.defined()) return features_bvf.amax(/*dim=*/1);
    return features_bvf
        .masked_fill(is_present_bv.logical_not().unsqueeze(-1),
                     -std::numeric_limits<double>::infinity())
        .amax(/*dim=*/1);
  }

  void check_options() const {
    check_at_least_one("num_classes", num_classes_);
    check_at_least_one("num_views", num_views_);
    check_at_least_one("attention_width", attention_width_);
    require(backbone_ != nullptr && backbone_->num_classes() == 0, [&] {
      return ErrorMessage("remat.multi_view.options")
          .where("remat::MultiViewClassifier")
          .what(backbone_ == nullptr
                    ? std::string("the backbone is null, and one is needed")
                    : "the backbone has a head for " + std::to_string(backbone_->num_classes()) +
                          " classes, and one without was expected")
          .cure("Build it with num_classes = 0: classes are counted here, after the views are one");
    });
  }

  static void check_at_least_one(const char* option, std::int64_t value) {
    require(value >= 1, [&] {
      return ErrorMessage("remat.multi_view.options")
          .where("remat::MultiViewClassifier")
          .what(std::string(option) + " is " + std::to_string(value) + ", at least 1 was expected");
    });
  }

  void check_images(const torch::Tensor& images_bvchw) const {
    const std::int64_t channels = backbone_->options().in_channels;
    const bool is_right = images_bvchw.defined() && images_bvchw.dim() == 5 &&
                          images_bvchw.size(1) >= 1 && images_bvchw.size(1) <= num_views_ &&
                          images_bvchw.size(2) == channels;
    require(is_right, [&] {
      return ErrorMessage("remat.multi_view.images")
          .where("remat::MultiViewClassifier")
          .what("the images are " +
                (images_bvchw.defined() ? "of shape " + shape_text(images_bvchw) : "undefined") +
                ", (B, V, " + std::to_string(channels) + ", H, W) with V from 1 to " +
                std::to_string(num_views_) + " was expected")
          .cure("Stack the views of an object along dimension 1; a single view is unsqueeze(1)");
    });
  }

  static void check_mask(const torch::Tensor& images_bvchw, const torch::Tensor& is_present_bv) {
    const bool is_right = is_present_bv.scalar_type() == torch::kBool &&
                          is_present_bv.sizes() == images_bvchw.sizes().slice(0, 2);
    require(is_right, [&] {
      return ErrorMessage("remat.multi_view.mask")
          .where("remat::MultiViewClassifier")
          .what("the mask is of shape " + shape_text(is_present_bv) + " and type " +
                c10::toString(is_present_bv.scalar_type()) + ", and for images of shape " +
                shape_text(images_bvchw) + " shape (" + std::to_string(images_bvchw.size(0)) +
                ", " + std::to_string(images_bvchw.size(1)) + ") and type Bool was expected");
    });
    const torch::Tensor empty_rows = is_present_bv.any(1).logical_not().nonzero();
    require(empty_rows.numel() == 0, [&] {
      return ErrorMessage("remat.multi_view.mask")
          .where("remat::MultiViewClassifier")
          .what("row " + std::to_string(empty_rows[0].item<std::int64_t>()) + " of " +
                std::to_string(is_present_bv.size(0)) +
                " has no view, at least one of each object was expected")
          .cure("Leave the object out of the batch");
    });
  }

  static std::string shape_text(const torch::Tensor& tensor) {
    std::string text;
    for (const std::int64_t size : tensor.sizes())
      text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + ")";
  }

  std::int64_t num_classes_, num_views_, attention_width_;
  ViewAggregation aggregation_;
  std::shared_ptr<Backbone> backbone_;
  blocks::GatedAttention attention_{nullptr};
  torch::nn::Linear classifier_{nullptr};
};

/// Classifies objects that are seen from several sides: one backbone for all views, whose features
/// become one row by attention, mean or maximum, and a linear layer on it.
///
/// Checkpointing is the backbone's: `remat::enable_gradient_checkpointing(model)` or
/// `model->backbone()->enable_gradient_checkpointing(...)` with a number of segments or a
/// `MemoryBudget`, which is for all views at once.
///
/// ```cpp
/// remat::MultiViewClassifier model("resnet18", /*num_classes=*/10, /*num_views=*/3, "max");
/// remat::enable_gradient_checkpointing(model);
/// torch::Tensor logits = model->forward(images);  // (B, 3, 3, H, W) -> (B, 10)
/// ```
/// @par Source  Su et al., Multi-view Convolutional Neural Networks for 3D Shape Recognition (2015)
/// for `max` behind one shared network; `blocks::GatedAttention` for `attention`
TORCH_MODULE(MultiViewClassifier);

}  // namespace remat

namespace remat {

/// A function whose calls are checkpointed so that their steps stay within a memory budget.
///
/// The first call with a shape of input, and with each kind of step (autocast, what requires grad),
/// makes a plan, for which the function runs twice more. As in a module with a budget, the loss
/// behind the function is taken to need two tensors of its result's size.
///
/// ```cpp
/// remat::Budgeted block(remat::MemoryBudget::fraction_of_plain(0.5),
///                       [&](const torch::Tensor& x) { return second(torch::gelu(first(x))); });
/// block(x).sum().backward();
/// ```
/// @tparam Function  takes a tensor, and more arguments if it likes; returns a tensor
/// @par Threads  any call from any thread, if the function allows it
template <class Function>
class Budgeted {
 public:
  /// @param name  stands in messages and reports
  Budgeted(const MemoryBudget& budget, Function function, const std::string& name = "budgeted")
      : function_(std::move(function)), named_(name) {
    run_.set(budget);
  }

  /// Calls the function as a region.
  ///
  /// @throws BudgetError  if no plan fits the budget
  template <class... More>
    requires std::is_invocable_r_v<torch::Tensor, Function&, const torch::Tensor&, More&...>
  torch::Tensor operator()(const torch::Tensor& x, More&&... more) {
    return run_.run_any(named_, x, [&](const torch::Tensor& input) -> torch::Tensor {
      return std::invoke(function_, input, more...);
    });
  }

  /// Returns the plan of the last call; null before the first.
  std::shared_ptr<const MemoryPlan> memory_plan() const { return run_.plan(); }
  /// Says how the last call kept to its plan.
  PlanOutcome plan_outcome() const { return run_.outcome(); }

 private:
  Function function_;
  torch::nn::Module named_;
  detail::BudgetedRun run_;
};

}  // namespace remat

namespace remat {

namespace detail {

template <class Range>
using ElementOf = std::remove_cvref_t<decltype(*std::begin(std::declval<Range&>()))>;

template <class Element>
inline constexpr bool is_tensor_call =
    std::same_as<Element, torch::nn::AnyModule> ||
    std::is_invocable_r_v<torch::Tensor, Element&, torch::Tensor>;

template <class Range>
constexpr bool holds_tensor_calls() {
  if constexpr (NestedSequential<Range>)
    return true;
  else if constexpr (requires { typename ElementOf<Range>; })
    return is_tensor_call<ElementOf<Range>>;
  else
    return false;
}

template <class Element>
torch::Tensor call_with_tensor(Element& element, torch::Tensor x) {
  if constexpr (std::same_as<std::remove_cv_t<Element>, torch::nn::AnyModule>)
    return element.forward(std::move(x));
  else
    return std::invoke(element, std::move(x));
}

}  // namespace detail

/// A `torch::nn::Sequential`, or a range of AnyModules, module holders or callables that map a
/// tensor to a tensor.
template <class Candidate>
concept TensorCalls =
    detail::Holds<detail::holds_tensor_calls<std::remove_cvref_t<Candidate>>(),
                  "checkpoint_sequential needs a torch::nn::Sequential, or a range of modules or "
                  "callables that take a tensor and return one">;

/// Runs `modules` one after the other, in segments that backward recomputes: Python's function of
/// this name.
///
/// As there, segments have `size / segments` modules, the last takes the rest and is not
/// checkpointed. More segments than modules means one module per segment.
///
/// @param modules  a `torch::nn::Sequential`, or a range of modules or callables
/// @param segments  at least 1
/// @return  what running them plainly returns
/// @throws ArgumentError  if `segments` is below 1
/// @par Keeps  the tensors between segments, and all that the last segment saves
template <TensorCalls Modules>
torch::Tensor checkpoint_sequential(Modules&& modules, std::int64_t segments, torch::Tensor x) {
  detail::require_segment_count(segments, "remat::checkpoint_sequential");
  if constexpr (requires {
                  modules.ptr();
                  modules->begin();
                }) {
    return checkpoint_sequential(*modules.ptr(), segments, std::move(x));
  } else if constexpr (requires { modules->begin(); }) {
    return checkpoint_sequential(*modules, segments, std::move(x));
  } else {
    const auto count = static_cast<std::size_t>(std::ranges::distance(modules));
    const std::size_t segment_count = std::min(count, static_cast<std::size_t>(segments));
    auto module = std::begin(modules);
    for (std::size_t segment = 0; segment < segment_count; ++segment) {
      const bool is_last = segment + 1 == segment_count;
      const std::size_t size =
          is_last ? count - segment * (count / segment_count) : count / segment_count;
      const auto run = [&] {
        torch::Tensor value = std::move(x);
        for (std::size_t index = 0; index < size; ++index, ++module)
          value = detail::call_with_tensor(*module, std::move(value));
        return value;
      };
      x = is_last ? run() : checkpoint(run);
    }
    return x;
  }
}

}  // namespace remat

namespace remat {

namespace detail {

/// What a text for a budget may be, for messages and documentation.
inline constexpr const char* kBudgetForms =
    "bytes (2147483648, 512MiB, 1.5GiB) or a part of what plain needs (0.33)";

/// What a text says; without a budget, what is wrong with it.
struct BudgetText {
  std::optional<MemoryBudget> budget{};
  bool is_out_of_range = false;  ///< a number as it should be, and too small or too large
  std::string cure{};
};

/// Returns a number in full, without an exponent, so that it reads back as the same.
inline std::string plain_number(double number) {
  std::array<char, 400> text{};
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  return {text.data(), end.ptr};
}

/// Says what to write in place of a number with a unit that is none of ours.
inline std::string cure_of_unit(double number, std::string_view unit) {
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  if (unit == "%") return "Write " + plain_number(number / 100);
  std::string upper;
  for (const char letter : unit)
    upper += static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  if (upper.find_first_not_of("E+-0123456789") == std::string::npos)
    return "Write the number in full";
  const std::string rest = upper.substr(1);
  const bool is_prefix = std::string_view("KMGT").find(upper[0]) != std::string_view::npos;
  if (!is_prefix || (rest != "" && rest != "B" && rest != "I" && rest != "IB")) return "";
  const std::string written = plain_number(number) + upper[0] + "iB";
  if (rest.starts_with('I')) return "Write " + written;
  return std::string(unit) + " is a power of 1000 to some and of 1024 to others: write " + written +
         ", or count the bytes";
}

/// Reads a budget: a number with a unit, or a whole one above 1, is bytes; any other is a part of
/// plain.
inline BudgetText read_budget(std::string_view text) {
  if (text.starts_with('-')) return {.is_out_of_range = true, .cure = "A budget is above 0"};
  const std::size_t end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view unit = text.substr(end);
  const std::optional<double> number = parse_digits<double>(text.substr(0, end));
  if (!number) return {};
  if (*number == 0) return {.is_out_of_range = true, .cure = "A budget is above 0"};
  if (unit.empty() && (*number <= 1 || text.find('.') != std::string_view::npos))
    return {.budget = MemoryBudget::fraction_of_plain(*number)};
  if (const std::optional<Bytes> bytes = parse_bytes(text)) {
    if (bytes->count > 0) return {.budget = MemoryBudget::bytes(*bytes)};
    return {.is_out_of_range = true, .cure = "A budget is at least 1 byte"};
  }
  if (parse_bytes("1" + std::string(unit)))
    return {.is_out_of_range = true, .cure = "It is a whole number of bytes, below 8388608TiB"};
  return {.cure = cure_of_unit(*number, unit)};
}

}  // namespace detail

/// Reads a budget as people write it: "2GiB", "1.5 GiB", "2147483648" are bytes, "0.33" and "1" are
/// parts of what the plain step needs.
///
/// A number without a unit is bytes if it is whole and above 1. Part of a byte is left out. KB, MB
/// and GB are refused, since they mean two things.
///
/// @throws ArgumentError  with the forms that there are
inline MemoryBudget parse_memory_budget(std::string_view text) {
  const detail::BudgetText read = detail::read_budget(text);
  require(read.budget.has_value(), [&] {
    return ErrorMessage("remat.budget.text")
        .where("remat::parse_memory_budget")
        .what("the budget is \"" + std::string(text) + "\", " + detail::kBudgetForms +
              " was expected")
        .cure(read.cure);
  });
  return *read.budget;
}

/// Writes a budget so that `parse_memory_budget` reads the same: "2GiB", "1000B", "0.33".
inline std::string to_string(const MemoryBudget& budget) {
  if (budget.fraction() > 0) {
    const std::string text = detail::plain_number(budget.fraction());
    return text.find('.') == std::string::npos ? text + ".0" : text;
  }
  std::int64_t count = budget.resolve({}).count;
  std::size_t unit = 0;
  while (count % 1024 == 0 && unit + 1 < detail::kByteUnits.size()) count /= 1024, ++unit;
  return std::to_string(count) + detail::kByteUnits[unit];
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryBudget& budget) {
  return stream << to_string(budget);
}

}  // namespace remat

namespace remat {

/// One way to run a training step, and what it is predicted to cost.
struct FrontierPoint {
  /// What decides what stays.
  enum class Kind : std::uint8_t {
    plain,     ///< nothing: no checkpointing
    segments,  ///< a known schedule over layers, see `segment_keeps`
    budget,    ///< a search: what a memory budget of `peak` gets
  };

  Kind kind = Kind::plain;
  std::string name;                   ///< "4 segments"
  bool is_common = false;             ///< a schedule that people compare with
  Bytes peak;                         ///< the most bytes alive at once, above those before the step
  double fraction_of_plain = 1;       ///< of the plain step's peak
  double recomputed_seconds = 0;      ///< of operations that backward runs again
  std::int64_t recomputed_count = 0;  ///< how many those are
  double share_of_forward = 0;        ///< those seconds over those of all of forward's operations

  friend bool operator==(const FrontierPoint&, const FrontierPoint&) = default;
};

/// What a model's training step can be had for: memory against time.
struct Frontier {
  using Kind = FrontierPoint::Kind;

  /// Plain, then the schedules, then what budgets get, the most memory first.
  std::vector<FrontierPoint> points;
  double forward_seconds = 0;  ///< of all of forward's operations, once

  /// Returns the plain step; there must be points.
  const FrontierPoint& plain() const { return points.front(); }

  /// Returns the points of one kind, in their order.
  std::vector<FrontierPoint> of(Kind kind) const {
    std::vector<FrontierPoint> list;
    std::ranges::copy_if(points, std::back_inserter(list),
                         [&](const FrontierPoint& point) { return point.kind == kind; });
    return list;
  }

  /// Returns what a budget gets: plain, or the fastest that fits; null if nothing does.
  const FrontierPoint* fastest_within(Bytes budget) const {
    for (const FrontierPoint& point : points)
      if (point.kind != Kind::segments && point.peak <= budget) return &point;
    return nullptr;
  }

  friend bool operator==(const Frontier&, const Frontier&) = default;
};

namespace detail {

inline std::string percent(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * part);
  return text;
}

/// Names a budget that the peak just fits into: rounded upwards.
inline std::string budget_name(Bytes peak, Bytes plain) {
  const double part = static_cast<double>(peak.count) / static_cast<double>(plain.count);
  return "budget " + percent(std::ceil(1e3 * part) / 1e3);
}

}  // namespace detail

/// Makes the frontier of a traced step.
inline Frontier make_frontier(const StepTrace& trace) {
  Frontier frontier;
  frontier.forward_seconds = trace.seconds();
  StepSimulation simulation(trace);
  const auto add = [&](FrontierPoint::Kind kind, std::string name, const StepCost& cost) {
    const Bytes plain = frontier.points.empty() ? cost.peak : frontier.plain().peak;
    const auto part = [](double count, double of) { return of > 0 ? count / of : 0; };
    frontier.points.push_back(
        {kind, std::move(name), /*is_common=*/false, cost.peak,
         part(static_cast<double>(cost.peak.count), static_cast<double>(plain.count)), cost.seconds,
         cost.recomputed_count, part(cost.seconds, frontier.forward_seconds)});
  };
  KeptValues saved;
  for (const std::int32_t count : trace.saved_counts()) saved.push_back(count > 0);
  const StepCost plain = simulation.run(saved);
  add(FrontierPoint::Kind::plain, "plain", plain);
  for (const NamedKeeps& schedule : segment_keeps(trace)) {
    add(FrontierPoint::Kind::segments, schedule.name, simulation.run(schedule.kept));
    frontier.points.back().is_common = schedule.is_common;
  }
  const std::vector<StepPoint> found = KeepSearch(trace).run().list();
  for (std::size_t i = found.size(); i-- > 0;)
    if (found[i].cost.peak < plain.peak)
      add(FrontierPoint::Kind::budget, detail::budget_name(found[i].cost.peak, plain.peak),
          found[i].cost);
  return frontier;
}

namespace detail {

/// Picks about `count` points, the most and the least among them, at even distances in memory.
///
/// @param points  the most memory first
inline std::vector<FrontierPoint> thin_out(const std::vector<FrontierPoint>& points,
                                           std::size_t count) {
  if (points.size() <= count) return points;
  const auto most = static_cast<double>(points.front().peak.count);
  const auto least = static_cast<double>(points.back().peak.count);
  std::vector<FrontierPoint> picked;
  for (const FrontierPoint& point : points) {
    const double level =
        most - (most - least) * static_cast<double>(picked.size()) / static_cast<double>(count - 1);
    if (static_cast<double>(point.peak.count) <= level) picked.push_back(point);
  }
  if (picked.back() != points.back()) picked.push_back(points.back());
  return picked;
}

}  // namespace detail

/// Writes a table: the plain step, the schedules that people compare with, and some twenty of the
/// plans for budgets. A schedule's last column says what a plan of no more memory takes.
inline std::string to_string(const Frontier& frontier) {
  if (frontier.points.empty()) return "no points";
  std::string text;
  const auto line = [&](const std::string& name, const std::string& peak,
                        const std::string& fraction, const std::string& count,
                        const std::string& share, const std::string& plan) {
    char row[200];
    std::snprintf(row, sizeof row, "%-30s %11s %9s %11s %11s", name.c_str(), peak.c_str(),
                  fraction.c_str(), count.c_str(), share.c_str());
    text += (text.empty() ? "" : "\n") + std::string(row);
    if (!plan.empty()) std::snprintf(row, sizeof row, " %11s", plan.c_str()), text += row;
  };
  const auto write = [&](const FrontierPoint& point, const std::string& plan) {
    line(point.name, to_string(point.peak), detail::percent(point.fraction_of_plain),
         std::to_string(point.recomputed_count), detail::percent(point.share_of_forward), plan);
  };
  line("a training step", "peak", "of plain", "runs again", "extra time", "by a plan");
  write(frontier.plain(), "");
  for (const FrontierPoint& point : frontier.of(FrontierPoint::Kind::segments)) {
    if (!point.is_common) continue;
    const FrontierPoint* plan = frontier.fastest_within(point.peak);
    write(point, plan == nullptr ? "none" : detail::percent(plan->share_of_forward));
  }
  constexpr std::size_t kRows = 20;
  for (const auto& point : detail::thin_out(frontier.of(FrontierPoint::Kind::budget), kRows))
    write(point, "");
  char foot[100];
  std::snprintf(foot, sizeof foot, "\nextra time is part of that of forward's operations, %.1f ms",
                1e3 * frontier.forward_seconds);
  return text + foot;
}

inline std::ostream& operator<<(std::ostream& stream, const Frontier& frontier) {
  return stream << to_string(frontier);
}

}  // namespace remat

namespace remat {

namespace detail {

/// Makes 64 bits of texts and numbers, the same on every machine.
///
/// @par Source  FNV-1a, by Fowler, Noll and Vo
class Fingerprint {
 public:
  void add(std::string_view text) {
    add(static_cast<std::int64_t>(text.size()));  // so that "a", "b" is not "ab"
    for (const char letter : text) add_byte(static_cast<unsigned char>(letter));
  }
  void add(std::int64_t number) {
    for (int shift = 0; shift < 64; shift += 8)
      add_byte(static_cast<unsigned char>(static_cast<std::uint64_t>(number) >> shift & 0xff));
  }
  void add(double number) { add(std::bit_cast<std::int64_t>(number)); }
  void add(bool flag) { add_byte(flag ? 1 : 0); }

  /// Returns 16 hexadecimal digits.
  std::string text() const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string digits;
    for (int shift = 60; shift >= 0; shift -= 4) digits += kDigits[state_ >> shift & 15];
    return digits;
  }

 private:
  void add_byte(unsigned char byte) { state_ = (state_ ^ byte) * 0x100000001b3; }

  std::uint64_t state_ = 0xcbf29ce484222325;
};

}  // namespace detail

/// Returns 16 hexadecimal digits that stand for the operations of a plan, their names and the bytes
/// of their results: plans of the same network and shape of input have the same, whatever their
/// budgets.
inline std::string fingerprint(const MemoryPlan& plan) {
  detail::Fingerprint print;
  for (const MemoryPlan::Operation& operation : plan.operations) {
    print.add(operation.name);
    print.add(static_cast<std::int64_t>(operation.results.size()));
    for (const MemoryPlan::Result& result : operation.results) print.add(result.bytes.count);
  }
  return print.text();
}

namespace detail {

/// Returns 16 hexadecimal digits that stand for all of a plan.
inline std::string checksum(const MemoryPlan& plan) {
  Fingerprint print;
  print.add(fingerprint(plan));
  for (const MemoryPlan::Operation& operation : plan.operations)
    for (const MemoryPlan::Result& result : operation.results) {
      print.add(result.is_kept);
      if (result.is_transient) print.add(std::string_view("transient"));  // as in the file
    }
  for (const Bytes bytes : {plan.budget, plan.peak, plan.plain_peak}) print.add(bytes.count);
  for (const double seconds : {plan.recomputed_seconds, plan.forward_seconds}) print.add(seconds);
  print.add(plan.recomputed_count);
  print.add(plan.saved_count);
  return print.text();
}

}  // namespace detail
}  // namespace remat

namespace remat {

/// Keeps the tensor between units at every `Count`-th unit: segments of `Count` units, the last may
/// be shorter.
///
/// @tparam Count  at least 1; `EveryNth<1>` is `EachUnit`
template <int Count>
struct EveryNth {
  static_assert(Count >= 1, "remat::EveryNth<N> needs N >= 1");

  Plan operator()(const Chain& chain) const {
    constexpr auto kSize = static_cast<std::size_t>(Count);
    std::vector<std::size_t> sizes(chain.unit_count / kSize, kSize);
    if (chain.unit_count % kSize != 0) sizes.push_back(chain.unit_count % kSize);
    return Plan::from_sizes(sizes);
  }
};

}  // namespace remat

namespace remat {

/// Checkpoints nothing: the null rule, a type in place of an `if`.
struct KeepAll {
  Plan operator()(const Chain& chain) const { return Plan::keep_all(chain.unit_count); }
};

}  // namespace remat

namespace remat {

/// Makes about sqrt(n) segments for n units, where borders and one segment's inside are about
/// equally large.
///
/// Balanced as `Segments` are.
///
/// @par Source  Chen et al., Training Deep Nets with Sublinear Memory Cost (2016)
struct SquareRoot {
  Plan operator()(const Chain& chain) const {
    const auto root = std::lround(std::sqrt(static_cast<double>(chain.unit_count)));
    return balanced_plan(chain, static_cast<std::size_t>(std::max(1L, root)));
  }
};

}  // namespace remat

namespace remat {

/// The tensors' bytes of one training step, or of one part of it, above the level before it.
struct StepMemory {
  Bytes peak;  ///< the most that were alive at once
  Bytes kept;  ///< of a step: alive just before backward, mostly what was saved for it; of a unit:
               ///< alive when its forward returned, less what it could let go
};

/// When a part of a forward was recomputed.
struct RecomputeSpan {
  double begin_seconds = 0, end_seconds = 0;
  std::int64_t operation_count = 0;
};

/// The course of one training step. Seconds are those of the thread that allocates, from the step's
/// beginning: an accelerator computes later than its memory is taken.
struct StepTimeline {
  std::vector<MemorySample> samples{};  ///< at the beginning, and at each allocation and release
  double backward_begin_seconds = 0;    ///< before: forward and loss
  double end_seconds = 0;
  std::vector<RecomputeSpan> recomputes{};
};

/// What one unit of a chain, or one checkpointed module, takes in forward.
struct UnitMemory {
  std::string name;                ///< as in `named_modules()`
  StepMemory plain, checkpointed;  ///< of several calls: kept in all, and the highest peak
};

/// What checkpointing does to the memory of one training step; see `compare_memory`.
struct MemoryReport {
  StepMemory plain, checkpointed;
  std::int64_t regions = 0;                ///< that the checkpointed step ran; 0: nothing was saved
  std::int64_t recomputed_operations = 0;  ///< that its backward ran a second time
  std::optional<double> time_ratio{};      ///< checkpointed over plain, median; empty: not timed
  StepTimeline plain_timeline{}, checkpointed_timeline{};
  std::vector<UnitMemory> units{};  ///< in the order of forward, those inside others left out

  /// Returns by how much the peak is lower with checkpointing; negative if it is higher.
  Bytes saving() const { return plain.peak - checkpointed.peak; }
  /// Returns the saving as a part of the plain peak, 0 to 1.
  double saved_part() const {
    return plain.peak.count == 0
               ? 0
               : static_cast<double>(saving().count) / static_cast<double>(plain.peak.count);
  }
};

namespace detail {

inline std::string fixed_number(double number, int decimals) {
  char text[40];
  std::snprintf(text, sizeof text, "%.*f", decimals, number);
  return text;
}

/// Writes how much is saved and what that costs, on one line.
inline std::string saving_text(const MemoryReport& report) {
  std::string text = to_string(report.saving()) + " (" +
                     fixed_number(100 * report.saved_part(), 1) + " % of the peak)";
  if (report.regions == 0) return text + "; nothing in this step was checkpointed";
  text += "; " + std::to_string(report.recomputed_operations) + " operations recomputed";
  if (report.time_ratio) text += "; time x" + fixed_number(*report.time_ratio, 2);
  return text;
}

inline std::string unit_row(const std::string& name, std::size_t name_width,
                            const std::vector<std::string>& cells) {
  std::string row = name + std::string(name_width - std::min(name_width, name.size()), ' ');
  for (const std::string& cell : cells)
    row += std::string(14 - std::min<std::size_t>(14, cell.size()), ' ') + cell;
  return row;
}

/// Writes a line per unit, each after an end of line; nothing if there are none.
inline std::string unit_table(const std::vector<UnitMemory>& units) {
  if (units.empty()) return "";
  const std::string title = "forward, by unit";
  std::size_t width = title.size();
  for (const UnitMemory& unit : units) width = std::max(width, unit.name.size());
  std::string table = "\n\n" + unit_row(title, width, {"", "plain", "", "checkpointed"}) + "\n" +
                      unit_row("", width, {"kept", "peak", "kept", "peak"});
  for (const UnitMemory& unit : units)
    table +=
        "\n" + unit_row(unit.name, width,
                        {to_string(unit.plain.kept), to_string(unit.plain.peak),
                         to_string(unit.checkpointed.kept), to_string(unit.checkpointed.peak)});
  return table;
}

}  // namespace detail

/// Writes the report as lines for people, the last one without an end of line: three of the step,
/// and a table of the units if there are any.
inline std::string to_string(const MemoryReport& report) {
  const auto line = [](const StepMemory& memory) {
    return "peak " + to_string(memory.peak) + ", kept for backward " + to_string(memory.kept);
  };
  return "plain:        " + line(report.plain) + "\ncheckpointed: " + line(report.checkpointed) +
         "\nsaving:       " + detail::saving_text(report) + detail::unit_table(report.units);
}

inline std::ostream& operator<<(std::ostream& stream, const MemoryReport& report) {
  return stream << to_string(report);
}

}  // namespace remat

#include <thread>

namespace remat::detail {

/// What one training step did to memory.
struct StepRecord {
  struct Unit {
    const void* module;
    StepMemory memory;
  };

  StepMemory memory;
  StepTimeline timeline;
  std::vector<Unit> units;  // in the order of their first calls
};

/// Records one training step: its live bytes over time, its recomputes, and what its units take.
///
/// Set as the allocation listener on the thread that runs the step, where `MemoryMeter` would be:
/// both count the same.
class REMAT_VISIBLE StepRecorder final : public AllocationListener {
 public:
  StepRecorder() { record_.timeline.samples.push_back({0, {0}}); }

  /// Marks the moment between the loss and its backward pass.
  void backward_begins() {
    const std::lock_guard lock(mutex_);
    is_in_forward_ = false;
    record_.memory.kept = live_;
    record_.timeline.backward_begin_seconds = now();
  }

  /// Returns the record; called when the step is over.
  StepRecord finish() {
    const std::lock_guard lock(mutex_);
    record_.timeline.end_seconds = now();
    return std::move(record_);
  }

  void changed(const void*, std::int64_t bytes, c10::Device) override {
    const std::lock_guard lock(mutex_);
    live_.count += bytes;
    record_.memory.peak = std::max(record_.memory.peak, live_);
    unit_peak_ = std::max(unit_peak_, live_);
    record_.timeline.samples.push_back({now(), live_});
  }

  void recompute_begins() override {
    const std::lock_guard lock(mutex_);
    open_.emplace_back(std::this_thread::get_id(), record_.timeline.recomputes.size());
    const double begin = now();
    record_.timeline.recomputes.push_back({begin, begin, 0});
  }
  void recompute_ended(std::int64_t operation_count) override {
    const std::lock_guard lock(mutex_);
    // Each device has a thread of backward: several may recompute at once.
    const auto open =
        std::ranges::find(open_, std::this_thread::get_id(), &decltype(open_)::value_type::first);
    if (open == open_.end()) return;
    RecomputeSpan& span = record_.timeline.recomputes[open->second];
    span.end_seconds = now();
    span.operation_count = operation_count;
    open_.erase(open);
  }

  void unit_begins(const void* module) override {
    const std::lock_guard lock(mutex_);
    if (!is_in_forward_ || std::this_thread::get_id() != thread_) return;
    if (unit_depth_++ > 0) return;
    unit_ = module;
    unit_start_ = unit_peak_ = live_;
  }
  void unit_ended() override {
    const std::lock_guard lock(mutex_);
    if (unit_depth_ == 0 || std::this_thread::get_id() != thread_) return;
    if (--unit_depth_ > 0) return;
    auto known = std::ranges::find(record_.units, unit_, &StepRecord::Unit::module);
    if (known == record_.units.end()) known = record_.units.insert(known, {unit_, {}});
    known->memory.kept += live_ - unit_start_;
    known->memory.peak = std::max(known->memory.peak, unit_peak_ - unit_start_);
  }

 private:
  double now() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::thread::id thread_ = std::this_thread::get_id();
  std::mutex mutex_;  // guards what follows
  StepRecord record_;
  Bytes live_;
  std::vector<std::pair<std::thread::id, std::size_t>> open_;  // recomputes, by thread
  bool is_in_forward_ = true;
  int unit_depth_ = 0;
  const void* unit_ = nullptr;  // the outermost one
  Bytes unit_start_, unit_peak_;
};

}  // namespace remat::detail

namespace remat {

/// Says how `compare_memory` measures.
struct CompareMemoryOptions {
  std::optional<std::int64_t> segments{};  ///< empty: the switches as they are, or all by own rule
  int timed_pairs = 3;                     ///< pairs of steps for the time ratio; 0: none
};

namespace detail {

/// Runs forward, loss, `before_backward` and backward.
using MeasuredStep = std::function<void(const std::function<void()>& before_backward)>;

inline void require_loss(const torch::Tensor& value) {
  require(value.defined() && value.numel() == 1 && value.requires_grad(), [&] {
    return ErrorMessage("remat.memory.loss")
        .where("remat::compare_memory")
        .what(!value.defined() ? std::string("the loss is undefined, a scalar was expected")
                               : "the loss has " + std::to_string(value.numel()) +
                                     " elements and requires_grad = " +
                                     (value.requires_grad() ? "true" : "false") +
                                     ", a scalar that requires grad was expected")
        .cure("Return what a training step calls backward() on, and leave grad mode on");
  });
}

inline StepRecord measure(ModelState& state, const MeasuredStep& step) {
  state.rewind();  // outside: what it frees was not allocated by the step
  const auto recorder = std::make_shared<StepRecorder>();
  const AllocationListenerGuard guard(recorder);
  step([&] { recorder->backward_begins(); });
  return recorder->finish();
}

/// Returns a unit's name in the model; a unit that a backbone has put together from registered
/// parts, such as its stem, has the name that its chain gave it.
inline std::string name_of_unit(const torch::nn::Module& model, const torch::nn::Module* unit) {
  if (unit == &model) return model.name();
  const auto modules = model.named_modules(/*name_prefix=*/{}, /*include_self=*/false);
  for (const auto& item : modules)
    if (item.value().get() == unit) return item.key();
  const auto name_in = [&](const torch::nn::Module& parent) {
    const auto* toggle = dynamic_cast<const CheckpointToggle*>(&parent);
    return toggle == nullptr ? std::string() : toggle->unit_name(unit);
  };
  if (std::string name = name_in(model); !name.empty()) return name;
  for (const auto& item : modules)
    if (const std::string name = name_in(*item.value()); !name.empty())
      return item.key() + "." + name;
  return "unregistered";
}

/// Joins what both steps found of each unit, in the order of the plain one.
inline std::vector<UnitMemory> join_units(const torch::nn::Module& model, const StepRecord& plain,
                                          const StepRecord& checkpointed) {
  std::vector<UnitMemory> units;
  std::map<const void*, std::size_t> places;
  const auto unit_of = [&](const void* module) -> UnitMemory& {
    const auto [place, is_new] = places.emplace(module, units.size());
    if (is_new)
      units.push_back({name_of_unit(model, static_cast<const torch::nn::Module*>(module)), {}, {}});
    return units[place->second];
  };
  for (const auto& unit : plain.units) unit_of(unit.module).plain = unit.memory;
  for (const auto& unit : checkpointed.units) unit_of(unit.module).checkpointed = unit.memory;
  return units;
}

inline double seconds_of(ModelState& state, const MeasuredStep& step) {
  state.rewind();
  const auto start = std::chrono::steady_clock::now();
  step([] {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Returns the median of alternating pairs, without a listener, which costs time.
inline std::optional<double> time_ratio(ModelState& state, const MeasuredStep& plain,
                                        const MeasuredStep& step, int pairs) {
  std::vector<double> ratios;
  for (int pair = 0; pair < pairs; ++pair) {
    const double plain_seconds = seconds_of(state, plain);
    ratios.push_back(seconds_of(state, step) / plain_seconds);
  }
  std::ranges::sort(ratios);
  return ratios.empty() ? std::nullopt : std::optional(ratios[ratios.size() / 2]);
}

/// Where checkpointing does not work, both steps would be the same.
inline void require_engine(const EngineStatus& status) {
  if (status.is_available) return;
  throw EnvironmentError(ErrorMessage("remat.memory.engine")
                             .where("remat::compare_memory")
                             .what("there is nothing to compare")
                             .cause(status.reason));
}

/// Checks what can be checked before a step.
inline void require_comparable(torch::nn::Module& model, const CompareMemoryOptions& options) {
  require(model.is_training(), [&] {
    return ErrorMessage("remat.memory.eval")
        .where("remat::compare_memory")
        .what(model.name() + " is in eval mode, training mode was expected")
        .cause("Checkpointing does nothing in eval mode")
        .cure("Call train() first");
  });
  if (options.segments) require_segment_count(*options.segments, "remat::compare_memory");
  require_engine(engine_status());
}

inline void switch_on(torch::nn::Module& model, const std::optional<std::int64_t>& segments) {
  if (segments)
    enable_gradient_checkpointing(model, *segments);
  else if (!is_gradient_checkpointing_enabled(model))
    enable_gradient_checkpointing(model);
}

/// Measures the step twice, and leaves the model as it was.
inline MemoryReport compare_steps(torch::nn::Module& model, const torch::Tensor& input,
                                  const MeasuredStep& step, const CompareMemoryOptions& options) {
  require_comparable(model, options);
  ModelState state(model, input);
  for (const torch::Tensor& parameter : model.parameters())  // a forward may move some
    if (parameter.defined() && has_plain_storage(parameter)) state.before_write(parameter);
  switch_on(model, options.segments);
  const MeasuredStep plain = [&](const std::function<void()>& before_backward) {
    const PlainScope scope;
    step(before_backward);
  };
  step([] {});   // chains plan by bytes from their second forward on
  plain([] {});  // and what is set up once should be in neither timeline

  StepRecord plain_record = measure(state, plain);
  const Statistics before = statistics();
  StepRecord checkpointed_record = measure(state, step);
  MemoryReport report;
  report.regions = statistics().regions - before.regions;
  report.recomputed_operations = statistics().recomputed_operations - before.recomputed_operations;
  require(report.regions > 0 || for_each_toggle(model, [](CheckpointToggle&) {}) > 0, [&] {
    return ErrorMessage("remat.memory.nothing")
        .where("remat::compare_memory")
        .what("nothing inside " + model.name() + " is checkpointed")
        .cure("Make parts of it Checkpointed<...>, or call remat::checkpoint in its forward");
  });
  report.plain = plain_record.memory;
  report.checkpointed = checkpointed_record.memory;
  report.units = join_units(model, plain_record, checkpointed_record);
  report.plain_timeline = std::move(plain_record.timeline);
  report.checkpointed_timeline = std::move(checkpointed_record.timeline);
  report.time_ratio = time_ratio(state, plain, step, options.timed_pairs);
  return report;
}

}  // namespace detail

/// Runs one training step plain and checkpointed, and reports the memory of both: its peak, its
/// course, and what each unit takes.
///
/// A step is forward, loss and backward, without gradients at its start; both draw the same random
/// numbers. Afterwards the model is as it was, also after an exception: parameters, gradients,
/// buffers, modes, switches, plans and random states. Where nothing is switched on, everything is
/// for the comparison. What `MemoryMeter` does not see is not in the figures, and regions that
/// other threads run meanwhile are counted as this step's. Leaf tensors that only `loss` knows keep
/// the gradients that they get.
///
/// @param model  in training mode; a module with forward(input)
/// @param loss   makes a scalar of what forward returned
/// @throws ArgumentError     if the model is in eval mode or has nothing checkpointed, or the loss
/// is no scalar that requires grad
/// @throws EnvironmentError  if checkpointing does not work in this process
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
MemoryReport compare_memory(Module& model, const torch::Tensor& input, Loss&& loss,
                            const CompareMemoryOptions& options = {}) {
  const bool is_inner = input.defined() && !input.is_leaf();
  const torch::Tensor x = is_inner ? input.detach().requires_grad_() : input;
  const auto step = [&](const std::function<void()>& before_backward) {
    auto output = model.forward(x);
    const torch::Tensor value = loss(output);
    detail::require_loss(value);
    before_backward();
    value.backward();
  };
  return detail::compare_steps(model, x, step, options);
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
MemoryReport compare_memory(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& input,
                            Loss&& loss, const CompareMemoryOptions& options = {}) {
  return compare_memory(*model.ptr(), input, std::forward<Loss>(loss), options);
}

}  // namespace remat

namespace remat {

namespace detail {

/// What is no module and no holder of one.
template <class Type>
concept PlainFunction =
    std::is_invocable_v<Type&, const torch::Tensor&> &&
    !std::is_base_of_v<torch::nn::Module, std::remove_cvref_t<Type>> &&
    !std::is_base_of_v<torch::detail::ModuleHolderIndicator, std::remove_cvref_t<Type>>;

/// Traces a training step with its real loss, and leaves everything as it was.
template <class Forward, class Loss>
StepTrace trace_loss_step(torch::nn::Module& module, const torch::Tensor& example,
                          const Forward& forward, Loss& loss) {
  require(module.is_training() && records_regions(), [&] {
    return ErrorMessage("remat.plan.mode")
        .where("remat::plan")
        .what(module.name() +
              " is in eval mode, or grad mode is off, or this is inside another plan")
        .cause("Nothing would be recorded")
        .cure("Call train() first, and plan outside of NoGradGuard and checkpointed regions");
  });
  const auto backward = [&](auto& output, const std::vector<torch::Tensor>& leaves) {
    const torch::Tensor value = loss(output);
    require(value.defined() && value.numel() == 1 && value.requires_grad(), [] {
      return ErrorMessage("remat.plan.loss")
          .where("remat::plan")
          .what("the loss is no scalar that requires grad")
          .cure("Return what a training step calls backward() on");
    });
    if (!leaves.empty()) value.backward({}, {}, /*create_graph=*/false, at::TensorList(leaves));
  };
  return trace_module(module, example, forward, backward);
}

template <class Module, class Loss>
StepTrace trace_training_step(Module& model, const torch::Tensor& example, Loss& loss) {
  const auto forward = [&](const torch::Tensor& x) { return model.forward(x); };
  return trace_loss_step(model, example, forward, loss);
}

}  // namespace detail

/// Makes the plan that needs the least time within a budget, from one traced training step.
///
/// The step is forward as one checkpointed region, loss and backward, run twice; afterwards the
/// model is as it was: gradients, buffers, modes, switches, random states. The plan is applied with
/// `remat::checkpoint(plan, fn, inputs...)` around the same forward, or given to a backbone's
/// `enable_gradient_checkpointing`.
///
/// @param model    in training mode; a module with forward(tensor)
/// @param example  an input of the size of a training batch
/// @param loss     makes a scalar of what forward returned
/// @throws BudgetError  if the budget is infeasible
/// @throws ArgumentError  if the model is in eval mode or the loss is no scalar that requires grad
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
MemoryPlan plan(Module& model, const torch::Tensor& example, Loss&& loss,
                const MemoryBudget& budget) {
  const StepTrace trace = detail::trace_training_step(model, example, loss);
  return plan_within(trace, KeepSearch(trace).run(), budget, /*reserve=*/{}, "remat::plan");
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
MemoryPlan plan(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& example,
                Loss&& loss, const MemoryBudget& budget) {
  return plan(*model.ptr(), example, std::forward<Loss>(loss), budget);
}

/// As for a module; takes a function of one tensor, whose plan `remat::checkpoint(plan, fn, x)`
/// applies. `remat::Budgeted` makes one by itself, in its first call.
///
/// What the function reads besides gets the same care as a module's parameters; modules that it
/// calls must be in training mode.
template <detail::PlainFunction Function, class Loss>
MemoryPlan plan(Function&& fn, const torch::Tensor& example, Loss&& loss,
                const MemoryBudget& budget) {
  torch::nn::Module named("the function");
  const StepTrace trace = detail::trace_loss_step(named, example, fn, loss);
  return plan_within(trace, KeepSearch(trace).run(), budget, /*reserve=*/{}, "remat::plan");
}

/// Calls `fn(inputs...)` as a checkpointed region that keeps what the plan says.
///
/// Regions inside are part of it. If other operations run than those of the plan, everything from
/// there on is dropped and recomputed: right, and slower.
///
/// @param outcome  gets whether the plan was followed to its end; may be null
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(const MemoryPlan& plan, PlanOutcome* outcome, Function&& fn,
                          Inputs&&... inputs) {
  detail::RegionOptions options;
  struct Report {
    std::shared_ptr<const detail::PlanFollower> from;
    PlanOutcome* to;
    ~Report() {
      if (to != nullptr) *to = from->outcome();
    }
  } const report{detail::follow_plan(options, std::make_shared<const MemoryPlan>(plan)), outcome};
  return detail::run_region(options, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

/// As above, without an outcome.
template <class Function, class... Inputs>
  requires std::invocable<Function, Inputs...>
decltype(auto) checkpoint(const MemoryPlan& plan, Function&& fn, Inputs&&... inputs) {
  return checkpoint(plan, nullptr, std::forward<Function>(fn), std::forward<Inputs>(inputs)...);
}

}  // namespace remat

namespace remat {

/// Says what a model's training step can be had for, from one traced step: without checkpointing,
/// by known schedules over its layers, and by the plans that memory budgets get.
///
/// All are simulated on the same trace, so that they compare; nothing is run but that step, twice.
/// Times are those of the operations that run again, measured in the traced step's forward.
/// Layers are those of the checkpointed chains inside the model, whether or not they are switched
/// on. Afterwards the model is as it was, as after `remat::plan`.
///
/// ```cpp
/// std::cout << remat::frontier(*net, images, loss) << '\n';
/// ```
/// @param model    in training mode; a module with forward(tensor)
/// @param example  an input of the size of a training batch
/// @param loss     makes a scalar of what forward returned
/// @throws ArgumentError  if the model is in eval mode or the loss is no scalar that requires grad
template <class Module, class Loss>
  requires std::derived_from<Module, torch::nn::Module>
Frontier frontier(Module& model, const torch::Tensor& example, Loss&& loss) {
  return make_frontier(detail::trace_training_step(model, example, loss));
}

/// As for a module; takes a holder.
template <class Impl, class Loss>
Frontier frontier(const torch::nn::ModuleHolder<Impl>& model, const torch::Tensor& example,
                  Loss&& loss) {
  return frontier(*model.ptr(), example, std::forward<Loss>(loss));
}

}  // namespace remat

namespace remat::detail {

/// Writes a number as SVG wants it: `std::printf` would write a comma where the locale has one.
inline std::string svg_number(double number, std::chars_format format, int precision) {
  std::array<char, 400> text{};  // the largest double has 309 digits
  if (std::abs(number) < 1e-12) number = 0;
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number, format, precision).ptr;
  return {text.data(), end};
}

/// Writes a place in the picture, in pixels.
inline std::string svg_place(double pixels) {
  return svg_number(pixels, std::chars_format::fixed, 1);
}

/// Makes words part of XML: escapes what has a meaning there and drops what may not be there.
inline std::string svg_escape(std::string_view words) {
  std::string text;
  for (const char c : words) {
    switch (c) {
      case '&':
        text += "&amp;";
        break;
      case '<':
        text += "&lt;";
        break;
      case '>':
        text += "&gt;";
        break;
      case '"':
        text += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20) text += c;
    }
  }
  return text;
}

/// Returns about how wide words are; a picture does not know the fonts of who looks at it.
inline double svg_width(std::string_view words, double font_size) {
  const auto is_start = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return 0.6 * font_size * static_cast<double>(std::ranges::count_if(words, is_start));
}

/// Where the words of a label lie about the place they are written at.
enum class SvgAnchor { start, middle, end };

struct SvgTextStyle {
  double font_size = 12;
  const char* color = "#444444";
  bool is_bold = false;
  bool is_rotated = false;  ///< reads upwards
};

inline std::string svg_text(double x, double y, SvgAnchor anchor, std::string_view words,
                            const SvgTextStyle& style = {}) {
  constexpr std::array<const char*, 3> kAnchors = {"start", "middle", "end"};
  std::string text = "<text x=\"" + svg_place(x) + "\" y=\"" + svg_place(y) + "\" text-anchor=\"" +
                     kAnchors[static_cast<std::size_t>(anchor)] + "\" font-size=\"" +
                     svg_place(style.font_size) + "\" fill=\"" + style.color + "\"";
  if (style.is_bold) text += " font-weight=\"bold\"";
  if (style.is_rotated)
    text += " transform=\"rotate(-90 " + svg_place(x) + " " + svg_place(y) + ")\"";
  return text + ">" + svg_escape(words) + "</text>\n";
}

inline std::string svg_line(double x1, double y1, double x2, double y2, std::string_view color) {
  return "<line x1=\"" + svg_place(x1) + "\" y1=\"" + svg_place(y1) + "\" x2=\"" + svg_place(x2) +
         "\" y2=\"" + svg_place(y2) + "\" stroke=\"" + std::string(color) + "\"/>\n";
}

inline std::string svg_box(double x, double y, double width, double height, std::string_view color,
                           double opacity = 1) {
  std::string text = "<rect x=\"" + svg_place(x) + "\" y=\"" + svg_place(y) + "\" width=\"" +
                     svg_place(width) + "\" height=\"" + svg_place(height) + "\" fill=\"" +
                     svg_escape(color) + "\"";
  if (opacity < 1)
    text += " fill-opacity=\"" + svg_number(opacity, std::chars_format::fixed, 2) + "\"";
  return text + "/>\n";
}

/// Maps values to pixels along one axis.
struct SvgScale {
  double low, high;  // values at the ends; low < high
  double low_pixel, high_pixel;

  double operator()(double value) const {
    return low_pixel + (value - low) / (high - low) * (high_pixel - low_pixel);
  }

  /// Returns the round values between the ends, at most `count` + 1 of them.
  std::vector<double> ticks(double count) const {
    const double rough = (high - low) / count;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    double distance = 10 * power;
    for (const double factor : {5.0, 2.0, 1.0})
      if (factor * power >= rough) distance = factor * power;
    std::vector<double> values;
    const double first = std::ceil(low / distance - 1e-9);
    for (double index = first; index * distance <= high + 1e-9 * distance; ++index)
      values.push_back(index * distance);
    return values;
  }
};

}  // namespace remat::detail

namespace remat {

/// An axis of a chart.
struct ChartAxis {
  std::string title;           ///< with the unit: "milliseconds since the step began"
  bool starts_at_zero = true;  ///< shows zero even if no point is near it
};

/// A point of a chart, in the units of the axes.
struct ChartPoint {
  double x = 0, y = 0;
  std::string label{};  ///< written beside the point; empty: none
};

/// A part of the x axis.
struct ChartSpan {
  double from = 0, to = 0;
};

/// Says how something in a chart looks.
struct ChartStyle {
  std::string name{};             ///< in the legend, once per name; empty: not there
  std::string color = "#2471a3";  ///< as SVG has it
  bool has_line = true;           ///< joins the points in their order
  bool is_stepped = false;        ///< a value holds until the next point
  bool is_dashed = false;         ///< for the line
  bool is_filled = false;         ///< shades the area down to zero
  bool has_markers = false;       ///< a dot at each point
};

/// Parts of the x axis that look alike.
struct ChartBand {
  std::vector<ChartSpan> spans;
  ChartStyle style{};
};

/// Draws curves, points and spans over two axes as an SVG picture.
///
/// ```cpp
/// remat::SvgChart chart("Memory against time", {"step time, ratio", false}, {"peak, MiB"});
/// chart.add({{1.0, 812, "keep all"}, {1.2, 420, "4 segments"}},
///           {.name = "segments", .has_markers = true});
/// file << chart.text();
/// ```
/// What is added later is drawn on top. Points that are not finite are left out. The picture needs
/// no font, script or style sheet.
class SvgChart {
 public:
  SvgChart(std::string title, ChartAxis x_axis, ChartAxis y_axis)
      : title_(std::move(title)), x_axis_(std::move(x_axis)), y_axis_(std::move(y_axis)) {}

  /// Sets a line below the title.
  SvgChart& set_subtitle(std::string words) {
    subtitle_ = std::move(words);
    return *this;
  }

  /// Adds a curve, an area or points, as the style says.
  SvgChart& add(std::vector<ChartPoint> points, ChartStyle style) {
    std::erase_if(points, [](const ChartPoint& point) {
      return !std::isfinite(point.x) || !std::isfinite(point.y);
    });
    series_.push_back({std::move(points), std::move(style)});
    return *this;
  }

  /// Shades parts of the x axis over the whole height, behind the curves.
  SvgChart& shade(ChartBand band) {
    shades_.push_back(std::move(band));
    return *this;
  }

  /// Adds a bar below the x axis, where spans are marked beside a name.
  SvgChart& add_lane(std::string name, std::vector<ChartBand> bands) {
    lanes_.push_back({std::move(name), std::move(bands)});
    return *this;
  }

  /// Returns the picture.
  std::string text() const {
    const Frame frame = this->frame();
    std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " +
                      detail::svg_place(kWidth) + " " + detail::svg_place(frame.height) +
                      "\" font-family=\"Helvetica, Arial, sans-serif\" role=\"img\">\n<title>" +
                      detail::svg_escape(title_) + "</title>\n" +
                      detail::svg_box(0, 0, kWidth, frame.height, "white") +
                      detail::svg_text(kMargin, 30, Anchor::start, title_, {17, "#222222", true});
    if (!subtitle_.empty())
      svg += detail::svg_text(kMargin, 50, Anchor::start, subtitle_, {12.5, "#666666"});
    svg += draw_legend(frame) + draw_grid(frame);
    for (const Series& series : series_) svg += draw_area(series, frame);
    for (const Series& series : series_) svg += draw_line(series, frame);
    return svg + draw_labels(frame) + draw_lanes(frame) + "</svg>\n";
  }

 private:
  using Anchor = detail::SvgAnchor;
  static constexpr double kWidth = 860, kMargin = 24, kRight = kWidth - 28;
  static constexpr double kPlotHeight = 330, kLegendLine = 20, kLaneHeight = 16, kLaneStep = 22;
  static constexpr const char* kGrid = "#e4e4e4";

  struct Series {
    std::vector<ChartPoint> points;
    ChartStyle style;
  };
  struct Lane {
    std::string name;
    std::vector<ChartBand> bands;
  };
  struct LegendEntry {
    const ChartStyle* style;
    double band_opacity;  // 0: no band
    double x, y;
  };
  struct Frame {
    detail::SvgScale x, y;
    std::vector<LegendEntry> legend;
    double height;
  };
  struct Box {
    double left, top, right, bottom;
  };

  // --- layout ---

  Frame frame() const {
    Range x, y;
    for (const Series& series : series_)
      for (const ChartPoint& point : series.points) x.include(point.x), y.include(point.y);
    for (const Lane& lane : lanes_)
      for (const ChartBand& band : lane.bands)
        for (const ChartSpan& span : band.spans) x.include(span.from), x.include(span.to);
    x.finish(x_axis_), y.finish(y_axis_);
    y.high += 0.08 * (y.high - y.low);

    std::vector<LegendEntry> legend = place_legend(subtitle_.empty() ? 56 : 74);
    const double top = (legend.empty() ? (subtitle_.empty() ? 26 : 44) : legend.back().y) + 22;
    const double bottom = top + kPlotHeight;
    const double lanes = static_cast<double>(lanes_.size()) * kLaneStep;
    double left = 84;
    for (const Lane& lane : lanes_)
      left = std::max(left, kMargin + 8 + detail::svg_width(lane.name, 12));
    return {{x.low, x.high, left, kRight},
            {y.low, y.high, bottom, top},
            std::move(legend),
            bottom + 56 + (lanes_.empty() ? 0 : lanes + 6)};
  }

  struct Range {
    double low = 0, high = 0;
    bool is_empty = true;

    void include(double value) {
      low = is_empty ? value : std::min(low, value);
      high = is_empty ? value : std::max(high, value);
      is_empty = false;
    }
    void finish(const ChartAxis& axis) {
      if (axis.starts_at_zero) include(0);
      if (!(high > low)) high = low + 1;
      const double edge = axis.starts_at_zero ? 0 : 0.05 * (high - low);
      low -= edge, high += edge;
    }
  };

  std::vector<LegendEntry> place_legend(double y) const {
    std::vector<LegendEntry> entries;
    double x = kMargin;
    const auto place = [&](const ChartStyle& style, double band_opacity) {
      const auto has_name = [&](const LegendEntry& entry) {
        return entry.style->name == style.name;
      };
      if (style.name.empty() || std::ranges::any_of(entries, has_name)) return;
      const double width = 26 + detail::svg_width(style.name, 12) + 18;
      if (x + width > kRight && x > kMargin) x = kMargin, y += kLegendLine;
      entries.push_back({&style, band_opacity, x, y});
      x += width;
    };
    for (const Series& series : series_) place(series.style, 0);
    for (const ChartBand& band : shades_) place(band.style, kShadeOpacity);
    for (const Lane& lane : lanes_)
      for (const ChartBand& band : lane.bands) place(band.style, 1);
    return entries;
  }

  // --- drawing ---

  static std::string draw_legend(const Frame& frame) {
    std::string svg;
    for (const LegendEntry& entry : frame.legend) {
      const ChartStyle& style = *entry.style;
      const bool is_band = entry.band_opacity > 0;
      if (is_band)
        svg += detail::svg_box(entry.x, entry.y - 10, 18, 11, style.color, entry.band_opacity);
      else if (style.has_line)
        svg += stroke("M" + place(entry.x, entry.y - 4) + "h18", style);
      if (!is_band && style.has_markers) svg += dot(entry.x + 9, entry.y - 4, style);
      svg += detail::svg_text(entry.x + 25, entry.y, Anchor::start, style.name);
    }
    return svg;
  }

  std::string draw_grid(const Frame& frame) const {
    const double bottom = frame.y.low_pixel, top = frame.y.high_pixel, left = frame.x.low_pixel;
    const auto number = [](double value) {
      return detail::svg_number(value, std::chars_format::general, 6);
    };
    std::string svg;
    for (const ChartBand& band : shades_)
      svg += draw_band(band, frame, top, bottom - top, kShadeOpacity);
    for (const double value : frame.y.ticks(7)) {
      svg += detail::svg_line(left, frame.y(value), kRight, frame.y(value), kGrid);
      svg += detail::svg_text(left - 8, frame.y(value) + 4, Anchor::end, number(value));
    }
    svg += detail::svg_line(left, bottom, kRight, bottom, "#888888");
    for (const double value : frame.x.ticks(9)) {
      svg += detail::svg_line(frame.x(value), bottom, frame.x(value), bottom + 5, "#888888");
      svg += detail::svg_text(frame.x(value), bottom + 19, Anchor::middle, number(value));
    }
    return svg + detail::svg_text((left + kRight) / 2, bottom + 40, Anchor::middle, x_axis_.title) +
           detail::svg_text(kMargin, (top + bottom) / 2, Anchor::middle, y_axis_.title,
                            {.is_rotated = true});
  }

  static std::string draw_area(const Series& series, const Frame& frame) {
    if (!series.style.is_filled || series.points.empty()) return "";
    const double base = frame.y(std::clamp(0.0, frame.y.low, frame.y.high));
    return "<path fill=\"" + detail::svg_escape(series.style.color) +
           "\" fill-opacity=\"0.12\" d=\"" + path(series, frame) + "L" +
           place(frame.x(series.points.back().x), base) + "L" +
           place(frame.x(series.points.front().x), base) + "Z\"/>\n";
  }

  static std::string draw_line(const Series& series, const Frame& frame) {
    std::string svg;
    if (series.style.has_line && !series.points.empty())
      svg += stroke(path(series, frame), series.style);
    if (series.style.has_markers)
      for (const ChartPoint& point : series.points)
        svg += dot(frame.x(point.x), frame.y(point.y), series.style);
    return svg;
  }

  /// Puts each label on the first side of its point where it covers no other label.
  std::string draw_labels(const Frame& frame) const {
    std::string svg;
    std::vector<Box> taken;
    for (const Series& series : series_)
      for (const ChartPoint& point : series.points) {
        if (point.label.empty()) continue;
        const Box box = place_label(point, frame, taken);
        taken.push_back(box);
        // Where a curve passes behind them, words stay readable.
        svg += detail::svg_box(box.left - 1, box.top + 1, box.right - box.left + 2,
                               box.bottom - box.top - 1, "white", 0.75);
        svg +=
            detail::svg_text(box.left, box.bottom - 3, Anchor::start, point.label, {12, "#222222"});
      }
    return svg;
  }

  static Box place_label(const ChartPoint& point, const Frame& frame,
                         const std::vector<Box>& taken) {
    const double width = detail::svg_width(point.label, 12), height = 15;
    const double x = frame.x(point.x), y = frame.y(point.y);
    std::vector<Box> sides;
    for (const double top : {y - height - 3, y + 4, y - height / 2})
      for (const double left : {x + 7, x - 7 - width})
        sides.push_back({left, top, left + width, top + height});
    const auto is_free = [&](const Box& side) {
      return side.left > frame.x.low_pixel && side.right < kRight &&
             side.top > frame.y.high_pixel - 8 && side.bottom < frame.y.low_pixel &&
             std::ranges::none_of(
                 taken,
                 [&](const Box& other) {
                   return side.left < other.right && other.left < side.right &&
                          side.top < other.bottom && other.top < side.bottom;
                 });
    };
    const auto found = std::ranges::find_if(sides, is_free);
    return found == sides.end() ? sides.front() : *found;
  }

  std::string draw_lanes(const Frame& frame) const {
    std::string svg;
    double top = frame.y.low_pixel + 54;
    for (const Lane& lane : lanes_) {
      for (const ChartBand& band : lane.bands) svg += draw_band(band, frame, top, kLaneHeight, 1);
      svg += detail::svg_text(frame.x.low_pixel - 8, top + 12, Anchor::end, lane.name);
      top += kLaneStep;
    }
    return svg;
  }

  /// Draws spans; those without a visible gap between them become one.
  static std::string draw_band(const ChartBand& band, const Frame& frame, double top, double height,
                               double opacity) {
    std::vector<ChartSpan> spans = band.spans;
    std::ranges::sort(spans, {}, &ChartSpan::from);
    std::string svg;
    for (std::size_t first = 0; first < spans.size();) {
      const double left = frame.x(spans[first].from);
      double right = left + 1;
      for (; first < spans.size() && frame.x(spans[first].from) < right + 0.5; ++first)
        right = std::max(right, frame.x(spans[first].to));
      svg += detail::svg_box(left, top, right - left, height, band.style.color, opacity);
    }
    return svg;
  }

  static std::string place(double x, double y) {
    return detail::svg_place(x) + " " + detail::svg_place(y);
  }

  static std::string path(const Series& series, const Frame& frame) {
    std::string d = "M";
    for (std::size_t i = 0; i < series.points.size(); ++i) {
      const double x = frame.x(series.points[i].x), y = frame.y(series.points[i].y);
      if (i == 0)
        d += place(x, y);
      else if (series.style.is_stepped)
        d += "H" + detail::svg_place(x) + "V" + detail::svg_place(y);
      else
        d += "L" + place(x, y);
    }
    return d;
  }

  static std::string stroke(const std::string& d, const ChartStyle& style) {
    return "<path fill=\"none\" stroke-width=\"1.6\" stroke-linejoin=\"round\" stroke=\"" +
           detail::svg_escape(style.color) + "\"" +
           (style.is_dashed ? " stroke-dasharray=\"5 4\"" : "") + " d=\"" + d + "\"/>\n";
  }

  static std::string dot(double x, double y, const ChartStyle& style) {
    return "<circle cx=\"" + detail::svg_place(x) + "\" cy=\"" + detail::svg_place(y) +
           "\" r=\"3.5\" fill=\"" + detail::svg_escape(style.color) + "\" stroke=\"white\"/>\n";
  }

  static constexpr double kShadeOpacity = 0.25;

  std::string title_, subtitle_;
  ChartAxis x_axis_, y_axis_;
  std::vector<Series> series_;
  std::vector<ChartBand> shades_;
  std::vector<Lane> lanes_;
};

}  // namespace remat

namespace remat {

namespace detail {

/// Finds places for the labels of a chart's points, where they cover neither a curve, nor a point,
/// nor each other. Works in pixels to the right and upwards.
class LabelPlaces {
 public:
  /// @param curve  stepped, in the units of the axes, which begin at zero
  LabelPlaces(const std::vector<ChartPoint>& curve, const std::vector<ChartPoint>& points) {
    double x_most = 0, y_most = 0;
    for (const auto* list : {&curve, &points})
      for (const ChartPoint& point : *list)
        x_most = std::max(x_most, point.x), y_most = std::max(y_most, point.y);
    if (x_most > 0) x_scale_ = kWidth / x_most;
    if (y_most > 0) y_scale_ = kHeight / (kHeadroom * y_most);
    for (const ChartPoint& point : points) {
      const double x = x_scale_ * point.x, y = y_scale_ * point.y;
      taken_.push_back({x - kDot, y - kDot, x + kDot, y + kDot});
    }
    for (std::size_t i = 1; i < curve.size(); ++i) {
      const double from = x_scale_ * curve[i - 1].x, to = x_scale_ * curve[i].x;
      const double before = y_scale_ * curve[i - 1].y, after = y_scale_ * curve[i].y;
      taken_.push_back({from, before, to, before});
      taken_.push_back({to, std::min(before, after), to, std::max(before, after)});
    }
  }

  /// Returns the point with its label alone, moved so that `SvgChart` writes it in a free place: it
  /// writes to the right and above.
  ChartPoint place(const ChartPoint& point) {
    const double width = svg_width(point.label, kFontSize);
    const double x = x_scale_ * point.x, y = y_scale_ * point.y;
    for (const double bottom : {3.0, -7.5, -19.0, 17.0, 31.0, 45.0, 59.0, 73.0})
      for (const double left : {x + kGap, x - kGap - width}) {
        const Box box{left, y + bottom, left + width, y + bottom + kLineHeight};
        if (!is_free(box)) continue;
        taken_.push_back(box);
        return {(left - kGap) / x_scale_, (y + bottom - 3) / y_scale_, point.label};
      }
    return point;
  }

 private:
  struct Box {
    double left, bottom, right, top;
  };
  static constexpr double kWidth = 748, kHeight = 330, kHeadroom = 1.08;  // as `SvgChart` has them
  static constexpr double kFontSize = 12, kLineHeight = 15, kGap = 7, kDot = 4, kClear = 2;

  bool is_free(const Box& box) const {
    // Inside of the axes, and by a point that does not widen them.
    if (box.left < kGap || box.right > kWidth - 2 || box.bottom < 3 ||
        box.bottom - 3 > kHeight / kHeadroom)
      return false;
    return std::ranges::none_of(taken_, [&](const Box& other) {
      return box.left - kClear < other.right && other.left < box.right + kClear &&
             box.bottom - kClear < other.top && other.bottom < box.top + kClear;
    });
  }

  double x_scale_ = 1, y_scale_ = 1;
  std::vector<Box> taken_;
};

}  // namespace detail

/// Draws the frontier as an SVG picture: memory to the right, extra time upwards; the curve of what
/// budgets get, and the schedules that people compare with, with their names.
///
/// Budgets for which more than all of forward runs again, and more than with any of the schedules,
/// are outside of the picture.
inline std::string to_svg(const Frontier& frontier) {
  const auto place = [](const FrontierPoint& point, const std::string& name) {
    return ChartPoint{100 * point.fraction_of_plain, 100 * point.share_of_forward,
                      name.empty() ? name : name + ": " + to_string(point.peak)};
  };
  double most = 1;  // of forward
  for (const FrontierPoint& point : frontier.points)
    if (point.is_common) most = std::max(most, point.share_of_forward);

  std::vector<ChartPoint> curve, schedules, plain, names;
  for (const FrontierPoint& point : frontier.points) {
    const bool is_plain = point.kind == FrontierPoint::Kind::plain;
    if (point.kind != FrontierPoint::Kind::segments && point.share_of_forward <= most)
      curve.push_back(place(point, ""));
    if (is_plain) plain.push_back(place(point, ""));
    if (point.is_common) schedules.push_back(place(point, ""));
    if (is_plain || point.is_common) names.push_back(place(point, point.name));
  }
  std::ranges::reverse(curve);
  const bool is_least_shown = curve.size() > 1 && frontier.points.back().share_of_forward <= most;
  // First of all, since it has little room.
  if (is_least_shown) names.insert(names.begin(), place(frontier.points.back(), "least"));
  std::vector<ChartPoint> dots = schedules;
  dots.insert(dots.end(), plain.begin(), plain.end());
  detail::LabelPlaces places(curve, dots);
  for (ChartPoint& name : names) name = places.place(name);

  SvgChart chart("Memory against time of a training step",
                 {"peak of a step, % of the plain step's"},
                 {"operations that run again, % of forward's time"});
  chart.set_subtitle(
      "Predicted from one traced step" +
      (is_least_shown || curve.size() < 2
           ? std::string()
           : "; the least, outside of the picture, is " + to_string(frontier.points.back().peak)));
  chart.add(std::move(curve), {.name = "plans for memory budgets", .is_stepped = true});
  const auto style = [](const char* name, const char* color) {
    return ChartStyle{.name = name, .color = color, .has_line = false, .has_markers = true};
  };
  chart.add(std::move(schedules), style("schedules by segments", "#c0392b"));
  chart.add(std::move(plain), style("no checkpointing", "#222222"));
  chart.add(std::move(names), {.has_line = false});
  return chart.text();
}

}  // namespace remat

namespace remat {

/// How a curve of memory is called and coloured, the same in every picture.
struct MemoryCurveStyle {
  std::string name, color;

  /// Returns the style of a step without checkpointing.
  static MemoryCurveStyle plain() { return {"plain", "#c0392b"}; }
  /// Returns the style of a checkpointed step.
  static MemoryCurveStyle checkpointed() { return {"checkpointed", "#2471a3"}; }
};

/// Draws live bytes over the time of a step, one curve per step, with its peak and, on a bar below,
/// its parts.
class MemoryChart {
 public:
  /// @param highest  what the y axis has to show; its unit follows from it
  MemoryChart(std::string title, Bytes highest)
      : unit_(unit_for(highest)),
        chart_(std::move(title), {"milliseconds since the step began"},
               {std::string("live tensors, ") + detail::kByteUnits[unit_]}) {}

  /// Sets a line below the title.
  MemoryChart& set_subtitle(std::string words) {
    chart_.set_subtitle(std::move(words));
    return *this;
  }

  /// Adds a curve, thinned to what a picture shows.
  MemoryChart& add_curve(const std::vector<MemorySample>& samples, const MemoryCurveStyle& style) {
    const auto point_of = [&](const MemorySample& sample) {
      return ChartPoint{1e3 * sample.seconds, in_unit(sample.live)};
    };
    std::vector<ChartPoint> points;
    for (const MemorySample& sample : thinned(samples)) points.push_back(point_of(sample));
    chart_.add(std::move(points),
               {.name = style.name, .color = style.color, .is_stepped = true, .is_filled = true});
    const auto peak = std::ranges::max_element(samples, {}, &MemorySample::live);
    if (peak == samples.end()) return *this;
    ChartPoint marked = point_of(*peak);
    marked.label = style.name + ", peak " + to_string(peak->live);
    chart_.add({std::move(marked)}, {.color = style.color, .has_line = false, .has_markers = true});
    return *this;
  }

  /// Adds a curve, and below the axis a bar of forward, backward and what backward recomputes.
  MemoryChart& add_step(const StepTimeline& timeline, const MemoryCurveStyle& style) {
    std::vector<MemorySample> samples = timeline.samples;
    if (!samples.empty()) samples.push_back({timeline.end_seconds, samples.back().live});
    add_curve(samples, style);
    const double turn = 1e3 * timeline.backward_begin_seconds, end = 1e3 * timeline.end_seconds;
    std::vector<ChartBand> bands = {{{{0, turn}}, {.name = "forward", .color = "#cbd8e1"}},
                                    {{{turn, end}}, {.name = "backward", .color = "#8fa5b3"}}};
    if (!timeline.recomputes.empty())
      bands.push_back({{}, {.name = "recompute in backward", .color = "#f0a030"}});
    for (const RecomputeSpan& span : timeline.recomputes)
      bands.back().spans.push_back({1e3 * span.begin_seconds, 1e3 * span.end_seconds});
    chart_.add_lane(style.name, std::move(bands));
    return *this;
  }

  /// Returns the picture.
  std::string text() const { return chart_.text(); }

 private:
  static std::size_t unit_for(Bytes highest) {
    std::size_t unit = 0;
    for (; highest.count >= 1024 && unit + 1 < detail::kByteUnits.size(); ++unit)
      highest.count /= 1024;
    return unit;
  }
  double in_unit(Bytes bytes) const {
    double value = static_cast<double>(bytes.count);
    for (std::size_t unit = 0; unit < unit_; ++unit) value /= 1024;
    return value;
  }

  std::size_t unit_;
  SvgChart chart_;
};

/// Draws a report as an SVG picture: live bytes over the plain and the checkpointed step, and when
/// each went forward, backward, and recomputed.
inline std::string to_svg(const MemoryReport& report) {
  MemoryChart chart("Memory of one training step, plain and checkpointed",
                    std::max(report.plain.peak, report.checkpointed.peak));
  chart.set_subtitle("saving " + detail::saving_text(report));
  chart.add_step(report.plain_timeline, MemoryCurveStyle::plain());
  chart.add_step(report.checkpointed_timeline, MemoryCurveStyle::checkpointed());
  return chart.text();
}

}  // namespace remat

// CMake reads these three lines; nothing else states the version.
#define REMAT_VERSION_MAJOR 0
#define REMAT_VERSION_MINOR 1
#define REMAT_VERSION_PATCH 0

namespace remat::detail {

/// A file that gets its name when it is complete, and is gone if it never is.
class NewFile {
 public:
  /// Throws the error of whoever writes the file: what went wrong, and what to do.
  using Fail = void (*)(const std::filesystem::path& path, std::string_view what,
                        std::string_view cure);

  /// Calls `fail` if the file cannot be made beside its future name.
  NewFile(const std::filesystem::path& path, Fail fail) : path_(path), part_(path), fail_(fail) {
    part_ += "." + std::to_string(std::random_device{}()) + ".part";
    stream_.open(part_, std::ios::binary);
    if (!stream_)
      fail_(path, "no file can be made there",
            "Check that the folder exists and that files may be made in it");
  }

  ~NewFile() {
    if (is_complete_) return;
    stream_.close();
    std::error_code ignored;
    std::filesystem::remove(part_, ignored);
  }

  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* bytes, std::size_t count) {
    stream_.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  }

  /// Calls `fail` if not all bytes could be written, or the name cannot be taken.
  void complete() {
    stream_.close();
    if (!stream_) fail_(path_, "not all bytes could be written", "Check the space on the disk");
    std::error_code error;
    std::filesystem::rename(part_, path_, error);
    if (error)
      fail_(path_, "the file cannot get its name: " + error.message(),
            "Check what has that name now");
    is_complete_ = true;
  }

 private:
  std::filesystem::path path_, part_;
  Fail fail_;
  std::ofstream stream_;
  bool is_complete_ = false;
};

}  // namespace remat::detail

namespace remat::detail {

/// Reports a weight file that cannot be written; what `NewFile` is to call.
[[noreturn]] inline void throw_unwritable(const std::filesystem::path& path, std::string_view what,
                                          std::string_view cure) {
  throw WeightsError(
      ErrorMessage("remat.weights.write").where("\"" + path.string() + "\"").what(what).cure(cure));
}

}  // namespace remat::detail
