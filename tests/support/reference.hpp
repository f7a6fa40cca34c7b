// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

/// Numbers of torchvision's models, from tests/data/torchvision/NAME.json, and the rule that fills
/// a model like theirs.
///
/// The files were computed with torchvision 0.14.1 in float64, dropout and stochastic depth at 0.
/// Each parameter and buffer is filled from its name, so that no weights are needed, and each
/// tensor is reported as a probe of two numbers.
namespace reference {

/// The CRC-32 of zlib: reflected, polynomial 0xEDB88320.
inline std::uint32_t crc32(std::string_view text) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char character : text) {
    crc ^= static_cast<unsigned char>(character);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xEDB88320u : 0u);
  }
  return ~crc;
}

/// OpenBLAS, MKL and oneDNN add in different orders; 152 layers of float64 stay well within this,
/// relative to the norm.
inline constexpr double kTolerance = 1e-8;

/// Returns numbers in [0, 1), multiples of 2^-24, that depend on the key and the position only.
inline torch::Tensor uniform(std::string_view key, std::int64_t count) {
  const std::uint32_t start = crc32(key);
  torch::Tensor numbers = torch::empty({count}, torch::kFloat64);
  auto* out = numbers.data_ptr<double>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint32_t hash = start + static_cast<std::uint32_t>(i) * 0x9E3779B9u;
    hash = (hash ^ (hash >> 16)) * 0x85EBCA6Bu;
    hash = (hash ^ (hash >> 13)) * 0xC2B2AE35u;
    hash ^= hash >> 16;
    out[i] = static_cast<double>(hash >> 8) / (1 << 24);
  }
  return numbers;
}

/// Returns the value of the parameter or buffer of that name.
inline torch::Tensor fill(const std::string& key, torch::IntArrayRef shape) {
  const std::string last = key.substr(key.rfind('.') + 1);
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  const torch::Tensor u = uniform(key, count);
  const torch::Tensor v = 2 * u - 1;
  torch::Tensor filled;
  if (last == "running_mean")
    filled = v / 8;
  else if (last == "running_var")
    filled = 1 + u / 2;
  else if (last == "layer_scale")
    filled = 0.25 + v / 8;
  else if (shape.size() == 1 && last == "weight")
    filled = 1 + v / 4;
  else if (shape.size() <= 1)
    filled = v / 8;
  else
    filled = v * std::exp2(std::nearbyint(std::log2(
                     std::sqrt(3.0 * static_cast<double>(shape[0]) / static_cast<double>(count)))));
  return filled.reshape(shape);
}

/// Makes a model float64 and fills it.
inline void fill(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  model.to(torch::kFloat64);
  for (auto& item : model.named_parameters())
    item.value().copy_(fill(item.key(), item.value().sizes()));
  for (auto& item : model.named_buffers())
    if (item.value().is_floating_point())
      item.value().copy_(fill(item.key(), item.value().sizes()));
}

inline torch::Tensor image(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return (2 * uniform("image", count) - 1).reshape(shape);
}

/// The scalar that the gradients of the reference are gradients of.
inline torch::Tensor loss(const torch::Tensor& logits) {
  return (logits * (uniform("loss", logits.numel()).reshape(logits.sizes()) - 0.5)).sum();
}

/// Two numbers that pin a tensor down: its norm, and its product with fixed numbers.
inline std::vector<double> probe(const torch::Tensor& tensor, const std::string& key) {
  const torch::Tensor flat = tensor.detach().to(torch::kFloat64).reshape({-1});
  return {flat.norm().item<double>(),
          flat.dot(uniform("probe:" + key, flat.numel()) - 0.5).item<double>()};
}

/// Reads the file of that model.
inline nlohmann::ordered_json load(const std::string& name) {
  const std::string path = std::string(REMAT_TEST_DATA) + "/torchvision/" + name + ".json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  return nlohmann::ordered_json::parse(file);
}

}  // namespace reference
