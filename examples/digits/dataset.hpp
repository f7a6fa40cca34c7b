// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <charconv>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace digits {

inline constexpr std::int64_t kSide = 8;
inline constexpr std::int64_t kPixels = kSide * kSide;
inline constexpr std::int64_t kBrightest = 16;
inline constexpr std::int64_t kClasses = 10;

/// Images with their labels.
struct Dataset {
  torch::Tensor images;  // (N, 1, 8, 8) float32, 0 to 1
  torch::Tensor labels;  // (N) int64

  std::int64_t size() const { return labels.size(0); }
  Dataset rows(const torch::Tensor& indices) const {
    return {images.index_select(0, indices), labels.index_select(0, indices)};
  }
};

/// Splits a line of the file into whole numbers.
///
/// @throws std::runtime_error  naming the file, the line and what is wrong with it
inline std::vector<std::int64_t> read_row(std::string_view line, const std::string& place) {
  std::vector<std::int64_t> row;
  while (!line.empty()) {
    const std::string_view field = line.substr(0, line.find(','));
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error != std::errc() || end != field.data() + field.size())
      throw std::runtime_error(place + "\"" + std::string(field) + "\" is no whole number");
    row.push_back(value);
    line.remove_prefix(std::min(line.size(), field.size() + 1));
  }
  if (std::ssize(row) != 1 + kPixels)
    throw std::runtime_error(place + std::to_string(row.size()) + " fields, a label and " +
                             std::to_string(kPixels) + " pixels were expected");
  if (row[0] < 0 || row[0] >= kClasses)
    throw std::runtime_error(place + "the label is " + std::to_string(row[0]) +
                             ", 0 to 9 was expected");
  for (std::size_t i = 1; i < row.size(); ++i)
    if (row[i] < 0 || row[i] > kBrightest)
      throw std::runtime_error(place + "a pixel is " + std::to_string(row[i]) +
                               ", 0 to 16 was expected");
  return row;
}

/// Reads a CSV file: a header line, then lines of a label and 64 pixels.
///
/// @throws std::runtime_error  if the file is not there or a line is not so
inline Dataset read_csv(const std::string& path) {
  std::ifstream file(path);
  if (!file)
    throw std::runtime_error("cannot open " + path +
                             ": give the path of examples/data/digits.csv with --data");

  std::vector<float> pixels;
  std::vector<std::int64_t> labels;
  std::string line;
  std::getline(file, line);
  if (!line.starts_with("label,"))
    throw std::runtime_error(path + ", line 1: a header that begins with \"label,\" was expected");
  for (std::size_t number = 2; std::getline(file, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const auto row = read_row(line, path + ", line " + std::to_string(number) + ": ");
    labels.push_back(row[0]);
    for (std::size_t i = 1; i < row.size(); ++i)
      pixels.push_back(static_cast<float>(row[i]) / kBrightest);
  }
  if (labels.size() < 100)
    throw std::runtime_error(path + ": " + std::to_string(labels.size()) +
                             " images, at least 100 were expected: the file is cut short");

  const auto count = static_cast<std::int64_t>(labels.size());
  return {torch::tensor(pixels).view({count, 1, kSide, kSide}), torch::tensor(labels)};
}

/// Resizes images and gives them three channels, as a ResNet for photographs expects.
inline torch::Tensor prepare(const torch::Tensor& images_n1hw, std::int64_t image_size) {
  namespace F = torch::nn::functional;
  const auto options = F::InterpolateFuncOptions()
                           .size(std::vector<std::int64_t>{image_size, image_size})
                           .mode(torch::kBilinear)
                           .align_corners(false);
  return F::interpolate((images_n1hw - 0.5) / 0.5, options).repeat({1, 3, 1, 1});
}

}  // namespace digits
