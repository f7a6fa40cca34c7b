// SPDX-License-Identifier: MIT
//
// Several views of one object, of which some are missing: one backbone sees them all as a batch,
// and checkpointing reaches it.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

int main() {
  torch::manual_seed(0);
  // At most four views, three classes; features of a view are projected to 64 numbers.
  remat::MultiViewClassifier net("resnet18", 3, 4, "attention",
                                 remat::MultiViewOptions{.backbone = {.feature_dim = 64}});

  const auto images = torch::randn({4, 4, 3, 64, 64});  // (B, V, C, H, W)
  const auto classes = torch::tensor({0, 2, 1, 0});
  auto is_present = torch::ones({4, 4}, torch::kBool);  // (B, V)
  is_present[1][3] = false;                             // the second object has three views,
  is_present[2].slice(0, 1) = false;                    // the third a single one

  const auto peak = [&] {
    const remat::MemoryMeter meter;
    torch::nn::functional::cross_entropy(net->forward(images, is_present), classes).backward();
    return meter.peak();
  };
  const remat::Bytes plain = peak();
  remat::enable_gradient_checkpointing(net);
  peak();  // the first step measures the units
  const remat::Bytes checkpointed = peak();

  std::cout << "scores " << net->forward(images, is_present).sizes() << "\npeak of a step: plain "
            << plain << ", checkpointed " << checkpointed << '\n';
  return checkpointed < plain ? 0 : 1;
}
