// SPDX-License-Identifier: MIT
#include "remat/plan/memory_plan_json.hpp"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/doctest.hpp"

namespace memory_plan_json_test {

using remat::Bytes;
using remat::MemoryPlan;

MemoryPlan small_plan() {
  MemoryPlan plan;
  plan.operations = {{"aten::convolution", {{Bytes{4096}, true}}},
                     {"aten::native_batch_norm", {{Bytes{4096}, false}, {Bytes{16}, true}, {}}},
                     {"aten::relu_", {}},
                     {"own \"kind\"\n\\ \u00fc", {{Bytes{std::int64_t{1} << 40}, false}}}};
  plan.budget = Bytes{1000000};
  plan.peak = Bytes{999999};
  plan.plain_peak = Bytes{std::numeric_limits<std::int64_t>::max()};
  plan.recomputed_seconds = 0.1;
  plan.forward_seconds = 1.0 / 3;
  plan.recomputed_count = 17;
  plan.saved_count = 23;
  return plan;
}

/// Returns the error of reading a text, or "".
std::string error_of(const std::string& json) {
  try {
    remat::parse_plan(json, "p.json");
  } catch (const remat::PlanError& error) {
    return error.what();
  }
  return "";
}

/// The small plan's text with one piece replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string json = remat::to_json(small_plan());
  const auto place = json.find(from);
  REQUIRE(place != std::string::npos);
  return json.replace(place, from.size(), to);
}

/// Whether a text is refused by remat's error, or means the small plan; counts the latter.
bool is_error_or_same(const std::string& json, std::size_t& same) {
  try {
    if (remat::parse_plan(json) != small_plan()) return false;
    ++same;  // a space for the end of a line
  } catch (const remat::PlanError&) {
  }
  return true;
}

/// A folder that is gone afterwards.
struct Folder {
  std::filesystem::path path = std::filesystem::temp_directory_path() /
                               ("remat-plan-" + std::to_string(std::random_device{}()));
  Folder() { std::filesystem::create_directory(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }

  std::size_t size() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path), {}));
  }
};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_CASE("a plan comes back from JSON and from a file as it was") {
  const Folder folder;
  for (const MemoryPlan& plan : {MemoryPlan(), small_plan()}) {
    CHECK(remat::parse_plan(remat::to_json(plan)) == plan);
    remat::save_plan(plan, folder.path / "plan.json");
    CHECK(remat::load_plan(folder.path / "plan.json") == plan);
  }
  CHECK(folder.size() == 1);
}

TEST_CASE("a transient value stays one, and a plan without any says nothing of them") {
  MemoryPlan plan = small_plan();
  const std::string before = remat::to_json(plan);
  CHECK(before.find("transient") == std::string::npos);
  plan.operations[1].results[0].is_transient = true;
  CHECK(remat::parse_plan(remat::to_json(plan)) == plan);
  CHECK(remat::fingerprint(plan) == remat::fingerprint(small_plan()));
  CHECK(remat::detail::checksum(plan) != remat::detail::checksum(small_plan()));
  // On every machine the same.
  CHECK(before.find("\"checksum\": \"4004deb4c670484b\"") != std::string::npos);
  CHECK(error_of(with("\"is_kept\":false", "\"is_kept\":false,\"is_transient\":1"))
            .find("is_transient\" is 1, true or false was expected") != std::string::npos);
}

TEST_CASE("a plan says how many results are recomputed more than once") {
  MemoryPlan plan = small_plan();
  CHECK(remat::to_string(plan).find("more than once") == std::string::npos);
  plan.operations[1].results[0].is_transient = true;
  CHECK(remat::to_string(plan).ends_with("; 1 result is recomputed more than once"));
}

TEST_CASE("times come back to the bit") {
  MemoryPlan plan = small_plan();
  for (const double seconds : {0.0, -0.0, 5e-324, 2.2250738585072014e-308, 1e-5, 0.1, 1.0 / 3, 1.0,
                               9007199254740993.0, 1.7976931348623157e308}) {
    CAPTURE(seconds);
    plan.recomputed_seconds = seconds;
    const double read = remat::parse_plan(remat::to_json(plan)).recomputed_seconds;
    CHECK(std::bit_cast<std::uint64_t>(read) == std::bit_cast<std::uint64_t>(seconds));
  }
}

TEST_CASE("the text has a line for each operation, and says what it is") {
  const std::string json = remat::to_json(small_plan());
  CHECK(json.starts_with("{\n  \"format\": \"remat.memory_plan\",\n  \"version\": 1,\n"));
  CHECK(json.find("\n    {\"name\":\"aten::convolution\",\"results\":[{\"bytes\":4096,\"is_kept\":"
                  "true}]},\n") != std::string::npos);
  CHECK(json.ends_with("}\n  ]\n}\n"));
}

TEST_CASE("plans of the same operations have one fingerprint, and other operations another") {
  const MemoryPlan plan = small_plan();
  MemoryPlan other = plan;
  other.budget = Bytes{7};
  other.operations[0].results[0].is_kept = false;
  CHECK(remat::fingerprint(other) == remat::fingerprint(plan));
  CHECK(remat::detail::checksum(other) != remat::detail::checksum(plan));

  std::vector<MemoryPlan> changed(4, plan);
  changed[0].operations[0].name = "aten::convolutiom";
  changed[1].operations[0].results[0].bytes += Bytes{1};
  changed[2].operations.pop_back();
  std::swap(changed[3].operations[0], changed[3].operations[1]);
  for (const MemoryPlan& one : changed) CHECK(remat::fingerprint(one) != remat::fingerprint(plan));
  // FNV-1a of nothing: files of one machine are read on another.
  CHECK(remat::fingerprint(MemoryPlan()) == "cbf29ce484222325");
}

TEST_CASE("a value that was edited by hand is found by fingerprint or checksum") {
  const std::string error = error_of(with("4096", "4095"));
  CHECK(error.starts_with("[remat.plan_file.damaged] \"p.json\": its \"fingerprint\" is \""));
  CHECK(
      error.ends_with(": the file is damaged, edited, or no memory plan. Save the plan again, or "
                      "make it anew."));
  CHECK(error_of(with("\"is_kept\":true", "\"is_kept\":false")).find("its \"checksum\" is") !=
        std::string::npos);
  CHECK(error_of(with("999999", "999998")).find("its \"checksum\" is") != std::string::npos);
  CHECK(error_of(with("0.1", "0.10000000000000002")).find("its \"checksum\" is") !=
        std::string::npos);
  CHECK(error_of(with("\"recomputed_count\": 17", "\"recomputed_count\": 18")) != "");
  CHECK(error_of(with("\"saved_count\": 23", "\"saved_count\": 24")) != "");
}

TEST_CASE("a key that is missing, unknown or of another type is named") {
  const auto says = [](const std::string& json, const std::string& what) {
    const std::string error = error_of(json);
    CAPTURE(error);
    CHECK(error.find("\"p.json\": " + what) != std::string::npos);
  };
  says(with("\"peak_bytes\": 999999,", ""), "its \"peak_bytes\" is missing");
  says(with("{\"bytes\":4096,", "{"), "its \"operations[0].results[0].bytes\" is missing");
  says(with("\"budget_bytes\"", "\"budget\""), "it has a key that there is not, \"budget\"");
  says(with("\"bytes\":16,", "\"bytes\":16,\"dtype\":1,"),
       "it has a key that there is not, \"operations[1].results[1].dtype\"");
  says(with("1000000", "\"1000000\""),
       "its \"budget_bytes\" is \"1000000\", a whole number of at least 0 was expected");
  says(with("1000000", "1e6"), "its \"budget_bytes\" is 1000000.0, a whole number");
  says(with("1000000", "-1"), "its \"budget_bytes\" is -1, a whole number of at least 0 and below");
  says(with("1000000", "9223372036854775808"), "its \"budget_bytes\" is 9223372036854775808, a");
  says(with("1000000", "99999999999999999999"), "its \"budget_bytes\" is 1e+20, a whole number");
  says(with("0.1", "-0.1"), "its \"recomputed_seconds\" is -0.1");
  says(with("0.1", "null"), "its \"recomputed_seconds\" is null, a number was expected");
  says(with("0.1", "1e999"), "it has a number that is too large");
  says(with("true", "1"), "its \"operations[0].results[0].is_kept\" is 1, true or false was");
  says(with("\"aten::convolution\"", "[]"), "its \"operations[0].name\" is a list, a text was");
  says(with("[{\"bytes\":4096,\"is_kept\":true}]", "{}"),
       "its \"operations[0].results\" is an object");
  says(with("{\"bytes\":4096,\"is_kept\":true}", "5"),
       "its \"operations[0].results[0]\" is no obj");
  says(with("1099511627776", "9223372036854775807"), "its \"operations[3].results[0].bytes\" is");
  says("[]", "it is no JSON object");
  says("{}", "its \"format\" is missing");
  says("{\"format\": \"other\"}",
       "its \"format\" is \"other\", \"remat.memory_plan\" was expected");
  says("", "it is no JSON from its byte 1 of 0 on");
  says(std::string(2000000, '['), "it is no JSON from its byte");
  std::string deep = "{\"format\":";
  deep.append(1000000, '[').append(1000000, ']').append("}");
  says(deep, "its \"format\" is a list");
}

TEST_CASE("a later version of the format is refused as such") {
  CHECK(
      error_of(with("\"version\": 1", "\"version\": 2")) ==
      "[remat.plan_file.version] \"p.json\": its \"version\" is 2, and this remat reads version 1. "
      "Make the plan anew, or read it with the remat that wrote it.");
  CHECK(error_of("{\"format\": \"remat.memory_plan\", \"version\": 3, \"new\": 1}")
            .starts_with("[remat.plan_file.version]"));
}

TEST_CASE(
    "a text that is cut off anywhere, or has one byte changed, is an error or the same plan") {
  const std::string json = remat::to_json(small_plan());
  const std::size_t last = json.rfind('}');
  for (std::size_t size = 0; size <= last; ++size) {
    CAPTURE(size);
    CHECK(error_of(json.substr(0, size)) != "");
  }
  std::size_t same = 0;
  for (std::size_t place = 0; place < json.size(); ++place)
    for (const char byte : {'0', '9', ' ', '"', '{', ']', ',', '-', 'e', '\0', '\x80'}) {
      std::string changed = json;
      changed[place] = byte;
      if (is_error_or_same(changed, same)) continue;
      CAPTURE(changed);
      CHECK(false);
    }
  CHECK(same < json.size() * 2);
}

TEST_CASE("bytes moved about and repeated at random never end in anything but remat's error") {
  const std::string json = remat::to_json(small_plan());
  std::mt19937_64 random(5);
  std::size_t same = 0;
  const auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  for (int i = 0; i < 5000; ++i) {
    std::string changed = json;
    for (std::size_t edits = 1 + below(4); edits > 0; --edits) {
      const std::size_t from = below(changed.size()), to = below(changed.size());
      const std::string piece = changed.substr(from, 1 + below(20));
      below(2) == 0 ? changed.insert(to, piece) : changed.replace(to, piece.size(), piece);
    }
    if (is_error_or_same(changed, same)) continue;
    CAPTURE(changed);
    CHECK(false);
  }
}

TEST_CASE("a file that is not there, a folder and an endless file say so") {
  const auto error = [](const std::filesystem::path& path) -> std::string {
    try {
      remat::load_plan(path);
    } catch (const remat::PlanError& caught) {
      return caught.what();
    }
    return "";
  };
  CHECK(error("no-such.json") ==
        "[remat.plan_file.read] \"no-such.json\": there is no such file. Check the path.");
  CHECK(error(".").find("the plan cannot be read") != std::string::npos);
  if (std::filesystem::exists("/dev/zero"))
    CHECK(error("/dev/zero").find("larger than 64 MiB") != std::string::npos);
}

TEST_CASE("what cannot be written is refused, and leaves the file that was there") {
  const Folder folder;
  const std::filesystem::path path = folder.path / "plan.json";
  remat::save_plan(small_plan(), path);
  const std::string before = content_of(path);

  std::vector<MemoryPlan> wrong(5, small_plan());
  wrong[0].forward_seconds = std::numeric_limits<double>::quiet_NaN();
  wrong[1].recomputed_seconds = std::numeric_limits<double>::infinity();
  wrong[2].operations[0].results[0].bytes = Bytes{-1};
  wrong[3].operations[0].name = "\xff";
  wrong[4].operations[0].results[0].bytes = Bytes{std::numeric_limits<std::int64_t>::max()};
  for (const MemoryPlan& plan : wrong)
    CHECK_THROWS_WITH_AS(remat::save_plan(plan, path), doctest::Contains("remat.plan_file.write"),
                         remat::PlanError);
  CHECK_THROWS_WITH_AS(remat::save_plan(small_plan(), folder.path / "none" / "plan.json"),
                       doctest::Contains("no file can be made there. Check that the folder exists"),
                       remat::PlanError);
  std::filesystem::create_directory(folder.path / "taken");
  CHECK_THROWS_WITH_AS(remat::save_plan(small_plan(), folder.path / "taken"),
                       doctest::Contains("the file cannot get its name"), remat::PlanError);

  CHECK(content_of(path) == before);
  CHECK(folder.size() == 2);
}

}  // namespace memory_plan_json_test
