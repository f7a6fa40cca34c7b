// SPDX-License-Identifier: MIT
#pragma once

// remat 0.1.0 in one file, made by scripts/amalgamate.py: do not edit.
//
//   remat/config.hpp
//   remat/errors.hpp
//   remat/libtorch/tensor.hpp
//   remat/libtorch/nn.hpp
//   remat/libtorch/layers.hpp
//   remat/nn/toggle.hpp
//   remat/backbones/backbone.hpp
//   remat/plan/plan.hpp
//   remat/backbones/chain_backbone.hpp
//   remat/engine/operator_facts.hpp
//   remat/libtorch/dispatch.hpp
//   remat/engine/operator_traits.hpp
//   remat/libtorch/random.hpp
//   remat/engine/value.hpp
//   remat/engine/call.hpp
//   remat/detail/stable_list.hpp
//   remat/engine/write_watch.hpp
//   remat/libtorch/threads.hpp
//   remat/units.hpp
//   remat/plan/cost.hpp
//   remat/policies/keep.hpp
//   remat/engine/tape.hpp
//   remat/libtorch/autograd.hpp
//   remat/engine/process.hpp
//   remat/engine/recompute.hpp
//   remat/engine/materialise.hpp
//   remat/engine/saved_tensor.hpp
//   remat/engine/recorder.hpp
//   remat/engine/install.hpp
//   remat/engine/tensors_in.hpp
//   remat/engine/region.hpp
//   remat/checkpoint.hpp
//   remat/policies/concepts.hpp
//   remat/nn/concepts.hpp
//   remat/nn/holder.hpp
//   remat/nn/checkpointed.hpp
//   remat/nn/chain_layer.hpp
//   remat/nn/chain_units.hpp
//   remat/plan/simulate.hpp
//   remat/plan/balance.hpp
//   remat/nn/chain_plan.hpp
//   remat/nn/chain_run.hpp
//   remat/nn/chain.hpp
//   remat/policies/segments.hpp
//   remat/policies/sequential.hpp
//   remat/nn/sequential.hpp
//   remat/backbones/resnet.hpp
//   remat/detail/nearest_names.hpp
//   remat/backbones/registry.hpp
//   remat/backbones.hpp
//   remat/plan/graph.hpp
//   remat/engine/graph_of.hpp
//   remat/explain.hpp
//   remat/libtorch/allocator.hpp
//   remat/memory/meter.hpp
//   remat/libtorch/version.hpp
//   remat/libtorch/device_memory.hpp
//   remat/memory/stats.hpp
//   remat/memory.hpp
//   remat/nn/checkpoint_sequential.hpp
//   remat/nn/plain.hpp
//   remat/nn.hpp
//   remat/plan.hpp
//   remat/policies/each_stage.hpp
//   remat/policies/each_unit.hpp
//   remat/policies/every_nth.hpp
//   remat/policies/keep_all.hpp
//   remat/policies/square_root.hpp
//   remat/policies.hpp
//   remat/version.hpp
//   remat/remat.hpp

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

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

/// Reports, in backward, that something which the recompute needs is no longer what it was.
class REMAT_VISIBLE RecomputeError : public detail::CodedError<std::runtime_error> {
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

#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/max_pool2d.h>
#include <torch/enum.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <atomic>

namespace remat {

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
  /// Switches checkpointing off: forward is a plain call.
  virtual void disable_gradient_checkpointing() = 0;
  virtual bool is_gradient_checkpointing_enabled() const = 0;

  /// Exempts one of the modules that this one checkpoints, which may be itself.
  ///
  /// @return  false if `unit` is none of them
  virtual bool exempt_unit(const torch::nn::Module& unit) {
    static_cast<void>(unit);
    return false;
  }

 protected:
  CheckpointToggle() = default;
  CheckpointToggle(const CheckpointToggle&) = default;
  CheckpointToggle& operator=(const CheckpointToggle&) = default;
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

namespace remat {

/// Says what to build; meant for designated initialisers: `{.feature_dim = 128, .in_channels = 1}`.
struct BackboneOptions {
  bool pretrained =
      false;  ///< load published weights; not available in this version: true is an error
  std::int64_t feature_dim =
      0;  ///< 0: the pooled features as they are; else a linear layer named `projection`
  std::int64_t in_channels = 3;  ///< channels of the images
  std::int64_t num_classes =
      0;  ///< 0: no head; else torchvision's own head, under torchvision's name
};

/// Turns images into features, and into class scores if it was built with a head.
///
/// Names, shapes, initialisation and numbers are those of the torchvision model of the same name.
/// A backbone starts with gradient checkpointing off, and uses it in training mode only.
class Backbone : public torch::nn::Module, public CheckpointToggle {
 public:
  /// Computes one row per image.
  ///
  /// @param images_nchw  (N, in_channels, H, W)
  /// @return  (N, feature_dim()), or (N, num_classes()) with a head
  /// @throws ArgumentError  if `images_nchw` has not this shape
  torch::Tensor forward(const torch::Tensor& images_nchw) {
    check_images(images_nchw);
    torch::Tensor features = pool(forward_features(images_nchw));  // (N, raw_feature_dim)
    if (!projection_.is_empty()) return projection_->forward(features);
    return options_.num_classes == 0 ? features : forward_head(std::move(features));
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

  /// Returns how many segments are in effect, plain ones included; 0 while checkpointing is off.
  virtual std::int64_t segments() const = 0;

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

  /// Registers `projection` if the options ask for one; called last, so that its keys come last.
  void register_projection() {
    if (options_.feature_dim == 0) return;
    projection_ =
        register_module("projection", torch::nn::Linear(raw_feature_dim_, options_.feature_dim));
  }

 private:
  void check_options() const {
    require(!options_.pretrained, [&] {
      return ErrorMessage("remat.backbone.pretrained")
          .where(name())
          .what(
              "pretrained = true was given, and this version of remat cannot read weight files yet")
          .cure(
              "Build it with pretrained = false, and load the weights with your own code: the "
              "names are torchvision's");
    });
    check_not_negative("feature_dim", options_.feature_dim, 0);
    check_not_negative("num_classes", options_.num_classes, 0);
    check_not_negative("in_channels", options_.in_channels, 1);
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

#include <algorithm>
#include <initializer_list>
#include <ostream>
#include <span>
#include <vector>

namespace remat {

/// A run of units, `[first, last)`, that is recomputed as one, or kept.
struct Segment {
  std::size_t first = 0;
  std::size_t last = 0;
  bool is_checkpointed = true;

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

  const std::vector<Segment>& segments() const { return segments_; }
  std::size_t segment_count() const { return segments_.size(); }
  std::size_t unit_count() const { return segments_.empty() ? 0 : segments_.back().last; }
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

/// A backbone whose features come out of one chain of units.
///
/// The chain holds the units but is no registered child: the units are registered by the backbone
/// under torchvision's names, and a second registration would give each weight a second name.
///
/// @tparam Policy  how the chain is checkpointed, for example `Checkpointed<Sequential,
/// Segments<4>>`
template <class Policy>
class ChainBackbone : public Backbone {
 public:
  /// Runs the chain, segment by segment if checkpointing is on.
  torch::Tensor forward_features(const torch::Tensor& images_nchw) override {
    return chain_->forward(images_nchw);
  }

  /// Switches checkpointing on with the policy's own rule.
  void enable_gradient_checkpointing() override { chain_->enable_gradient_checkpointing(); }
  /// Switches checkpointing on with `segment_count` segments; more than units means one per unit.
  ///
  /// @throws ArgumentError  if `segment_count` is below 1
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    chain_->enable_gradient_checkpointing(segment_count);
  }
  void disable_gradient_checkpointing() override { chain_->disable_gradient_checkpointing(); }
  bool is_gradient_checkpointing_enabled() const override {
    return chain_->is_gradient_checkpointing_enabled();
  }

  std::int64_t segments() const override {
    return is_gradient_checkpointing_enabled() ? static_cast<std::int64_t>(plan().segment_count())
                                               : 0;
  }

  /// Returns the plan of the next forward pass.
  Plan plan() const { return chain_->plan(); }

  /// Returns the chain: its units, and what they were measured to cost.
  const Policy& chain() const { return chain_; }

  bool exempt_unit(const torch::nn::Module& unit) override { return chain_->exempt_unit(unit); }

  void train(bool on = true) override {
    Backbone::train(on);
    chain_->train(on);
  }

 protected:
  ChainBackbone(std::string name, std::int64_t raw_feature_dim, const BackboneOptions& options)
      : Backbone(std::move(name), raw_feature_dim, options) {
    chain_->disable_gradient_checkpointing();
  }

  /// Appends a unit, a module that is registered elsewhere in this backbone.
  ///
  /// @param name  for messages and plans; without dots, which LibTorch refuses
  template <class Unit>
  void append_unit(std::string name, const Unit& unit) {
    chain_->push_back(std::move(name), unit);
  }

 private:
  void copy_checkpointing_from(const Backbone& other) override {
    chain_->copy_checkpointing_from(*dynamic_cast<const ChainBackbone&>(other).chain_);
  }

  Policy chain_;
};

}  // namespace remat

#include <functional>

#include <array>

#include <concepts>

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

#include <ATen/core/jit_type.h>
#include <c10/util/flat_hash_map.h>

#include <map>
#include <mutex>
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

#include <ATen/Context.h>
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

#include <limits>

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
  bool is_counted : 1 = false;  // its bytes stand in the costs of a unit
  bool is_saved : 1 = false;
  bool is_result : 1 = false;  // a region's result
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

#include <optional>

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
  std::int64_t largest = 0;           // bytes of the largest tensor
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

#include <compare>
#include <cstdio>

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

/// Writes bytes with the largest unit that leaves at least 1: "512 B", "12.3 MiB".
inline std::string to_string(Bytes bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes.count);
  std::size_t unit = 0;
  while ((value >= 1024 || value <= -1024) && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
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

/// What one unit of a chain costs in memory.
struct UnitCost {
  Bytes saved;   ///< tensors that backward needs and a checkpointed segment drops
  Bytes output;  ///< the unit's result, which stays if a segment ends there
  Bytes kept{};  ///< tensors that backward needs and a keep policy holds in any case

  friend bool operator==(const UnitCost&, const UnitCost&) = default;
  friend std::ostream& operator<<(std::ostream& stream, const UnitCost& cost) {
    return stream << "saved " << cost.saved << ", output " << cost.output
                  << ", kept " << cost.kept;
  }
};

/// What a rule is told about a chain.
struct Chain {
  std::size_t unit_count = 0;
  std::vector<UnitCost>
      unit_costs;  ///< one per unit; empty before the first forward has measured them
  std::vector<std::size_t>
      stage_sizes;  ///< units per stage, their sum is `unit_count`; empty: one stage

  /// Returns a chain of which only the number of units is known.
  static Chain of(std::size_t unit_count) { return {unit_count, {}, {}}; }
  /// Returns a chain with measured units.
  static Chain of(std::vector<UnitCost> unit_costs) {
    const std::size_t unit_count = unit_costs.size();
    return {unit_count, std::move(unit_costs), {}};
  }

  bool is_measured() const { return unit_count != 0 && unit_costs.size() == unit_count; }
};

}  // namespace remat

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

namespace remat::detail {

/// Which results stay although they could be recomputed; empty: none.
using KeepPredicate = std::function<bool(const keep::Operation&, Bytes)>;

class SavedTensor;

/// A checkpointed region of a tape. Regions that are opened inside another share its tape.
struct Region {
  std::string name;
  RegionId parent = none;
  int depth = 0;
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
  std::vector<const c10::StorageImpl*> recent_memory;  // of the external tensors among those
  std::weak_ptr<void> lent_until;  // alive while a backward pass that keeps its graph will take
                                   // back what it was lent
  std::vector<ValueId> lent;
  at::Tensor last_random_state;
  int thread_count = at::get_num_threads();
  bool measures_time = false;
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

#include <cstdlib>

namespace remat {

/// Whether checkpointing works in this process, and why not if it does not.
struct EngineStatus {
  bool is_available = false;
  std::string reason;  ///< empty when available
};

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

namespace remat::detail {

/// Runs the operations that one dropped value needs, and nothing else.
///
/// A slice is a transaction. What it computes lives in its own table and moves to the tape only
/// after the last operation has succeeded, so that an exception (memory exhausted, a parameter that
/// was changed) leaves the tape as it was.
///
/// Regions nest on one tape. When a saved tensor of region R needs an operation of a region that is
/// neither R nor around R, that run is temporary: of its results only those stay that leave the
/// region, for the region's own backward part comes later and will run it again. So a chain of
/// chains costs one more run per level and the memory of one inner segment.
class Slice {
 public:
  Slice(Tape& tape, ValueId target, RegionId for_region)
      : tape_(tape), target_(target), for_region_(for_region) {}

  c10::Storage run(bool lends) {
    collect();
    {
      c10::impl::ExcludeDispatchKeyGuard below(keys_above_recompute());
      // Kernels below autograd read grad mode (oneDNN's LSTM returns no workspace without it), and
      // only operations that ran with it on are recorded. No graph arises: autograd's keys are
      // excluded.
      at::AutoGradMode as_recorded(true);
      const ThreadCountGuard threads(tape_.thread_count);
      for (const OperationId id : order_)
        run_operation(tape_.operations[static_cast<std::size_t>(id)]);
    }
    process_state().recomputed += static_cast<std::int64_t>(order_.size());
    return commit(lends);
  }

 private:
  struct Made {
    c10::Storage storage;
    std::int32_t readers = 0;  // operations of this slice that still have to read it
    std::int32_t resting_readers =
        0;  // those that will not need it again: a temporary run's readers will
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

    for (const OperationId id : order_) {
      const Operation& operation = tape_.operations[static_cast<std::size_t>(id)];
      const bool is_lasting =
          tape_.common_ancestor(operation.region, for_region_) == operation.region;
      for (std::size_t i = 0; i < operation.use_count; ++i) {
        const Use& use = tape_.uses[operation.first_use + i];
        if (!use.needs_content || is_available(use.value)) continue;
        Made& made = made_[use.value];
        ++made.readers;
        made.resting_readers += is_lasting;
      }
    }
    for (const OperationId id : order_) {
      const Operation& operation = tape_.operations[static_cast<std::size_t>(id)];
      for (std::size_t i = 0; i < operation.result_count; ++i)
        plan_stay(operation, tape_.results[operation.first_result + i].value);
    }
    made_[target_].stays = true;
  }

  /// Whether a result stays behind the slice: somebody still waits for it, and it is not an inner
  /// part of a temporary run.
  void plan_stay(const Operation& operation, ValueId id) {
    const Value& made = value(id);
    if (made.need == 0 || is_available(id)) return;
    const int shared_depth = tape_.depth(tape_.common_ancestor(operation.region, for_region_));
    if (tape_.depth(made.scope) > shared_depth && made.kept_from_depth > shared_depth + 1) return;
    const auto found = made_.find(id);
    if (found == made_.end() || made.need > found->second.resting_readers) made_[id].stays = true;
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
    tape_->remove_need(value_);
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
    tape_->remove_need(value_);
    bind(id);
  }

  /// As `rebind`, but the new content is external: hold the memory.
  void rebind(const c10::Storage& memory) {
    tape_->remove_need(value_);
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
      call_.largest = std::max(call_.largest, static_cast<std::int64_t>(tensor.nbytes()));
    });
  }

  std::int32_t use_of(const Written& written) const {
    for (std::size_t i = first_use_; i < tape_.uses.size(); ++i)
      if (tape_.uses[i].argument == written.argument && tape_.uses[i].position == written.position)
        return static_cast<std::int32_t>(i - first_use_);
    return none;
  }

  /// Kept: what the policies of this and all enclosing regions want, and side results that are tiny
  /// beside what they come with.
  void apply_keep_policy(const Operation& operation) {
    constexpr std::int64_t tiny_share = 64;
    const bool keeps_statistics = process_state().keeps_statistics;
    for (auto& [id, storage] : made_) {
      Value& made = value(id);
      made.kept_from_depth =
          keeps_statistics && made.nbytes * tiny_share <= call_.largest ? 0 : kept_from(made);
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
  int kept_from(const Value& made) {
    RegionId id = tape_.region;
    int depth = tape_.depth(id) + 1;
    for (; id != none; id = tape_.regions[static_cast<std::size_t>(id)].parent, --depth) {
      Region& region = tape_.regions[static_cast<std::size_t>(id)];
      if (!region.keep ||
          !region.keep({traits_.name, region.ordinals[&traits_], Bytes{call_.largest}},
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
  c10::SmallVector<std::pair<ValueId, c10::Storage>, 4> made_;
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
  KeepPredicate keep;                           ///< empty: keep nothing
  std::string name = "checkpoint";              ///< for messages
  std::vector<UnitCost>* unit_costs = nullptr;  ///< filled by unit, see `begin_unit`
  bool measures_time = false;
  std::function<void(Tape&)> at_end;  ///< sees the tape when the region has ended well
};

/// Whether a region that is opened now would do anything: elsewhere it is a plain call.
inline bool records_regions() {
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

    std::lock_guard<std::recursive_mutex> lock(tape_->mutex);
    parent_ = tape_->region;
    Region& region = tape_->regions.emplace_back();
    region.name = options.name;
    region.parent = parent_;
    region.depth = tape_->depth(parent_) + 1;
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

namespace detail {

/// Holds a string literal, so that it can be a template argument.
template <std::size_t size>
struct Sentence {
  char text[size]{};
  constexpr Sentence(const char (&words)[size]) {  // NOLINT(*-explicit-*): a literal is to convert
    for (std::size_t index = 0; index < size; ++index) text[index] = words[index];
  }
};

/// Carries its reason into the compiler's message: where the condition is false, GCC and Clang
/// print the arguments, and so the sentence, word for word.
template <bool condition, Sentence sentence>
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
/// to use.
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

/// Says that a constructor copies an unwrapped clone.
struct FromClone {};

/// The module class `Base` with switches, and a way to run its forward as a region.
template <class Base, class Keep>
class CheckpointedModule : public Base, public CheckpointToggle {
 public:
  using Base::Base;
  CheckpointedModule() = default;
  CheckpointedModule(FromClone, const Base& clone, const CheckpointedModule& original)
      : Base(clone), is_enabled_(original.is_enabled_), is_exempt_(original.is_exempt_) {
    // In LibTorch 1.13 Module is a virtual base, which the copy constructor of `Base` leaves to the
    // last class.
    static_cast<torch::nn::Module&>(*this) = clone;
  }

  void enable_gradient_checkpointing() override { is_enabled_ = true; }
  /// A module is one unit, so that every number of segments means one.
  void enable_gradient_checkpointing(std::int64_t segment_count) override {
    require_segment_count(segment_count, this->name());
    is_enabled_ = true;
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
    if (is_exempt_.get()) return call_plain(std::forward<Call>(call));
    if (!should_checkpoint(arguments...)) return std::forward<Call>(call)();
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

template <CheckpointableModule What, KeepPolicy Keep>
class Checkpointed<What, Keep, keep::nothing>
    : public torch::nn::ModuleHolder<CheckpointedImpl<detail::UnitImpl<What>, Keep>> {
 public:
  using Impl = CheckpointedImpl<detail::UnitImpl<What>, Keep>;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
};

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

  const std::string& name() const { return name_; }
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

/// A checkpointed chain as the chain around it sees it, and as its planner does.
class ChainStructure {
 public:
  virtual ~ChainStructure() = default;

  /// Appends the chain's units; all are plain if `is_plain`.
  virtual void add_units(std::vector<ChainUnit>& units, bool is_plain) const = 0;
  /// Returns the units' names, as `named_modules()` has them below the chain.
  virtual std::vector<std::string> unit_names() const = 0;
  /// Returns how many units each layer has: a nested chain is a stage.
  virtual std::vector<std::size_t> stage_sizes() const = 0;
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

#include <queue>

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
      : costs_(costs), segment_count_(segment_count), saved_before_(costs.size() + 1, 0),
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

namespace remat::detail {

/// A pattern, a rule and a keep policy as values: templates end here.
struct ChainPolicy {
  std::function<Plan(const Chain&)> rule;
  std::function<Plan(const Plan&, const Chain&)> pattern;
  KeepPredicate keep;

  template <class PatternType, class RuleType, class Keep>
  static ChainPolicy of() {
    return {RuleType(), PatternType(), make_keep_predicate<Keep>()};
  }
};

/// The plan for one structure of a chain, and what it came from; never changed once it is shared.
struct ChainPlan {
  std::vector<ChainUnit> units;
  std::optional<std::int64_t> segment_count;  // as asked for at run time; empty: the rule's
  std::vector<UnitCost> unit_costs;           // empty: not measured yet
  Plan plan;
  std::vector<std::string> segment_names;
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
    const Chain known{units.size(), std::move(costs), chain.stage_sizes()};
    Plan plan = segment_count_ ? balanced_plan(known, static_cast<std::size_t>(*segment_count_))
                               : policy_->rule(known);
    require_all_units(chain, plan, units.size());
    if (known.is_measured()) {
      plan = policy_->pattern(plan, known);
      require_all_units(chain, plan, units.size());
    } else if (plan.checkpointed_count() > 0) {
      // Plain segments are not measured, so the first forward has none.
      result->is_to_measure = true;
      std::vector<Segment> segments = plan.segments();
      for (Segment& segment : segments) segment.is_checkpointed = true;
      plan = Plan(std::move(segments));
    }
    std::vector<std::size_t> plain_units;
    for (std::size_t index = 0; index < units.size(); ++index)
      if (units[index].is_plain) plain_units.push_back(index);
    result->plan = plan.with_plain_units(plain_units);
    result->segment_names = segment_names(result->plan, chain.unit_names());
    return result;
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
  const auto call = [&] { value = unit.module->any_forward(std::move(value), more...); };
  if (unit.is_plain)
    call_plain(call);
  else
    call();
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
                              public CheckpointToggle,
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
  void disable_gradient_checkpointing() override { is_enabled_ = false; }
  bool is_gradient_checkpointing_enabled() const override { return is_enabled_.get(); }

  bool exempt_unit(const torch::nn::Module& unit) override {
    const auto units = detail::units_of(*this);
    if (std::ranges::find(units, &unit, &detail::ChainUnit::identity) == units.end()) return false;
    planner_.exempt(unit);
    return true;
  }

  /// Returns the plan of the next training forward: by unit count until the units are measured,
  /// then by bytes.
  Plan plan() const {
    const auto units = detail::units_of(*this);
    return is_enabled_.get() ? planner_.plan_for(*this, units)->plan : Plan::keep_all(units.size());
  }
  /// Returns what each unit was measured to cost; empty before the first checkpointed forward.
  std::vector<UnitCost> unit_costs() const {
    return planner_.plan_for(*this, detail::units_of(*this))->unit_costs;
  }

  /// Takes over switch, segment count, exemptions and measurements of a chain with the same units.
  void copy_checkpointing_from(const CheckpointedChainImpl& other) {
    is_enabled_ = other.is_enabled_;
    planner_.take_over(*other.planner_.plan_for(other, detail::units_of(other)),
                       detail::units_of(*this));
  }

  void pretty_print(std::ostream& stream) const override {
    stream << "remat::Checkpointed<remat::Sequential>";
  }

 protected:
  explicit CheckpointedChainImpl(detail::ChainPolicy policy) : planner_(std::move(policy)) {}

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
    torch::nn::AnyValue value(std::move(x));
    if (is_on) {
      const auto planned = planner_.plan_for(*this, units);
      auto costs = detail::run_segments(*planned, policy().keep, value, more...);
      if (!costs.empty()) planner_.store_costs(*this, *planned, std::move(costs));
    } else {
      for (const auto& unit : units) detail::run_unit(unit, value, more...);
    }
    auto* result = value.template try_get<torch::Tensor>();
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

  std::vector<std::size_t> stage_sizes() const override {
    std::vector<std::size_t> sizes;
    for (const ChainLayer& layer : layers_) {
      std::vector<detail::ChainUnit> units;
      detail::add_units_of_layer(layer, /*is_plain=*/false, units);
      if (!units.empty()) sizes.push_back(units.size());
    }
    return sizes;
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
    auto copy = std::make_shared<CheckpointedSequentialImpl>(policy());
    copy->become_clone_of(*this, device);
    return copy;
  }
};

}  // namespace remat

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
/// ```
/// Each child is a unit; a nested `torch::nn::Sequential` or checkpointed chain is opened, so that
/// a stage of blocks counts as its blocks; switch, rule and keep policy are then those of the outer
/// chain. `forward(x, more...)` hands extra arguments to every layer.
/// @par Keeps  the tensors between segments, what the keep policy chooses, and all of a plain
/// segment
template <Pattern PatternType, class RuleType, class Keep>
class Checkpointed<PatternType, RuleType, Keep>
    : public detail::LayeredHolder<CheckpointedChainImpl, CheckpointedSequentialImpl> {
  static_assert(Rule<RuleType>,
                "remat::Checkpointed<Pattern, Rule, Keep> needs a rule as its second argument");
  static_assert(
      KeepPolicy<Keep>,
      "remat::Checkpointed<Pattern, Rule, Keep> needs a keep policy as its third argument");
  using Holder = detail::LayeredHolder<CheckpointedChainImpl, CheckpointedSequentialImpl>;

 public:
  using Holder::Holder;

  /// Constructs an empty chain, to be filled with `push_back`.
  Checkpointed()
      : Holder(std::shared_ptr<CheckpointedChainImpl>(std::make_shared<CheckpointedSequentialImpl>(
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

/// The two residual blocks of the paper's figure 5.
enum class ResNetBlock { kBasic, kBottleneck };

/// One row of the paper's table 1.
struct ResNetDesign {
  int depth;                                ///< layers with weights, as in the name
  ResNetBlock block;                        ///< which block the stages repeat
  std::array<std::int64_t, 4> block_count;  ///< blocks in each of the four stages
};

inline constexpr std::array kResNetDesigns{
    ResNetDesign{18, ResNetBlock::kBasic, {2, 2, 2, 2}},
    ResNetDesign{34, ResNetBlock::kBasic, {3, 4, 6, 3}},
    ResNetDesign{50, ResNetBlock::kBottleneck, {3, 4, 6, 3}},
    ResNetDesign{101, ResNetBlock::kBottleneck, {3, 4, 23, 3}},
    ResNetDesign{152, ResNetBlock::kBottleneck, {3, 8, 36, 3}},
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
template <class Policy>
class ResNetImpl : public ChainBackbone<Policy> {
 public:
  explicit ResNetImpl(int depth, const BackboneOptions& options = {})
      : ChainBackbone<Policy>("resnet" + std::to_string(depth), raw_width(resnet_design(depth)),
                              options),
        depth_(depth) {
    blocks::ResNetStem stem(options.in_channels);
    this->register_module("conv1", stem->conv1);
    this->register_module("bn1", stem->bn1);
    this->append_unit("stem", stem);
    const ResNetDesign& design = resnet_design(depth);
    if (design.block == ResNetBlock::kBasic)
      register_stages<blocks::BasicBlock>(design);
    else
      register_stages<blocks::Bottleneck>(design);
    if (options.num_classes != 0)
      fc_ = this->register_module("fc", torch::nn::Linear(raw_width(design), options.num_classes));
    this->register_projection();
    initialise();
  }

 protected:
  std::shared_ptr<Backbone> build_again() const override {
    return std::make_shared<ResNetImpl>(depth_, this->options());
  }
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
        const Block block(in, kResNetStageWidths[stage], stride);
        layer->push_back(block);
        this->append_unit(name + "_" + std::to_string(index), block);
        in = kResNetStageWidths[stage] * Block::ContainedType::kExpansion;
      }
      this->register_module(name, layer);
    }
  }

  /// As torchvision: He et al., Delving Deep into Rectifiers (2015), normal, by the fan out, for
  /// convolutions; normalisations and linear layers as LibTorch makes them (scale 1 and shift 0).
  void initialise() {
    for (const auto& module : this->modules(/*include_self=*/false))
      if (auto* convolution = module->template as<torch::nn::Conv2d>())
        torch::nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
  }

  int depth_;
  torch::nn::Linear fc_{nullptr};
};

/// A residual network; its units are the stem and each residual block.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), table 1;
/// torchvision's `resnet*`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class ResNet : public torch::nn::ModuleHolder<ResNetImpl<Policy>> {
 public:
  /// Makes a holder of nothing, to be assigned later.
  ResNet(std::nullptr_t)
      : torch::nn::ModuleHolder<ResNetImpl<Policy>>(nullptr) {}  // NOLINT: as LibTorch's holders
  /// @param depth  18, 34, 50, 101 or 152
  /// @throws ArgumentError  for another depth, or options that cannot be
  explicit ResNet(int depth, const BackboneOptions& options = {})
      : torch::nn::ModuleHolder<ResNetImpl<Policy>>(
            std::make_shared<ResNetImpl<Policy>>(depth, options)) {}
};

/// A residual network whose depth is in the type, with the default policy.
template <int depth>
class ResNetOfDepth : public ResNet<> {
 public:
  ResNetOfDepth(std::nullptr_t) : ResNet<>(nullptr) {}  // NOLINT: as LibTorch's holders
  explicit ResNetOfDepth(const BackboneOptions& options = {}) : ResNet<>(depth, options) {}
};

using ResNet18 = ResNetOfDepth<18>;
using ResNet34 = ResNetOfDepth<34>;
using ResNet50 = ResNetOfDepth<50>;
using ResNet101 = ResNetOfDepth<101>;
using ResNet152 = ResNetOfDepth<152>;

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
  std::shared_ptr<Backbone> (*create)(const BackboneOptions& options);
};

template <int depth>
std::shared_ptr<Backbone> create_resnet(const BackboneOptions& options) {
  return ResNetOfDepth<depth>(options).ptr();
}

inline const std::vector<BackboneEntry>& backbone_entries() {
  static const std::vector<BackboneEntry> entries{
      {{"resnet18", "ResNet", 11'689'512, 512}, create_resnet<18>},
      {{"resnet34", "ResNet", 21'797'672, 512}, create_resnet<34>},
      {{"resnet50", "ResNet", 25'557'032, 2048}, create_resnet<50>},
      {{"resnet101", "ResNet", 44'549'160, 2048}, create_resnet<101>},
      {{"resnet152", "ResNet", 60'192'808, 2048}, create_resnet<152>},
  };
  return entries;
}

}  // namespace detail

/// Lists every backbone that `create_backbone` knows, family by family.
inline std::vector<BackboneInfo> list_backbones() {
  std::vector<BackboneInfo> list;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) list.push_back(entry.info);
  return list;
}

/// Builds a backbone by name, checkpointing off.
///
/// @throws ArgumentError  for an unknown name, with the nearest ones, and for options that cannot
/// be
inline std::shared_ptr<Backbone> create_backbone(std::string_view name,
                                                 const BackboneOptions& options = {}) {
  std::vector<std::string> names;
  for (const detail::BackboneEntry& entry : detail::backbone_entries()) {
    if (entry.info.name == name) return entry.create(options);
    names.push_back(entry.info.name);
  }
  throw ArgumentError(ErrorMessage("remat.backbone.unknown")
                          .where("remat::create_backbone")
                          .what("there is no backbone \"" + std::string(name) +
                                "\"; the nearest names are " +
                                detail::quoted_list(detail::nearest_names(name, names)))
                          .cure("remat::list_backbones() has the full list"));
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
/// and what running it again costs.
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
  return table + foot;
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

}  // namespace remat

// First, for Clang: see libtorch/tensor.hpp.

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace remat::detail {

/// Receives each allocation and release that LibTorch's allocators report on the thread it was set
/// on, and on the threads of backward passes that are started there.
class AllocationListener : public c10::MemoryReportingInfoBase {
 public:
  virtual void changed(std::int64_t bytes, c10::Device device) = 0;

  // The signature differs between versions; the one that matches overrides, and `override` would
  // refuse the other.
#ifdef __clang__
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  virtual void reportMemoryUsage(void*, std::int64_t bytes, std::int64_t, std::int64_t,
                                 c10::Device device) {
    changed(bytes, device);
  }
  virtual void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t,
                                 c10::Device device) {
    changed(bytes, device);
  }
#ifdef __clang__
#pragma clang diagnostic pop
#endif
  bool memoryProfilingEnabled() const override { return true; }
};

/// Sets a listener for the life of the guard. It takes the profiler's place: the inner one wins.
class AllocationListenerGuard {
 public:
  explicit AllocationListenerGuard(std::shared_ptr<AllocationListener> listener)
      : guard_(c10::DebugInfoKind::PROFILER_STATE, std::move(listener)) {}

 private:
  c10::DebugInfoGuard guard_;
};

}  // namespace remat::detail

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
  /// Live bytes at a moment.
  struct Sample {
    double seconds;  ///< since the meter was made
    Bytes live;
  };

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

    void changed(std::int64_t bytes, c10::Device) override {
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

#include <torch/version.h>

/// True when the LibTorch at hand is at least `major.minor`. Detection by the compiler is
/// preferred; this is for behaviour that cannot be detected.
#define REMAT_LIBTORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

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

/// Sets the peaks to the current figures.
inline void reset_device_peak([[maybe_unused]] c10::Device device) {
#if REMAT_LIBTORCH_AT_LEAST(2, 9)
  const auto accelerator = at::getAccelerator(false);
  if (accelerator.has_value() && *accelerator == device.type())
    at::accelerator::resetPeakStats(device.has_index() ? device.index() : c10::DeviceIndex{0});
#endif
}

}  // namespace remat::detail

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

}  // namespace remat

#include <iterator>

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

/// Makes one segment per unit: the least memory inside a segment, a border tensor for each.
struct EachUnit {
  Plan operator()(const Chain& chain) const {
    return Plan::from_count(chain.unit_count, chain.unit_count);
  }
};

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

#include <cmath>

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

// CMake reads these three lines; nothing else states the version.
#define REMAT_VERSION_MAJOR 0
#define REMAT_VERSION_MINOR 1
#define REMAT_VERSION_PATCH 0
