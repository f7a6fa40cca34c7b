// SPDX-License-Identifier: MIT
//
// What checkpointing would do for a network, before anything is trained: one step plain and one
// checkpointed, as text, as a picture, and as JSON.
//
//   10_report [FOLDER]   writes report.svg and report.json there; by default into the current
//   folder

#include "remat/remat.hpp"
#include "remat/training/memory_report_json.hpp"

#include <torch/torch.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>

namespace {

void write(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("cannot write " + path.string());
  std::cout << "wrote " << path.string() << '\n';
}

}  // namespace

int main(int argc, char** argv) try {
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
  torch::manual_seed(0);
  const auto net = remat::create_classifier("mobilenet_v2", 10);
  const auto images = torch::randn({16, 3, 64, 64});
  const auto labels = torch::randint(10, {16});

  // Weights, gradients, statistics, switches and random numbers are afterwards as before.
  const remat::MemoryReport report = remat::compare_memory(
      *net, images,
      [&](const torch::Tensor& scores) { return torch::cross_entropy_loss(scores, labels); });

  std::cout << report << '\n';
  write(folder / "report.svg", remat::to_svg(report));
  write(folder / "report.json", remat::to_json(report).dump(2) + "\n");
  return report.saving() > remat::Bytes{0} ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << '\n';
  return 2;
}
