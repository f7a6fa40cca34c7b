// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

namespace train {

/// Returns a generator that depends on these numbers alone, whatever was drawn before: order and
/// augmentation of an epoch are the same after a restart, and on any number of threads.
inline std::mt19937_64 generator_of(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t mixed = 0;
  for (const std::uint64_t number : numbers) {
    // One step of SplitMix64 for each number.
    mixed += number + 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    mixed ^= mixed >> 31;
  }
  return std::mt19937_64(mixed);
}

/// Draws from [low, high).
inline double uniform(std::mt19937_64& generator, double low, double high) {
  return low + (high - low) * static_cast<double>(generator() >> 11) * 0x1p-53;
}

/// Puts elements into a random order, the same with every standard library.
template <class Element>
void shuffle(std::vector<Element>& elements, std::mt19937_64& generator) {
  for (std::size_t left = elements.size(); left > 1; --left)
    std::swap(elements[left - 1], elements[generator() % left]);
}

/// Returns the order in which an epoch sees `count` cases.
inline std::vector<std::size_t> epoch_order(std::size_t count, std::int64_t seed,
                                            std::int64_t epoch) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  auto generator =
      generator_of({static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(epoch)});
  shuffle(order, generator);
  return order;
}

}  // namespace train
