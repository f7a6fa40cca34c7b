// SPDX-License-Identifier: MIT
#include "tests/support/sweep.hpp"

namespace {
namespace sweep_modules {

using namespace torch::nn;
using sweep::Case;
using sweep::Entry;
using torch::Tensor;

/// A module with one tensor in and one out.
template <class Holder>
Entry unary(std::string name, std::function<Holder()> make, std::vector<std::int64_t> shape) {
  return {std::move(name), [make, shape] {
            Holder module = make();
            return Case{{torch::randn(shape)}, [module](const std::vector<Tensor>& in) mutable { return module(in[0]); }, module.ptr()};
          }};
}

/// A loss of an input and a target that `target` makes.
template <class Holder>
Entry loss(std::string name, std::function<Holder()> make, std::vector<std::int64_t> shape, std::function<Tensor()> target) {
  return {std::move(name), [make, shape, target] {
            Holder module = make();
            return Case{{torch::randn(shape), target()},
                        [module](const std::vector<Tensor>& in) mutable { return module(in[0].sigmoid(), in[1]); },
                        module.ptr()};
          }};
}

/// Any module with a call of its own.
template <class Holder, class Call>
Entry other(std::string name, std::function<Holder()> make, std::function<std::vector<Tensor>()> inputs, Call call) {
  return {std::move(name), [make, inputs, call] {
            Holder module = make();
            return Case{inputs(), [module, call](const std::vector<Tensor>& in) mutable { return call(module, in); }, module.ptr()};
          }};
}

#define UNARY(shape, ...) unary<std::decay_t<decltype(__VA_ARGS__)>>(#__VA_ARGS__, [] { return __VA_ARGS__; }, std::vector<std::int64_t> shape)
#define LOSS(shape, target, ...) \
  loss<std::decay_t<decltype(__VA_ARGS__)>>(#__VA_ARGS__, [] { return __VA_ARGS__; }, std::vector<std::int64_t> shape, [] { return target; })
#define OTHER(make, inputs, ...)                                                                          \
  other<std::decay_t<decltype(make)>>(#make, [] { return make; }, [] { return std::vector<Tensor> inputs; }, \
                                      [](auto& m, const std::vector<Tensor>& in) -> Tensor { return __VA_ARGS__; })

TEST_CASE("every layer of torch::nn gives plain's bits when everything in it is dropped") {
  sweep::check({
      UNARY(({2, 3, 9}), Conv1d(Conv1dOptions(3, 4, 3).stride(2))),
      UNARY(({2, 4, 9, 9}), Conv2d(Conv2dOptions(4, 6, 3).padding(1).groups(2))),
      UNARY(({2, 4, 9, 9}), Conv2d(Conv2dOptions(4, 4, 3).padding(1).padding_mode(torch::kReflect))),
      UNARY(({2, 2, 5, 5, 5}), Conv3d(Conv3dOptions(2, 3, 3))),
      UNARY(({2, 3, 9}), ConvTranspose1d(ConvTranspose1dOptions(3, 4, 3))),
      UNARY(({2, 3, 5, 5}), ConvTranspose2d(ConvTranspose2dOptions(3, 4, 3).stride(2))),
      UNARY(({1, 2, 4, 4, 4}), ConvTranspose3d(ConvTranspose3dOptions(2, 3, 3))),
      UNARY(({4, 6}), Linear(6, 5)),
      UNARY(({2, 3, 6}), Linear(6, 5)),
      UNARY(({4, 6}), Linear(LinearOptions(6, 5).bias(false))),
      UNARY(({4, 6}), Identity()),
      UNARY(({2, 3, 4}), Flatten()),
      UNARY(({2, 6, 4}), Unflatten(UnflattenOptions(1, {2, 3}))),
      UNARY(({4, 3}), BatchNorm1d(3)),
      UNARY(({4, 3, 5}), BatchNorm1d(BatchNorm1dOptions(3).momentum(c10::nullopt))),
      UNARY(({4, 3, 5, 5}), BatchNorm2d(3)),
      UNARY(({4, 3, 5, 5}), BatchNorm2d(BatchNorm2dOptions(3).track_running_stats(false))),
      UNARY(({4, 3, 5, 5}), BatchNorm2d(BatchNorm2dOptions(3).affine(false))),
      UNARY(({2, 3, 4, 4, 4}), BatchNorm3d(3)),
      UNARY(({4, 3, 5}), InstanceNorm1d(InstanceNorm1dOptions(3).affine(true).track_running_stats(true))),
      UNARY(({4, 3, 5, 5}), InstanceNorm2d(InstanceNorm2dOptions(3).affine(true).track_running_stats(true))),
      UNARY(({4, 3, 5, 5}), InstanceNorm2d(3)),
      UNARY(({2, 3, 4, 4, 4}), InstanceNorm3d(3)),
      UNARY(({4, 5, 6}), LayerNorm(LayerNormOptions({6}))),
      UNARY(({4, 6, 5}), GroupNorm(GroupNormOptions(3, 6))),
      UNARY(({4, 6, 5, 5}), LocalResponseNorm(LocalResponseNormOptions(2))),
      UNARY(({4, 6, 5, 5}), CrossMapLRN2d(2)),
      UNARY(({4, 6}), Dropout(0.4)),
      UNARY(({4, 6}), Dropout(DropoutOptions(0.4).inplace(true))),
      UNARY(({4, 6, 3, 3}), Dropout2d(0.4)),
      UNARY(({4, 6, 3, 3, 3}), Dropout3d(0.4)),
      UNARY(({4, 6}), AlphaDropout(0.4)),
      UNARY(({4, 6, 3}), FeatureAlphaDropout(0.4)),
      UNARY(({2, 3, 8}), MaxPool1d(2)),
      UNARY(({2, 3, 8, 8}), MaxPool2d(MaxPool2dOptions(3).stride(2).padding(1))),
      UNARY(({2, 3, 6, 6, 6}), MaxPool3d(2)),
      UNARY(({2, 3, 8}), AvgPool1d(2)),
      UNARY(({2, 3, 8, 8}), AvgPool2d(2)),
      UNARY(({2, 3, 6, 6, 6}), AvgPool3d(2)),
      UNARY(({2, 3, 8}), AdaptiveAvgPool1d(3)),
      UNARY(({2, 3, 8, 8}), AdaptiveAvgPool2d(AdaptiveAvgPool2dOptions({3, 2}))),
      UNARY(({2, 3, 8, 8}), AdaptiveAvgPool2d(1)),
      UNARY(({2, 3, 6, 6, 6}), AdaptiveAvgPool3d(2)),
      UNARY(({2, 3, 8}), AdaptiveMaxPool1d(3)),
      UNARY(({2, 3, 8, 8}), AdaptiveMaxPool2d(3)),
      UNARY(({2, 3, 6, 6, 6}), AdaptiveMaxPool3d(2)),
      UNARY(({2, 3, 8, 8}), FractionalMaxPool2d(FractionalMaxPool2dOptions(2).output_size(4))),
      UNARY(({2, 3, 8, 8, 8}), FractionalMaxPool3d(FractionalMaxPool3dOptions(2).output_size(4))),
      UNARY(({2, 3, 8}), LPPool1d(LPPool1dOptions(2, 2))),
      UNARY(({2, 3, 8, 8}), LPPool2d(LPPool2dOptions(2, 2))),
      UNARY(({2, 3, 8}), ReflectionPad1d(2)),
      UNARY(({2, 3, 8, 8}), ReflectionPad2d(2)),
      UNARY(({2, 3, 8}), ReplicationPad1d(2)),
      UNARY(({2, 3, 8, 8}), ReplicationPad2d(2)),
      UNARY(({2, 3, 4, 4, 4}), ReplicationPad3d(1)),
      UNARY(({2, 3, 8, 8}), ZeroPad2d(1)),
      UNARY(({2, 3, 8}), ConstantPad1d(ConstantPad1dOptions(1, 0.5))),
      UNARY(({2, 3, 8, 8}), ConstantPad2d(ConstantPad2dOptions(1, 0.5))),
      UNARY(({2, 3, 4, 4, 4}), ConstantPad3d(ConstantPad3dOptions(1, 0.5))),
      UNARY(({4, 6}), ELU()),
      UNARY(({4, 6}), ELU(ELUOptions().inplace(true))),
      UNARY(({4, 6}), SELU()),
      UNARY(({4, 6}), SELU(SELUOptions().inplace(true))),
      UNARY(({4, 6}), Hardshrink()),
      UNARY(({4, 6}), Hardtanh()),
      UNARY(({4, 6}), Hardtanh(HardtanhOptions().inplace(true))),
      UNARY(({4, 6}), LeakyReLU()),
      UNARY(({4, 6}), LeakyReLU(LeakyReLUOptions().inplace(true))),
      UNARY(({4, 6}), LogSigmoid()),
      UNARY(({4, 6}), Softmax(1)),
      UNARY(({4, 6}), Softmin(1)),
      UNARY(({4, 6}), LogSoftmax(1)),
      UNARY(({2, 4, 6, 6}), Softmax2d()),
      UNARY(({4, 6}), PReLU()),
      UNARY(({4, 6}), PReLU(PReLUOptions().num_parameters(6))),
      UNARY(({4, 6}), ReLU()),
      UNARY(({4, 6}), ReLU(ReLUOptions(true))),
      UNARY(({4, 6}), ReLU6()),
      UNARY(({4, 6}), ReLU6(ReLU6Options(true))),
      UNARY(({40, 6}), RReLU()),
      UNARY(({40, 6}), RReLU(RReLUOptions().inplace(true))),
      UNARY(({4, 6}), CELU()),
      UNARY(({4, 6}), GLU(1)),
      UNARY(({4, 6}), GELU()),
      UNARY(({4, 6}), SiLU()),
      UNARY(({4, 6}), Mish()),
      UNARY(({4, 6}), Sigmoid()),
      UNARY(({4, 6}), Softplus()),
      UNARY(({4, 6}), Softshrink()),
      UNARY(({4, 6}), Softsign()),
      UNARY(({4, 6}), Tanh()),
      UNARY(({4, 6}), Tanhshrink()),
      UNARY(({4, 6}), Threshold(0.1, 0.2)),
      UNARY(({4, 6}), Threshold(ThresholdOptions(0.1, 0.2).inplace(true))),
      UNARY(({2, 8, 3, 3}), PixelShuffle(2)),
      UNARY(({2, 2, 4, 4}), PixelUnshuffle(2)),
      UNARY(({2, 3, 4, 4}), Upsample(UpsampleOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kNearest))),
      UNARY(({2, 3, 4, 4}), Upsample(UpsampleOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kBilinear).align_corners(false))),
      UNARY(({2, 3, 4, 4}), Upsample(UpsampleOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kBicubic).align_corners(true))),
      UNARY(({2, 12, 12}), Fold(FoldOptions({4, 5}, {2, 2}))),
      UNARY(({2, 3, 6, 6}), Unfold(UnfoldOptions(2))),
      UNARY(({5, 3, 8}), TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.2))),
      UNARY(({5, 3, 8}), TransformerEncoder(TransformerEncoderOptions(TransformerEncoderLayer(TransformerEncoderLayerOptions(8, 2).dim_feedforward(16)), 2))),
  }, 1);  // CrossMapLRN2d throws by itself
}

TEST_CASE("every loss of torch::nn gives plain's bits when everything in it is dropped") {
  sweep::check({
      LOSS(({4, 5}), torch::randn({4, 5}), L1Loss()),
      LOSS(({4, 5}), torch::randn({4, 5}), MSELoss()),
      LOSS(({4, 5}), torch::rand({4, 5}) * 0.8, BCELoss()),
      LOSS(({4, 5}), torch::rand({4, 5}), BCEWithLogitsLoss()),
      LOSS(({4, 5}), torch::rand({4, 5}), KLDivLoss()),
      LOSS(({4, 5}), torch::randint(2, {4, 5}) * 2 - 1, HingeEmbeddingLoss()),
      LOSS(({4, 5}), torch::randint(5, {4}, torch::kLong), MultiMarginLoss()),
      LOSS(({4, 5}), torch::randn({4, 5}), SmoothL1Loss()),
      LOSS(({4, 5}), torch::randn({4, 5}), HuberLoss()),
      LOSS(({4, 5}), torch::tensor(std::vector<std::int64_t>{1, 3, -1, 0, 0, 0, 2, -1, 0, 0, 4, -1, 0, 0, 0, 2, 1, 0, -1, 0}).view({4, 5}), MultiLabelMarginLoss()),
      LOSS(({4, 5}), torch::randint(2, {4, 5}) * 2 - 1, SoftMarginLoss()),
      LOSS(({4, 5}), torch::randint(2, {4, 5}).to(torch::kFloat), MultiLabelSoftMarginLoss()),
      LOSS(({4, 5}), torch::rand({4, 5}), PoissonNLLLoss()),
      LOSS(({4, 5}), torch::randint(5, {4}, torch::kLong), NLLLoss()),
      LOSS(({4, 5}), torch::randint(5, {4}, torch::kLong), CrossEntropyLoss()),
      LOSS(({4, 5}), torch::randint(5, {4}, torch::kLong), CrossEntropyLoss(CrossEntropyLossOptions().label_smoothing(0.1))),
      OTHER(CosineEmbeddingLoss(), ({torch::randn({4, 5}), torch::randn({4, 5}), torch::randint(2, {4}, torch::kLong) * 2 - 1}), m(in[0], in[1], in[2])),
      OTHER(MarginRankingLoss(), ({torch::randn({4}), torch::randn({4}), torch::randint(2, {4}, torch::kLong) * 2 - 1}), m(in[0], in[1], in[2])),
      OTHER(TripletMarginLoss(), ({torch::randn({4, 5}), torch::randn({4, 5}), torch::randn({4, 5})}), m(in[0], in[1], in[2])),
      OTHER(TripletMarginWithDistanceLoss(), ({torch::randn({4, 5}), torch::randn({4, 5}), torch::randn({4, 5})}), m(in[0], in[1], in[2])),
      OTHER(CTCLoss(), ({torch::randn({12, 2, 6}), torch::tensor(std::vector<std::int64_t>{1, 2, 3, 2, 2, 4}).view({2, 3})}),
            m(in[0].log_softmax(2), in[1], torch::full({2}, 12, torch::kLong), torch::full({2}, 3, torch::kLong))),
      OTHER(AdaptiveLogSoftmaxWithLoss(AdaptiveLogSoftmaxWithLossOptions(8, 5, {2})), ({torch::randn({4, 8}), torch::randint(5, {4}, torch::kLong)}), m(in[0], in[1]).output),
  });
}

TEST_CASE("layers with several inputs or results give plain's bits when everything in them is dropped") {
  sweep::check({
      OTHER(Bilinear(4, 5, 3), ({torch::randn({6, 4}), torch::randn({6, 5})}), m(in[0], in[1])),
      OTHER(CosineSimilarity(), ({torch::randn({6, 4}), torch::randn({6, 4})}), m(in[0], in[1])),
      OTHER(PairwiseDistance(), ({torch::randn({6, 4}), torch::randn({6, 4})}), m(in[0], in[1])),
      OTHER(Embedding(10, 4), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(Embedding(EmbeddingOptions(10, 4).max_norm(0.5)), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(Embedding(EmbeddingOptions(10, 4).sparse(true)), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(EmbeddingBag(EmbeddingBagOptions(10, 4).mode(torch::kMean)), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(EmbeddingBag(EmbeddingBagOptions(10, 4).mode(torch::kSum)), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(EmbeddingBag(EmbeddingBagOptions(10, 4).mode(torch::kMax)), ({torch::randint(10, {3, 5}, torch::kLong)}), m(in[0])),
      OTHER(RNN(RNNOptions(4, 6).num_layers(2).dropout(0.2)), ({torch::randn({5, 3, 4})}), std::get<0>(m(in[0]))),
      OTHER(LSTM(LSTMOptions(4, 6).num_layers(2).bidirectional(true)), ({torch::randn({5, 3, 4})}), std::get<0>(m(in[0]))),
      OTHER(LSTM(LSTMOptions(4, 6).proj_size(3)), ({torch::randn({5, 3, 4})}), std::get<0>(m(in[0]))),
      OTHER(GRU(GRUOptions(4, 6).bidirectional(true)), ({torch::randn({5, 3, 4})}), std::get<0>(m(in[0]))),
      OTHER(RNNCell(4, 6), ({torch::randn({3, 4})}), m(in[0])),
      OTHER(LSTMCell(4, 6), ({torch::randn({3, 4})}), std::get<1>(m(in[0]))),
      OTHER(GRUCell(4, 6), ({torch::randn({3, 4})}), m(in[0])),
      OTHER(MultiheadAttention(MultiheadAttentionOptions(8, 2).dropout(0.2)), ({torch::randn({5, 3, 8})}), std::get<0>(m(in[0], in[0], in[0]))),
      OTHER(MultiheadAttention(MultiheadAttentionOptions(8, 2)), ({torch::randn({5, 3, 8}), torch::randn({7, 3, 8})}), std::get<1>(m(in[0], in[1], in[1]))),
      OTHER(TransformerDecoderLayer(TransformerDecoderLayerOptions(8, 2).dim_feedforward(16)), ({torch::randn({5, 3, 8}), torch::randn({7, 3, 8})}), m(in[0], in[1])),
      OTHER(Transformer(TransformerOptions(8, 2).num_encoder_layers(1).num_decoder_layers(1).dim_feedforward(16)), ({torch::randn({5, 3, 8}), torch::randn({4, 3, 8})}), m(in[0], in[1])),
      OTHER(MaxUnpool1d(2), ({torch::randn({2, 3, 8})}), [&] { auto [y, i] = MaxPool1d(2)->forward_with_indices(in[0]); return m(y, i); }()),
      OTHER(MaxUnpool2d(2), ({torch::randn({2, 3, 8, 8})}), [&] { auto [y, i] = MaxPool2d(2)->forward_with_indices(in[0]); return m(y, i); }()),
      OTHER(MaxUnpool3d(2), ({torch::randn({2, 3, 4, 4, 4})}), [&] { auto [y, i] = MaxPool3d(2)->forward_with_indices(in[0]); return m(y, i); }()),
  });
}

#undef UNARY
#undef LOSS
#undef OTHER

}  // namespace sweep_modules
}  // namespace
