// SPDX-License-Identifier: MIT
#define DOCTEST_CONFIG_IMPLEMENT
#include "tests/support/doctest.hpp"

#include <iostream>

namespace {

/// Learns how many test cases the filters let through.
struct RunCounter : doctest::IReporter {
  static inline unsigned test_case_count = 0;

  explicit RunCounter(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& run) override {
    test_case_count = run.numTestCasesPassingFilters;
  }
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};
REGISTER_LISTENER("run counter", 1, RunCounter);

}  // namespace

int main(int argument_count, char** arguments) {
  doctest::Context context(argument_count, arguments);
  const int result = context.run();

  if (context.shouldExit()) return result;
  if (RunCounter::test_case_count == 0) {
    std::cerr << "no test case matches the filters: an empty run proves nothing\n";
    return 1;
  }
  return result;
}
