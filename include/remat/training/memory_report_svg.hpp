// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "remat/memory/timeline.hpp"
#include "remat/training/memory_report.hpp"
#include "remat/training/svg_chart.hpp"
#include "remat/units.hpp"

namespace remat {

/// How a curve of memory is called and coloured, the same in every picture.
struct MemoryCurveStyle {
  std::string name, color;

  /// Returns the style of a step without checkpointing.
  static MemoryCurveStyle plain() { return {"plain", "#c0392b"}; }
  /// Returns the style of a checkpointed step.
  static MemoryCurveStyle checkpointed() { return {"checkpointed", "#2471a3"}; }
};

/// Draws live bytes over the time of a step, one curve per step, with its peak and, on a bar below,
/// its parts.
class MemoryChart {
 public:
  /// @param highest  what the y axis has to show; its unit follows from it
  MemoryChart(std::string title, Bytes highest)
      : unit_(unit_for(highest)),
        chart_(std::move(title), {"milliseconds since the step began"},
               {std::string("live tensors, ") + detail::kByteUnits[unit_]}) {}

  /// Sets a line below the title.
  MemoryChart& set_subtitle(std::string words) {
    chart_.set_subtitle(std::move(words));
    return *this;
  }

  /// Adds a curve, thinned to what a picture shows.
  MemoryChart& add_curve(const std::vector<MemorySample>& samples, const MemoryCurveStyle& style) {
    const auto point_of = [&](const MemorySample& sample) {
      return ChartPoint{1e3 * sample.seconds, in_unit(sample.live)};
    };
    std::vector<ChartPoint> points;
    for (const MemorySample& sample : thinned(samples)) points.push_back(point_of(sample));
    chart_.add(std::move(points),
               {.name = style.name, .color = style.color, .is_stepped = true, .is_filled = true});
    const auto peak = std::ranges::max_element(samples, {}, &MemorySample::live);
    if (peak == samples.end()) return *this;
    ChartPoint marked = point_of(*peak);
    marked.label = style.name + ", peak " + to_string(peak->live);
    chart_.add({std::move(marked)}, {.color = style.color, .has_line = false, .has_markers = true});
    return *this;
  }

  /// Adds a curve, and below the axis a bar of forward, backward and what backward recomputes.
  MemoryChart& add_step(const StepTimeline& timeline, const MemoryCurveStyle& style) {
    std::vector<MemorySample> samples = timeline.samples;
    if (!samples.empty()) samples.push_back({timeline.end_seconds, samples.back().live});
    add_curve(samples, style);
    const double turn = 1e3 * timeline.backward_begin_seconds, end = 1e3 * timeline.end_seconds;
    std::vector<ChartBand> bands = {{{{0, turn}}, {.name = "forward", .color = "#cbd8e1"}},
                                    {{{turn, end}}, {.name = "backward", .color = "#8fa5b3"}}};
    if (!timeline.recomputes.empty())
      bands.push_back({{}, {.name = "recompute in backward", .color = "#f0a030"}});
    for (const RecomputeSpan& span : timeline.recomputes)
      bands.back().spans.push_back({1e3 * span.begin_seconds, 1e3 * span.end_seconds});
    chart_.add_lane(style.name, std::move(bands));
    return *this;
  }

  /// Returns the picture.
  std::string text() const { return chart_.text(); }

 private:
  static std::size_t unit_for(Bytes highest) {
    std::size_t unit = 0;
    for (; highest.count >= 1024 && unit + 1 < detail::kByteUnits.size(); ++unit)
      highest.count /= 1024;
    return unit;
  }
  double in_unit(Bytes bytes) const {
    double value = static_cast<double>(bytes.count);
    for (std::size_t unit = 0; unit < unit_; ++unit) value /= 1024;
    return value;
  }

  std::size_t unit_;
  SvgChart chart_;
};

/// Draws a report as an SVG picture: live bytes over the plain and the checkpointed step, and when
/// each went forward, backward, and recomputed.
inline std::string to_svg(const MemoryReport& report) {
  MemoryChart chart("Memory of one training step, plain and checkpointed",
                    std::max(report.plain.peak, report.checkpointed.peak));
  chart.set_subtitle("saving " + detail::saving_text(report));
  chart.add_step(report.plain_timeline, MemoryCurveStyle::plain());
  chart.add_step(report.checkpointed_timeline, MemoryCurveStyle::checkpointed());
  return chart.text();
}

}  // namespace remat
