// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/initial_weights.hpp"
#include "remat/backbones/published.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/tensor.hpp"
#include "remat/weights/load.hpp"

namespace remat {

namespace detail {

/// Returns the folder in which torchvision keeps what it has fetched.
///
/// @par Source  PyTorch's `torch.hub.get_dir`: TORCH_HOME, else `torch` in XDG_CACHE_HOME or
/// ~/.cache
inline std::filesystem::path torchvision_cache() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here sets it
    return std::filesystem::path(value == nullptr ? "" : value);
  };
  std::filesystem::path home = variable("TORCH_HOME");
  if (home.empty()) {
    const std::filesystem::path cache = variable("XDG_CACHE_HOME");
    home = (cache.empty() ? variable("HOME") / ".cache" : cache) / "torch";
  }
  return home / "hub" / "checkpoints";
}

/// Whether the stored head has the shapes of the backbone's; a file without one counts as fitting.
inline bool does_head_fit(const Backbone& backbone, const StateDictReader& file) {
  const auto parameters = backbone.named_parameters();
  return std::ranges::all_of(file.entries(), [&](const TensorEntry& entry) {
    std::string_view name = entry.name;
    if (name.starts_with("module.")) name.remove_prefix(7);
    if (!name.starts_with(backbone.head())) return true;
    const torch::Tensor* mine = parameters.find(std::string(name));
    return mine != nullptr && mine->sizes() == at::IntArrayRef(entry.shape);
  });
}

inline bool has_projection(const StateDictReader& file) {
  return std::ranges::any_of(file.entries(), [](const TensorEntry& entry) {
    return entry.name.find("projection.") != std::string::npos;
  });
}

}  // namespace detail

/// Loads a weight file of the same network, published or saved by us, into a backbone.
///
/// As `load_weights`, and besides: the first convolution is folded if the file is for another
/// number of channels, position embeddings are resized for another image size, a head for another
/// number of classes is left as it is with a warning, or passed over if the backbone has none, and
/// a `projection` that the file does not know stays as initialised.
///
/// @return  what became of each key
/// @throws WeightsError  if anything else differs; then nothing has changed
inline LoadReport load_backbone_weights(Backbone& backbone, const std::filesystem::path& path) {
  const auto file = open_state_dict(path);
  LoadOptions options;
  options.fit = [&backbone](const std::string& key, const torch::Tensor& stored,
                            at::IntArrayRef shape) {
    return backbone.fit_weight(key, stored, shape);
  };
  const bool is_head_skipped =
      backbone.num_classes() == 0 || !detail::does_head_fit(backbone, *file);
  if (is_head_skipped) options.skip.push_back(backbone.head());
  if (!detail::has_projection(*file)) options.skip.emplace_back("projection.");
  const LoadReport report = load_weights(backbone, *file, options);
  if (is_head_skipped && backbone.num_classes() != 0)
    TORCH_WARN("remat: ", backbone.name(), ": the head in ", path.string(), " is not for ",
               backbone.num_classes(), " classes: \"", backbone.head(),
               "*\" stays as it was initialised");
  return report;
}

namespace detail {

/// Returns the published file in torchvision's cache.
///
/// @throws WeightsError  with the Python line that fetches it, if it is not there
inline std::filesystem::path published_weights(std::string_view name) {
  const PublishedModel& model = published_model(name);
  std::filesystem::path path = torchvision_cache() / model.weights_file;
  if (!std::filesystem::exists(path))
    throw WeightsError(
        ErrorMessage("remat.weights.not_cached")
            .where(name)
            .what("pretrained = true was given, and there is no " + path.string())
            .cause("The published weights have not been fetched to this machine")
            .cure("Fetch them with Python's `import torchvision; " + model.python_line() +
                  "`, set TORCH_HOME to where they are, or give the file as weights"));
  return path;
}

/// Loads what the options ask for, if they do.
inline void load_initial_weights(Backbone& backbone) {
  backbone.options().pretrained.load_into(backbone);
  backbone.options().weights.load_into(backbone);
}

}  // namespace detail

inline Pretrained::Pretrained(bool is_wanted) {
  if (is_wanted)
    load_ = [](Backbone& backbone) {
      load_backbone_weights(backbone, detail::published_weights(backbone.name()));
    };
}

template <std::convertible_to<std::string> Path>
  requires(!std::same_as<std::remove_cvref_t<Path>, WeightsFile>)
WeightsFile::WeightsFile(Path&& path)
    : path_(std::forward<Path>(path)), load_([](Backbone& backbone, const std::string& file) {
        load_backbone_weights(backbone, file);
      }) {}

}  // namespace remat
