// SPDX-License-Identifier: MIT
#pragma once

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "tests/benchmarks/rotor.hpp"

namespace benchmarks {

/// A block of a network as a function.
using Block = std::function<torch::Tensor(torch::Tensor)>;

/// Returns the units of a network's chain, and what follows them as the last block.
///
/// The backbone runs its chain by one level of segments; nested ones need the blocks themselves.
inline std::vector<Block> blocks_of(remat::ChainBackbone& net) {
  struct Opened : remat::Backbone {  // for the names of the protected steps
    using Backbone::forward_head;
    using Backbone::pool;
  };
  std::vector<Block> blocks;
  for (const remat::detail::ChainUnit& unit : remat::detail::units_of(*net.chain()))
    blocks.push_back(
        [module = unit.module](torch::Tensor x) { return module->forward(std::move(x)); });
  // Swin's chain ends with the channels last.
  const bool is_permuted = net.name().starts_with("swin");
  blocks.push_back([&net, is_permuted](torch::Tensor x) {
    if (is_permuted) x = x.permute({0, 3, 1, 2});
    return (net.*&Opened::forward_head)((net.*&Opened::pool)(std::move(x)));
  });
  return blocks;
}

/// Measures one block.
///
/// @param is_first  its input needs no gradient
inline BlockCost measure_block(const Block& block, const torch::Tensor& input, bool is_first) {
  constexpr int kRuns = 3;  // the first sets kernels up
  BlockCost cost;
  cost.seconds = std::numeric_limits<double>::infinity();
  {
    const torch::NoGradGuard no_grad;
    const remat::MemoryMeter meter;
    const torch::Tensor output = block(input);
    cost.dropped_peak = meter.peak().count;
    cost.output = meter.current().count;
  }
  for (int run = 0; run < kRuns; ++run) {
    const torch::Tensor x = input.detach().requires_grad_(!is_first);
    remat::MemoryMeter meter;
    const auto start = std::chrono::steady_clock::now();
    torch::Tensor output = block(x);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    cost.seconds = std::min(cost.seconds, time.count());
    cost.forward_peak = meter.peak().count;
    cost.saved = meter.current().count;
    // The product's backward makes the output's gradient, and nobody else holds that. The output
    // itself is gone by then, as after the next block's backward.
    const torch::Tensor root = (output * 1).sum();
    output.reset();
    meter.reset_peak();
    root.backward();
    cost.backward_peak = meter.peak().count;
  }
  return cost;
}

/// Measures all blocks. The parameters' gradients are there and get something added.
inline std::vector<BlockCost> measure_blocks(const std::vector<Block>& blocks,
                                             torch::Tensor input) {
  std::vector<BlockCost> costs;
  for (const Block& block : blocks) {
    costs.push_back(measure_block(block, input, costs.empty()));
    const torch::NoGradGuard no_grad;
    input = block(input);
  }
  return costs;
}

/// Runs blocks by a schedule: what it forgets is a checkpointed region, inside of which the regions
/// of the second run lie. They are dropped once more there, and recomputed when their turn comes.
inline torch::Tensor run_schedule(const RotorSchedule& steps, const std::vector<Block>& blocks,
                                  torch::Tensor x) {
  for (const RotorStep& step : steps)
    x = step.inside.empty()
            ? blocks[step.first](x)
            : remat::checkpoint([&] { return run_schedule(step.inside, blocks, x); });
  return x;
}

}  // namespace benchmarks
