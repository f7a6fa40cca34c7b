// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "remat/training/svg_elements.hpp"

namespace remat {

/// An axis of a chart.
struct ChartAxis {
  std::string title;           ///< with the unit: "milliseconds since the step began"
  bool starts_at_zero = true;  ///< shows zero even if no point is near it
};

/// A point of a chart, in the units of the axes.
struct ChartPoint {
  double x = 0, y = 0;
  std::string label{};  ///< written beside the point; empty: none
};

/// A part of the x axis.
struct ChartSpan {
  double from = 0, to = 0;
};

/// Says how something in a chart looks.
struct ChartStyle {
  std::string name{};             ///< in the legend, once per name; empty: not there
  std::string color = "#2471a3";  ///< as SVG has it
  bool has_line = true;           ///< joins the points in their order
  bool is_stepped = false;        ///< a value holds until the next point
  bool is_dashed = false;         ///< for the line
  bool is_filled = false;         ///< shades the area down to zero
  bool has_markers = false;       ///< a dot at each point
};

/// Parts of the x axis that look alike.
struct ChartBand {
  std::vector<ChartSpan> spans;
  ChartStyle style{};
};

/// Draws curves, points and spans over two axes as an SVG picture.
///
/// ```cpp
/// remat::SvgChart chart("Memory against time", {"step time, ratio", false}, {"peak, MiB"});
/// chart.add({{1.0, 812, "keep all"}, {1.2, 420, "4 segments"}},
///           {.name = "segments", .has_markers = true});
/// file << chart.text();
/// ```
/// What is added later is drawn on top. Points that are not finite are left out. The picture needs
/// no font, script or style sheet.
class SvgChart {
 public:
  SvgChart(std::string title, ChartAxis x_axis, ChartAxis y_axis)
      : title_(std::move(title)), x_axis_(std::move(x_axis)), y_axis_(std::move(y_axis)) {}

  /// Sets a line below the title.
  SvgChart& set_subtitle(std::string words) {
    subtitle_ = std::move(words);
    return *this;
  }

  /// Adds a curve, an area or points, as the style says.
  SvgChart& add(std::vector<ChartPoint> points, ChartStyle style) {
    std::erase_if(points, [](const ChartPoint& point) {
      return !std::isfinite(point.x) || !std::isfinite(point.y);
    });
    series_.push_back({std::move(points), std::move(style)});
    return *this;
  }

  /// Shades parts of the x axis over the whole height, behind the curves.
  SvgChart& shade(ChartBand band) {
    shades_.push_back(std::move(band));
    return *this;
  }

  /// Adds a bar below the x axis, where spans are marked beside a name.
  SvgChart& add_lane(std::string name, std::vector<ChartBand> bands) {
    lanes_.push_back({std::move(name), std::move(bands)});
    return *this;
  }

  /// Returns the picture.
  std::string text() const {
    const Frame frame = this->frame();
    std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " +
                      detail::svg_place(kWidth) + " " + detail::svg_place(frame.height) +
                      "\" font-family=\"Helvetica, Arial, sans-serif\" role=\"img\">\n<title>" +
                      detail::svg_escape(title_) + "</title>\n" +
                      detail::svg_box(0, 0, kWidth, frame.height, "white") +
                      detail::svg_text(kMargin, 30, Anchor::start, title_, {17, "#222222", true});
    if (!subtitle_.empty())
      svg += detail::svg_text(kMargin, 50, Anchor::start, subtitle_, {12.5, "#666666"});
    svg += draw_legend(frame) + draw_grid(frame);
    for (const Series& series : series_) svg += draw_area(series, frame);
    for (const Series& series : series_) svg += draw_line(series, frame);
    return svg + draw_labels(frame) + draw_lanes(frame) + "</svg>\n";
  }

 private:
  using Anchor = detail::SvgAnchor;
  static constexpr double kWidth = 860, kMargin = 24, kRight = kWidth - 28;
  static constexpr double kPlotHeight = 330, kLegendLine = 20, kLaneHeight = 16, kLaneStep = 22;
  static constexpr const char* kGrid = "#e4e4e4";

  struct Series {
    std::vector<ChartPoint> points;
    ChartStyle style;
  };
  struct Lane {
    std::string name;
    std::vector<ChartBand> bands;
  };
  struct LegendEntry {
    const ChartStyle* style;
    double band_opacity;  // 0: no band
    double x, y;
  };
  struct Frame {
    detail::SvgScale x, y;
    std::vector<LegendEntry> legend;
    double height;
  };
  struct Box {
    double left, top, right, bottom;
  };

  // --- layout ---

  Frame frame() const {
    Range x, y;
    for (const Series& series : series_)
      for (const ChartPoint& point : series.points) x.include(point.x), y.include(point.y);
    for (const Lane& lane : lanes_)
      for (const ChartBand& band : lane.bands)
        for (const ChartSpan& span : band.spans) x.include(span.from), x.include(span.to);
    x.finish(x_axis_), y.finish(y_axis_);
    y.high += 0.08 * (y.high - y.low);

    std::vector<LegendEntry> legend = place_legend(subtitle_.empty() ? 56 : 74);
    const double top = (legend.empty() ? (subtitle_.empty() ? 26 : 44) : legend.back().y) + 22;
    const double bottom = top + kPlotHeight;
    const double lanes = static_cast<double>(lanes_.size()) * kLaneStep;
    double left = 84;
    for (const Lane& lane : lanes_)
      left = std::max(left, kMargin + 8 + detail::svg_width(lane.name, 12));
    return {{x.low, x.high, left, kRight},
            {y.low, y.high, bottom, top},
            std::move(legend),
            bottom + 56 + (lanes_.empty() ? 0 : lanes + 6)};
  }

  struct Range {
    double low = 0, high = 0;
    bool is_empty = true;

    void include(double value) {
      low = is_empty ? value : std::min(low, value);
      high = is_empty ? value : std::max(high, value);
      is_empty = false;
    }
    void finish(const ChartAxis& axis) {
      if (axis.starts_at_zero) include(0);
      if (!(high > low)) high = low + 1;
      const double edge = axis.starts_at_zero ? 0 : 0.05 * (high - low);
      low -= edge, high += edge;
    }
  };

  std::vector<LegendEntry> place_legend(double y) const {
    std::vector<LegendEntry> entries;
    double x = kMargin;
    const auto place = [&](const ChartStyle& style, double band_opacity) {
      const auto has_name = [&](const LegendEntry& entry) {
        return entry.style->name == style.name;
      };
      if (style.name.empty() || std::ranges::any_of(entries, has_name)) return;
      const double width = 26 + detail::svg_width(style.name, 12) + 18;
      if (x + width > kRight && x > kMargin) x = kMargin, y += kLegendLine;
      entries.push_back({&style, band_opacity, x, y});
      x += width;
    };
    for (const Series& series : series_) place(series.style, 0);
    for (const ChartBand& band : shades_) place(band.style, kShadeOpacity);
    for (const Lane& lane : lanes_)
      for (const ChartBand& band : lane.bands) place(band.style, 1);
    return entries;
  }

  // --- drawing ---

  static std::string draw_legend(const Frame& frame) {
    std::string svg;
    for (const LegendEntry& entry : frame.legend) {
      const ChartStyle& style = *entry.style;
      const bool is_band = entry.band_opacity > 0;
      if (is_band)
        svg += detail::svg_box(entry.x, entry.y - 10, 18, 11, style.color, entry.band_opacity);
      else if (style.has_line)
        svg += stroke("M" + place(entry.x, entry.y - 4) + "h18", style);
      if (!is_band && style.has_markers) svg += dot(entry.x + 9, entry.y - 4, style);
      svg += detail::svg_text(entry.x + 25, entry.y, Anchor::start, style.name);
    }
    return svg;
  }

  std::string draw_grid(const Frame& frame) const {
    const double bottom = frame.y.low_pixel, top = frame.y.high_pixel, left = frame.x.low_pixel;
    const auto number = [](double value) {
      return detail::svg_number(value, std::chars_format::general, 6);
    };
    std::string svg;
    for (const ChartBand& band : shades_)
      svg += draw_band(band, frame, top, bottom - top, kShadeOpacity);
    for (const double value : frame.y.ticks(7)) {
      svg += detail::svg_line(left, frame.y(value), kRight, frame.y(value), kGrid);
      svg += detail::svg_text(left - 8, frame.y(value) + 4, Anchor::end, number(value));
    }
    svg += detail::svg_line(left, bottom, kRight, bottom, "#888888");
    for (const double value : frame.x.ticks(9)) {
      svg += detail::svg_line(frame.x(value), bottom, frame.x(value), bottom + 5, "#888888");
      svg += detail::svg_text(frame.x(value), bottom + 19, Anchor::middle, number(value));
    }
    return svg + detail::svg_text((left + kRight) / 2, bottom + 40, Anchor::middle, x_axis_.title) +
           detail::svg_text(kMargin, (top + bottom) / 2, Anchor::middle, y_axis_.title,
                            {.is_rotated = true});
  }

  static std::string draw_area(const Series& series, const Frame& frame) {
    if (!series.style.is_filled || series.points.empty()) return "";
    const double base = frame.y(std::clamp(0.0, frame.y.low, frame.y.high));
    return "<path fill=\"" + detail::svg_escape(series.style.color) +
           "\" fill-opacity=\"0.12\" d=\"" + path(series, frame) + "L" +
           place(frame.x(series.points.back().x), base) + "L" +
           place(frame.x(series.points.front().x), base) + "Z\"/>\n";
  }

  static std::string draw_line(const Series& series, const Frame& frame) {
    std::string svg;
    if (series.style.has_line && !series.points.empty())
      svg += stroke(path(series, frame), series.style);
    if (series.style.has_markers)
      for (const ChartPoint& point : series.points)
        svg += dot(frame.x(point.x), frame.y(point.y), series.style);
    return svg;
  }

  /// Puts each label on the first side of its point where it covers no other label.
  std::string draw_labels(const Frame& frame) const {
    std::string svg;
    std::vector<Box> taken;
    for (const Series& series : series_)
      for (const ChartPoint& point : series.points) {
        if (point.label.empty()) continue;
        const Box box = place_label(point, frame, taken);
        taken.push_back(box);
        // Where a curve passes behind them, words stay readable.
        svg += detail::svg_box(box.left - 1, box.top + 1, box.right - box.left + 2,
                               box.bottom - box.top - 1, "white", 0.75);
        svg +=
            detail::svg_text(box.left, box.bottom - 3, Anchor::start, point.label, {12, "#222222"});
      }
    return svg;
  }

  static Box place_label(const ChartPoint& point, const Frame& frame,
                         const std::vector<Box>& taken) {
    const double width = detail::svg_width(point.label, 12), height = 15;
    const double x = frame.x(point.x), y = frame.y(point.y);
    std::vector<Box> sides;
    for (const double top : {y - height - 3, y + 4, y - height / 2})
      for (const double left : {x + 7, x - 7 - width})
        sides.push_back({left, top, left + width, top + height});
    const auto is_free = [&](const Box& side) {
      return side.left > frame.x.low_pixel && side.right < kRight &&
             side.top > frame.y.high_pixel - 8 && side.bottom < frame.y.low_pixel &&
             std::ranges::none_of(
                 taken,
                 [&](const Box& other) {
                   return side.left < other.right && other.left < side.right &&
                          side.top < other.bottom && other.top < side.bottom;
                 });
    };
    const auto found = std::ranges::find_if(sides, is_free);
    return found == sides.end() ? sides.front() : *found;
  }

  std::string draw_lanes(const Frame& frame) const {
    std::string svg;
    double top = frame.y.low_pixel + 54;
    for (const Lane& lane : lanes_) {
      for (const ChartBand& band : lane.bands) svg += draw_band(band, frame, top, kLaneHeight, 1);
      svg += detail::svg_text(frame.x.low_pixel - 8, top + 12, Anchor::end, lane.name);
      top += kLaneStep;
    }
    return svg;
  }

  /// Draws spans; those without a visible gap between them become one.
  static std::string draw_band(const ChartBand& band, const Frame& frame, double top, double height,
                               double opacity) {
    std::vector<ChartSpan> spans = band.spans;
    std::ranges::sort(spans, {}, &ChartSpan::from);
    std::string svg;
    for (std::size_t first = 0; first < spans.size();) {
      const double left = frame.x(spans[first].from);
      double right = left + 1;
      for (; first < spans.size() && frame.x(spans[first].from) < right + 0.5; ++first)
        right = std::max(right, frame.x(spans[first].to));
      svg += detail::svg_box(left, top, right - left, height, band.style.color, opacity);
    }
    return svg;
  }

  static std::string place(double x, double y) {
    return detail::svg_place(x) + " " + detail::svg_place(y);
  }

  static std::string path(const Series& series, const Frame& frame) {
    std::string d = "M";
    for (std::size_t i = 0; i < series.points.size(); ++i) {
      const double x = frame.x(series.points[i].x), y = frame.y(series.points[i].y);
      if (i == 0)
        d += place(x, y);
      else if (series.style.is_stepped)
        d += "H" + detail::svg_place(x) + "V" + detail::svg_place(y);
      else
        d += "L" + place(x, y);
    }
    return d;
  }

  static std::string stroke(const std::string& d, const ChartStyle& style) {
    return "<path fill=\"none\" stroke-width=\"1.6\" stroke-linejoin=\"round\" stroke=\"" +
           detail::svg_escape(style.color) + "\"" +
           (style.is_dashed ? " stroke-dasharray=\"5 4\"" : "") + " d=\"" + d + "\"/>\n";
  }

  static std::string dot(double x, double y, const ChartStyle& style) {
    return "<circle cx=\"" + detail::svg_place(x) + "\" cy=\"" + detail::svg_place(y) +
           "\" r=\"3.5\" fill=\"" + detail::svg_escape(style.color) + "\" stroke=\"white\"/>\n";
  }

  static constexpr double kShadeOpacity = 0.25;

  std::string title_, subtitle_;
  ChartAxis x_axis_, y_axis_;
  std::vector<Series> series_;
  std::vector<ChartBand> shades_;
  std::vector<Lane> lanes_;
};

}  // namespace remat
