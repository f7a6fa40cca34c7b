// SPDX-License-Identifier: MIT
#include "remat/amp/autocast.hpp"

#include "tests/support/doctest.hpp"

#include "remat/memory/meter.hpp"

#include <torch/torch.h>

#include <cstdint>
#include <future>
#include <string>
#include <thread>

namespace {
namespace autocast_scope_test {

using remat::amp::Autocast;
using remat::amp::AutocastOptions;
using remat::amp::is_autocast_enabled;

c10::ScalarType product_type() {
  return torch::matmul(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type();
}

template <class Error>
std::string text(c10::DeviceType device, const AutocastOptions& options = {}) {
  try {
    const Autocast autocast(device, options);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

bool has(const std::string& said, const std::string& words) {
  CAPTURE(said);
  return said.find(words) != std::string::npos;
}

TEST_CASE("a scope computes in bfloat16, an inner one that is off does not, and each restores") {
  CHECK((product_type() == torch::kFloat));
  {
    const Autocast outer(torch::kCPU);
    CHECK((product_type() == torch::kBFloat16));
    CHECK(is_autocast_enabled(torch::kCPU));
    {
      const Autocast inner(torch::kCPU, {.enabled = false});
      CHECK((product_type() == torch::kFloat));
      {
        const Autocast innermost(torch::kCPU);
        CHECK((product_type() == torch::kBFloat16));
      }
      CHECK_FALSE(is_autocast_enabled(torch::kCPU));
    }
    CHECK((product_type() == torch::kBFloat16));
  }
  CHECK_FALSE(is_autocast_enabled(torch::kCPU));
  CHECK((product_type() == torch::kFloat));
}

TEST_CASE("a scope restores the cache setting and dtype also when left by an exception") {
  const auto before = remat::detail::autocast_state(torch::kCPU);
  try {
    const Autocast autocast(torch::kCPU, {.dtype = torch::kBFloat16, .cache_enabled = false});
    CHECK_FALSE(remat::detail::autocast_state(torch::kCPU).uses_cache);
    throw 1;
  } catch (int) {
  }
  const auto after = remat::detail::autocast_state(torch::kCPU);
  CHECK(after.is_enabled == before.is_enabled);
  CHECK((after.dtype == before.dtype));
  CHECK(after.uses_cache == before.uses_cache);
}

TEST_CASE("a scope acts on the thread that made it, and on no other") {
  std::promise<void> is_open, may_close;
  bool is_on_there = false, was_on_there = true;
  auto type_there = torch::kDouble;
  std::thread other([&] {
    was_on_there = is_autocast_enabled(torch::kCPU);
    type_there = product_type();
    const Autocast autocast(torch::kCPU, {.cache_enabled = false});
    is_on_there = is_autocast_enabled(torch::kCPU);
    is_open.set_value();
    may_close.get_future().wait();
  });
  {
    is_open.get_future().wait();
    CHECK_FALSE(is_autocast_enabled(torch::kCPU));
    CHECK((product_type() == torch::kFloat));
    CHECK(remat::detail::autocast_state(torch::kCPU).uses_cache);
    may_close.set_value();
  }
  other.join();
  CHECK_FALSE(was_on_there);
  CHECK((type_there == torch::kFloat));
  CHECK(is_on_there);

  const Autocast autocast(torch::kCPU);
  std::thread([&] {
    is_on_there = is_autocast_enabled(torch::kCPU);
    type_there = product_type();
  }).join();
  CHECK_FALSE(is_on_there);
  CHECK((type_there == torch::kFloat));
}

TEST_CASE("casts of weights stay until the outermost scope ends, and no longer") {
  constexpr std::int64_t kWidth = 64;
  constexpr std::int64_t kCasts = (kWidth * kWidth + kWidth) * 2;  // weight and bias, 16 bits
  torch::nn::Linear layer(kWidth, kWidth);
  const auto x = torch::ones({2, kWidth});
  const remat::MemoryMeter meter;
  {
    const Autocast outer(torch::kCPU);
    {
      const Autocast inner(torch::kCPU);
      torch::linear(x, layer->weight, layer->bias);
      CHECK(meter.current().count == kCasts);
    }
    CHECK(meter.current().count == kCasts);
    torch::linear(x, layer->weight, layer->bias);
    CHECK(meter.current().count == kCasts);
    const Autocast off(torch::kCPU, {.enabled = false});
    torch::linear(x, layer->weight, layer->bias);
    CHECK(meter.current().count == kCasts);
  }
  CHECK(meter.current().count == 0);

  const Autocast without_cache(torch::kCPU, {.cache_enabled = false});
  torch::linear(x, layer->weight, layer->bias);
  CHECK(meter.current().count == 0);
}

TEST_CASE("float16 on the CPU computes where LibTorch has its kernels and is refused elsewhere") {
  if constexpr (remat::detail::kHasCpuHalf) {
    const Autocast autocast(torch::kCPU, {.dtype = torch::kHalf});
    CHECK((product_type() == torch::kHalf));
  } else {
    const auto said = text<remat::EnvironmentError>(torch::kCPU, {.dtype = torch::kHalf});
    CHECK(has(said, "remat.autocast.cpu_half"));
    CHECK(has(said, "no such kernels for the CPU"));
  }
}

TEST_CASE("a forward without autograd in a scope of its own leaves later uses their gradient") {
  torch::nn::Linear layer(4, 4);
  const Autocast autocast(torch::kCPU);
  {
    const torch::NoGradGuard no_grad;
    const Autocast inner(torch::kCPU);
    layer(torch::ones({2, 4}));
  }
  layer(torch::ones({2, 4})).sum().backward();
  CHECK(layer->weight.grad().defined());
  CHECK(layer->bias.grad().defined());
}

TEST_CASE("dtypes and devices that autocast does not take are refused and change nothing") {
  const auto wide = text<remat::ArgumentError>(torch::kCPU, {.dtype = torch::kDouble});
  CHECK(has(wide, "remat.autocast.dtype"));
  CHECK(has(wide, "the dtype is float64, and bfloat16 or float16 was expected"));
  const auto meta = text<remat::ArgumentError>(torch::kMeta);
  CHECK(has(meta, "remat.autocast.device"));
  CHECK(has(meta, "autocast on meta"));
  CHECK_FALSE(is_autocast_enabled(torch::kMeta));
  if (!at::hasCUDA()) {
    CHECK(has(text<remat::EnvironmentError>(torch::kCUDA), "remat.autocast.no_device"));
    const Autocast off(torch::kCUDA, {.enabled = false});
    CHECK_FALSE(is_autocast_enabled(torch::kCUDA));
  }
  CHECK_FALSE(is_autocast_enabled(torch::kCPU));
  CHECK(remat::detail::enter_autocast() == 1);
  remat::detail::leave_autocast();
}

}  // namespace autocast_scope_test
}  // namespace
