// SPDX-License-Identifier: MIT
//
// Trains a ResNet on real images twice from the same seed, plain and with gradient checkpointing:
// the same weights, bit for bit, in less memory.

#include "remat/remat.hpp"

#include <cstdio>
#include <exception>
#include <string>

#include "digits/arguments.hpp"
#include "digits/dataset.hpp"
#include "digits/memory_chart.hpp"
#include "digits/training.hpp"

namespace {

/// Returns the number of tensors that differ in a bit.
std::size_t difference_count(const digits::Run& left, const digits::Run& right) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < left.state.size(); ++i)
    if (!torch::equal(left.state[i], right.state[i])) ++count;
  return count;
}

void print_table(const digits::Run& plain, const digits::Run& checkpointed,
                 std::size_t differences) {
  const double saving = 1 - checkpointed.peak.mebibytes() / plain.peak.mebibytes();
  const auto row = [](const char* name, const char* format, double left, double right) {
    std::printf("%-28s", name);
    std::printf(format, left);
    std::printf(format, right);
    std::printf("\n");
  };
  std::printf("\n%-28s%14s%14s\n", "", "plain", "checkpointed");
  row("peak activations, MiB", "%14.1f", plain.peak.mebibytes(), checkpointed.peak.mebibytes());
  row("saving, %", "%14.1f", 0, 100 * saving);
  row("step time, ms (median)", "%14.1f", 1e3 * plain.step_seconds,
      1e3 * checkpointed.step_seconds);
  row("step time, ratio", "%14.3f", 1, checkpointed.step_seconds / plain.step_seconds);
  row("operations recorded", "%14.0f", static_cast<double>(plain.statistics.recorded_operations),
      static_cast<double>(checkpointed.statistics.recorded_operations));
  row("operations recomputed", "%14.0f",
      static_cast<double>(plain.statistics.recomputed_operations),
      static_cast<double>(checkpointed.statistics.recomputed_operations));
  row("test accuracy, %", "%14.2f", 100 * plain.accuracy, 100 * checkpointed.accuracy);
  if (differences == 0)
    std::printf("\nweights identical: yes (%zu tensors, bit for bit)\n", plain.state.size());
  else
    std::printf("\nweights identical: NO (%zu of %zu tensors differ)\n", differences,
                plain.state.size());
}

int run(const digits::Arguments& arguments) {
  at::set_num_threads(static_cast<int>(arguments.threads));
  digits::Dataset all = digits::read_csv(arguments.data);
  if (arguments.limit > 0 && arguments.limit < all.size())
    all = all.rows(torch::arange(arguments.limit));
  // Every fifth image is for testing: the file has the writers in order, so both parts have all of
  // them.
  const auto index = torch::arange(all.size());
  const digits::Dataset training = all.rows(index.masked_select(index.remainder(5).ne(4)));
  const digits::Dataset test = all.rows(index.masked_select(index.remainder(5).eq(4)));
  if (training.size() < arguments.batch)
    throw std::runtime_error("--batch is " + std::to_string(arguments.batch) + ", at most the " +
                             std::to_string(training.size()) + " training images were expected");
  std::printf(
      "%s, %ld images of handwritten digits for training, %ld for testing, %ld px, batch %ld\n",
      arguments.model.c_str(), long(training.size()), long(test.size()), long(arguments.image_size),
      long(arguments.batch));

  const digits::Run plain = digits::train(arguments, training, test, false);
  const digits::Run checkpointed = digits::train(arguments, training, test, true);

  const std::size_t differences = difference_count(plain, checkpointed);
  print_table(plain, checkpointed, differences);
  digits::write_memory_chart(arguments.svg, plain.course, checkpointed.course);
  std::printf("live memory over one step: %s\n", arguments.svg.c_str());
  return differences == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** values) {
  try {
    const digits::Arguments arguments = digits::parse_arguments(count, values);
    if (arguments.is_help) return std::printf("%s", digits::kUsage), 0;
    return run(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 2;
  }
}
