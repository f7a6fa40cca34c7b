// SPDX-License-Identifier: MIT
#include "tests/support/sweep.hpp"

namespace {
namespace sweep_functions {

using sweep::Case;
using sweep::Entry;
using torch::Tensor;

/// A function of `count` tensors of one shape.
Entry of(std::string name, std::vector<std::vector<std::int64_t>> shapes, std::function<Tensor(const std::vector<Tensor>&)> run) {
  return {std::move(name), [shapes, run] {
            std::vector<Tensor> inputs;
            for (const auto& shape : shapes) inputs.push_back(torch::randn(shape));
            return Case{std::move(inputs), run};
          }};
}

#define F(...) of(#__VA_ARGS__, {{4, 6}, {4, 6}}, [](const std::vector<Tensor>& in) -> Tensor { \
    [[maybe_unused]] Tensor a = in[0], b = in[1]; return __VA_ARGS__; })
#define SQUARE(...) of(#__VA_ARGS__, {{5, 5}, {5, 5}}, [](const std::vector<Tensor>& in) -> Tensor { \
    [[maybe_unused]] Tensor a = in[0], b = in[1]; return __VA_ARGS__; })
#define IMAGE(...) of(#__VA_ARGS__, {{2, 3, 8, 8}, {2, 3, 8, 8}}, [](const std::vector<Tensor>& in) -> Tensor { \
    [[maybe_unused]] Tensor a = in[0], b = in[1]; return __VA_ARGS__; })

TEST_CASE("pointwise functions give plain's bits when everything in them is dropped") {
  sweep::check({
      F(a + b), F(a - b), F(a * b), F(a / b), F(2 - a), F(2 / a), F(a + 1.5), F(-a), F(a.abs()), F(a.exp()), F(a.expm1()), F(a.exp2()),
      F(a.abs().log()), F(a.abs().log1p()), F(a.abs().log2()), F(a.abs().log10()), F(a.abs().sqrt()), F(a.abs().rsqrt()),
      F(a.square()), F(a.pow(3)), F(a.abs().pow(b)), F(a.sin()), F(a.cos()), F(a.tan()), F(a.tanh()), F(a.sinh()), F(a.cosh()),
      F(a.sigmoid().asin()), F(a.sigmoid().acos()), F(a.atan()), F(torch::atan2(a, b)), F(a.asinh()), F((a.abs() + 1).acosh()),
      F((a.sigmoid() * 0.5).atanh()), F(a.sigmoid()), F(a.erf()), F(a.erfc()), F((a.tanh() * 0.5).erfinv()), F(a.abs().lgamma()), F(a.abs().digamma()),
      F(a.floor() + a), F(a.ceil() + a), F(a.round() + a), F(a.trunc() + a), F(a.frac()), F(a.sign() + a), F(a.reciprocal()), F(torch::fmod(a, 1.5)),
      F(torch::remainder(a, b.abs() + 1)), F(torch::lerp(a, b, 0.3)), F(torch::lerp(a, b, a.sigmoid())), F(torch::addcmul(a, a, b, 0.5)),
      F(torch::addcdiv(a, a, b, 0.5)), F(a.clamp(-0.5, 0.5)), F(a.clamp_min(0.1)), F(torch::max(a, b)), F(torch::min(a, b)), F(torch::maximum(a, b)),
      F(torch::minimum(a, b)), F(torch::where(a > 0, a, b)), F(a.masked_fill(b > 0, 0.5)), F(torch::hypot(a, b)), F(torch::logaddexp(a, b)),
      F(torch::xlogy(a, b.abs() + 1)), F(torch::relu(a)), F(torch::gelu(a)), F(torch::silu(a)), F(torch::mish(a)), F(torch::hardswish(a)),
      F(torch::hardsigmoid(a)), F(torch::hardtanh(a)), F(torch::leaky_relu(a, 0.1)), F(torch::elu(a)), F(torch::celu(a)), F(torch::selu(a)),
      F(torch::softplus(a)), F(torch::softshrink(a)), F(torch::log_sigmoid(a)), F(torch::logit(a.sigmoid())), F(torch::nan_to_num(a)),
      F(torch::threshold(a, 0.1, 0.2)), F(torch::sgn(a) + a), F(torch::i0(a)), F(torch::sinc(a)), F(torch::special_xlog1py(a, b.abs())),
      F(torch::heaviside(a.detach(), b.detach()) + a), F(a.to(torch::kDouble)), F(a.to(torch::kDouble).to(torch::kFloat)), F(a.type_as(b)),
      F(torch::ldexp(a, b.detach().round())), F(torch::copysign(a, b)), F(torch::polygamma(1, a.abs() + 1)), F(a.to(torch::kInt).to(torch::kFloat) + a),
  });
}

TEST_CASE("functions that write in place give plain's bits when everything in them is dropped") {
  sweep::check({
      F(a.clone().add_(b)), F(a.add_(b)), F(a.mul_(b)), F(a.div_(b.abs() + 1)), F(a.sub_(b).mul_(2).add_(1)), F(a.sigmoid_()), F(a.tanh_()), F(a.relu_()),
      F(a.exp_()), F(a.clamp_(-0.5, 0.5)), F(a.masked_fill_(b > 0, 0.5)), F(a.zero_().add_(b)), F(a.fill_(0.5).mul_(b)), F(a.copy_(b).mul_(a)),
      F(a.index_fill_(1, torch::tensor({0, 2}), 0.5)), F(a.index_add_(1, torch::tensor({0, 2}), b.narrow(1, 0, 2))),
      F(a.index_copy_(1, torch::tensor({0, 2}), b.narrow(1, 0, 2))), F(a.scatter_(1, torch::tensor({0, 2, 1, 1}).view({4, 1}), b.narrow(1, 0, 1))),
      F(a.scatter_add_(1, torch::tensor({0, 2, 1, 1}).view({4, 1}), b.narrow(1, 0, 1))), F(a.index_put_({torch::tensor({0, 2})}, b.narrow(0, 0, 2))),
      F(a.masked_scatter_(b.detach() > 0, b)), F((a.select(0, 1).mul_(2), a * a)), F((a.narrow(1, 1, 3).add_(b.narrow(1, 0, 3)), a.sin())),
      F((a.t().mul_(b.t()), a.cos())), F((a.view({-1}).narrow(0, 3, 5).zero_(), a * b)), F((a.mul_(a), a.exp())), F(a.add_(a).mul(b)),
      F(torch::empty_like(a).copy_(a).mul_(b)), F(torch::zeros_like(a).add_(a).mul_(b)), F(torch::ones({4, 6}).mul_(a).mul_(b)),
      F([&] { auto t = torch::zeros({4, 12}); t.narrow(1, 0, 6).copy_(a); t.narrow(1, 6, 6).copy_(b); return t.sin(); }()),
      F([&] { auto t = torch::empty({4, 6}); torch::NoGradGuard g; t.fill_(0.5); return t; }() * a),
      F([&] { auto t = a * 2; { torch::NoGradGuard g; t.mul_(3); } return t * b; }()), F(a.addcmul_(b, b, 0.5)), F(a.lerp_(b, 0.25)), F(a.cumsum_(1)),
      F([&] { auto t = a.detach() * 1; torch::add_out(t, a.detach(), b.detach()); return t * a; }()),
      F([&] { auto t = torch::empty({0}); torch::add_out(t, a.detach(), b.detach()); return t * a; }()),
      F([&] { auto t = torch::empty({4, 6}); float* p = t.data_ptr<float>(); for (int i = 0; i < 24; ++i) p[i] = 0.25f * float(i); return t * a; }()),
      F([&] { auto t = torch::empty_like(a); float* p = t.data_ptr<float>(); for (int i = 0; i < 24; ++i) p[i] = 0.25f * float(i); return t * a * b; }()),
      F(torch::dropout_(a, 0.3, true)), F(torch::threshold_(a, 0.1, 0.2)), F(torch::rrelu_(a, 0.1, 0.3, true)), F(a.clone().squeeze_().unsqueeze_(0).sin()),
      F(a.clone().t_().cos()), F(a.clone().resize_({24}).sin()), F([&] { auto t = torch::empty({4, 6}); t.resize_({6, 4}); t.copy_(b.t()); return t.t() * a; }()),
  }, 3);
}

TEST_CASE("random functions give plain's bits when everything in them is dropped") {
  sweep::check({
      F(torch::dropout(a, 0.3, true)), F(torch::feature_dropout(a, 0.3, true)), F(torch::alpha_dropout(a, 0.3, true)), F(torch::rrelu(a, 0.1, 0.3, true)),
      F(a * torch::rand_like(a)), F(a * torch::randn_like(a)), F(a * torch::rand({4, 6})), F(a * torch::randn({4, 6})), F(a * torch::bernoulli(b.sigmoid().detach())),
      F(a * torch::empty_like(a).bernoulli_(0.4)), F(a * torch::empty({4, 6}).uniform_(-1, 1)), F(a * a.new_empty({4, 6}).normal_()), F(a * torch::empty_like(a).exponential_()),
      F(a * torch::empty_like(a).geometric_(0.4)), F(a * torch::empty_like(a).cauchy_()), F(a * torch::empty_like(a).log_normal_()), F(a.index_select(1, torch::randperm(6))),
      F(a * at::normal(b.detach(), 1.5)), F(a * torch::poisson(b.abs().detach())), F(a.gather(1, torch::multinomial(b.abs().detach(), 3))),
      F(a * torch::bernoulli(a.detach(), 0.4)), F(a * torch::randint_like(a.detach(), 5)), F(a * torch::_standard_gamma(b.abs() + 1)),
      F(torch::dropout(torch::dropout(a, 0.3, true) * torch::dropout(b, 0.3, true), 0.2, true)),
      F([&] { auto g = at::detail::createCPUGenerator(5); return a * torch::empty_like(a).normal_(0, 1, g) * torch::rand({4, 6}, g); }()),
  });
}

TEST_CASE("reductions, shapes and indices give plain's bits when everything in them is dropped") {
  sweep::check({
      F(a.sum()), F(a.sum(1)), F(a.mean()), F(a.mean(0)), F(a.prod()), F(a.prod(1)), F(a.std()), F(a.std(1)), F(a.var(1)), F(std::get<0>(torch::var_mean(a, 1))),
      F(a.norm()), F(a.norm(2, 1)), F(a.norm(1, 1)), F(a.max()), F(std::get<0>(a.max(1))), F(a.min()), F(a.amax(1)), F(a.amin(1)), F(std::get<0>(a.median(1))),
      F(std::get<0>(a.mode(1))), F(std::get<0>(a.kthvalue(2, 1))), F(a.logsumexp(1)), F(a.softmax(1)), F(a.log_softmax(1)), F(a.cumsum(1)), F(a.cumprod(1)),
      F(a.logcumsumexp(1)), F(std::get<0>(torch::cummax(a, 1))), F(std::get<0>(a.sort(1))), F(std::get<0>(a.topk(3, 1))), F(a.renorm(2, 0, 1)), F(torch::dist(a, b)),
      F(torch::cdist(a, b)), F(torch::cosine_similarity(a, b)), F(a.argmax(1).to(torch::kFloat) + a.sum(1)), F(a.nansum(1)), F(torch::count_nonzero(a).to(torch::kFloat) * a),
      F(a.view({3, 8})), F(a.reshape({-1})), F(a.t()), F(a.transpose(0, 1).contiguous()), F(a.permute({1, 0}).reshape({4, 6})), F(a.unsqueeze(0).expand({3, 4, 6})),
      F(a.repeat({2, 1})), F(a.flip({1})), F(a.roll(2, 1)), F(torch::cat({a, b}, 1)), F(torch::stack({a, b, a})), F(torch::cat({a, torch::ones({4, 2}), b}, 1)),
      F(a.chunk(2, 1)[0] * a.chunk(2, 1)[1]), F(a.split(2, 1)[1]), F(a.unbind(0)[2]), F(a.narrow(1, 1, 3)), F(a.select(0, 2)), F(a.slice(1, 0, 6, 2)), F(a.diagonal()),
      F(a.index_select(1, torch::tensor({0, 3}))), F(a.index({torch::tensor({0, 3}), torch::tensor({1, 2})})), F(a.index({b.detach() > 0})), F(a.masked_select(b.detach() > 0)),
      F(a.gather(1, torch::tensor({0, 2, 1, 1}).view({4, 1}))), F(a.scatter(1, torch::tensor({0, 2, 1, 1}).view({4, 1}), b.narrow(1, 0, 1))), F(a.take(torch::tensor({0, 7}))),
      F(a.triu()), F(a.tril()), F(torch::diag(a.narrow(1, 0, 4))), F(torch::block_diag({a, b})), F(torch::tensordot(a, b, {1}, {1})), F(torch::outer(a.select(0, 0), b.select(0, 1))),
      F(torch::einsum("ij,kj->ik", {a, b})), F(torch::kron(a, b)), F(torch::meshgrid({a.select(0, 0), b.select(0, 1)}, "ij")[0]), F(a.unfold(1, 3, 2)), F(a.as_strided({3, 3}, {6, 1})),
      F(torch::one_hot(torch::tensor({0, 3, 1, 2}), 6).to(torch::kFloat) * a), F(torch::searchsorted(std::get<0>(b.detach().sort(1)), a.detach()).to(torch::kFloat) + a), F(a.detach() * b),
      F(torch::nonzero(a.detach() > 0).to(torch::kFloat).sum() * a), F(std::get<0>(torch::_unique(a.detach())).sum() * a), F(a * b.sum().item<float>()),
      F(torch::repeat_interleave(a, 2, 1)), F(a.movedim(0, 1)), F(a.diff()), F(torch::trapezoid(a, b)), F(a.squeeze().unfold(0, 2, 1)), F(torch::pad(a, {1, 1}, "constant", 0.5)),
      F(torch::bucketize(a.detach(), torch::tensor({-1.f, 0.f, 1.f})).to(torch::kFloat) + a), F(torch::tril_indices(4, 4).to(torch::kFloat).sum() * a), F(a.select_scatter(b.select(0, 1), 0, 2)),
      F(torch::_unsafe_view(a * b, {3, 8})), F(a.unsafe_split(2, 0)[0]), F(a.unsafe_chunk(2, 0)[0].sin()), F(torch::hstack({a, b})), F(torch::split_with_sizes(a, {2, 4}, 1)[1].exp()),
  }, 1);
}

TEST_CASE("linear algebra, transforms and images give plain's bits when everything in them is dropped") {
  sweep::check({
      SQUARE(a.mm(b)), SQUARE(torch::addmm(a, a, b)), SQUARE(a.mv(b.select(0, 1))), SQUARE(torch::dot(a.select(0, 1), b.select(0, 2))), SQUARE(a.unsqueeze(0).bmm(b.unsqueeze(0))),
      SQUARE(torch::baddbmm(a.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0))), SQUARE(torch::matmul(a, b)), SQUARE(torch::linear(a, b)), SQUARE(torch::chain_matmul({a, b, a})),
      SQUARE(torch::inverse(a + 5 * torch::eye(5))), SQUARE(torch::det(a)), SQUARE(torch::logdet(a.mm(a.t()) + torch::eye(5))), SQUARE(torch::linalg_cholesky(a.mm(a.t()) + torch::eye(5))),
      SQUARE(torch::linalg_solve(a + 5 * torch::eye(5), b)), SQUARE(std::get<1>(torch::linalg_qr(a))), SQUARE(torch::linalg_svdvals(a)), SQUARE(std::get<0>(torch::linalg_eigh(a + a.t()))),
      SQUARE(torch::matrix_exp(a)), SQUARE(torch::linalg_matrix_power(a, 3)), SQUARE(torch::trace(a)), SQUARE(torch::linalg_norm(a)), SQUARE(torch::cross(a.narrow(1, 0, 3), b.narrow(1, 0, 3), 1)),
      SQUARE(torch::fft_fft(a)), SQUARE(torch::fft_rfft(a)), SQUARE(torch::fft_irfft(torch::fft_rfft(a))), SQUARE(torch::fft_fft(a).conj().abs()), SQUARE(torch::real(torch::fft_fft(a).conj() * torch::fft_fft(b))),
      SQUARE(torch::complex(a, b)), SQUARE(torch::view_as_real(torch::complex(a, b))), SQUARE(torch::complex(a, b).angle()), SQUARE(torch::polar(a.abs(), b)), SQUARE(torch::imag(torch::complex(a, b).conj()) * a),
      SQUARE(torch::complex(a, b).mm(torch::complex(b, a).conj().t())), SQUARE(torch::stft(a.flatten(), 8, 4, 8, torch::hann_window(8), false, true, true).abs()),
      IMAGE(torch::conv2d(a, b.narrow(2, 0, 3).narrow(3, 0, 3))), IMAGE(torch::conv_transpose2d(a, b.narrow(0, 0, 1).expand({3, 3, 8, 8}).narrow(2, 0, 3).narrow(3, 0, 3))),
      IMAGE(torch::max_pool2d(a, 2)), IMAGE(torch::avg_pool2d(a, 2)), IMAGE(torch::adaptive_avg_pool2d(a, {1, 1})), IMAGE(torch::upsample_bilinear2d(a, {12, 12}, false)),
      IMAGE(torch::upsample_nearest2d(a, {12, 12})), IMAGE(torch::upsample_bicubic2d(a, {12, 12}, false)), IMAGE(torch::grid_sampler(a, b.narrow(1, 0, 2).permute({0, 2, 3, 1}), 0, 0, false)),
      IMAGE(torch::pixel_shuffle(a.repeat({1, 4, 1, 1}), 2)), IMAGE(torch::channel_shuffle(a.repeat({1, 2, 1, 1}), 2)), IMAGE(torch::im2col(a, {2, 2}, {1, 1}, {0, 0}, {1, 1})),
      IMAGE(torch::reflection_pad2d(a, {1, 1, 1, 1})), IMAGE(torch::replication_pad2d(a, {1, 1, 1, 1})), IMAGE(torch::constant_pad_nd(a, {1, 1}, 0.5)),
      IMAGE(torch::batch_norm(a, {}, {}, {}, {}, true, 0.1, 1e-5, false)), IMAGE(torch::instance_norm(a, {}, {}, {}, {}, true, 0.1, 1e-5, false)), IMAGE(torch::group_norm(a, 3)), IMAGE(torch::layer_norm(a, {8})),
      IMAGE(a.contiguous(torch::MemoryFormat::ChannelsLast).sin()), IMAGE(torch::relu(a.to(torch::kBFloat16)).to(torch::kFloat)), IMAGE(torch::glu(a, 2)), IMAGE(a.mean({2, 3})), IMAGE(a.flatten(1).matmul(b.flatten(1).t())),
      IMAGE(torch::embedding(b.flatten(1), torch::tensor({0, 1, 1}))), IMAGE(torch::bilinear(a.flatten(1), b.flatten(1), torch::ones({2, 192, 192}), {})),
      IMAGE(torch::affine_grid_generator(a.flatten(1).narrow(1, 0, 6).view({2, 2, 3}), {2, 3, 4, 4}, false)),
  }, 1);
}

#undef F
#undef SQUARE
#undef IMAGE

}  // namespace sweep_functions
}  // namespace
