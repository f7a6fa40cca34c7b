// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

#include "remat/remat.hpp"

namespace train {

/// What is shown of a step.
struct StepFigures {
  std::int64_t epoch, epochs, step, steps;  // from 1
  double loss, images_per_second;
  remat::Bytes peak;
};

/// Shows how far an epoch is: a bar on a terminal, elsewhere a line every few seconds.
class ProgressBar {
 public:
  void show(const StepFigures& figures) {
    const auto now = std::chrono::steady_clock::now();
    const bool is_last = figures.step == figures.steps;
    const auto pause = is_terminal_ ? std::chrono::milliseconds(50) : std::chrono::seconds(10);
    if (!is_last && now - shown_ < pause) return;
    shown_ = now;

    std::array<char, 160> text{};
    std::snprintf(text.data(), text.size(), "loss %.4f  %.*f images/s  memory %s", figures.loss,
                  figures.images_per_second < 10 ? 1 : 0, figures.images_per_second,
                  remat::to_string(figures.peak).c_str());
    std::string line =
        "epoch " + std::to_string(figures.epoch) + "/" + std::to_string(figures.epochs) + "  ";
    if (is_terminal_) line = "\r\033[K" + line + bar(figures.step, figures.steps) + "  ";
    line += "step " + std::to_string(figures.step) + "/" + std::to_string(figures.steps) + "  " +
            text.data();
    std::fputs(line.c_str(), stdout);
    is_open_ = is_terminal_;
    if (!is_terminal_) std::fputc('\n', stdout);
    std::fflush(stdout);
  }

  /// Ends the line, if one is open, before something else is printed.
  void finish() {
    if (is_open_) std::fputc('\n', stdout);
    is_open_ = false;
  }

 private:
  static std::string bar(std::int64_t step, std::int64_t steps) {
    constexpr std::int64_t kWidth = 20;
    const std::int64_t done = kWidth * step / std::max<std::int64_t>(1, steps);
    return "[" + std::string(static_cast<std::size_t>(done), '=') +
           std::string(static_cast<std::size_t>(kWidth - done), ' ') + "]";
  }

  bool is_terminal_ = isatty(STDOUT_FILENO) != 0;
  bool is_open_ = false;
  std::chrono::steady_clock::time_point shown_{};
};

}  // namespace train
