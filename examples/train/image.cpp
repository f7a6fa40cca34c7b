// SPDX-License-Identifier: MIT
//
// The only source that knows the image library, stb_image, which is a header with its code in it.

#include "train/image.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>

#include "train/user_error.hpp"

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_PNG
#define STBI_ONLY_JPEG
// A file of a few bytes may claim to be enormous.
#define STBI_MAX_DIMENSIONS 32768
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include <stb/stb_image.h>
#pragma GCC diagnostic pop

namespace train {

namespace {

std::string reason() {
  const char* text = stbi_failure_reason();
  if (text == nullptr) return "unknown";
  const std::string known = text;
  if (known == "can't fopen") return "the file cannot be opened";
  if (known == "unknown image type") return "this is neither PNG nor JPEG";
  return known;
}

}  // namespace

Image read_image(const std::filesystem::path& path) {
  constexpr int kChannels = 3;
  int width = 0, height = 0, channels = 0;
  const std::unique_ptr<stbi_uc, void (*)(void*)> pixels(
      stbi_load(path.c_str(), &width, &height, &channels, kChannels), &stbi_image_free);
  if (pixels == nullptr) throw UserError(path.string() + ": cannot be read: " + reason());
  const std::size_t size =
      static_cast<std::size_t>(width) * static_cast<std::size_t>(height) * kChannels;
  return {height, width, {pixels.get(), pixels.get() + size}};
}

std::string check_image_header(const std::filesystem::path& path) {
  int width = 0, height = 0, channels = 0;
  return stbi_info(path.c_str(), &width, &height, &channels) == 0 ? reason() : "";
}

}  // namespace train
