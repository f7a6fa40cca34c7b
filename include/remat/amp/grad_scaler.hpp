// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/amp/grad_scaler_state.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/autocast.hpp"
#include "remat/libtorch/loss_scaling.hpp"
#include "remat/libtorch/optimizer.hpp"

namespace remat::amp {

/// Keeps small gradients from vanishing in float16: scales the loss, unscales the gradients, skips
/// steps whose gradients are infinite, and adapts the scale. Python's `torch.amp.GradScaler`.
///
/// ```
/// scaler.scale(loss).backward();
/// scaler.clip_grad_norm_(optimizer, 1.0);   // or unscale_, or neither
/// scaler.step(optimizer);                   // each optimizer once
/// scaler.update();                          // once per iteration
/// ```
/// The arithmetic is Python's, so the scales of a training are the same to the bit, also on the CPU
/// with LibTorch 1.13, which has no kernels for it.
///
/// @par Threads  none of its own; use from one thread at a time
/// @par Source   Micikevicius et al., Mixed Precision Training (2017), section 3.2
class GradScaler {
 public:
  /// @param device  where the scale is kept: that of the loss
  /// @throws ArgumentError     if a factor or the interval makes no sense
  /// @throws EnvironmentError  if it is enabled and LibTorch sees no such device
  explicit GradScaler(c10::Device device, const GradScalerOptions& options = {})
      : device_(device),
        is_enabled_(options.enabled),
        settings_{options.init_scale, options.growth_factor, options.backoff_factor,
                  options.growth_interval, 0} {
    if (!is_enabled_) return;
    remat::detail::require_sensible(settings_, "remat.grad_scaler.options", "GradScaler",
                                    "Use Python's defaults: 65536, 2, 0.5 and 2000");
    if (!remat::detail::has_device(device.type()))
      throw EnvironmentError(ErrorMessage("remat.grad_scaler.no_device")
                                 .where("GradScaler on " + device.str())
                                 .what("LibTorch sees no such device")
                                 .cure("Give the device of the loss, or enabled = false"));
  }
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// Returns the loss times the scale, with its history; the loss itself if disabled.
  torch::Tensor scale(const torch::Tensor& loss) {
    if (!is_enabled_) return loss;
    if (!scale_.defined()) make_tensors();
    return loss * scale_.to(loss.device(), /*non_blocking=*/true);
  }
  /// Returns each loss times the scale.
  std::vector<torch::Tensor> scale(const std::vector<torch::Tensor>& losses) {
    std::vector<torch::Tensor> scaled;
    scaled.reserve(losses.size());
    for (const torch::Tensor& loss : losses) scaled.push_back(scale(loss));
    return scaled;
  }

  /// Divides the gradients of an optimizer's parameters by the scale, once per iteration, so that
  /// they can be inspected or edited before `step`, which otherwise does it.
  ///
  /// @throws ArgumentError  if it was done already, if the optimizer has been stepped since the
  ///                        last `update`, if no loss was scaled, or if a gradient is float16: then
  ///                        no gradient is changed
  void unscale_(torch::optim::Optimizer& optimizer) {
    if (!is_enabled_) return;
    require_scaled("unscale_");
    Progress& progress = progress_[&optimizer];
    require(progress.stage != Stage::unscaled, [] {
      return ErrorMessage("remat.grad_scaler.unscaled_twice")
          .where("GradScaler::unscale_")
          .what("this optimizer's gradients were unscaled already since the last update()")
          .cause(
              "update() was not called at the end of the last iteration, perhaps because its "
              "step was skipped by hand")
          .cure("Call update() at the end of every iteration, and unscale_ at most once in it");
    });
    require(progress.stage != Stage::stepped, [] {
      return ErrorMessage("remat.grad_scaler.unscaled_late")
          .where("GradScaler::unscale_")
          .what("this optimizer was stepped already since the last update()")
          .cause(
              "unscale_ comes after step, or update() is missing at the end of the last "
              "iteration")
          .cure("Call unscale_, then step, then update()");
    });
    progress.found_inf = unscale_gradients(optimizer);
    progress.stage = Stage::unscaled;
  }

  /// Unscales the gradients if that is still to be done, then scales them down together so that
  /// their norm is at most `max_norm`.
  ///
  /// @return  the norm before, of the unscaled gradients
  /// @throws ArgumentError  as `unscale_`
  double clip_grad_norm_(torch::optim::Optimizer& optimizer, double max_norm,
                         double norm_type = 2) {
    if (is_enabled_ && progress_[&optimizer].stage != Stage::unscaled) unscale_(optimizer);
    std::vector<torch::Tensor> parameters;
    for (const auto& group : optimizer.param_groups())
      parameters.insert(parameters.end(), group.params().begin(), group.params().end());
    return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
  }

  /// Unscales the gradients unless that was done, and steps the optimizer if all of them are
  /// finite.
  ///
  /// @param closure  only without scaling, as in Python
  /// @return  whether the optimizer was stepped
  /// @throws ArgumentError  if it was stepped already since the last `update`, if no loss was
  ///                        scaled, if no parameter has a gradient, or for a closure
  bool step(torch::optim::Optimizer& optimizer,
            torch::optim::Optimizer::LossClosure closure = nullptr) {
    if (!is_enabled_) {
      optimizer.step(std::move(closure));
      return true;
    }
    require_steppable(optimizer, closure != nullptr);
    Progress& progress = progress_[&optimizer];
    if (progress.stage == Stage::ready) unscale_(optimizer);
    require(!progress.found_inf.empty(), [] { return no_checks("step"); });

    float found = 0;
    for (const torch::Tensor& found_inf : progress.found_inf) found += found_inf.item<float>();
    const bool is_finite = found == 0.0f;
    if (is_finite) optimizer.step();
    progress.stage = Stage::stepped;
    return is_finite;
  }

  /// Ends an iteration: moves the scale back if a step was skipped, and up after `growth_interval`
  /// iterations without one.
  ///
  /// @param new_scale  replaces the scale instead; the count of clean steps goes on
  /// @throws ArgumentError  if nothing was unscaled or stepped since the last `update`, or if
  ///                        `new_scale` is not positive and finite
  void update(std::optional<double> new_scale = {}) {
    if (!is_enabled_) return;
    require_scaled("update");
    if (new_scale.has_value()) {
      GradScalerState wanted = settings_;
      wanted.scale = *new_scale;
      remat::detail::require_sensible(wanted, "remat.grad_scaler.new_scale", "GradScaler::update",
                                      "Give a positive scale, or none to let it adapt");
      scale_.fill_(*new_scale);
    } else {
      torch::Tensor found_inf = found_anywhere();
      remat::detail::update_scale(scale_, growth_tracker_, found_inf, settings_.growth_factor,
                                  settings_.backoff_factor, settings_.growth_interval);
    }
    progress_.clear();
  }

  /// Returns the scale; 1 if disabled. Waits for an accelerator.
  double get_scale() const {
    if (!is_enabled_) return 1;
    return scale_.defined() ? static_cast<double>(scale_.item<float>()) : settings_.scale;
  }

  /// Returns whether it scales at all; false makes everything but `step` do nothing.
  bool is_enabled() const noexcept { return is_enabled_; }

  /// Returns what `load_state` takes; call it after `update`. All zero if disabled.
  GradScalerState state() const {
    if (!is_enabled_) return {};
    GradScalerState state = settings_;
    state.scale = get_scale();
    if (growth_tracker_.defined()) state.growth_tracker = growth_tracker_.item<std::int32_t>();
    return state;
  }

  /// Goes on from a saved state; nothing if disabled.
  ///
  /// @throws ArgumentError  if no scaler can have saved that: then nothing is changed
  void load_state(const GradScalerState& state) {
    if (!is_enabled_) return;
    require(state != GradScalerState{}, [] {
      return ErrorMessage("remat.grad_scaler.state")
          .where("GradScaler::load_state")
          .what("the state is empty")
          .cause("it was saved from a disabled scaler, or never filled")
          .cure("Start with a new scaler");
    });
    remat::detail::require_sensible(state, "remat.grad_scaler.state", "GradScaler::load_state",
                                    "Load what state() returned");
    settings_ = state;
    if (!scale_.defined()) return;
    scale_.fill_(state.scale);
    growth_tracker_.fill_(state.growth_tracker);
  }

 private:
  enum class Stage { ready, unscaled, stepped };

  /// How far an optimizer is in this iteration.
  struct Progress {
    Stage stage = Stage::ready;
    std::vector<torch::Tensor> found_inf;  // one per device
  };

  /// Gradients that one call of the kernel takes.
  struct Batch {
    c10::Device device;
    c10::ScalarType dtype;
    std::vector<torch::Tensor> grads;
  };

  static ErrorMessage no_checks(std::string_view function) {
    return ErrorMessage("remat.grad_scaler.no_checks")
        .where("GradScaler::" + std::string(function))
        .what("No inf checks were recorded: no gradient was unscaled since the last update()")
        .cause(
            "backward was not called, the optimizer holds other parameters, or step() is "
            "missing")
        .cure("Call scale(loss).backward(), then step(optimizer), then update()");
  }

  void require_scaled(std::string_view function) const {
    require(scale_.defined(), [&] {
      return ErrorMessage("remat.grad_scaler.not_scaled")
          .where("GradScaler::" + std::string(function))
          .what("no loss was scaled before")
          .cause("backward was called on the bare loss")
          .cure("Call scale(loss).backward()");
    });
  }

  void require_steppable(const torch::optim::Optimizer& optimizer, bool has_closure) const {
    require(!has_closure, [] {
      return ErrorMessage("remat.grad_scaler.closure")
          .where("GradScaler::step")
          .what("a closure was given, and none can be run while scaling is enabled")
          .cause("it would make new gradients, scaled ones, inside the step")
          .cure("Use an optimizer that needs none, or a scaler with enabled = false");
    });
    require_scaled("step");
    const auto found = progress_.find(&optimizer);
    require(found == progress_.end() || found->second.stage != Stage::stepped, [] {
      return ErrorMessage("remat.grad_scaler.stepped_twice")
          .where("GradScaler::step")
          .what("this optimizer was stepped already since the last update()")
          .cause("update() is missing at the end of the last iteration")
          .cure("Call update() once per iteration, after the steps of all optimizers");
    });
  }

  static void require_unscalable(const torch::Tensor& parameter, std::size_t group,
                                 std::size_t index) {
    const torch::Tensor& grad = parameter.grad();
    require(grad.scalar_type() != c10::ScalarType::Half, [&] {
      std::ostringstream what;
      what << "parameter " << index << " of group " << group << ", " << parameter.sizes()
           << ", has a gradient of float16, and float32 was expected";
      return ErrorMessage("remat.grad_scaler.half_gradient")
          .where("GradScaler::unscale_")
          .what(what.str())
          .cause("the whole model was turned to float16")
          .cure("Leave the parameters in float32 and run forward under remat::amp::Autocast");
    });
  }

  void make_tensors() {
    const at::NoGradGuard no_grad;
    const auto options = at::TensorOptions().device(device_);
    scale_ = at::empty({}, options.dtype(at::kFloat)).fill_(settings_.scale);
    growth_tracker_ = at::empty({}, options.dtype(at::kInt)).fill_(settings_.growth_tracker);
  }

  static std::vector<Batch> batches_of(torch::optim::Optimizer& optimizer) {
    std::vector<Batch> batches;
    const auto& groups = optimizer.param_groups();
    for (std::size_t group = 0; group < groups.size(); ++group) {
      const auto& parameters = groups[group].params();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        torch::Tensor grad = parameters[i].grad();
        if (!grad.defined()) continue;
        require_unscalable(parameters[i], group, i);
        if (grad.is_sparse()) grad = grad._values();
        add_to_batch(batches, std::move(grad));
      }
    }
    return batches;
  }

  static void add_to_batch(std::vector<Batch>& batches, torch::Tensor grad) {
    for (Batch& batch : batches) {
      if (batch.device != grad.device() || batch.dtype != grad.scalar_type()) continue;
      batch.grads.push_back(std::move(grad));
      return;
    }
    batches.push_back({grad.device(), grad.scalar_type(), {std::move(grad)}});
  }

  /// Returns one flag per device.
  std::vector<torch::Tensor> unscale_gradients(torch::optim::Optimizer& optimizer) const {
    const at::NoGradGuard no_grad;
    std::vector<Batch> batches = batches_of(optimizer);
    // In double, since a float's reciprocal may be rounded differently on some devices.
    const torch::Tensor inv_scale = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
    std::vector<torch::Tensor> flags;
    for (Batch& batch : batches) {
      std::size_t i = 0;
      while (i < flags.size() && flags[i].device() != batch.device) ++i;
      if (i == flags.size())
        flags.push_back(
            at::empty({}, at::TensorOptions().dtype(at::kFloat).device(batch.device)).zero_());
      remat::detail::check_and_unscale(batch.grads, flags[i],
                                       inv_scale.to(batch.device, /*non_blocking=*/true));
    }
    return flags;
  }

  torch::Tensor found_anywhere() const {
    const at::NoGradGuard no_grad;
    torch::Tensor sum;
    for (const auto& [optimizer, progress] : progress_)
      for (const torch::Tensor& flag : progress.found_inf) {
        const torch::Tensor here = flag.to(scale_.device(), /*non_blocking=*/true);
        sum = sum.defined() ? sum + here : here;
      }
    require(sum.defined(), [] { return no_checks("update"); });
    return sum;
  }

  c10::Device device_;
  bool is_enabled_;
  GradScalerState settings_;  // its scale and tracker hold until the tensors are made
  torch::Tensor scale_, growth_tracker_;
  std::map<const torch::optim::Optimizer*, Progress> progress_;
};

}  // namespace remat::amp
