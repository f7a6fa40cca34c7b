// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "remat/remat.hpp"

namespace digits {

/// Live memory over the time of one step.
struct Curve {
  std::vector<double> milliseconds;
  std::vector<double> mebibytes;
};

/// Reads the meter's timeline, thinned to what a picture shows; highs and lows stay.
inline Curve curve_of(const remat::MemoryMeter& meter, std::size_t points = 1500) {
  Curve curve;
  const auto& timeline = meter.timeline();
  const std::size_t stride = std::max<std::size_t>(1, 2 * timeline.size() / points);
  for (std::size_t first = 0; first < timeline.size(); first += stride) {
    const auto begin = timeline.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end =
        timeline.begin() + static_cast<std::ptrdiff_t>(std::min(first + stride, timeline.size()));
    auto [low, high] = std::minmax_element(
        begin, end, [](const auto& left, const auto& right) { return left.live < right.live; });
    if (high < low) std::swap(low, high);
    for (const auto& sample : {*low, *high}) {
      curve.milliseconds.push_back(1e3 * (sample.seconds - timeline.front().seconds));
      curve.mebibytes.push_back(sample.live.mebibytes());
    }
  }
  return curve;
}

/// Returns a round distance between ticks, so that there are four to ten of them.
inline double tick_distance(double range) {
  const double power = std::pow(10.0, std::floor(std::log10(range)));
  for (const double factor : {0.1, 0.2, 0.5, 1.0})
    if (range / (factor * power) <= 8) return factor * power;
  return 2 * power;
}

/// Writes a picture of live memory during one step, plain and checkpointed, as SVG.
class MemoryChart {
 public:
  MemoryChart(const Curve& plain, const Curve& checkpointed)
      : plain_(plain), checkpointed_(checkpointed) {
    for (const Curve* curve : {&plain, &checkpointed}) {
      for (const double x : curve->milliseconds) width_ms_ = std::max(width_ms_, x);
      for (const double y : curve->mebibytes) height_mib_ = std::max(height_mib_, y);
    }
    height_mib_ *= 1.05;
  }

  /// @throws std::runtime_error  if the file cannot be written
  void write(const std::string& path) const {
    std::ofstream file(path);
    file << text();
    file.close();
    if (!file) throw std::runtime_error("cannot write " + path);
  }

  std::string text() const {
    std::string svg = R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 420" )"
                      R"(font-family="sans-serif" font-size="13">
<rect width="800" height="420" fill="white"/>
<text x="70" y="24" font-size="16">Live activation memory during one training step</text>
)";
    for (double y = 0; y <= height_mib_; y += tick_distance(height_mib_)) {
      svg += line("grid", 0, y, width_ms_, y);
      svg += label(kLeft - 8, y_of(y) + 4, "end", number(y));
    }
    for (double x = 0; x <= width_ms_; x += tick_distance(width_ms_))
      svg += label(x_of(x), kBottom + 18, "middle", number(x));
    svg += label((kLeft + kRight) / 2, kBottom + 38, "middle", "milliseconds since the step began");
    svg += label(kLeft - 8, kTop - 12, "end", "MiB");
    svg += series(plain_, "#c0392b", "plain", 0);
    svg += series(checkpointed_, "#2471a3", "checkpointed", 1);
    return svg + "</svg>\n";
  }

 private:
  static constexpr double kLeft = 70, kRight = 780, kTop = 50, kBottom = 370;

  double x_of(double milliseconds) const {
    return kLeft + milliseconds / width_ms_ * (kRight - kLeft);
  }
  double y_of(double mebibytes) const {
    return kBottom - mebibytes / height_mib_ * (kBottom - kTop);
  }

  static std::string number(double value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.4g", std::abs(value) < 1e-9 ? 0.0 : value);
    return text.data();
  }
  static std::string fixed(double value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f", value);
    return text.data();
  }
  static std::string label(double x, double y, const std::string& anchor,
                           const std::string& words) {
    return "<text x=\"" + fixed(x) + "\" y=\"" + fixed(y) + "\" text-anchor=\"" + anchor + "\">" +
           words + "</text>\n";
  }
  std::string line(const std::string& id, double x1, double y1, double x2, double y2) const {
    return "<line class=\"" + id + "\" stroke=\"#dddddd\" x1=\"" + fixed(x_of(x1)) + "\" y1=\"" +
           fixed(y_of(y1)) + "\" x2=\"" + fixed(x_of(x2)) + "\" y2=\"" + fixed(y_of(y2)) + "\"/>\n";
  }
  std::string series(const Curve& curve, const std::string& color, const std::string& name,
                     int row) const {
    std::string points;
    double peak = 0;
    for (std::size_t i = 0; i < curve.milliseconds.size(); ++i) {
      points += fixed(x_of(curve.milliseconds[i])) + "," + fixed(y_of(curve.mebibytes[i])) + " ";
      peak = std::max(peak, curve.mebibytes[i]);
    }
    const double y = kTop + 6 + 20 * row;
    return "<polyline fill=\"none\" stroke-width=\"1.5\" stroke=\"" + color + "\" points=\"" +
           points + "\"/>\n<rect x=\"560\" y=\"" + fixed(y - 9) +
           "\" width=\"14\" height=\"10\" fill=\"" + color + "\"/>\n" +
           label(582, y, "start", name + ", peak " + fixed(peak) + " MiB");
  }

  Curve plain_, checkpointed_;
  double width_ms_ = 1e-3, height_mib_ = 1e-3;
};

}  // namespace digits
