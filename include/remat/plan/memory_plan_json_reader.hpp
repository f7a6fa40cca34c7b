// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "remat/errors.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan_fingerprint.hpp"
#include "remat/units.hpp"

namespace remat::detail {

inline constexpr const char* kPlanFormat = "remat.memory_plan";
inline constexpr std::int64_t kPlanVersion = 1;
inline constexpr std::size_t kLargestPlanFile = std::size_t{64} << 20;  // 700 000 operations

/// Understands the JSON of a plan, and refuses what `to_json` does not write.
class PlanReader {
 public:
  using Json = nlohmann::json;

  /// @param source  what messages call the text
  explicit PlanReader(std::string source) : source_(std::move(source)) {}

  MemoryPlan read(std::string_view text) const {
    const Json json = parse(text);
    check_kind(json);
    check_keys(json, "",
               {"format", "version", "fingerprint", "checksum", "budget_bytes", "peak_bytes",
                "plain_peak_bytes", "recomputed_seconds", "forward_seconds", "recomputed_count",
                "saved_count", "operations"});
    MemoryPlan plan;
    plan.budget = Bytes{count(json, "", "budget_bytes")};
    plan.peak = Bytes{count(json, "", "peak_bytes")};
    plan.plain_peak = Bytes{count(json, "", "plain_peak_bytes")};
    plan.recomputed_seconds = seconds(json, "recomputed_seconds");
    plan.forward_seconds = seconds(json, "forward_seconds");
    plan.recomputed_count = count(json, "", "recomputed_count");
    plan.saved_count = count(json, "", "saved_count");
    read_operations(member(json, "", "operations", &Json::is_array, "a list"), plan);
    check_print(json, "fingerprint", fingerprint(plan), "operations");
    check_print(json, "checksum", checksum(plan), "contents");
    return plan;
  }

 private:
  using IsType = bool (Json::*)() const noexcept;

  [[noreturn]] void refuse(std::string_view code, const std::string& what,
                           std::string_view cure) const {
    throw PlanError(ErrorMessage(code).where("\"" + source_ + "\"").what(what).cure(cure));
  }
  [[noreturn]] void damaged(const std::string& what) const {
    refuse("remat.plan_file.damaged", what + ": the file is damaged, edited, or no memory plan",
           "Save the plan again, or make it anew");
  }

  Json parse(std::string_view text) const {
    try {
      return Json::parse(text);
    } catch (const Json::parse_error& error) {
      damaged("it is no JSON from its byte " + std::to_string(error.byte) + " of " +
              std::to_string(text.size()) + " on");
    } catch (const Json::exception&) {
      damaged("it has a number that is too large");
    }
  }

  void check_kind(const Json& json) const {
    if (!json.is_object()) damaged("it is no JSON object");
    if (text(json, "", "format") != kPlanFormat)
      damaged("its \"format\" is \"" + text(json, "", "format") + "\", \"" + kPlanFormat +
              "\" was expected");
    const std::int64_t version = count(json, "", "version");
    if (version != kPlanVersion)
      refuse("remat.plan_file.version",
             "its \"version\" is " + std::to_string(version) + ", and this remat reads version " +
                 std::to_string(kPlanVersion),
             "Make the plan anew, or read it with the remat that wrote it");
  }

  /// Nothing is ignored in silence.
  void check_keys(const Json& object, const std::string& place,
                  std::initializer_list<std::string_view> known) const {
    for (const auto& item : object.items())
      if (std::find(known.begin(), known.end(), item.key()) == known.end())
        damaged("it has a key that there is not, \"" + place + shortened(item.key()) + "\"");
  }

  static std::string shortened(const std::string& text) {
    constexpr std::size_t kLongest = 60;
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
  }
  static std::string text_of(const Json& value) {
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    return shortened(value.dump());
  }

  void check_print(const Json& json, const char* key, const std::string& expected,
                   const char* of) const {
    if (const std::string& given = text(json, "", key); given != expected)
      damaged("its \"" + std::string(key) + "\" is \"" + shortened(given) + "\", and its " + of +
              " make it \"" + expected + "\"");
  }

  const Json& member(const Json& object, const std::string& place, const char* key, IsType is_type,
                     const char* expected) const {
    const auto found = object.find(key);
    if (found == object.end()) damaged("its \"" + place + key + "\" is missing");
    if (!((*found).*is_type)())
      damaged("its \"" + place + key + "\" is " + text_of(*found) + ", " + expected +
              " was expected");
    return *found;
  }

  const std::string& text(const Json& object, const std::string& place, const char* key) const {
    return member(object, place, key, &Json::is_string, "a text").get_ref<const std::string&>();
  }

  std::int64_t count(const Json& object, const std::string& place, const char* key) const {
    const Json& number =
        member(object, place, key, &Json::is_number_integer, "a whole number of at least 0");
    const bool is_unsigned = number.is_number_unsigned();
    constexpr auto kMost = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (is_unsigned ? number.get<std::uint64_t>() > kMost : number.get<std::int64_t>() < 0)
      damaged("its \"" + place + key + "\" is " + number.dump() +
              ", a whole number of at least 0 and below 2^63 was expected");
    return number.get<std::int64_t>();
  }

  bool flag(const Json& object, const std::string& place, const char* key) const {
    return member(object, place, key, &Json::is_boolean, "true or false").get<bool>();
  }

  double seconds(const Json& object, const char* key) const {
    const auto number = member(object, "", key, &Json::is_number, "a number").get<double>();
    if (!std::isfinite(number) || number < 0)
      damaged("its \"" + std::string(key) + "\" is " + std::to_string(number) +
              ", a number of at least 0 was expected");
    return number;
  }

  void read_operations(const Json& operations, MemoryPlan& plan) const {
    std::int64_t sum = 0;
    for (const Json& operation : operations) {
      const std::string place = "operations[" + std::to_string(plan.operations.size()) + "]";
      if (!operation.is_object()) damaged("its \"" + place + "\" is no object");
      check_keys(operation, place + ".", {"name", "results"});
      MemoryPlan::Operation& read = plan.operations.emplace_back();
      read.name = text(operation, place + ".", "name");
      for (const Json& result :
           member(operation, place + ".", "results", &Json::is_array, "a list")) {
        const std::string at = place + ".results[" + std::to_string(read.results.size()) + "]";
        if (!result.is_object()) damaged("its \"" + at + "\" is no object");
        check_keys(result, at + ".", {"bytes", "is_kept", "is_transient"});
        const std::int64_t bytes = count(result, at + ".", "bytes");
        if (bytes > std::numeric_limits<std::int64_t>::max() - sum)
          damaged("its \"" + at + ".bytes\" is " + std::to_string(bytes) +
                  ", and with those before it no count of bytes");
        sum += bytes;
        const bool has_transient = result.contains("is_transient");  // else it is not
        read.results.push_back({Bytes{bytes}, flag(result, at + ".", "is_kept"),
                                has_transient && flag(result, at + ".", "is_transient")});
      }
    }
  }

  std::string source_;
};

}  // namespace remat::detail
