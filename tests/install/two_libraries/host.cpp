// SPDX-License-Identifier: MIT
#include <dlfcn.h>
#include <torch/torch.h>

#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "region.hpp"

// Linked with both libraries, or given their paths: `loaded first.so second.so`.

namespace {

Region find_region(const char* path, const char* symbol) {
  void* library = RTLD_DEFAULT;
  if (path != nullptr) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* found = path != nullptr && library == nullptr ? nullptr : dlsym(library, symbol);
  if (found == nullptr) throw std::runtime_error(dlerror());
  return reinterpret_cast<Region>(found);
}

/// Operations recomputed so far, as a library counts them.
std::int64_t recomputed_by(Region region) {
  at::Tensor result;
  return region(torch::ones({1, 1}), torch::ones({1, 1}), {}, /*is_checkpointed=*/false, result);
}

/// Runs the regions of both libraries alternately and nested both ways: output and gradients.
std::vector<at::Tensor> run_step(Region first, Region second, bool is_checkpointed) {
  torch::manual_seed(7);
  auto input = torch::randn({6, 8}, torch::requires_grad());
  auto weight = torch::randn({8, 8}, torch::requires_grad());
  auto call = [&](Region region, const std::function<at::Tensor(at::Tensor)>& inner) {
    return [&weight, region, inner, is_checkpointed](const at::Tensor& x) {
      at::Tensor result;
      region(x, weight, inner, is_checkpointed, result);
      return result;
    };
  };

  at::Tensor x = input;
  for (int round = 0; round < 3; ++round) {
    x = call(first, {})(x);
    x = call(second, {})(x);
    x = call(first, call(second, call(first, {})))(x);
    x = call(second, call(first, call(second, {})))(x);
  }
  auto gradients = torch::autograd::grad({x.square().sum()}, {input, weight});
  return {x, gradients[0], gradients[1], torch::randn({4})};
}

}  // namespace

int main(int argument_count, char** arguments) {
  const bool is_loaded = argument_count == 3;
  const Region first = find_region(is_loaded ? arguments[1] : nullptr, "first_region");
  const Region second = find_region(is_loaded ? arguments[2] : nullptr, "second_region");

  const auto plain = run_step(first, second, false);
  int failed = 0;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto checkpointed = run_step(first, second, true);
    for (std::size_t index = 0; index < plain.size(); ++index)
      failed += !torch::equal(plain[index], checkpointed[index]);
  }
  // Each library by itself recomputes, and both count in one place.
  for (const Region region : {first, second}) {
    const std::int64_t before = recomputed_by(region);
    run_step(region, region, true);
    failed += recomputed_by(region) == before || recomputed_by(first) != recomputed_by(second);
  }
  std::cout << (is_loaded ? "loaded" : "linked") << ": " << failed << " differences from plain\n";
  return failed == 0 ? 0 : 1;
}
