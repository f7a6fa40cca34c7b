// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string_view>

#include "remat/errors.hpp"

namespace remat::amp {

/// What a `GradScaler` starts from; meant for designated initialisers. The defaults are Python's.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;     ///< above 1, applied after `growth_interval` clean steps
  double backoff_factor = 0.5;  ///< in (0, 1), applied after infinities
  std::int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: `step` steps, everything else does nothing
};

/// What a training that goes on later must find again: plain numbers, to be saved as one likes.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  std::int64_t growth_interval = 0;
  std::int64_t growth_tracker = 0;  ///< clean steps since the scale changed

  bool operator==(const GradScalerState&) const = default;
};

}  // namespace remat::amp

namespace remat::detail {

/// Refuses a state that no scaler can have.
///
/// @throws ArgumentError  with this code, place and cure
inline void require_sensible(const amp::GradScalerState& state, std::string_view code,
                             std::string_view where, std::string_view cure) {
  const auto refuse_unless = [&](bool condition, std::string_view name, double given,
                                 std::string_view expected) {
    require(condition, [&] {
      std::ostringstream what;
      what << "the " << name << " is " << given << ", and " << expected << " was expected";
      return ErrorMessage(code).where(where).what(what.str()).cure(cure);
    });
  };
  const auto largest = static_cast<double>(std::numeric_limits<float>::max());
  const auto interval = static_cast<double>(state.growth_interval);
  refuse_unless(state.scale > 0 && state.scale <= largest, "scale", state.scale,
                "a positive float32");
  refuse_unless(state.growth_factor > 1 && std::isfinite(state.growth_factor), "growth factor",
                state.growth_factor, "a finite number above 1");
  refuse_unless(state.backoff_factor > 0 && state.backoff_factor < 1, "backoff factor",
                state.backoff_factor, "a number between 0 and 1");
  refuse_unless(state.growth_interval >= 1, "growth interval", interval, "1 at least");
  // Beyond the interval the scale would never grow again, in silence.
  refuse_unless(state.growth_tracker >= 0 && state.growth_tracker < state.growth_interval &&
                    state.growth_tracker <= std::numeric_limits<std::int32_t>::max(),
                "growth tracker", static_cast<double>(state.growth_tracker),
                "a count below the growth interval");
}

}  // namespace remat::detail
