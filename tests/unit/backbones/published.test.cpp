// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones/published.hpp"

#include <array>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace published_test {
namespace {

using Triple = std::array<double, 3>;

/// Reads what torchvision was asked for by tests/data/make_published.py.
std::vector<nlohmann::json> torchvision_facts() {
  std::ifstream file(std::string(REMAT_TEST_DATA) + "/published.json");
  return nlohmann::json::parse(file).get<std::vector<nlohmann::json>>();
}

}  // namespace

TEST_CASE("the facts of every published model are torchvision's") {
  const auto facts = torchvision_facts();
  REQUIRE(facts.size() == 33);

  for (const nlohmann::json& expected : facts) {
    const auto name = expected["name"].get<std::string>();
    CAPTURE(name);
    const remat::PublishedModel& model = remat::published_model(name);

    CHECK(model.name == name);
    CHECK(model.parameters == expected["parameters"].get<std::int64_t>());
    CHECK(model.feature_dim == expected["feature_dim"].get<std::int64_t>());
    CHECK(model.weights_file == expected["weights_file"].get<std::string>());
    CHECK(model.weights_version == expected["weights_version"].get<std::string>());
    const remat::Preprocessing& preprocessing = model.preprocessing;
    CHECK(preprocessing.resize_size == expected["resize_size"].get<std::int64_t>());
    CHECK(preprocessing.crop_size == expected["crop_size"].get<std::int64_t>());
    CHECK((preprocessing.interpolation == remat::Interpolation::kBicubic) ==
          (expected["interpolation"].get<std::string>() == "bicubic"));
    CHECK(preprocessing.mean == expected["mean"].get<Triple>());
    CHECK(preprocessing.std == expected["std"].get<Triple>());
  }
}

TEST_CASE("a published model names its file and the Python line that fetches it") {
  const remat::PublishedModel& model = remat::published_model("resnet50");

  CHECK(model.weights_file == "resnet50-11ad3fa6.pth");
  CHECK(model.python_line() == "torchvision.models.resnet50(weights=\"IMAGENET1K_V2\")");
}

TEST_CASE("preprocessing differs between models, and not by size alone") {
  CHECK(remat::published_model("resnet18").preprocessing.resize_size == 256);
  CHECK(remat::published_model("resnet50").preprocessing.resize_size == 232);
  CHECK(remat::published_model("efficientnet_b2").preprocessing.crop_size == 288);
  CHECK(remat::published_model("efficientnet_v2_l").preprocessing.mean == Triple{0.5, 0.5, 0.5});
  CHECK(remat::published_model("swin_t").preprocessing.interpolation ==
        remat::Interpolation::kBicubic);
}

TEST_CASE("an unknown published model is refused with the nearest names") {
  std::string text;
  try {
    remat::published_model("convnext_tinny");
  } catch (const remat::ArgumentError& error) {
    text = error.what();
  }

  CHECK(text ==
        "[remat.backbone.unknown] remat::published_model: there is no published model "
        "\"convnext_tinny\"; the nearest names are \"convnext_tiny\", \"convnext_small\", "
        "\"convnext_base\". remat::list_backbones() has the full list.");
}

}  // namespace published_test
