// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "remat/weights/byte_source.hpp"
#include "remat/weights/file_kind.hpp"
#include "remat/weights/legacy_reader.hpp"
#include "remat/weights/state_dict.hpp"
#include "remat/weights/zip_directory.hpp"
#include "remat/weights/zip_reader.hpp"

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
