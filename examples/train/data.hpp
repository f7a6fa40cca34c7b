// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "digits/dataset.hpp"
#include "remat/yaml.hpp"
#include "train/cases.hpp"
#include "train/image_folder.hpp"
#include "train/user_error.hpp"

namespace train {

/// Reads the demo's digits.
inline Cases read_digits(const std::string& path) {
  const auto digits = std::make_shared<const digits::Dataset>(digits::read_csv(path));
  Cases cases;
  for (std::int64_t i = 0; i < digits::kClasses; ++i) cases.classes.push_back(std::to_string(i));
  const auto* labels = digits->labels.data_ptr<std::int64_t>();
  cases.labels.assign(labels, labels + digits->size());
  cases.read = [digits](std::size_t index) {
    const float* grey = digits->images.data_ptr<float>() + index * digits::kPixels;
    Image image{digits::kSide, digits::kSide, {}};
    for (std::int64_t i = 0; i < digits::kPixels; ++i)
      image.pixels.insert(image.pixels.end(), 3,
                          static_cast<std::uint8_t>(std::lround(255 * grey[i])));
    return std::vector<Image>{std::move(image)};
  };
  return cases;
}

/// Reads a folder, and says what in it was passed over.
inline Cases read_folder(const std::string& path, const remat::Config& config) {
  const ImageFolder folder(path, config.data.source == "views");
  if (const auto [count, file] = folder.ignored(); count > 0)
    std::printf("%s: %zu files are neither PNG nor JPEG and were passed over, %s for example\n",
                path.c_str(), count, file.c_str());
  Cases cases = folder.cases();
  if (cases.most_views > config.model.num_views && config.data.source == "views")
    throw UserError(path + ": a case has " + std::to_string(cases.most_views) +
                    " views, and model.num_views is " + std::to_string(config.model.num_views) +
                    ": set it to " + std::to_string(cases.most_views));
  return cases;
}

/// Finds the data that a configuration names.
///
/// @throws UserError  if there is none, or it does not fit the configuration
inline SplitCases find_data(const remat::Config& config) {
  const remat::DataConfig& data = config.data;
  SplitCases parts;
  if (data.source == "digits")
    parts = split(read_digits(data.path.empty() ? REMAT_EXAMPLES_DATA "/digits.csv" : data.path),
                  data.validation_share, config.training.seed);
  else if (data.validation_path.empty())
    parts = split(read_folder(data.path, config), data.validation_share, config.training.seed);
  else
    parts = {read_folder(data.path, config), read_folder(data.validation_path, config)};

  if (parts.training.classes != parts.validation.classes)
    throw UserError(data.validation_path + ": the folders of the classes are not those of " +
                    data.path);
  const std::int64_t class_count = std::ssize(parts.training.classes);
  if (config.model.num_classes != 0 && config.model.num_classes != class_count)
    throw UserError("model.num_classes is " + std::to_string(config.model.num_classes) +
                    ", and the data has " + std::to_string(class_count) + " classes");
  return {parts.training.limited_to(data.limit), parts.validation.limited_to(data.limit)};
}

}  // namespace train
