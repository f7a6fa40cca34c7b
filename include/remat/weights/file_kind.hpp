// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/weights/byte_source.hpp"

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
