// SPDX-License-Identifier: MIT
#pragma once

#include "remat/engine/operator_traits.hpp"
#include "remat/libtorch/random.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

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
