// SPDX-License-Identifier: MIT
#pragma once

#include <filesystem>
#include <string_view>

#include "remat/detail/new_file.hpp"
#include "remat/errors.hpp"

namespace remat::detail {

/// Reports a weight file that cannot be written; what `NewFile` is to call.
[[noreturn]] inline void throw_unwritable(const std::filesystem::path& path, std::string_view what,
                                          std::string_view cure) {
  throw WeightsError(
      ErrorMessage("remat.weights.write").where("\"" + path.string() + "\"").what(what).cure(cure));
}

}  // namespace remat::detail
