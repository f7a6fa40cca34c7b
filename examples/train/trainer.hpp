// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "remat/remat.hpp"
#include "remat/yaml.hpp"
#include "train/accumulation.hpp"
#include "train/data.hpp"
#include "train/durable_file.hpp"
#include "train/loader.hpp"
#include "train/metrics.hpp"
#include "train/network.hpp"
#include "train/optimizer.hpp"
#include "train/precision.hpp"
#include "train/progress_bar.hpp"
#include "train/run_state.hpp"
#include "train/schedule.hpp"
#include "train/stop_signal.hpp"
#include "train/user_error.hpp"
#include "train/validation.hpp"

namespace train {

/// Trains a network as a configuration says.
class Trainer {
 public:
  /// @param config  with every choice made: no device "auto"
  Trainer(const remat::Config& config, const SplitCases& data, const OutputFolder& folder,
          c10::Device device)
      : config_(config),
        folder_(folder),
        precision_{device, config.training.use_amp},
        network_(config, std::ssize(data.training.classes)),
        optimizer_(optimizer_on(device)),
        scaler_(device, precision_.scaler()),
        state_(network_.module(), optimizer_, scaler_, device),
        training_(data.training, transform(), loader_options()),
        validation_(data.validation, transform(), loader_options()),
        batches_(std::max<std::int64_t>(1, training_size() / config.training.batch_size)),
        steps_((batches_ + config.training.accumulation_steps - 1) /
               config.training.accumulation_steps),
        schedule_(config.training, steps_) {
    progress_.training_cases = training_size();
    progress_.validation_cases = std::ssize(data.validation.labels);
  }

  /// Goes on where a checkpoint ends.
  ///
  /// @throws UserError  if configuration or data are others
  void resume() {
    const Progress fresh = progress_;
    progress_ = state_.load(folder_.checkpoint(), config_);
    if (progress_.training_cases != fresh.training_cases ||
        progress_.validation_cases != fresh.validation_cases)
      throw UserError("the run was begun with " + counts(progress_) + " cases, and there are " +
                      counts(fresh) + " now: going on with other data would be neither");
    std::printf("going on after epoch %ld, step %ld of %ld\n", long(progress_.epoch),
                long(progress_.step_in_epoch), long(steps_));
  }

  /// Trains to the end, to training.max_steps, or to a signal.
  ///
  /// @return  the exit code: 0, or 128 and the signal's number
  int run() {
    describe();
    metrics_.emplace(folder_.metrics(), progress_.metrics_bytes);
    while (progress_.epoch < config_.training.epochs)
      if (const std::optional<int> code = run_epoch()) return *code;
    report_end();
    return 0;
  }

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t training_size() const { return std::ssize(training_.cases().labels); }

  static std::string counts(const Progress& progress) {
    return std::to_string(progress.training_cases) + " training and " +
           std::to_string(progress.validation_cases) + " validation";
  }

  static std::string counted(std::int64_t count, const std::string& noun) {
    return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
  }

  torch::optim::AdamW optimizer_on(c10::Device device) {
    network_.module().to(device);
    return make_optimizer(network_.module(), config_.training);
  }
  Transform transform() const {
    return {config_.data, remat::published_model(network_.backbone().name()).preprocessing};
  }
  LoaderOptions loader_options() const {
    return {config_.training.batch_size, config_.data.workers,
            config_.data.source == "views" ? config_.model.num_views : 0, config_.training.seed};
  }

  std::string checkpointing() const {
    if (const auto& budget = network_.budget())
      return "on, within " + remat::to_string(*budget) +
             (budget->fraction() > 0 ? " of plain" : "");
    const std::int64_t segments = network_.backbone().segments();
    return segments == 0 ? "off" : "on, " + std::to_string(segments) + " segments";
  }

  void describe() {
    const auto& training = config_.training;
    std::printf("%s, %.1f million parameters, gradient checkpointing %s\n",
                network_.backbone().name().c_str(),
                static_cast<double>(network_.parameter_count()) / 1e6, checkpointing().c_str());
    std::printf("%s, %s, %s\n", precision_.device.str().c_str(), precision_.name(),
                counted(at::get_num_threads(), "thread").c_str());
    std::printf("%s cases, %zu classes, %ld px; epochs of %s", counts(progress_).c_str(),
                training_.cases().classes.size(), long(config_.data.image_size),
                counted(steps_, "step").c_str());
    const std::int64_t left_out = training_size() - batches_ * training.batch_size;
    if (left_out > 0)
      std::printf(", %s left out of each: too few for a batch", counted(left_out, "case").c_str());
    std::printf("\n");
    if (progress_.validation_cases == 0)
      std::printf("no case is for validation: there will be no best.safetensors\n");
    std::fflush(stdout);
  }

  /// @return  the exit code if this is to be the end
  std::optional<int> run_epoch() {
    start_epoch();
    while (progress_.step_in_epoch < steps_) {
      if (is_limit_reached()) return stop_at_limit();
      train_step();
      if (StopSignal::received() != 0) return stop();
      if (is_checkpoint_due()) save_checkpoint();
    }
    bar_.finish();
    std::optional<Score> score;
    if (progress_.validation_cases > 0) {
      score = validate(network_, validation_, precision_);
      if (!score) return stop();
    }
    end_epoch(score);
    return {};
  }

  void start_epoch() {
    epoch_start_ = Clock::now();
    auto order = epoch_order(training_.cases().size(), config_.training.seed, progress_.epoch);
    const auto used = static_cast<std::size_t>(batches_ * config_.training.batch_size);
    order.resize(std::min(order.size(), used));
    training_.start(std::move(order), progress_.step_in_epoch * config_.training.accumulation_steps,
                    progress_.epoch);
  }

  /// One step of the optimizer.
  void train_step() {
    const auto start = Clock::now();
    const double rate = schedule_.rate(progress_.step);
    set_learning_rate(optimizer_, rate);
    for (torch::Tensor& parameter : network_.module().parameters())
      parameter.mutable_grad() = torch::Tensor();

    remat::MemoryMeter meter;
    images_ = 0;
    const std::int64_t case_count = cases_of_step();
    const double loss = accumulate_gradients(
        batches_of_step(), case_count, [this] { return next_loss(); },
        [this](const torch::Tensor& weighted) { scaler_.scale(weighted).backward(); });
    if (!std::isfinite(loss) && !scaler_.is_enabled()) throw_diverged(loss, rate);
    std::optional<double> norm;
    if (config_.training.clip_norm > 0)
      norm = scaler_.clip_grad_norm_(optimizer_, config_.training.clip_norm);
    scaler_.step(optimizer_);
    scaler_.update();

    ++progress_.step;
    ++progress_.step_in_epoch;
    progress_.loss_sum += loss * static_cast<double>(case_count);
    progress_.loss_count += case_count;
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    note_step(loss, rate, norm, static_cast<double>(images_) / seconds, meter.peak());
    if (network_.budget() && !is_plan_told_) tell_plan();
  }

  /// What the first step was planned to need; the last line that the plan writes of itself.
  void tell_plan() {
    const auto plan = network_.backbone().memory_plan();
    if (plan == nullptr) return;
    is_plan_told_ = true;
    bar_.finish();
    const std::string text = remat::to_string(*plan);
    std::printf("%s\n", text.substr(text.rfind('\n') + 1).c_str());
    std::fflush(stdout);
  }

  std::int64_t batches_of_step() const {
    const std::int64_t first = progress_.step_in_epoch * config_.training.accumulation_steps;
    return std::min(config_.training.accumulation_steps, batches_ - first);
  }
  std::int64_t cases_of_step() const {
    return std::min(batches_of_step() * config_.training.batch_size, training_size());
  }

  std::pair<torch::Tensor, std::int64_t> next_loss() {
    const std::optional<Batch> read = training_.next();
    if (!read) throw std::logic_error("the loader ended before the epoch");
    const Batch batch = read->to(precision_.device);
    images_ += batch.images.numel() / (3 * config_.data.image_size * config_.data.image_size);
    const auto logits = precision_.run([&] { return network_.forward(batch); });
    const auto options = torch::nn::functional::CrossEntropyFuncOptions().label_smoothing(
        config_.training.label_smoothing);
    return {torch::nn::functional::cross_entropy(logits, batch.labels, options), batch.size()};
  }

  [[noreturn]] void throw_diverged(double loss, double rate) const {
    throw std::runtime_error(
        "the loss is " + std::to_string(loss) + " in step " + std::to_string(progress_.step + 1) +
        ", with a learning rate of " + std::to_string(rate) +
        ": lower training.lr, raise training.warmup_epochs, or set training.clip_norm. " +
        "The last checkpoint stays as it is");
  }

  void note_step(double loss, double rate, std::optional<double> norm, double images_per_second,
                 remat::Bytes peak) {
    nlohmann::ordered_json line{{"kind", "step"},
                                {"epoch", progress_.epoch + 1},
                                {"step", progress_.step},
                                {"loss", loss},
                                {"lr", rate},
                                {"gradient_norm", nullptr},
                                {"images_per_second", images_per_second},
                                {"peak_bytes", peak.count}};
    if (norm) line["gradient_norm"] = *norm;
    metrics_->write(line);
    bar_.show({progress_.epoch + 1, config_.training.epochs, progress_.step_in_epoch, steps_, loss,
               images_per_second, peak});
  }

  void end_epoch(const std::optional<Score>& score) {
    const double training_loss =
        progress_.loss_sum / static_cast<double>(std::max<std::int64_t>(1, progress_.loss_count));
    ++progress_.epoch;
    progress_.step_in_epoch = 0;
    progress_.loss_sum = 0;
    progress_.loss_count = 0;
    const double seconds = std::chrono::duration<double>(Clock::now() - epoch_start_).count();
    nlohmann::ordered_json line{{"kind", "epoch"},
                                {"epoch", progress_.epoch},
                                {"step", progress_.step},
                                {"training_loss", training_loss},
                                {"seconds", seconds}};
    std::printf("epoch %ld/%ld  training loss %.4f", long(progress_.epoch),
                long(config_.training.epochs), training_loss);
    if (score) note_score(*score, line);
    std::printf("  %.1f s\n", seconds);
    std::fflush(stdout);
    metrics_->write(line);
    save_weights(folder_.last());
    save_checkpoint();
  }

  void note_score(const Score& score, nlohmann::ordered_json& line) {
    const bool is_best =
        score.accuracy > progress_.best_score ||
        (score.accuracy == progress_.best_score && score.loss < progress_.best_loss);
    line["validation_loss"] = score.loss;
    line["accuracy"] = score.accuracy;
    line["is_best"] = is_best;
    std::printf("  validation loss %.4f  accuracy %.2f %%%s", score.loss, 100 * score.accuracy,
                is_best ? "  best so far" : "");
    if (!is_best) return;
    progress_.best_score = score.accuracy;
    progress_.best_loss = score.loss;
    progress_.best_epoch = progress_.epoch;
    save_weights(folder_.best());
  }

  bool is_limit_reached() const {
    return config_.training.max_steps > 0 && progress_.step >= config_.training.max_steps;
  }
  bool is_checkpoint_due() const {
    const std::int64_t every = config_.output.checkpoint_steps;
    // The epoch's own comes after validation.
    return every > 0 && progress_.step % every == 0 && progress_.step_in_epoch < steps_;
  }

  void save_weights(const std::filesystem::path& path) {
    save_durably(remat::state_dict(network_.module()), path,
                 {{"format", "pt"},
                  {RunState::kConfig, remat::to_yaml(config_)},
                  {RunState::kClasses, nlohmann::json(training_.cases().classes).dump()}});
  }

  /// The metrics first: the checkpoint says how many of them belong to it.
  void save_checkpoint() {
    progress_.metrics_bytes = metrics_->sync();
    state_.save(folder_.checkpoint(), progress_, config_);
  }

  int stop() {
    bar_.finish();
    save_checkpoint();
    std::printf("stopped in epoch %ld after step %ld of %ld; --resume goes on there\n",
                long(progress_.epoch + 1), long(progress_.step_in_epoch), long(steps_));
    return 128 + StopSignal::received();
  }

  int stop_at_limit() {
    bar_.finish();
    save_weights(folder_.last());
    save_checkpoint();
    std::printf("training.max_steps is reached: %ld steps, in epoch %ld; %s\n",
                long(progress_.step), long(progress_.epoch + 1), folder_.last().c_str());
    return 0;
  }

  void report_end() const {
    if (progress_.best_epoch > 0)
      std::printf("best: epoch %ld, accuracy %.2f %%: %s\n", long(progress_.best_epoch),
                  100 * progress_.best_score, folder_.best().c_str());
    std::printf("last: %s\n", folder_.last().c_str());
  }

  remat::Config config_;
  const OutputFolder& folder_;
  Precision precision_;
  Network network_;
  torch::optim::AdamW optimizer_;
  remat::amp::GradScaler scaler_;
  RunState state_;
  Loader training_, validation_;
  std::int64_t batches_, steps_;  // of an epoch
  Schedule schedule_;
  Progress progress_;
  std::optional<Metrics> metrics_;
  ProgressBar bar_;
  Clock::time_point epoch_start_;
  std::int64_t images_ = 0;  // of the step
  bool is_plan_told_ = false;
};

}  // namespace train
