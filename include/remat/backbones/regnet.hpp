// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/backbones/family.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/blocks/activation.hpp"
#include "remat/nn/blocks/conv_norm_act.hpp"
#include "remat/nn/blocks/fan_out_init.hpp"
#include "remat/nn/blocks/squeeze_excitation.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"

namespace remat {

/// A RegNetY: what the paper's linear rule (d, w_0, w_a, w_m) gives after rounding.
struct RegNetDesign {
  std::string_view name;
  std::array<std::int64_t, 4> block_count;  ///< blocks of each stage
  std::array<std::int64_t, 4> width;        ///< channels of each stage
  std::int64_t group_width;                 ///< channels of a group of the 3×3 convolutions
};

// name, blocks, widths, group width
inline constexpr std::array kRegNetYDesigns{
    RegNetDesign{"regnet_y_400mf", {1, 3, 6, 6}, {48, 104, 208, 440}, 8},
    RegNetDesign{"regnet_y_800mf", {1, 3, 8, 2}, {64, 144, 320, 784}, 16},
    RegNetDesign{"regnet_y_1_6gf", {2, 6, 17, 2}, {48, 120, 336, 888}, 24},
    RegNetDesign{"regnet_y_3_2gf", {2, 5, 13, 1}, {72, 216, 576, 1512}, 24},
    RegNetDesign{"regnet_y_8gf", {2, 4, 10, 1}, {224, 448, 896, 2016}, 56},
    RegNetDesign{"regnet_y_16gf", {2, 4, 11, 1}, {224, 448, 1232, 3024}, 112},
    RegNetDesign{"regnet_y_32gf", {2, 5, 12, 1}, {232, 696, 1392, 3712}, 232},
};
inline constexpr std::int64_t kRegNetStemWidth = 32;
inline constexpr double kRegNetLinearDeviation = 0.01;  // torchvision's, of initial weights

namespace blocks {

/// The branch of a RegNetY block: a grouped 3×3 convolution between two 1×1 ones, with
/// squeeze-and-excitation before the last. Nothing is narrowed: the bottleneck ratio is 1.
///
/// The squeeze is a quarter of the block's *input*.
///
/// @par Source  torchvision's `BottleneckTransform`
class RegNetBranchImpl : public torch::nn::Cloneable<RegNetBranchImpl> {
 public:
  RegNetBranchImpl(std::int64_t in, std::int64_t out, std::int64_t stride, std::int64_t group_width)
      : in_(in), out_(out), stride_(stride), group_width_(group_width) {
    reset();
  }

  void reset() override {
    a = register_module("a", ConvNormAct(padded_convolution(in_, out_, 1), BatchNormConstants{},
                                         activations::relu_));
    b = register_module(
        "b",
        ConvNormAct(padded_convolution(out_, out_, 3).stride(stride_).groups(out_ / group_width_),
                    BatchNormConstants{}, activations::relu_));
    se = register_module("se",
                         SqueezeExcitation(out_, in_ / 4, activations::relu, activations::sigmoid));
    c = register_module("c", ConvNormAct(padded_convolution(out_, out_, 1)));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    torch::Tensor y = a->forward(x_nchw);  // (N, out, h, w)
    y = b->forward(y);                     // (N, out, h / stride, w / stride)
    return c->forward(se->forward(y));     // (N, out, h / stride, w / stride)
  }

  ConvNormAct a{nullptr}, b{nullptr}, c{nullptr};
  SqueezeExcitation se{nullptr};

 private:
  std::int64_t in_, out_, stride_, group_width_;
};
TORCH_MODULE(RegNetBranch);

/// A residual block of a RegNetY; where the shape changes, a strided 1×1 convolution projects the
/// input.
///
/// @par Source  Radosavovic et al., Designing Network Design Spaces (2020), figure 4 with
/// squeeze-and-excitation; torchvision's `ResBottleneckBlock`
class RegNetBlockImpl : public torch::nn::Cloneable<RegNetBlockImpl> {
 public:
  RegNetBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride, std::int64_t group_width)
      : in_(in), out_(out), stride_(stride), group_width_(group_width) {
    reset();
  }

  void reset() override {
    proj = nullptr;
    if (in_ != out_ || stride_ != 1)
      proj = register_module("proj", ConvNormAct(padded_convolution(in_, out_, 1).stride(stride_)));
    f = register_module("f", RegNetBranch(in_, out_, stride_, group_width_));
  }

  torch::Tensor forward(const torch::Tensor& x_nchw) {
    const torch::Tensor shortcut = proj.is_empty() ? x_nchw : proj->forward(x_nchw);
    return (shortcut + f->forward(x_nchw)).relu_();  // (N, out, h / stride, w / stride)
  }

  ConvNormAct proj{nullptr};
  RegNetBranch f{nullptr};

 private:
  std::int64_t in_, out_, stride_, group_width_;
};
TORCH_MODULE(RegNetBlock);

}  // namespace blocks

/// The module behind `RegNet`.
class RegNetImpl : public FamilyBackbone<RegNetImpl, RegNetDesign> {
 public:
  static constexpr std::string_view kFamily = "RegNet";
  static constexpr std::span<const RegNetDesign> designs() { return kRegNetYDesigns; }

  RegNetImpl(const RegNetDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, design.width.back(), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    build_stem();
    build_stages();
    if (options.num_classes != 0)
      fc_ = register_module("fc", torch::nn::Linear(design.width.back(), options.num_classes));
    // Biases of squeeze-and-excitation stay as LibTorch draws them, as in torchvision.
    blocks::init_convolutions_by_fan_out(*this);
    blocks::init_linear_normal(*this, kRegNetLinearDeviation);
    register_projection();
  }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return fc_->forward(pooled); }
  std::string first_convolution() const override { return "stem.0.weight"; }
  std::string head() const override { return "fc."; }

 private:
  void build_stem() {
    const blocks::ConvNormAct stem(
        blocks::padded_convolution(options().in_channels, kRegNetStemWidth, 3).stride(2),
        blocks::BatchNormConstants{}, blocks::activations::relu_);
    append("stem", register_module("stem", stem));
  }

  void build_stages() {
    std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> stages;
    std::int64_t in = kRegNetStemWidth;
    for (std::size_t index = 0; index < design().width.size(); ++index) {
      const std::string name = "block" + std::to_string(index + 1);
      const std::int64_t width = design().width[index];
      torch::nn::Sequential stage;
      for (std::int64_t i = 0; i < design().block_count[index]; ++i) {
        stage->push_back(name + "-" + std::to_string(i),
                         blocks::RegNetBlock(in, width, i == 0 ? 2 : 1, design().group_width));
        in = width;
      }
      append(name, stage);
      stages.emplace_back(name, stage.ptr());
    }
    register_module("trunk_output", torch::nn::ModuleDict(stages));
  }

  torch::nn::Linear fc_{nullptr};
};

/// A network of residual blocks whose widths and depths follow a linear rule; its units are the
/// stem and each block.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  Radosavovic et al., Designing Network Design Spaces (2020), figure 15 and table 4;
/// torchvision's `regnet_y_*`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class RegNet : public BackboneHolder<RegNetImpl, Policy> {
 public:
  using BackboneHolder<RegNetImpl, Policy>::BackboneHolder;
};

using RegNetY400MF = NamedBackbone<RegNet<>, "regnet_y_400mf">;
using RegNetY800MF = NamedBackbone<RegNet<>, "regnet_y_800mf">;
using RegNetY1_6GF = NamedBackbone<RegNet<>, "regnet_y_1_6gf">;
using RegNetY3_2GF = NamedBackbone<RegNet<>, "regnet_y_3_2gf">;
using RegNetY8GF = NamedBackbone<RegNet<>, "regnet_y_8gf">;
using RegNetY16GF = NamedBackbone<RegNet<>, "regnet_y_16gf">;
using RegNetY32GF = NamedBackbone<RegNet<>, "regnet_y_32gf">;

}  // namespace remat
