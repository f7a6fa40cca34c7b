// SPDX-License-Identifier: MIT
#include "remat/plan/budget_text.hpp"

#include <cstdint>
#include <limits>
#include <string>

#include "tests/support/doctest.hpp"

namespace budget_text_test {

using namespace remat::literals;
using remat::MemoryBudget;
using remat::parse_memory_budget;

/// Returns the message of the error, or "".
std::string error_of(const std::string& text) {
  try {
    parse_memory_budget(text);
  } catch (const remat::ArgumentError& error) {
    return error.what();
  }
  return "";
}

std::string cure_of(const std::string& text) {
  const std::string error = error_of(text), before = "was expected. ";
  const auto place = error.find(before);
  return place == std::string::npos ? error : error.substr(place + before.size());
}

TEST_CASE("a budget is read as bytes or as a part of plain") {
  CHECK(parse_memory_budget("2147483648") == MemoryBudget::bytes(2_GiB));
  CHECK(parse_memory_budget("2GiB") == MemoryBudget::bytes(2_GiB));
  CHECK(parse_memory_budget("1.5 GiB") == MemoryBudget::bytes(1536_MiB));
  CHECK(parse_memory_budget("2") == MemoryBudget::bytes(2_B));
  CHECK(parse_memory_budget("1B") == MemoryBudget::bytes(1_B));
  CHECK(parse_memory_budget("0.33") == MemoryBudget::fraction_of_plain(0.33));
  CHECK(parse_memory_budget(".5") == MemoryBudget::fraction_of_plain(0.5));
  CHECK(parse_memory_budget("1") == MemoryBudget::fraction_of_plain(1));
  CHECK(parse_memory_budget("1.5") == MemoryBudget::fraction_of_plain(1.5));
}

TEST_CASE("a budget that is written is read back the same") {
  for (const std::int64_t count :
       {std::int64_t{1}, std::int64_t{2}, std::int64_t{1000}, std::int64_t{1} << 10,
        std::int64_t{3} << 29, std::int64_t{1} << 62, std::numeric_limits<std::int64_t>::max()}) {
    const auto budget = MemoryBudget::bytes({count});
    CAPTURE(to_string(budget));
    CHECK(parse_memory_budget(to_string(budget)) == budget);
  }
  for (const double part : {0.33, 1.0 / 3, 1.0, 2.0, 1e20, 1e-9, 5e-324, 1.7976931348623157e308}) {
    const auto budget = MemoryBudget::fraction_of_plain(part);
    CAPTURE(to_string(budget));
    CHECK(parse_memory_budget(to_string(budget)) == budget);
  }
  CHECK(to_string(MemoryBudget::bytes(2_GiB)) == "2GiB");
  CHECK(to_string(MemoryBudget::bytes(1536_MiB)) == "1536MiB");
  CHECK(to_string(MemoryBudget::bytes(1000_B)) == "1000B");
  CHECK(to_string(MemoryBudget::fraction_of_plain(0.33)) == "0.33");
}

TEST_CASE("what is no budget is refused with the forms that there are, and what to write") {
  CHECK(error_of("2GB") ==
        "[remat.budget.text] remat::parse_memory_budget: the budget is \"2GB\", bytes (2147483648, "
        "512MiB, 1.5GiB) or a part of what plain needs (0.33) was expected. GB is a power of 1000 "
        "to some and of 1024 to others: write 2GiB, or count the bytes.");
  CHECK(cure_of("1.5 mb").starts_with("mb is a power of 1000"));
  CHECK(cure_of("3K").find("write 3KiB") != std::string::npos);
  CHECK(cure_of("2gib") == "Write 2GiB.");
  CHECK(cure_of("33%") == "Write 0.33.");
  CHECK(cure_of("1e9") == "Write the number in full.");
  CHECK(cure_of("0") == "A budget is above 0.");
  CHECK(cure_of("0.0GiB") == "A budget is above 0.");
  CHECK(cure_of("-1GiB") == "A budget is above 0.");
  CHECK(cure_of("0.0001KiB") == "A budget is at least 1 byte.");
  CHECK(cure_of("1.5B") == "It is a whole number of bytes, below 8388608TiB.");
  CHECK(cure_of("8589934592GiB") == "It is a whole number of bytes, below 8388608TiB.");
  CHECK(cure_of("99999999999999999999") == "It is a whole number of bytes, below 8388608TiB.");
  for (const char* junk : {"", " ", "half", "GiB", "2 apples", "2GiBs", "0x10", "010", "1,5GiB",
                           "1.2.3", "+1", "nan", "inf", "2 GiB ", "1__0", "\xff", "2\xff"}) {
    CAPTURE(junk);
    CHECK(error_of(junk).find("was expected") != std::string::npos);
  }
}

}  // namespace budget_text_test
