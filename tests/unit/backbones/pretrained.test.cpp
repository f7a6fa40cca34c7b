// SPDX-License-Identifier: MIT
#include "tests/support/doctest.hpp"

#include "remat/backbones.hpp"
#include "remat/weights/safetensors.hpp"

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace pretrained_test {
namespace {

namespace fs = std::filesystem;

/// A folder that goes when the test ends.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(fs::temp_directory_path() / ("remat_pretrained_" + name)) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// Points TORCH_HOME to a folder while it lives.
class TorchHome {
 public:
  explicit TorchHome(const fs::path& path) {
    if (const char* value = std::getenv("TORCH_HOME")) before_ = value;
    setenv("TORCH_HOME", path.c_str(), 1);
  }
  ~TorchHome() {
    before_.empty() ? unsetenv("TORCH_HOME") : setenv("TORCH_HOME", before_.c_str(), 1);
  }
  TorchHome(const TorchHome&) = delete;
  TorchHome& operator=(const TorchHome&) = delete;

 private:
  std::string before_;
};

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const remat::WeightsError& error) {
    return error.what();
  }
  return "no error";
}

std::shared_ptr<remat::Backbone> saved(const std::string& name, const fs::path& path,
                                       remat::BackboneOptions options = {}) {
  torch::manual_seed(7);
  options.num_classes = 10;
  const auto model = remat::create_backbone(name, options);
  remat::save_safetensors(*model, path);
  return model;
}

torch::Tensor parameter(const remat::Backbone& model, const std::string& key) {
  return model.named_parameters()[key];
}

}  // namespace

TEST_CASE("a file given as weights makes the same network, bit for bit") {
  const Folder folder("same");
  const auto original = saved("resnet18", folder.path() / "net.safetensors");

  const auto copy = remat::create_classifier(
      "resnet18", 10, {.weights = (folder.path() / "net.safetensors").string()});

  original->eval();
  copy->eval();
  const torch::Tensor images = torch::randn({2, 3, 32, 32});
  CHECK(torch::equal(original->forward(images), copy->forward(images)));
}

TEST_CASE("pretrained takes torchvision's file from its cache") {
  const Folder folder("cache");
  const TorchHome home(folder.path());
  fs::create_directories(folder.path() / "hub" / "checkpoints");
  const auto original =
      saved("resnet18", folder.path() / "hub" / "checkpoints" / "resnet18-f37072fd.pth");

  const auto features = remat::create_backbone("resnet18", {.pretrained = true});

  CHECK(torch::equal(parameter(*features, "conv1.weight"), parameter(*original, "conv1.weight")));
  CHECK(torch::equal(features->named_buffers()["bn1.running_var"],
                     original->named_buffers()["bn1.running_var"]));
}

TEST_CASE("weights that are not in the cache give the file's name and the line that fetches it") {
  const Folder folder("empty");
  const TorchHome home(folder.path());

  CHECK(error_of([] { remat::create_backbone("resnet50", {.pretrained = true}); }) ==
        "[remat.weights.not_cached] resnet50: pretrained = true was given, and there is no " +
            (folder.path() / "hub/checkpoints/resnet50-11ad3fa6.pth").string() +
            ": The published weights have not been fetched to this machine. Fetch them with "
            "Python's `import torchvision; torchvision.models.resnet50(weights=\"IMAGENET1K_V2\")`"
            ", set TORCH_HOME to where they are, or give the file as weights.");
}

TEST_CASE("a first convolution for other channels is folded as timm does") {
  const Folder folder("channels");
  const fs::path file = folder.path() / "net.safetensors";
  const torch::Tensor stored = parameter(*saved("resnet18", file), "conv1.weight");
  const auto folded = [&](std::int64_t in_channels) {
    const auto model = remat::create_classifier(
        "resnet18", 10, {.weights = file.string(), .in_channels = in_channels});
    return parameter(*model, "conv1.weight").detach();
  };

  CHECK(torch::equal(folded(3), stored));
  CHECK(torch::equal(folded(1), stored.sum(1, true)));
  CHECK(torch::equal(folded(4), torch::cat({stored, stored.slice(1, 0, 1)}, 1) * 0.75));
  CHECK(torch::equal(folded(6), torch::cat({stored, stored}, 1) * 0.5));
}

TEST_CASE("a head for other classes stays as it was initialised, the rest is loaded") {
  const Folder folder("head");
  const fs::path file = folder.path() / "net.safetensors";
  const auto original = saved("resnet18", file);
  torch::manual_seed(3);
  const auto model = remat::create_classifier("resnet18", 7);
  const torch::Tensor head = parameter(*model, "fc.weight").detach().clone();

  const remat::LoadReport report = remat::load_backbone_weights(*model, file);

  CHECK(torch::equal(parameter(*model, "fc.weight"), head));
  CHECK(torch::equal(parameter(*model, "layer4.1.conv2.weight"),
                     parameter(*original, "layer4.1.conv2.weight")));
  CHECK(std::ranges::find(report.skipped, "fc.weight") != report.skipped.end());
  CHECK(report.missing.empty());
}

TEST_CASE("a projection that the file does not know stays, one that it knows is loaded") {
  const Folder folder("projection");
  const fs::path published = folder.path() / "published.safetensors";
  saved("resnet18", published);
  const fs::path own = folder.path() / "own.safetensors";

  const auto model =
      remat::create_backbone("resnet18", {.weights = published.string(), .feature_dim = 5});
  remat::save_safetensors(*model, own);
  torch::manual_seed(99);
  const auto again =
      remat::create_backbone("resnet18", {.weights = own.string(), .feature_dim = 5});

  CHECK(
      torch::equal(parameter(*model, "projection.weight"), parameter(*again, "projection.weight")));
}

TEST_CASE("position embeddings of another image size are resized, the class token stays") {
  const Folder folder("positions");
  const fs::path file = folder.path() / "net.safetensors";
  const auto original = saved("vit_b_32", file, {.image_size = 64});

  const auto model =
      remat::create_classifier("vit_b_32", 10, {.weights = file.string(), .image_size = 96});

  const torch::Tensor resized = parameter(*model, "encoder.pos_embedding");
  CHECK(resized.size(1) == 1 + 9);
  CHECK(torch::equal(resized.select(1, 0),
                     parameter(*original, "encoder.pos_embedding").select(1, 0)));
}

TEST_CASE("a file of another network lists what differs and changes nothing") {
  const Folder folder("other");
  const fs::path file = folder.path() / "net.safetensors";
  saved("resnet34", file);
  const auto model = remat::create_classifier("resnet18", 10);
  const torch::Tensor before = parameter(*model, "conv1.weight").detach().clone();

  const std::string text = error_of([&] { remat::load_backbone_weights(*model, file); });

  CHECK(text.find("unexpected") != std::string::npos);
  CHECK(text.find("layer1.2.conv1.weight") != std::string::npos);
  CHECK(torch::equal(parameter(*model, "conv1.weight"), before));
}

}  // namespace pretrained_test
