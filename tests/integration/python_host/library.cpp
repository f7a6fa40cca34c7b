// SPDX-License-Identifier: MIT
//
// What a Python process loads: training in C++ behind a C interface, and one operator that Python's
// tensors go through. Hidden visibility: the copy of the header in here is its own.
#include "remat/checkpoint.hpp"
#include "remat/libtorch/layers.hpp"

#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/optim/sgd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#define HOST_API extern "C" __attribute__((visibility("default")))

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

/// Convolution, batch norm, dropout: a state and random numbers.
struct Net : torch::nn::Module {
  Net()
      : conv(register_module("conv", torch::nn::Conv2d(2, 4, 3))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        head(register_module("head", torch::nn::Linear(4, 3))) {}

  Tensor forward(const Tensor& x, bool is_checkpointed) {
    const auto features = [&](const Tensor& input) {
      return at::dropout(norm(conv(input)).relu(), 0.25, /*train=*/true);
    };
    const Tensor maps = is_checkpointed ? remat::checkpoint(features, x) : features(x);
    return head(maps.mean({2, 3}));
  }

  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear head;
};

/// A training step whose backward is still to come.
struct Step {
  Tensor input, output;
};

Step forward(Net& net, bool is_checkpointed) {
  const Tensor input = at::randn({3, 2, 6, 6}).set_requires_grad(true);
  return {input, net.forward(input, is_checkpointed)};
}

void backward(Net& net, torch::optim::SGD& optimizer, const Step& step, Tensors& noted) {
  optimizer.zero_grad();
  step.output.square().sum().backward();
  optimizer.step();
  noted.push_back(step.output.detach());
  noted.push_back(step.input.grad());
  for (const Tensor& tensor : net.parameters()) noted.push_back(tensor.detach().clone());
  for (const Tensor& tensor : net.buffers()) noted.push_back(tensor.clone());
  noted.push_back(at::rand({2}));  // where the random generator is
}

/// Trains from one seed, and notes outputs, gradients, weights, buffers and random numbers.
Tensors train(int step_count, bool is_checkpointed) {
  at::manual_seed(5);
  Net net;
  torch::optim::SGD optimizer(net.parameters(), 0.1);
  Tensors noted;
  for (int index = 0; index < step_count; ++index)
    backward(net, optimizer, forward(net, is_checkpointed), noted);
  return noted;
}

std::int64_t difference_count(const Tensors& left, const Tensors& right) {
  std::int64_t count = left.size() != right.size();
  for (std::size_t index = 0; index < left.size() && index < right.size(); ++index)
    count += !at::equal(left[index], right[index]);
  return count;
}

std::string last_error;

/// Exceptions do not cross a C interface.
template <class Call>
std::int64_t guarded(Call call) noexcept {
  try {
    return call();
  } catch (const std::exception& error) {
    last_error = error.what();
    return -1;
  }
}

/// A forward that waits for its backward, with what it needs.
struct Pending {
  Net net;
  torch::optim::SGD optimizer{net.parameters(), 0.1};
  Step step;
};
std::optional<Pending> pending;

Tensor block(const Tensor& x, const Tensor& weight, double dropout, bool is_checkpointed) {
  const auto body = [&](const Tensor& input) {
    const Tensor hidden = at::dropout(at::mm(input, weight).tanh(), dropout, /*train=*/true);
    return at::mm(hidden, weight).sigmoid();
  };
  return is_checkpointed ? remat::checkpoint(body, x) : body(x);
}

}  // namespace

TORCH_LIBRARY(remat_host, library) { library.def("block", &block); }

/// Returns how many tensors differ between plain and checkpointed training, -1 after an exception.
HOST_API std::int64_t remat_host_train(int step_count) {
  return guarded(
      [&] { return difference_count(train(step_count, false), train(step_count, true)); });
}

/// Runs a checkpointed forward, and leaves its graph for `remat_host_finish`.
HOST_API std::int64_t remat_host_begin() {
  return guarded([] {
    at::manual_seed(5);
    pending.emplace();
    pending->step = forward(pending->net, true);
    return 0;
  });
}

/// Runs the backward of `remat_host_begin`, and returns how many tensors differ from plain.
HOST_API std::int64_t remat_host_finish() {
  return guarded([] {
    Tensors noted;
    backward(pending->net, pending->optimizer, pending->step, noted);
    pending.reset();
    Tensors plain = train(1, false);
    noted.pop_back();  // Python has drawn in between
    plain.pop_back();
    return difference_count(plain, noted);
  });
}

HOST_API std::int64_t remat_host_recomputed() { return remat::statistics().recomputed_operations; }

HOST_API const char* remat_host_error() { return last_error.c_str(); }
