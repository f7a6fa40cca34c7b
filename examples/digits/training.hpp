// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "digits/arguments.hpp"
#include "digits/dataset.hpp"
#include "digits/memory_chart.hpp"
#include "remat/remat.hpp"

namespace digits {

/// What one training run showed, and the weights and buffers it ended with.
struct Run {
  remat::Bytes peak;             // of activations, the largest step but the first
  double step_seconds = 0;       // median
  remat::Statistics statistics;  // of the last step
  double accuracy = 0;           // on the test images, 0 to 1
  std::vector<torch::Tensor> state;
  Course course;  // live memory over the last step
};

/// Shows how far a run is, on one line of a terminal, or a line per epoch elsewhere.
class Progress {
 public:
  Progress(std::string name, std::int64_t epochs, std::int64_t steps)
      : name_(std::move(name)), epochs_(epochs), steps_(steps), is_terminal_(isatty(1) != 0) {}

  void show(std::int64_t epoch, std::int64_t step, double loss) {
    if (!is_terminal_ && step != steps_) return;
    std::printf("%s%-12s  epoch %2ld of %ld  step %3ld of %ld  loss %.4f%s",
                is_terminal_ ? "\r" : "", name_.c_str(), long(epoch), long(epochs_), long(step),
                long(steps_), loss,
                is_terminal_ && !(epoch == epochs_ && step == steps_) ? "" : "\n");
    std::fflush(stdout);
  }

 private:
  std::string name_;
  std::int64_t epochs_, steps_;
  bool is_terminal_;
};

/// Sets gradients to zero, in place: they are there before a step and so no part of its
/// activations.
inline void zero_gradients(remat::Backbone& model) {
  for (torch::Tensor& parameter : model.parameters()) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
    parameter.mutable_grad().zero_();
  }
}

inline double accuracy(remat::Backbone& model, const Dataset& test, const Arguments& arguments) {
  const torch::NoGradGuard no_grad;
  model.eval();
  std::int64_t right = 0;
  for (std::int64_t first = 0; first < test.size(); first += arguments.batch) {
    const auto last = std::min(first + arguments.batch, test.size());
    const auto images = prepare(test.images.slice(0, first, last), arguments.image_size);
    const auto guesses = model.forward(images).argmax(1);
    right += guesses.eq(test.labels.slice(0, first, last)).sum().item<std::int64_t>();
  }
  model.train();
  return static_cast<double>(right) / static_cast<double>(test.size());
}

/// Trains a fresh model from the seed.
///
/// @param is_checkpointed  the only difference between the two runs
inline Run train(const Arguments& arguments, const Dataset& training, const Dataset& test,
                 bool is_checkpointed) {
  torch::manual_seed(static_cast<std::uint64_t>(arguments.seed));
  const auto model = remat::create_classifier(arguments.model, kClasses);
  if (is_checkpointed && arguments.segments > 0)
    model->enable_gradient_checkpointing(arguments.segments);
  else if (is_checkpointed)
    model->enable_gradient_checkpointing();
  torch::optim::SGD optimizer(model->parameters(),
                              torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-4));

  Run run;
  std::vector<double> seconds;
  const std::int64_t steps = training.size() / arguments.batch;
  Progress progress(is_checkpointed ? "checkpointed" : "plain", arguments.epochs, steps);
  for (std::int64_t epoch = 1; epoch <= arguments.epochs; ++epoch) {
    const auto order = torch::randperm(training.size());  // the same in both runs: same seed
    for (std::int64_t step = 1; step <= steps; ++step) {
      const auto indices = order.slice(0, (step - 1) * arguments.batch, step * arguments.batch);
      const Dataset batch = training.rows(indices);
      const auto images = prepare(batch.images, arguments.image_size);
      zero_gradients(*model);
      const bool is_last = epoch == arguments.epochs && step == steps;

      remat::reset_statistics();
      remat::MemoryMeter meter;
      meter.record_timeline(is_last);
      const auto start = std::chrono::steady_clock::now();
      auto loss = torch::cross_entropy_loss(model->forward(images), batch.labels);
      loss.backward();
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      // The first step measures what each unit costs; the plan by bytes holds from the second on.
      if (seconds.size() > 1) run.peak = std::max(run.peak, meter.peak());
      if (is_last) run.course = meter.timeline();

      optimizer.step();
      progress.show(epoch, step, loss.item<double>());
    }
  }
  run.statistics = remat::statistics();
  std::nth_element(seconds.begin(), seconds.begin() + std::ssize(seconds) / 2, seconds.end());
  run.step_seconds = seconds[seconds.size() / 2];
  run.accuracy = accuracy(*model, test, arguments);
  for (const auto& tensor : model->parameters()) run.state.push_back(tensor.detach());
  for (const auto& tensor : model->buffers()) run.state.push_back(tensor.detach());
  return run;
}

}  // namespace digits
