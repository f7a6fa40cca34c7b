// SPDX-License-Identifier: MIT
#include "remat/policies/keep.hpp"

#include <type_traits>

#include "tests/support/doctest.hpp"

#include "remat/policies/concepts.hpp"

using namespace remat::literals;

namespace {

template <class Keep>
bool keeps(std::string_view name) {
  return Keep()(remat::keep::Operation{name, 0, 1_KiB}, 1_KiB);
}

}  // namespace

TEST_CASE_TEMPLATE("every keep policy of the library conforms and is default-constructible", Keep,
                   remat::keep::nothing, remat::keep::convolutions_and_matmuls,
                   remat::keep::reducing_products, remat::keep::attention) {
  CHECK(remat::KeepPolicy<Keep>);
  CHECK(std::is_default_constructible_v<Keep>);
  CHECK_FALSE(keeps<Keep>("aten::relu"));
  CHECK_FALSE(keeps<Keep>("aten::native_batch_norm"));
}

TEST_CASE("keep::nothing keeps no convolution either") {
  CHECK_FALSE(keeps<remat::keep::nothing>("aten::convolution"));
}

TEST_CASE("keep::convolutions_and_matmuls keeps convolutions and products") {
  for (const char* name :
       {"aten::convolution", "aten::convolution_overrideable", "aten::mkldnn_convolution",
        "aten::cudnn_convolution", "aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm"}) {
    CAPTURE(name);
    CHECK(keeps<remat::keep::convolutions_and_matmuls>(name));
  }
  CHECK_FALSE(keeps<remat::keep::convolutions_and_matmuls>("aten::_softmax"));
  CHECK_FALSE(keeps<remat::keep::convolutions_and_matmuls>("aten::mmm"));
}

TEST_CASE("keep::reducing_products keeps products that do not enlarge their largest input") {
  constexpr remat::keep::reducing_products keep;
  for (const char* name : {"aten::convolution", "aten::addmm", "aten::bmm"}) {
    CAPTURE(name);
    const remat::keep::Operation product{name, 0, 4_KiB};
    CHECK(keep(product, 1_KiB));
    CHECK(keep(product, 4_KiB));
    CHECK_FALSE(keep(product, remat::Bytes{(4_KiB).count + 1}));
  }
}

TEST_CASE("keep::reducing_products keeps no other operation, however small its result") {
  const remat::keep::Operation pooling{"aten::avg_pool2d", 0, 4_KiB};
  CHECK_FALSE(remat::keep::reducing_products()(pooling, 1_KiB));
}

TEST_CASE("keep::attention keeps fused kernels and the parts of composed attention") {
  for (const char* name :
       {"aten::_scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention", "aten::bmm", "aten::baddbmm",
        "aten::_softmax"}) {
    CAPTURE(name);
    CHECK(keeps<remat::keep::attention>(name));
  }
  CHECK_FALSE(keeps<remat::keep::attention>("aten::convolution"));
  CHECK_FALSE(keeps<remat::keep::attention>("aten::addmm"));
}
