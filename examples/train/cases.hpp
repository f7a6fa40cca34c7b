// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "train/image.hpp"
#include "train/random_numbers.hpp"

namespace train {

/// The labelled cases of a data set; their images are read when they are wanted.
struct Cases {
  std::vector<std::string> classes;
  std::vector<std::int64_t> labels;  // one for each case
  std::int64_t most_views = 1;       // images of the case that has the most
  /// Reads the images of a case; several threads may call it.
  std::function<std::vector<Image>(std::size_t)> read;

  std::size_t size() const { return labels.size(); }

  /// Returns some of the cases, in that order.
  Cases choose(const std::vector<std::size_t>& indices) const {
    Cases chosen{classes, {}, most_views, {}};
    for (const std::size_t index : indices) chosen.labels.push_back(labels[index]);
    chosen.read = [read_any = read, indices](std::size_t index) {
      return read_any(indices[index]);
    };
    return chosen;
  }

  /// Returns at most `limit` cases, evenly spaced, so that every class is among them; 0: all.
  Cases limited_to(std::int64_t limit) const {
    const auto count = static_cast<std::size_t>(limit);
    if (limit == 0 || count >= size()) return *this;
    std::vector<std::size_t> indices;
    for (std::size_t i = 0; i < count; ++i) indices.push_back(i * size() / count);
    return choose(indices);
  }
};

/// Cases to train with, and cases to judge by, which may be none.
struct SplitCases {
  Cases training, validation;
};

/// Keeps a share of each class for validation, chosen by the seed; of two cases or more at least
/// one stays on each side.
inline SplitCases split(const Cases& cases, double share, std::int64_t seed) {
  std::vector<std::vector<std::size_t>> of_class(cases.classes.size());
  for (std::size_t i = 0; i < cases.size(); ++i)
    of_class[static_cast<std::size_t>(cases.labels[i])].push_back(i);

  std::vector<std::size_t> training, validation;
  auto generator = generator_of({static_cast<std::uint64_t>(seed), 0x5eed});
  for (std::vector<std::size_t>& members : of_class) {
    shuffle(members, generator);
    auto kept = static_cast<std::size_t>(std::llround(share * static_cast<double>(members.size())));
    if (share > 0 && members.size() >= 2)
      kept = std::clamp(kept, std::size_t{1}, members.size() - 1);
    const auto middle = members.begin() + static_cast<std::ptrdiff_t>(kept);
    validation.insert(validation.end(), members.begin(), middle);
    training.insert(training.end(), middle, members.end());
  }
  std::sort(training.begin(), training.end());
  std::sort(validation.begin(), validation.end());
  return {cases.choose(training), cases.choose(validation)};
}

}  // namespace train
