// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "remat/backbones/family.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/layers.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/policies/segments.hpp"
#include "remat/policies/sequential.hpp"

namespace remat {

/// The two residual blocks of the paper's figure 5.
enum class ResNetBlock { kBasic, kBottleneck };

/// One row of the paper's table 1.
struct ResNetDesign {
  std::string_view name;                    ///< torchvision's
  int depth;                                ///< layers with weights, as in the name
  ResNetBlock block;                        ///< which block the stages repeat
  std::array<std::int64_t, 4> block_count;  ///< blocks in each of the four stages
};

inline constexpr std::array kResNetDesigns{
    ResNetDesign{"resnet18", 18, ResNetBlock::kBasic, {2, 2, 2, 2}},
    ResNetDesign{"resnet34", 34, ResNetBlock::kBasic, {3, 4, 6, 3}},
    ResNetDesign{"resnet50", 50, ResNetBlock::kBottleneck, {3, 4, 6, 3}},
    ResNetDesign{"resnet101", 101, ResNetBlock::kBottleneck, {3, 4, 23, 3}},
    ResNetDesign{"resnet152", 152, ResNetBlock::kBottleneck, {3, 8, 36, 3}},
};
inline constexpr std::int64_t kResNetStemWidth = 64;
inline constexpr std::array<std::int64_t, 4> kResNetStageWidths{64, 128, 256, 512};

/// Returns the design of that depth.
///
/// @throws ArgumentError  if there is none
inline const ResNetDesign& resnet_design(int depth) {
  std::string depths;
  for (const ResNetDesign& design : kResNetDesigns) {
    if (design.depth == depth) return design;
    depths += (depths.empty() ? "" : ", ") + std::to_string(design.depth);
  }
  throw ArgumentError(
      ErrorMessage("remat.backbone.depth")
          .where("remat::ResNet")
          .what("the depth is " + std::to_string(depth) + ", one of " + depths + " was expected"));
}

namespace blocks {

/// Makes a convolution without bias, padded so that stride 1 keeps the size.
inline torch::nn::Conv2d resnet_convolution(std::int64_t in, std::int64_t out, std::int64_t kernel,
                                            std::int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

/// Makes the projection of a shortcut: a 1×1 convolution and its normalisation (the paper's option
/// B).
inline torch::nn::Sequential resnet_projection(std::int64_t in, std::int64_t out,
                                               std::int64_t stride) {
  return torch::nn::Sequential(resnet_convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out));
}

/// Two 3×3 convolutions around which the input is added.
///
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), figure 5, left;
/// torchvision's `BasicBlock`
class BasicBlockImpl : public torch::nn::Cloneable<BasicBlockImpl> {
 public:
  static constexpr std::int64_t kExpansion = 1;

  BasicBlockImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : in_(in), width_(width), stride_(stride) {
    reset();
  }

  void reset() override {
    conv1 = register_module("conv1", resnet_convolution(in_, width_, 3, stride_));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(width_));
    conv2 = register_module("conv2", resnet_convolution(width_, width_, 3, 1));
    bn2 = register_module("bn2", torch::nn::BatchNorm2d(width_));
    downsample = nullptr;
    if (stride_ != 1 || in_ != width_)
      downsample = register_module("downsample", resnet_projection(in_, width_, stride_));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y =
        bn1->forward(conv1->forward(x)).relu_();  // (N, width, h / stride, w / stride)
    y = bn2->forward(conv2->forward(y));          // (N, width, h / stride, w / stride)
    y += downsample.is_empty() ? x : downsample->forward(x);
    return y.relu_();
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr};
  torch::nn::Sequential downsample{nullptr};

 private:
  std::int64_t in_, width_, stride_;
};
TORCH_MODULE(BasicBlock);

/// A 3×3 convolution between two 1×1 ones that narrow and widen, around which the input is added.
///
/// The stride belongs to the 3×3, as in torchvision; the paper has it on the first 1×1, which is
/// less accurate.
///
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), figure 5, right;
/// torchvision's `Bottleneck`
class BottleneckImpl : public torch::nn::Cloneable<BottleneckImpl> {
 public:
  static constexpr std::int64_t kExpansion = 4;

  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
      : in_(in), width_(width), stride_(stride) {
    reset();
  }

  void reset() override {
    const std::int64_t out = kExpansion * width_;
    conv1 = register_module("conv1", resnet_convolution(in_, width_, 1, 1));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(width_));
    conv2 = register_module("conv2", resnet_convolution(width_, width_, 3, stride_));
    bn2 = register_module("bn2", torch::nn::BatchNorm2d(width_));
    conv3 = register_module("conv3", resnet_convolution(width_, out, 1, 1));
    bn3 = register_module("bn3", torch::nn::BatchNorm2d(out));
    downsample = nullptr;
    if (stride_ != 1 || in_ != out)
      downsample = register_module("downsample", resnet_projection(in_, out, stride_));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    torch::Tensor y = bn1->forward(conv1->forward(x)).relu_();  // (N, width, h, w)
    y = bn2->forward(conv2->forward(y)).relu_();  // (N, width, h / stride, w / stride)
    y = bn3->forward(conv3->forward(y));          // (N, 4 width, h / stride, w / stride)
    y += downsample.is_empty() ? x : downsample->forward(x);
    return y.relu_();
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr}, bn2{nullptr}, bn3{nullptr};
  torch::nn::Sequential downsample{nullptr};

 private:
  std::int64_t in_, width_, stride_;
};
TORCH_MODULE(Bottleneck);

/// The layers in front of the first block, as one unit: a strided 7×7 convolution and a strided
/// pooling.
class ResNetStemImpl : public torch::nn::Cloneable<ResNetStemImpl> {
 public:
  explicit ResNetStemImpl(std::int64_t in_channels) : in_channels_(in_channels) { reset(); }

  void reset() override {
    conv1 = register_module("conv1", resnet_convolution(in_channels_, kResNetStemWidth, 7, 2));
    bn1 = register_module("bn1", torch::nn::BatchNorm2d(kResNetStemWidth));
  }

  torch::Tensor forward(const torch::Tensor& images_nchw) {
    const torch::Tensor x =
        bn1->forward(conv1->forward(images_nchw)).relu_();  // (N, 64, H / 2, W / 2)
    return at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2,
                          /*padding=*/1);  // (N, 64, H / 4, W / 4)
  }

  torch::nn::Conv2d conv1{nullptr};
  torch::nn::BatchNorm2d bn1{nullptr};

 private:
  std::int64_t in_channels_;
};
TORCH_MODULE(ResNetStem);

}  // namespace blocks

/// The module behind `ResNet`.
class ResNetImpl : public FamilyBackbone<ResNetImpl, ResNetDesign> {
 public:
  static constexpr std::string_view kFamily = "ResNet";
  static constexpr std::span<const ResNetDesign> designs() { return kResNetDesigns; }

  ResNetImpl(const ResNetDesign& design, const BackboneOptions& options, CheckpointedChain chain)
      : FamilyBackbone(design, raw_width(design), options, std::move(chain)) {
    refuse_option("dropout", options.dropout);
    refuse_option("attention_dropout", options.attention_dropout);
    refuse_option("stochastic_depth", options.stochastic_depth);
    blocks::ResNetStem stem(options.in_channels);
    register_module("conv1", stem->conv1);
    register_module("bn1", stem->bn1);
    append("stem", stem);
    if (design.block == ResNetBlock::kBasic)
      register_stages<blocks::BasicBlock>(design);
    else
      register_stages<blocks::Bottleneck>(design);
    if (options.num_classes != 0)
      fc_ = register_module("fc", torch::nn::Linear(raw_width(design), options.num_classes));
    register_projection();
    initialise();
  }

  std::string first_convolution() const override { return "conv1.weight"; }
  std::string head() const override { return "fc."; }

 protected:
  torch::Tensor pool(torch::Tensor features_nchw) override {
    return at::adaptive_avg_pool2d(features_nchw, {1, 1}).flatten(1);  // (N, C)
  }
  torch::Tensor forward_head(torch::Tensor pooled) override { return fc_->forward(pooled); }

 private:
  static std::int64_t raw_width(const ResNetDesign& design) {
    return kResNetStageWidths.back() * (design.block == ResNetBlock::kBasic
                                            ? blocks::BasicBlockImpl::kExpansion
                                            : blocks::BottleneckImpl::kExpansion);
  }

  template <class Block>
  void register_stages(const ResNetDesign& design) {
    std::int64_t in = kResNetStemWidth;
    for (std::size_t stage = 0; stage < design.block_count.size(); ++stage) {
      const std::string name = "layer" + std::to_string(stage + 1);
      torch::nn::Sequential layer;
      for (std::int64_t index = 0; index < design.block_count[stage]; ++index) {
        const std::int64_t stride = stage > 0 && index == 0 ? 2 : 1;
        layer->push_back(Block(in, kResNetStageWidths[stage], stride));
        in = kResNetStageWidths[stage] * Block::ContainedType::kExpansion;
      }
      register_module(name, layer);
      append(name, layer);
    }
  }

  /// As torchvision: He et al., Delving Deep into Rectifiers (2015), normal, by the fan out, for
  /// convolutions; normalisations and linear layers as LibTorch makes them (scale 1 and shift 0).
  void initialise() {
    for (const auto& module : modules(/*include_self=*/false))
      if (auto* convolution = module->as<torch::nn::Conv2d>())
        torch::nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
  }

  torch::nn::Linear fc_{nullptr};
};

/// A residual network; its units are the stem and each residual block.
///
/// @tparam Policy  how the chain of units is checkpointed
/// @par Source  He et al., Deep Residual Learning for Image Recognition (2015), table 1;
/// torchvision's `resnet*`
template <class Policy = Checkpointed<Sequential, Segments<4>>>
class ResNet : public BackboneHolder<ResNetImpl, Policy> {
 public:
  using BackboneHolder<ResNetImpl, Policy>::BackboneHolder;

  /// @param depth  18, 34, 50, 101 or 152
  /// @throws ArgumentError  for another depth, or options that cannot be
  explicit ResNet(int depth, const BackboneOptions& options = {})
      : BackboneHolder<ResNetImpl, Policy>(resnet_design(depth), options) {}
};

using ResNet18 = NamedBackbone<ResNet<>, "resnet18">;
using ResNet34 = NamedBackbone<ResNet<>, "resnet34">;
using ResNet50 = NamedBackbone<ResNet<>, "resnet50">;
using ResNet101 = NamedBackbone<ResNet<>, "resnet101">;
using ResNet152 = NamedBackbone<ResNet<>, "resnet152">;

}  // namespace remat
