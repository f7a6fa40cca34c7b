// SPDX-License-Identifier: MIT
#pragma once

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

#include <cstdint>
#include <sstream>
#include <string>
#include <utility>

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
