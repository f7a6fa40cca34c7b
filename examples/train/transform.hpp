// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "remat/remat.hpp"
#include "remat/yaml.hpp"
#include "train/image.hpp"
#include "train/random_numbers.hpp"

namespace train {

/// Makes of an image what the network takes: cut, resized, normalised as its published weights
/// were.
class Transform {
 public:
  Transform(const remat::DataConfig& data, const remat::Preprocessing& published)
      : size_(data.image_size),
        augment_(data.augment),
        published_(published),
        margin_(static_cast<double>(published.crop_size) /
                static_cast<double>(published.resize_size)) {
    // Digits fill their images: nothing is to be cut off.
    if (data.source == "digits") margin_ = 1;
  }

  /// @param generator  for augmentation; null: none, as in validation
  /// @return  (3, S, S) float32
  torch::Tensor operator()(const Image& image, std::mt19937_64* generator) const {
    const auto pixels_hwc = torch::from_blob(const_cast<std::uint8_t*>(image.pixels.data()),
                                             {image.height, image.width, 3}, torch::kUInt8);
    const bool is_augmented = generator != nullptr && augment_ != "none";
    const Box box = is_augmented && augment_ == "crop_and_flip" ? random_box(image, *generator)
                                                                : central_box(image);
    auto pixels = pixels_hwc.slice(0, box.top, box.top + box.height)
                      .slice(1, box.left, box.left + box.width)
                      .permute({2, 0, 1})
                      .to(torch::kFloat32)
                      .div(255)
                      .unsqueeze(0);  // (1, 3, h, w)
    pixels = resized(pixels).squeeze(0);
    if (is_augmented && uniform(*generator, 0, 1) < 0.5) pixels = pixels.flip(2);
    return (pixels - channels(published_.mean)) / channels(published_.std);
  }

 private:
  struct Box {
    std::int64_t top, left, height, width;
  };

  static torch::Tensor channels(const std::array<double, 3>& values) {
    return torch::tensor({values[0], values[1], values[2]}, torch::kFloat32).view({3, 1, 1});
  }

  /// Returns the square in the middle that resizing and cutting leave of an image.
  Box central_box(const Image& image) const {
    const std::int64_t shorter = std::min(image.height, image.width);
    const auto side =
        std::max<std::int64_t>(1, std::llround(margin_ * static_cast<double>(shorter)));
    return {(image.height - side) / 2, (image.width - side) / 2, side, side};
  }

  /// Returns a random part of 35 to 100 % of the area, 3:4 to 4:3, as torchvision's
  /// RandomResizedCrop does, which begins at 8 %.
  static Box random_box(const Image& image, std::mt19937_64& generator) {
    const auto area = static_cast<double>(image.height * image.width);
    for (int attempt = 0; attempt < 10; ++attempt) {
      const double part = area * uniform(generator, 0.35, 1);
      const double ratio = std::exp(uniform(generator, std::log(3.0 / 4), std::log(4.0 / 3)));
      const std::int64_t width = std::llround(std::sqrt(part * ratio));
      const std::int64_t height = std::llround(std::sqrt(part / ratio));
      if (width < 1 || height < 1 || width > image.width || height > image.height) continue;
      const auto place = [&](std::int64_t room) {
        return static_cast<std::int64_t>(uniform(generator, 0, static_cast<double>(room + 1)));
      };
      const std::int64_t top = place(image.height - height);
      return {top, place(image.width - width), height, width};
    }
    return {0, 0, image.height, image.width};
  }

  torch::Tensor resized(const torch::Tensor& pixels_1chw) const {
    namespace F = torch::nn::functional;
    auto options = F::InterpolateFuncOptions()
                       .size(std::vector<std::int64_t>{size_, size_})
                       .align_corners(false)
                       .antialias(true);
    if (published_.interpolation == remat::Interpolation::kBicubic)
      // Bicubic weights are negative in part, and go past black and white.
      return F::interpolate(pixels_1chw, options.mode(torch::kBicubic)).clamp(0, 1);
    return F::interpolate(pixels_1chw, options.mode(torch::kBilinear));
  }

  std::int64_t size_;
  std::string augment_;
  remat::Preprocessing published_;
  double margin_;
};

}  // namespace train
