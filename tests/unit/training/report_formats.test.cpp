// SPDX-License-Identifier: MIT
#include "remat/training/compare_memory.hpp"
#include "remat/training/memory_report_json.hpp"
#include "remat/training/memory_report_svg.hpp"
#include "remat/training/svg_chart.hpp"

#include "tests/unit/nn/tiny_modules.hpp"

#include <algorithm>
#include <clocale>
#include <cstddef>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace report_formats_test {

using Chain = remat::Checkpointed<remat::Sequential>;

remat::MemoryReport measured_report() {
  torch::manual_seed(1);
  Chain chain;
  for (int index = 0; index < 6; ++index) chain->push_back(tiny::Block(64));
  return remat::compare_memory(chain, torch::randn({256, 64}),
                               [](const torch::Tensor& y) { return (y * y).sum(); },
                               {.segments = 3, .timed_pairs = 1});
}

/// Round numbers, and a name that XML and JSON have to escape.
remat::MemoryReport made_up_report() {
  remat::MemoryReport report{{{4 << 20}, {3 << 20}}, {{1 << 20}, {512 << 10}}, 3, 42, 1.25};
  report.units = {{"layer1.0", {{2 << 20}, {1 << 20}}, {{2 << 20}, {-512}}},
                  {"remat::Checkpointed<\"Net\">", {{64}, {0}}, {{64}, {0}}}};
  return report;
}

/// Returns what is wrong with a text as XML, of the kind that these pictures are; empty if nothing.
class XmlCheck {
 public:
  static std::string fault_of(std::string_view xml) {
    XmlCheck check{xml};
    while (check.fault_.empty() && !check.rest_.empty()) check.step();
    if (check.fault_.empty() && !check.open_.empty()) return "not closed: " + check.open_.back();
    return check.fault_;
  }

 private:
  explicit XmlCheck(std::string_view xml) : rest_(xml) {}

  void step() {
    const std::size_t tag = std::min(rest_.find('<'), rest_.size());
    check_words(rest_.substr(0, tag));
    rest_.remove_prefix(tag);
    if (rest_.empty()) return;
    const std::size_t end = rest_.find('>');
    if (end == std::string_view::npos) return fail("a tag without an end");
    take_tag(rest_.substr(1, end - 1));
    rest_.remove_prefix(end + 1);
    if (open_.empty() && rest_.find('<') != std::string_view::npos) fail("two roots");
  }

  void check_words(std::string_view words) {
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::string_view from_here = words.substr(i);
      const auto begins = [&](std::string_view entity) { return from_here.starts_with(entity); };
      if (words[i] == '>' || (static_cast<unsigned char>(words[i]) < 0x20 && words[i] != '\n'))
        fail("a character that has to be escaped");
      if (words[i] == '&' && !begins("&amp;") && !begins("&lt;") && !begins("&gt;") &&
          !begins("&quot;"))
        fail("an unknown entity");
    }
  }

  void take_tag(std::string_view tag) {
    if (tag.starts_with('/')) {
      if (open_.empty() || open_.back() != tag.substr(1)) return fail("closes another tag");
      return open_.pop_back();
    }
    const bool is_empty = tag.ends_with('/');
    if (is_empty) tag.remove_suffix(1);
    const std::size_t name = std::min(tag.find(' '), tag.size());
    if (!is_empty) open_.emplace_back(tag.substr(0, name));
    std::vector<std::string> seen;
    for (tag.remove_prefix(name); !tag.empty();) {
      const std::size_t equals = tag.find("=\"");
      const std::size_t end = equals == std::string_view::npos ? equals : tag.find('"', equals + 2);
      if (tag[0] != ' ' || end == std::string_view::npos) return fail("a broken attribute");
      const std::string attribute(tag.substr(1, equals - 1));
      if (std::ranges::count(seen, attribute) > 0) return fail(attribute + " twice");
      seen.push_back(attribute);
      check_words(tag.substr(equals + 2, end - equals - 2));
      tag.remove_prefix(end + 1);
    }
  }

  void fail(const std::string& fault) { fault_ = fault; }

  std::string_view rest_;
  std::vector<std::string> open_;
  std::string fault_;
};

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

TEST_CASE("a report with units reads as three lines and a table") {
  const std::string expected =
      "plain:        peak 4.0 MiB, kept for backward 3.0 MiB\n"
      "checkpointed: peak 1.0 MiB, kept for backward 512.0 KiB\n"
      "saving:       3.0 MiB (75.0 % of the peak); 42 operations recomputed; time x1.25\n"
      "\n"
      "forward, by unit                                 plain                checkpointed\n"
      "                                    kept          peak          kept          peak\n"
      "layer1.0                         1.0 MiB       2.0 MiB        -512 B       2.0 MiB\n"
      "remat::Checkpointed<\"Net\">           0 B          64 B           0 B          64 B";

  CHECK(remat::to_string(made_up_report()) == expected);
  std::ostringstream text;
  text << made_up_report();
  CHECK(text.str() == expected);
}

TEST_CASE("a report's picture is well-formed XML, with both curves and all parts of a step") {
  const remat::MemoryReport report = measured_report();

  const std::string svg = remat::to_svg(report);

  CHECK(XmlCheck::fault_of(svg) == "");
  CHECK(XmlCheck::fault_of(svg + "<g>") != "");
  for (const char* words :
       {"plain, peak ", "checkpointed, peak ", ">forward<", ">backward<", ">recompute in backward<",
        ">milliseconds since the step began<", ">live tensors, "})
    CHECK(svg.find(words) != std::string::npos);
  CHECK(svg.find("plain, peak " + remat::to_string(report.plain.peak)) != std::string::npos);
}

TEST_CASE("a picture of an empty report, and one of what is not finite, is well-formed") {
  CHECK(XmlCheck::fault_of(remat::to_svg(remat::MemoryReport{})) == "");

  remat::SvgChart chart("a < b & \"c\" > d\x01", {"x", false}, {"y", false});
  chart.set_subtitle("<&>");
  chart.add({{1, 2, "<one>"}, {NAN, 1}, {2, INFINITY}, {1, 2}},
            {.name = "<series>", .color = "\"red\"", .is_filled = true, .has_markers = true});
  chart.add({}, {.name = "none", .is_filled = true});
  chart.shade({{{3, 4}}, {.name = "&shade"}});
  chart.add_lane("<lane>", {{{{0, 1}}, {.name = "&part"}}});
  const std::string svg = chart.text();
  CHECK(XmlCheck::fault_of(svg) == "");
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(svg.find("inf") == std::string::npos);
}

TEST_CASE("spans without a visible gap are drawn as one, and others apart") {
  const auto boxes = [](std::vector<remat::ChartSpan> spans) {
    remat::SvgChart chart("", {"x"}, {"y"});
    chart.add({{0, 0}, {1000, 1}}, {});
    chart.add_lane("", {{std::move(spans), {.color = "#123456"}}});
    return count_of(chart.text(), "#123456");
  };
  CHECK(boxes({{0, 1}, {500, 501}}) == 2);
  CHECK(boxes({{500, 500.1}, {0, 0.1}, {0.2, 0.3}, {0.4, 0.5}}) == 2);
}

TEST_CASE("labels of neighbouring points do not cover each other") {
  remat::SvgChart chart("", {"x"}, {"y"});
  chart.add({{0, 0}, {50, 50, "first"}, {50.1, 50.1, "second"}, {100, 100}}, {.has_markers = true});
  const std::string svg = chart.text();
  const auto place_of = [&](const std::string& label, const std::string& axis) {
    const std::size_t text = svg.rfind(" " + axis + "=\"", svg.find(label));
    return std::stod(svg.substr(text + 4));
  };
  const bool are_on_two_lines =
      std::abs(place_of(">first<", "y") - place_of(">second<", "y")) >= 12;
  const bool are_side_by_side = place_of(">second<", "x") + 40 <= place_of(">first<", "x");
  CHECK((are_on_two_lines || are_side_by_side));
}

TEST_CASE("a report's JSON parses back to the same numbers") {
  const remat::MemoryReport report = measured_report();

  const auto json = nlohmann::json::parse(remat::to_json(report).dump());

  CHECK(json.at("saving_bytes") == report.saving().count);
  CHECK(json.at("saved_part") == report.saved_part());
  CHECK(json.at("regions") == report.regions);
  CHECK(json.at("recomputed_operations") == report.recomputed_operations);
  CHECK(json.at("time_ratio") == *report.time_ratio);
  const auto check_step = [](const nlohmann::json& step, const remat::StepMemory& memory,
                             const remat::StepTimeline& timeline) {
    CHECK(step.at("peak_bytes") == memory.peak.count);
    CHECK(step.at("kept_bytes") == memory.kept.count);
    const auto& course = step.at("timeline");
    CHECK(course.at("backward_begin_seconds") == timeline.backward_begin_seconds);
    CHECK(course.at("end_seconds") == timeline.end_seconds);
    CHECK(course.at("seconds").size() == course.at("live_bytes").size());
    CHECK(course.at("seconds").size() <= 802);
    CHECK(std::ranges::max(course.at("live_bytes").get<std::vector<std::int64_t>>()) ==
          memory.peak.count);
    REQUIRE(course.at("recomputes").size() == timeline.recomputes.size());
    for (std::size_t i = 0; i < timeline.recomputes.size(); ++i) {
      CHECK(course["recomputes"][i].at("begin_seconds") == timeline.recomputes[i].begin_seconds);
      CHECK(course["recomputes"][i].at("operations") == timeline.recomputes[i].operation_count);
    }
  };
  check_step(json.at("plain"), report.plain, report.plain_timeline);
  check_step(json.at("checkpointed"), report.checkpointed, report.checkpointed_timeline);
  REQUIRE(json.at("units").size() == 6);
  for (std::size_t i = 0; i < 6; ++i) {
    const auto& unit = json["units"][i];
    CHECK(unit.at("name") == report.units[i].name);
    CHECK(unit.at("plain").at("peak_bytes") == report.units[i].plain.peak.count);
    CHECK(unit.at("checkpointed").at("kept_bytes") == report.units[i].checkpointed.kept.count);
  }
}

TEST_CASE("in JSON a time that was not measured is null, and names are escaped") {
  remat::MemoryReport report = made_up_report();
  report.time_ratio.reset();

  const auto json = nlohmann::json::parse(remat::to_json(report).dump());

  CHECK(json.at("time_ratio").is_null());
  CHECK(json.at("units")[1].at("name") == "remat::Checkpointed<\"Net\">");
}

}  // namespace report_formats_test
