// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string_view>

namespace train {

/// Turns the first SIGINT or SIGTERM into a wish to stop after the step; the second one kills.
class StopSignal {
 public:
  StopSignal() {
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, &StopSignal::note);
  }

  /// Returns the signal that came, 0 if none did.
  static int received() { return received_.load(); }

 private:
  static void note(int signal) {
    received_ = signal;
    for (const int other : {SIGINT, SIGTERM}) std::signal(other, SIG_DFL);
    constexpr std::string_view kText =
        "\nstopping after this step, with a checkpoint; once more to stop at once\n";
    // Of what writes, only this may be called here.
    if (::write(STDERR_FILENO, kText.data(), kText.size()) < 0) return;
  }

  static_assert(std::atomic<int>::is_always_lock_free);
  static inline std::atomic<int> received_{0};
};

}  // namespace train
