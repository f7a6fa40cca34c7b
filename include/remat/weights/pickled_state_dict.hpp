// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "remat/errors.hpp"
#include "remat/weights/pickle_values.hpp"
#include "remat/weights/pickled_tensor.hpp"

namespace remat::detail {

using NamedPickledTensor = std::pair<std::string, PickledTensor>;

/// Finds the state dict among the values of a pickle and understands its tensors.
class PickledStateDict {
 public:
  /// @return  names and tensors in the file's order; everything else beside them is left out
  /// @throws WeightsError  if there is no dictionary of tensors, or one of them cannot be right
  static std::vector<NamedPickledTensor> find(const PickleValues& values, PickleId root) {
    return PickledStateDict(values).tensors_of(root);
  }

 private:
  /// Where training scripts put the weights among epochs, optimizer states and the like.
  static constexpr std::array<std::string_view, 3> kNestedUnder{"state_dict", "model",
                                                                "model_state_dict"};
  static constexpr int kDeepest = 3;
  static constexpr std::size_t kMostTensors = std::size_t{1} << 18;

  explicit PickledStateDict(const PickleValues& values) : values_(values) {}

  std::vector<NamedPickledTensor> tensors_of(PickleId root) const {
    if (!values_.is(root, PickleKind::kDictionary))
      refuse(root_kind(root) + ", a dictionary of tensors was expected");
    PickleId dictionary = root;
    for (int depth = 0; depth < kDeepest; ++depth) {
      const auto nested = nested_in(dictionary);
      if (!nested) break;
      dictionary = *nested;
    }
    auto tensors = read(dictionary);
    if (tensors.empty()) refuse("its dictionary holds no tensors, but " + keys_of(dictionary));
    return tensors;
  }

  /// A best score may be a tensor, too: so a dictionary inside goes before tensors beside it.
  std::optional<PickleId> nested_in(PickleId dictionary) const {
    const auto items = values_.items(dictionary);
    for (const std::string_view name : kNestedUnder)
      for (std::size_t i = 0; i + 1 < items.size(); i += 2)
        if (values_.is(items[i], PickleKind::kText) && values_.text(items[i]) == name &&
            values_.is(items[i + 1], PickleKind::kDictionary))
          return items[i + 1];
    return std::nullopt;
  }

  std::vector<NamedPickledTensor> read(PickleId dictionary) const {
    std::vector<NamedPickledTensor> tensors;
    // Found before they are copied: a hostile pickle may use one long name many times.
    std::unordered_set<std::string_view> names;
    const auto items = values_.items(dictionary);
    for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
      if (!values_.is(items[i + 1], PickleKind::kTensor)) continue;
      if (!values_.is(items[i], PickleKind::kText))
        refuse("a tensor of its dictionary has a key that is no text");
      const std::string_view name = values_.text(items[i]);
      if (!names.insert(name).second) throw_duplicate("\"" + values_.source().name() + "\"", name);
      if (names.size() > kMostTensors)
        values_.source().damaged("it has more than " + std::to_string(kMostTensors) + " tensors");
      tensors.emplace_back(name, PickledTensorReader(values_, name).read(items[i + 1]));
    }
    return tensors;
  }

  std::string root_kind(PickleId root) const {
    switch (values_.kind(root)) {
      case PickleKind::kTensor:
        return "it holds one tensor without a name";
      case PickleKind::kSequence:
        return "it holds a list";
      default:
        return "it holds a single value";
    }
  }

  std::string keys_of(PickleId dictionary) const {
    constexpr std::size_t kShown = 5;
    const auto items = values_.items(dictionary);
    std::string keys;
    for (std::size_t i = 0; i + 1 < std::min(items.size(), 2 * kShown); i += 2)
      if (values_.is(items[i], PickleKind::kText))
        keys += (keys.empty() ? "\"" : ", \"") + printable(values_.text(items[i])) + "\"";
    return std::to_string(items.size() / 2) + " other values" + (keys.empty() ? keys : ": " + keys);
  }

  [[noreturn]] void refuse(std::string_view what) const {
    throw WeightsError(
        ErrorMessage("remat.weights.content")
            .where("\"" + values_.source().name() + "\"")
            .what(what)
            .cure(
                "In Python, write torch.save(model.state_dict(), path); a state dict may also lie "
                "under the key state_dict, model or model_state_dict"));
  }

  const PickleValues& values_;
};

}  // namespace remat::detail
