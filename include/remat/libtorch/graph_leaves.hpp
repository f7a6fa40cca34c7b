// SPDX-License-Identifier: MIT
#pragma once

#include "remat/libtorch/autograd.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace remat::detail {

/// Finds the leaves behind what this thread computes from now on: a graph that was there before,
/// and leads to leaves of its own, is not entered.
class GraphLeaves {
 public:
  /// Adds the leaves that a backward pass from `result` would come to.
  void find_behind(const at::Tensor& result) {
    using torch::autograd::AccumulateGrad;
    if (!result.defined() || !result.requires_grad()) return;
    std::vector<Node*> todo{torch::autograd::impl::gradient_edge(result).function.get()};
    while (!todo.empty()) {
      Node* node = todo.back();
      todo.pop_back();
      if (node == nullptr || !seen_.insert(node).second) continue;
      if (const auto* accumulate = dynamic_cast<const AccumulateGrad*>(node))
        leaves_.push_back(accumulate->variable);
      else if (node->thread_id() == thread_ && node->sequence_nr() >= first_)
        for (const torch::autograd::Edge& edge : node->next_edges())
          todo.push_back(edge.function.get());
    }
  }

  const std::vector<at::Tensor>& leaves() const { return leaves_; }

 private:
  using Node = torch::autograd::Node;

  std::uint64_t thread_ = at::RecordFunction::currentThreadId();
  std::uint64_t first_ = at::sequence_number::peek();  // of the operations to come
  ska::flat_hash_set<Node*> seen_;
  std::vector<at::Tensor> leaves_;
};

}  // namespace remat::detail
