// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace remat::detail {

/// Writes a number as SVG wants it: `std::printf` would write a comma where the locale has one.
inline std::string svg_number(double number, std::chars_format format, int precision) {
  std::array<char, 400> text{};  // the largest double has 309 digits
  if (std::abs(number) < 1e-12) number = 0;
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), number, format, precision).ptr;
  return {text.data(), end};
}

/// Writes a place in the picture, in pixels.
inline std::string svg_place(double pixels) {
  return svg_number(pixels, std::chars_format::fixed, 1);
}

/// Makes words part of XML: escapes what has a meaning there and drops what may not be there.
inline std::string svg_escape(std::string_view words) {
  std::string text;
  for (const char c : words) {
    switch (c) {
      case '&':
        text += "&amp;";
        break;
      case '<':
        text += "&lt;";
        break;
      case '>':
        text += "&gt;";
        break;
      case '"':
        text += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) >= 0x20) text += c;
    }
  }
  return text;
}

/// Returns about how wide words are; a picture does not know the fonts of who looks at it.
inline double svg_width(std::string_view words, double font_size) {
  const auto is_start = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return 0.6 * font_size * static_cast<double>(std::ranges::count_if(words, is_start));
}

/// Where the words of a label lie about the place they are written at.
enum class SvgAnchor { start, middle, end };

struct SvgTextStyle {
  double font_size = 12;
  const char* color = "#444444";
  bool is_bold = false;
  bool is_rotated = false;  ///< reads upwards
};

inline std::string svg_text(double x, double y, SvgAnchor anchor, std::string_view words,
                            const SvgTextStyle& style = {}) {
  constexpr std::array<const char*, 3> kAnchors = {"start", "middle", "end"};
  std::string text = "<text x=\"" + svg_place(x) + "\" y=\"" + svg_place(y) + "\" text-anchor=\"" +
                     kAnchors[static_cast<std::size_t>(anchor)] + "\" font-size=\"" +
                     svg_place(style.font_size) + "\" fill=\"" + style.color + "\"";
  if (style.is_bold) text += " font-weight=\"bold\"";
  if (style.is_rotated)
    text += " transform=\"rotate(-90 " + svg_place(x) + " " + svg_place(y) + ")\"";
  return text + ">" + svg_escape(words) + "</text>\n";
}

inline std::string svg_line(double x1, double y1, double x2, double y2, std::string_view color) {
  return "<line x1=\"" + svg_place(x1) + "\" y1=\"" + svg_place(y1) + "\" x2=\"" + svg_place(x2) +
         "\" y2=\"" + svg_place(y2) + "\" stroke=\"" + std::string(color) + "\"/>\n";
}

inline std::string svg_box(double x, double y, double width, double height, std::string_view color,
                           double opacity = 1) {
  std::string text = "<rect x=\"" + svg_place(x) + "\" y=\"" + svg_place(y) + "\" width=\"" +
                     svg_place(width) + "\" height=\"" + svg_place(height) + "\" fill=\"" +
                     svg_escape(color) + "\"";
  if (opacity < 1)
    text += " fill-opacity=\"" + svg_number(opacity, std::chars_format::fixed, 2) + "\"";
  return text + "/>\n";
}

/// Maps values to pixels along one axis.
struct SvgScale {
  double low, high;  // values at the ends; low < high
  double low_pixel, high_pixel;

  double operator()(double value) const {
    return low_pixel + (value - low) / (high - low) * (high_pixel - low_pixel);
  }

  /// Returns the round values between the ends, at most `count` + 1 of them.
  std::vector<double> ticks(double count) const {
    const double rough = (high - low) / count;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    double distance = 10 * power;
    for (const double factor : {5.0, 2.0, 1.0})
      if (factor * power >= rough) distance = factor * power;
    std::vector<double> values;
    const double first = std::ceil(low / distance - 1e-9);
    for (double index = first; index * distance <= high + 1e-9 * distance; ++index)
      values.push_back(index * distance);
    return values;
  }
};

}  // namespace remat::detail
