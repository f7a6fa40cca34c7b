// SPDX-License-Identifier: MIT
//
// Weights of a network in a file, read without Python and without executing anything in it.
//
//   08_published_weights                           a file made here, for three classes and grey
//   images 08_published_weights NAME FILE [OUT]           a .pth, .pt or .safetensors of any of the
//   backbones;
//                                                  OUT: a .safetensors of the same for Python

#include "remat/remat.hpp"
#include "remat/weights/safetensors.hpp"

#include <torch/torch.h>

#include <exception>
#include <filesystem>
#include <iostream>
#include <span>
#include <string>

namespace {

/// Loads 1,000 classes as they are published, and hands them on.
void convert(const std::string& name, const std::string& file, const std::string& out) {
  const auto net = remat::create_classifier(name, 1000);
  std::cout << name << ": " << remat::load_weights(*net, file) << '\n';
  if (!out.empty()) remat::save_safetensors(*net, out);
}

/// Fine-tuning: another number of classes and of channels than the file has.
void adapt(const std::filesystem::path& file) {
  remat::save_safetensors(*remat::create_classifier("mobilenet_v3_small", 1000), file);
  // `.pretrained = true` instead of `.weights` takes the file that torchvision has fetched.
  const auto net = remat::create_classifier("mobilenet_v3_small", 3,
                                            {.weights = file.string(), .in_channels = 1});
  net->eval();
  std::cout << "scores " << net->forward(torch::rand({2, 1, 64, 64})).sizes() << '\n';

  // What does not fit is said at once, and nothing has changed.
  try {
    remat::load_weights(*remat::create_classifier("resnet18", 1000), file);
  } catch (const remat::WeightsError& error) {
    std::cout << "refused: " << error.what() << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::span<char*> arguments(argv, static_cast<std::size_t>(argc));
  if (argc >= 3) {
    convert(arguments[1], arguments[2], argc > 3 ? arguments[3] : "");
  } else {
    const auto file = std::filesystem::temp_directory_path() / "remat_example.safetensors";
    adapt(file);
    std::filesystem::remove(file);
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
