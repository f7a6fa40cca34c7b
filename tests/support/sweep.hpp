// SPDX-License-Identifier: MIT
#pragma once

#include "remat/checkpoint.hpp"
#include "tests/support/doctest.hpp"
#include "tests/support/write_observer.hpp"

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// Runs one operation or module in the middle of a region from which everything is dropped, and
/// once without checkpointing.
namespace sweep {

/// What a case computes, from inputs that it makes itself; made anew for each run from the same
/// seed.
struct Case {
  std::vector<torch::Tensor> inputs;  // leaves; those of floating point get gradients
  std::function<torch::Tensor(const std::vector<torch::Tensor>&)> run;  // what is swept
  std::shared_ptr<torch::nn::Module> module =
      nullptr;  // its parameters and buffers are compared too
};

using MakeCase = std::function<Case()>;

struct Entry {
  std::string name;
  MakeCase make;
};

/// Everything that a run leaves behind.
inline std::vector<torch::Tensor> outcome(const MakeCase& make, bool is_checkpointed) {
  torch::manual_seed(7);
  Case one = make();
  for (torch::Tensor& input : one.inputs)
    if (input.is_floating_point() || input.is_complex()) input.requires_grad_();

  // Before: inputs that are dropped. After: an operation that saves the result, so that the swept
  // operation has to run again.
  const auto region = [&](const std::vector<torch::Tensor>& inputs) {
    std::vector<torch::Tensor> inner;
    for (const torch::Tensor& input : inputs)
      inner.push_back(input.requires_grad() ? input * 1.25 : input);
    const torch::Tensor result = one.run(inner);
    return result.requires_grad() ? result * result : result;
  };
  torch::manual_seed(11);
  const torch::Tensor output =
      is_checkpointed ? remat::checkpoint(region, one.inputs) : region(one.inputs);

  std::vector<torch::Tensor> left{output.detach().clone(), torch::rand({2})};
  if (output.requires_grad()) {
    const torch::Tensor real = output.is_complex() ? torch::view_as_real(output) : output;
    torch::manual_seed(13);
    (real * torch::rand_like(real)).sum().backward();
  }
  left.push_back(torch::rand({2}));
  for (const torch::Tensor& input : one.inputs) left.push_back(input.grad());
  if (one.module) {
    for (const torch::Tensor& parameter : one.module->parameters())
      left.push_back(parameter.grad());
    for (const torch::Tensor& buffer : one.module->buffers()) left.push_back(buffer.clone());
  }
  return left;
}

inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  if (a.is_sparse())
    return same_bits(a.coalesce().indices(), b.coalesce().indices()) &&
           same_bits(a.coalesce().values(), b.coalesce().values());
  if (a.sizes() != b.sizes() || a.dtype() != b.dtype()) return false;
  if (a.numel() == 0) return true;
  // Bits, so that a NaN equals itself.
  const torch::Tensor left = a.contiguous(), right = b.contiguous();
  return std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
}

/// Drops everything while it lives, tiny side results too.
class DropEverything {
 public:
  DropEverything() { remat::detail::process_state().keeps_statistics = false; }
  ~DropEverything() { remat::detail::process_state().keeps_statistics = true; }
  DropEverything(const DropEverything&) = delete;
  DropEverything& operator=(const DropEverything&) = delete;
};

/// Compares each entry's two outcomes. Up to `may_lack` entries may be ones that plain cannot run;
/// then neither may a region.
inline void check(const std::vector<Entry>& entries, std::size_t may_lack = 0) {
  const DropEverything drop;
  std::size_t lacking = 0;
  const std::int64_t recomputed_before = remat::statistics().recomputed_operations;
  for (const Entry& entry : entries) {
    CAPTURE(entry.name);
    std::vector<torch::Tensor> plain;
    try {
      plain = outcome(entry.make, false);
      // A run of its own: with the observer's key in place LibTorch takes other kernels for some
      // norms.
      const WriteObserver observer;
      outcome(entry.make, false);
    } catch (const std::exception& error) {
      MESSAGE("plain throws: " << entry.name << ": " << std::string(error.what()).substr(0, 120));
      CHECK_THROWS(outcome(entry.make, true));  // what plain notices, remat notices
      ++lacking;
      continue;
    }
    std::vector<torch::Tensor> checkpointed;
    try {
      checkpointed = outcome(entry.make, true);
    } catch (const std::exception& error) {
      FAIL_CHECK(entry.name << " throws only when checkpointed: " << error.what());
      continue;
    }
    REQUIRE(plain.size() == checkpointed.size());
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CAPTURE(i);
      CHECK(same_bits(plain[i], checkpointed[i]));
    }
  }
  CAPTURE(WriteObserver::undeclared());
  CHECK(WriteObserver::undeclared().empty());  // each belongs into engine/operator_facts.hpp
  CHECK(lacking <= may_lack);
  CHECK(remat::statistics().recomputed_operations - recomputed_before >
        static_cast<std::int64_t>(entries.size()));
}

}  // namespace sweep
