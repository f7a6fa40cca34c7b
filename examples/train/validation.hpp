// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "train/loader.hpp"
#include "train/network.hpp"
#include "train/precision.hpp"
#include "train/stop_signal.hpp"

namespace train {

/// What a network is worth on cases that it was not trained with.
struct Score {
  double loss = 0;
  double accuracy = 0;  // 0 to 1
};

/// Judges a network in eval mode, where checkpointing is off by itself.
///
/// @return  nothing if a signal came meanwhile
inline std::optional<Score> validate(Network& network, Loader& loader, const Precision& precision) {
  const torch::NoGradGuard no_grad;
  network.module().eval();
  std::vector<std::size_t> order(loader.cases().size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  loader.start(order, 0, {});
  Score score;
  while (const std::optional<Batch> read = loader.next()) {
    if (StopSignal::received() != 0) break;
    const Batch batch = read->to(precision.device);
    const auto logits = precision.run([&] { return network.forward(batch); });
    score.loss += torch::cross_entropy_loss(logits, batch.labels).item<double>() *
                  static_cast<double>(batch.size());
    score.accuracy += logits.argmax(1).eq(batch.labels).sum().item<double>();
  }
  network.module().train();
  if (StopSignal::received() != 0) return {};
  score.loss /= static_cast<double>(order.size());
  score.accuracy /= static_cast<double>(order.size());
  return score;
}

}  // namespace train
