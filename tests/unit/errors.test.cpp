// SPDX-License-Identifier: MIT
#include "remat/errors.hpp"

#include <stdexcept>
#include <string>

#include "tests/support/doctest.hpp"

TEST_CASE("a message has its four parts in order, and leaves out what is not set") {
  remat::ErrorMessage message("remat.test.code");
  message.where("checkpoint \"a\"")
      .what("was 3 and is 4")
      .cause("edited in place.")
      .cure("Clone it");

  CHECK(message.text() == "checkpoint \"a\": was 3 and is 4: edited in place. Clone it.");
  CHECK(remat::ErrorMessage("remat.test.code").what("was 3").cure("Clone it.").text() ==
        "was 3. Clone it.");
  CHECK(remat::ErrorMessage("remat.test.code").text().empty());
}

TEST_CASE("an error is caught as the standard type, and asked for its code through the interface") {
  const auto code_of = [](auto&& raise) -> std::string {
    try {
      raise();
    } catch (const remat::Error& error) {
      return std::string(error.code()) + "|" + std::string(error.message());
    }
    return "";
  };

  CHECK_THROWS_AS(throw remat::ArgumentError("remat.test.code", "text"), std::invalid_argument);
  CHECK_THROWS_AS(throw remat::RecomputeError("remat.test.code", "text"), std::runtime_error);
  CHECK_THROWS_AS(throw remat::EnvironmentError("remat.test.code", "text"), std::runtime_error);
  CHECK(code_of([] { throw remat::ArgumentError("remat.test.code", "text"); }) ==
        "remat.test.code|text");
  CHECK(code_of([] {
          throw remat::RecomputeError(remat::ErrorMessage("remat.test.code").what("x"));
        }) == "remat.test.code|x.");
}

TEST_CASE("what() shows the code in brackets and then the text") {
  CHECK(remat::ArgumentError("remat.test.code", "text").what() ==
        std::string("[remat.test.code] text"));
}

TEST_CASE("a precondition throws only if it does not hold, and builds its message only then") {
  bool is_built = false;
  const auto message = [&] {
    is_built = true;
    return remat::ErrorMessage("remat.test.code").what("0 given");
  };

  CHECK_NOTHROW(remat::require(true, message));
  CHECK_FALSE(is_built);
  CHECK_THROWS_WITH_AS(remat::require(false, message), "[remat.test.code] 0 given.",
                       remat::ArgumentError);
  CHECK_THROWS_WITH_AS(remat::require(false, "remat.test.code", "0 given."),
                       "[remat.test.code] 0 given.", remat::ArgumentError);
}
