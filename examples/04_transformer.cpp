// SPDX-License-Identifier: MIT
//
// A transformer of one's own layers: each layer is a segment, and a mask reaches all of them.

#include "remat/remat.hpp"

#include <torch/torch.h>

#include <iostream>

namespace {

/// Attention and a feed-forward network, each behind a normalisation and around a shortcut.
struct EncoderLayerImpl : torch::nn::Module {
  explicit EncoderLayerImpl(std::int64_t width, std::int64_t head_count)
      : attention(register_module("attention", torch::nn::MultiheadAttention(width, head_count))),
        norm1(register_module("norm1", torch::nn::LayerNorm(layer_norm(width)))),
        norm2(register_module("norm2", torch::nn::LayerNorm(layer_norm(width)))),
        widen(register_module("widen", torch::nn::Linear(width, 4 * width))),
        narrow(register_module("narrow", torch::nn::Linear(4 * width, width))) {}

  /// @param tokens_nbc  (N tokens, B, C)
  /// @param is_padding  (B, N), true where a token is to be ignored
  torch::Tensor forward(const torch::Tensor& tokens_nbc, const torch::Tensor& is_padding) {
    const auto x = norm1->forward(tokens_nbc);
    const auto y = tokens_nbc + std::get<0>(attention->forward(x, x, x, is_padding, false));
    return y + narrow->forward(torch::gelu(widen->forward(norm2->forward(y))));
  }

  static torch::nn::LayerNormOptions layer_norm(std::int64_t width) { return {{width}}; }

  torch::nn::MultiheadAttention attention;
  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear widen, narrow;
};
TORCH_MODULE(EncoderLayer);

}  // namespace

int main() {
  torch::manual_seed(0);
  remat::Checkpointed<remat::TransformerLayers> encoder;
  for (int layer = 0; layer < 6; ++layer) encoder->push_back(EncoderLayer(64, 4));
  const auto tokens = torch::randn({128, 8, 64});
  const auto is_padding = torch::arange(128).unsqueeze(0) >= torch::arange(60, 124, 8).unsqueeze(1);

  // One training step: its peak, and the gradient of the first layer.
  const auto step = [&] {
    encoder->zero_grad();
    const remat::MemoryMeter meter;
    encoder->forward(tokens, is_padding).pow(2).mean().backward();
    return std::pair(meter.peak(), encoder->parameters()[0].grad().clone());
  };
  const auto [checkpointed, gradient] = step();
  std::cout << encoder->segment_count() << " segments: " << encoder->plan() << '\n';
  encoder->disable_gradient_checkpointing();
  const auto [plain, plain_gradient] = step();

  const bool is_equal = torch::equal(gradient, plain_gradient);
  std::cout << "plain         peak " << plain << '\n'
            << "checkpointed  peak " << checkpointed << '\n'
            << "gradients " << (is_equal ? "equal, bit for bit" : "DIFFER") << '\n';
  return is_equal && checkpointed < plain ? 0 : 1;
}
