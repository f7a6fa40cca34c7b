// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace train {

/// An image as its file has it, in three colours.
struct Image {
  std::int64_t height = 0, width = 0;
  std::vector<std::uint8_t> pixels;  // height x width x 3
};

/// Reads a PNG or JPEG file; grey becomes colour, transparency is dropped.
///
/// @throws UserError  naming the file and what is wrong with it
Image read_image(const std::filesystem::path& path);

/// Returns what is wrong with the beginning of an image file, or "".
std::string check_image_header(const std::filesystem::path& path);

}  // namespace train
