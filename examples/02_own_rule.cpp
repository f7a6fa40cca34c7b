// SPDX-License-Identifier: MIT
//
// A rule of one's own: it looks at a chain and says which units are recomputed together.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

/// Checkpoints the first half of a chain, unit by unit, and keeps the second half, which backward
/// wants first.
struct FirstHalf {
  remat::Plan operator()(const remat::Chain& chain) const {
    std::vector<remat::Segment> segments;
    for (std::size_t unit = 0; unit < chain.unit_count; ++unit)
      segments.push_back({unit, unit + 1, unit < chain.unit_count / 2});
    return remat::Plan(segments);
  }
};

struct LayerImpl : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return torch::gelu(linear->forward(x)); }

  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(64, 64));
};
TORCH_MODULE(Layer);

int main() {
  torch::manual_seed(0);
  remat::Checkpointed<remat::Sequential, FirstHalf> net;
  for (int layer = 0; layer < 6; ++layer) net->push_back(Layer());
  const auto step = [&] { net->forward(torch::randn({256, 64})).pow(2).mean().backward(); };

  // A rule is arithmetic: it can be asked without a network.
  std::cout << "for 4 units: " << FirstHalf()(remat::Chain::of(4)) << '\n';

  step();  // measures the units, all of them checkpointed; from now on the rule is followed
  remat::reset_statistics();
  step();

  const auto statistics = remat::statistics();
  std::cout << "this net:    " << net->plan() << '\n'
            << statistics.regions << " regions, " << statistics.recomputed_operations << " of "
            << statistics.recorded_operations << " recorded operations recomputed\n";
  return statistics.regions == 3 ? 0 : 1;
}
