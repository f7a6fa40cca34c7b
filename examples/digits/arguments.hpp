// SPDX-License-Identifier: MIT
#pragma once

#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace digits {

/// What the program was asked to do.
struct Arguments {
  std::string data = REMAT_EXAMPLES_DATA "/digits.csv";
  std::string svg = "digits.svg";
  std::string model = "resnet18";
  std::int64_t epochs = 8;
  std::int64_t batch = 128;
  std::int64_t image_size = 32;
  std::int64_t segments = 0;
  std::int64_t threads = 2;
  std::int64_t limit = 0;
  std::int64_t seed = 0;
  bool is_help = false;
};

inline constexpr const char* kUsage =
    R"(Trains a ResNet on handwritten digits, plain and then with gradient checkpointing, from the same seed.

usage: digits [--data FILE] [--svg FILE] [--model NAME] [--epochs N] [--batch N] [--image-size N]
              [--segments N] [--threads N] [--limit N] [--seed N]

  --data FILE      the CSV with the images (default: the one in examples/data)
  --svg FILE       where the picture of live memory goes (default: digits.svg)
  --model NAME     resnet18, 34, 50, 101 or 152 (default: resnet18)
  --epochs N       passes over the training images (default: 8)
  --batch N        images per step (default: 128)
  --image-size N   side to which the 8x8 images are enlarged (default: 32)
  --segments N     segments of the checkpointed run (default: the model's rule, 4)
  --threads N      threads of LibTorch (default: 2)
  --limit N        use only the first N images (default: all)
  --seed N         of weights and order (default: 0)

Exits with 1 if the two runs end with different weights, with 2 for a mistake in the arguments or the data.
)";

/// Reads the command line.
///
/// @throws std::runtime_error  for an unknown argument, a missing or a bad value
inline Arguments parse_arguments(int count, char** values) {
  Arguments arguments;
  const auto whole_number = [](std::string_view name, std::string_view text, std::int64_t least) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < least)
      throw std::runtime_error(std::string(name) + " is \"" + std::string(text) +
                               "\", a whole number of at least " + std::to_string(least) +
                               " was expected");
    return value;
  };
  for (int i = 1; i < count; ++i) {
    const std::string_view name = values[i];
    if (name == "--help" || name == "-h") {
      arguments.is_help = true;
      continue;
    }
    if (i + 1 == count && name.starts_with("--"))
      throw std::runtime_error(std::string(name) + " needs a value, or is unknown; see --help");
    const std::string_view value = ++i < count ? values[i] : "";
    if (name == "--data")
      arguments.data = value;
    else if (name == "--svg")
      arguments.svg = value;
    else if (name == "--model")
      arguments.model = value;
    else if (name == "--epochs")
      arguments.epochs = whole_number(name, value, 1);
    else if (name == "--batch")
      arguments.batch = whole_number(name, value, 2);
    else if (name == "--image-size")
      arguments.image_size = whole_number(name, value, 32);
    else if (name == "--segments")
      arguments.segments = whole_number(name, value, 1);
    else if (name == "--threads")
      arguments.threads = whole_number(name, value, 1);
    else if (name == "--limit")
      arguments.limit = whole_number(name, value, 100);
    else if (name == "--seed")
      arguments.seed = whole_number(name, value, 0);
    else
      throw std::runtime_error("unknown argument \"" + std::string(name) + "\"; see --help");
  }
  return arguments;
}

}  // namespace digits
