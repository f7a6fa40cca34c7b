// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"

namespace remat {

/// How an image is made smaller: torchvision's `InterpolationMode`, with antialiasing.
enum class Interpolation { kBilinear, kBicubic };

/// What was done to the images that published weights were evaluated on; with other figures the
/// same weights lose up to ten points of accuracy.
///
/// The shorter side is resized to `resize_size`, a square of `crop_size` is cut from the centre,
/// values are scaled to [0, 1], and each channel has `mean` subtracted and is divided by `std`.
struct Preprocessing {
  std::int64_t resize_size;
  std::int64_t crop_size;
  Interpolation interpolation;
  std::array<double, 3> mean;  ///< red, green, blue
  std::array<double, 3> std;   ///< likewise
};

/// What is known about a network of torchvision's and its published weights.
struct PublishedModel {
  std::string_view name;             ///< torchvision's, which is ours
  std::int64_t parameters;           ///< with the head for 1,000 classes
  std::int64_t feature_dim;          ///< width of the pooled features, before any layer of the head
  std::string_view weights_file;     ///< in torchvision's cache; ends in the start of its SHA-256
  std::string_view weights_version;  ///< which of the model's weights the file holds
  Preprocessing preprocessing;

  /// Returns the Python line that puts the file into torchvision's cache.
  std::string python_line() const {
    return "torchvision.models." + std::string(name) + "(weights=\"" +
           std::string(weights_version) + "\")";
  }
};

namespace detail {

/// Means and standard deviations of ImageNet's channels.
inline constexpr std::array<double, 3> kImageNetMean{0.485, 0.456, 0.406};
inline constexpr std::array<double, 3> kImageNetStd{0.229, 0.224, 0.225};
/// Of EfficientNetV2-L alone, whose weights were ported from the paper's own.
inline constexpr std::array<double, 3> kHalf{0.5, 0.5, 0.5};

constexpr Preprocessing imagenet(std::int64_t resize_size, std::int64_t crop_size,
                                 Interpolation interpolation = Interpolation::kBilinear) {
  return {resize_size, crop_size, interpolation, kImageNetMean, kImageNetStd};
}

/// torchvision 0.28 says this of its `DEFAULT` weights; `tests/data/make_published.py` asks it.
inline constexpr auto kPublishedModels = std::to_array<PublishedModel>({
    {"resnet18", 11'689'512, 512, "resnet18-f37072fd.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"resnet34", 21'797'672, 512, "resnet34-b627a593.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"resnet50", 25'557'032, 2048, "resnet50-11ad3fa6.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"resnet101", 44'549'160, 2048, "resnet101-cd907fc2.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"resnet152", 60'192'808, 2048, "resnet152-f82ba261.pth", "IMAGENET1K_V2", imagenet(232, 224)},
    {"mobilenet_v2", 3'504'872, 1280, "mobilenet_v2-7ebf99e0.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"mobilenet_v3_small", 2'542'856, 576, "mobilenet_v3_small-047dcff4.pth", "IMAGENET1K_V1",
     imagenet(256, 224)},
    {"mobilenet_v3_large", 5'483'032, 960, "mobilenet_v3_large-5c1a4163.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"efficientnet_b0", 5'288'548, 1280, "efficientnet_b0_rwightman-7f5810bc.pth", "IMAGENET1K_V1",
     imagenet(256, 224, Interpolation::kBicubic)},
    {"efficientnet_b1", 7'794'184, 1280, "efficientnet_b1-c27df63c.pth", "IMAGENET1K_V2",
     imagenet(255, 240)},
    {"efficientnet_b2", 9'109'994, 1408, "efficientnet_b2_rwightman-c35c1473.pth", "IMAGENET1K_V1",
     imagenet(288, 288, Interpolation::kBicubic)},
    {"efficientnet_v2_s", 21'458'488, 1280, "efficientnet_v2_s-dd5fe13b.pth", "IMAGENET1K_V1",
     imagenet(384, 384)},
    {"efficientnet_v2_m", 54'139'356, 1280, "efficientnet_v2_m-dc08266a.pth", "IMAGENET1K_V1",
     imagenet(480, 480)},
    {"efficientnet_v2_l",
     118'515'272,
     1280,
     "efficientnet_v2_l-59c71312.pth",
     "IMAGENET1K_V1",
     {480, 480, Interpolation::kBicubic, kHalf, kHalf}},
    {"regnet_y_400mf", 4'344'144, 440, "regnet_y_400mf-e6988f5f.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_800mf", 6'432'512, 784, "regnet_y_800mf-58fc7688.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_1_6gf", 11'202'430, 888, "regnet_y_1_6gf-0d7bc02a.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_3_2gf", 19'436'338, 1512, "regnet_y_3_2gf-9180c971.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_8gf", 39'381'472, 2016, "regnet_y_8gf-dc2b1b54.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_16gf", 83'590'140, 3024, "regnet_y_16gf-3e4a00f9.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"regnet_y_32gf", 145'046'770, 3712, "regnet_y_32gf-8db6d4b5.pth", "IMAGENET1K_V2",
     imagenet(232, 224)},
    {"vit_b_16", 86'567'656, 768, "vit_b_16-c867db91.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"vit_b_32", 88'224'232, 768, "vit_b_32-d86f8d99.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"vit_l_16", 304'326'632, 1024, "vit_l_16-852ce7e3.pth", "IMAGENET1K_V1", imagenet(242, 224)},
    {"vit_l_32", 306'535'400, 1024, "vit_l_32-c7638314.pth", "IMAGENET1K_V1", imagenet(256, 224)},
    {"swin_t", 28'288'354, 768, "swin_t-704ceda3.pth", "IMAGENET1K_V1",
     imagenet(232, 224, Interpolation::kBicubic)},
    {"swin_s", 49'606'258, 768, "swin_s-5e29d889.pth", "IMAGENET1K_V1",
     imagenet(246, 224, Interpolation::kBicubic)},
    {"swin_b", 87'768'224, 1024, "swin_b-68c6b09e.pth", "IMAGENET1K_V1",
     imagenet(238, 224, Interpolation::kBicubic)},
    {"convnext_tiny", 28'589'128, 768, "convnext_tiny-983f1562.pth", "IMAGENET1K_V1",
     imagenet(236, 224)},
    {"convnext_small", 50'223'688, 768, "convnext_small-0c510722.pth", "IMAGENET1K_V1",
     imagenet(230, 224)},
    {"convnext_base", 88'591'464, 1024, "convnext_base-6075fbad.pth", "IMAGENET1K_V1",
     imagenet(232, 224)},
    {"convnext_large", 197'767'336, 1536, "convnext_large-ea097f82.pth", "IMAGENET1K_V1",
     imagenet(232, 224)},
    {"maxvit_t", 30'919'624, 512, "maxvit_t-bc5ab103.pth", "IMAGENET1K_V1",
     imagenet(224, 224, Interpolation::kBicubic)},
});

/// Spellings without an underscore that people use as well.
inline constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kBackboneAliases{{
    {"mobilenetv2", "mobilenet_v2"},
    {"mobilenetv3_small", "mobilenet_v3_small"},
    {"mobilenetv3_large", "mobilenet_v3_large"},
}};

}  // namespace detail

/// Returns what torchvision publishes under that name.
///
/// @throws ArgumentError  with the nearest names if there is no such model
inline const PublishedModel& published_model(std::string_view name) {
  const auto* const found =
      std::ranges::find(detail::kPublishedModels, name, &PublishedModel::name);
  require(found != detail::kPublishedModels.end(), [&] {
    std::vector<std::string> names;
    for (const PublishedModel& model : detail::kPublishedModels) names.emplace_back(model.name);
    return ErrorMessage("remat.backbone.unknown")
        .where("remat::published_model")
        .what("there is no published model \"" + std::string(name) + "\"; the nearest names are " +
              detail::quoted_list(detail::nearest_names(name, names)))
        .cure("remat::list_backbones() has the full list");
  });
  return *found;
}

}  // namespace remat
