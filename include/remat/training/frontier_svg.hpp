// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "remat/plan/frontier.hpp"
#include "remat/training/svg_chart.hpp"
#include "remat/training/svg_elements.hpp"
#include "remat/units.hpp"

namespace remat {

namespace detail {

/// Finds places for the labels of a chart's points, where they cover neither a curve, nor a point,
/// nor each other. Works in pixels to the right and upwards.
class LabelPlaces {
 public:
  /// @param curve  stepped, in the units of the axes, which begin at zero
  LabelPlaces(const std::vector<ChartPoint>& curve, const std::vector<ChartPoint>& points) {
    double x_most = 0, y_most = 0;
    for (const auto* list : {&curve, &points})
      for (const ChartPoint& point : *list)
        x_most = std::max(x_most, point.x), y_most = std::max(y_most, point.y);
    if (x_most > 0) x_scale_ = kWidth / x_most;
    if (y_most > 0) y_scale_ = kHeight / (kHeadroom * y_most);
    for (const ChartPoint& point : points) {
      const double x = x_scale_ * point.x, y = y_scale_ * point.y;
      taken_.push_back({x - kDot, y - kDot, x + kDot, y + kDot});
    }
    for (std::size_t i = 1; i < curve.size(); ++i) {
      const double from = x_scale_ * curve[i - 1].x, to = x_scale_ * curve[i].x;
      const double before = y_scale_ * curve[i - 1].y, after = y_scale_ * curve[i].y;
      taken_.push_back({from, before, to, before});
      taken_.push_back({to, std::min(before, after), to, std::max(before, after)});
    }
  }

  /// Returns the point with its label alone, moved so that `SvgChart` writes it in a free place: it
  /// writes to the right and above.
  ChartPoint place(const ChartPoint& point) {
    const double width = svg_width(point.label, kFontSize);
    const double x = x_scale_ * point.x, y = y_scale_ * point.y;
    for (const double bottom : {3.0, -7.5, -19.0, 17.0, 31.0, 45.0, 59.0, 73.0})
      for (const double left : {x + kGap, x - kGap - width}) {
        const Box box{left, y + bottom, left + width, y + bottom + kLineHeight};
        if (!is_free(box)) continue;
        taken_.push_back(box);
        return {(left - kGap) / x_scale_, (y + bottom - 3) / y_scale_, point.label};
      }
    return point;
  }

 private:
  struct Box {
    double left, bottom, right, top;
  };
  static constexpr double kWidth = 748, kHeight = 330, kHeadroom = 1.08;  // as `SvgChart` has them
  static constexpr double kFontSize = 12, kLineHeight = 15, kGap = 7, kDot = 4, kClear = 2;

  bool is_free(const Box& box) const {
    // Inside of the axes, and by a point that does not widen them.
    if (box.left < kGap || box.right > kWidth - 2 || box.bottom < 3 ||
        box.bottom - 3 > kHeight / kHeadroom)
      return false;
    return std::ranges::none_of(taken_, [&](const Box& other) {
      return box.left - kClear < other.right && other.left < box.right + kClear &&
             box.bottom - kClear < other.top && other.bottom < box.top + kClear;
    });
  }

  double x_scale_ = 1, y_scale_ = 1;
  std::vector<Box> taken_;
};

}  // namespace detail

/// Draws the frontier as an SVG picture: memory to the right, extra time upwards; the curve of what
/// budgets get, and the schedules that people compare with, with their names.
///
/// Budgets for which more than all of forward runs again, and more than with any of the schedules,
/// are outside of the picture.
inline std::string to_svg(const Frontier& frontier) {
  const auto place = [](const FrontierPoint& point, const std::string& name) {
    return ChartPoint{100 * point.fraction_of_plain, 100 * point.share_of_forward,
                      name.empty() ? name : name + ": " + to_string(point.peak)};
  };
  double most = 1;  // of forward
  for (const FrontierPoint& point : frontier.points)
    if (point.is_common) most = std::max(most, point.share_of_forward);

  std::vector<ChartPoint> curve, schedules, plain, names;
  for (const FrontierPoint& point : frontier.points) {
    const bool is_plain = point.kind == FrontierPoint::Kind::plain;
    if (point.kind != FrontierPoint::Kind::segments && point.share_of_forward <= most)
      curve.push_back(place(point, ""));
    if (is_plain) plain.push_back(place(point, ""));
    if (point.is_common) schedules.push_back(place(point, ""));
    if (is_plain || point.is_common) names.push_back(place(point, point.name));
  }
  std::ranges::reverse(curve);
  const bool is_least_shown = curve.size() > 1 && frontier.points.back().share_of_forward <= most;
  // First of all, since it has little room.
  if (is_least_shown) names.insert(names.begin(), place(frontier.points.back(), "least"));
  std::vector<ChartPoint> dots = schedules;
  dots.insert(dots.end(), plain.begin(), plain.end());
  detail::LabelPlaces places(curve, dots);
  for (ChartPoint& name : names) name = places.place(name);

  SvgChart chart("Memory against time of a training step",
                 {"peak of a step, % of the plain step's"},
                 {"operations that run again, % of forward's time"});
  chart.set_subtitle(
      "Predicted from one traced step" +
      (is_least_shown || curve.size() < 2
           ? std::string()
           : "; the least, outside of the picture, is " + to_string(frontier.points.back().peak)));
  chart.add(std::move(curve), {.name = "plans for memory budgets", .is_stepped = true});
  const auto style = [](const char* name, const char* color) {
    return ChartStyle{.name = name, .color = color, .has_line = false, .has_markers = true};
  };
  chart.add(std::move(schedules), style("schedules by segments", "#c0392b"));
  chart.add(std::move(plain), style("no checkpointing", "#222222"));
  chart.add(std::move(names), {.has_line = false});
  return chart.text();
}

}  // namespace remat
