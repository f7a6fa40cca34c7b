// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "train/cases.hpp"
#include "train/image.hpp"
#include "train/user_error.hpp"

namespace train {

/// Finds the cases of a folder: PATH/CLASS/.../IMAGE, or PATH/CLASS/CASE/.../VIEW.
class ImageFolder {
 public:
  /// @param has_views  whether each folder below a class is one case, and its images are views
  /// @throws UserError  if there is nothing to train with, or an image is broken
  ImageFolder(const std::filesystem::path& path, bool has_views) : path_(path) {
    if (!std::filesystem::is_directory(path))
      throw UserError(path.string() + ": there is no such folder");
    for (const auto& class_folder : children(path, /*folders=*/true)) {
      classes_.push_back(class_folder.filename().string());
      const std::size_t before = files_.size();
      if (has_views)
        add_views_of(class_folder);
      else
        for (const auto& file : images_below(class_folder)) add_case({file});
      if (files_.size() == before)
        throw UserError(class_folder.string() + ": there is no PNG or JPEG file for this class");
    }
    if (classes_.size() < 2)
      throw UserError(path.string() + ": " + std::to_string(classes_.size()) +
                      " folders were found, one for each class and at least 2 were expected" +
                      (has_views ? ": CLASS/CASE/VIEW" : ": CLASS/IMAGE"));
    check_headers();
  }

  Cases cases() const {
    std::int64_t most_views = 1;
    for (const auto& files : files_)
      most_views = std::max(most_views, std::int64_t{std::ssize(files)});
    auto files = std::make_shared<const std::vector<std::vector<std::filesystem::path>>>(files_);
    return {classes_, labels_, most_views, [files](std::size_t index) {
              std::vector<Image> images;
              for (const auto& file : (*files)[index]) images.push_back(read_image(file));
              return images;
            }};
  }

  /// Returns how many files are no images and were passed over, and one of them.
  std::pair<std::size_t, std::filesystem::path> ignored() const { return {ignored_, an_ignored_}; }

 private:
  using Paths = std::vector<std::filesystem::path>;

  /// Returns folders or files, sorted by name so that every machine has the same order; hidden
  /// ones are left out.
  static Paths children(const std::filesystem::path& folder, bool folders) {
    Paths paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.is_directory() == folders && !entry.path().filename().string().starts_with('.'))
        paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    return paths;
  }

  static bool has_image_name(const std::filesystem::path& file) {
    std::string extension = file.extension().string();
    for (char& letter : extension)
      letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    return extension == ".png" || extension == ".jpg" || extension == ".jpeg";
  }

  Paths images_below(const std::filesystem::path& folder) {
    Paths images;
    for (const auto& file : children(folder, /*folders=*/false)) {
      if (has_image_name(file))
        images.push_back(file);
      else if (++ignored_ == 1)
        an_ignored_ = file;
    }
    for (const auto& below : children(folder, /*folders=*/true)) {
      const Paths deeper = images_below(below);
      images.insert(images.end(), deeper.begin(), deeper.end());
    }
    return images;
  }

  void add_views_of(const std::filesystem::path& class_folder) {
    for (const auto& file : children(class_folder, /*folders=*/false))
      if (has_image_name(file))
        throw UserError(file.string() +
                        ": an image lies in the folder of a class, and a folder for each case was "
                        "expected: CLASS/CASE/VIEW. With one image per case set data.source to "
                        "folder");
    for (const auto& case_folder : children(class_folder, /*folders=*/true)) {
      Paths views = images_below(case_folder);
      if (views.empty()) throw UserError(case_folder.string() + ": the case has no image");
      add_case(std::move(views));
    }
  }

  void add_case(Paths files) {
    files_.push_back(std::move(files));
    labels_.push_back(std::ssize(classes_) - 1);
  }

  /// A broken image stops the program now, not in the middle of an epoch.
  void check_headers() const {
    std::string broken;
    std::size_t count = 0;
    for (const auto& files : files_)
      for (const auto& file : files)
        if (const std::string reason = check_image_header(file); !reason.empty() && ++count <= 5)
          broken += "\n  " + file.string() + ": " + reason;
    if (count > 5) broken += "\n  and " + std::to_string(count - 5) + " more";
    if (count > 0)
      throw UserError(path_.string() + ": " + std::to_string(count) +
                      (count == 1 ? " image is broken:" : " images are broken:") + broken);
  }

  std::filesystem::path path_;
  std::vector<std::string> classes_;
  std::vector<std::int64_t> labels_;
  std::vector<Paths> files_;
  std::size_t ignored_ = 0;
  std::filesystem::path an_ignored_;
};

}  // namespace train
