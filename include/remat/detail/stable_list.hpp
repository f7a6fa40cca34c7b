// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace remat::detail {

/// A list that only grows at its end and never moves an element. Chunk k holds `FirstChunk << k`
/// elements, so that a tape of three operations is as cheap as one of a hundred thousand is
/// compact; std::deque allocates 512 bytes at a time, from the start.
template <class Element, std::size_t FirstChunk = 8>
class StableList {
  static_assert(std::has_single_bit(FirstChunk), "the size of the first chunk is a power of two");

 public:
  StableList() = default;
  StableList(const StableList&) = delete;
  StableList& operator=(const StableList&) = delete;
  ~StableList() {
    for (std::size_t i = size_; i-- > 0;) std::destroy_at(&(*this)[i]);
    for (std::size_t k = 0; k < chunks_.size(); ++k)
      std::allocator<Element>().deallocate(chunks_[k], FirstChunk << k);
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  Element& operator[](std::size_t index) {
    const std::size_t chunk = chunk_of(index);
    return chunks_[chunk][index - start_of(chunk)];
  }
  const Element& operator[](std::size_t index) const {
    return const_cast<StableList&>(*this)[index];
  }

  template <class... Arguments>
  Element& emplace_back(Arguments&&... arguments) {
    const std::size_t chunk = chunk_of(size_);
    if (chunk == chunks_.size()) {
      chunks_.reserve(chunk + 1);  // so that the allocation below has an owner whatever happens
      chunks_.push_back(std::allocator<Element>().allocate(FirstChunk << chunk));
    }
    Element* place = chunks_[chunk] + (size_ - start_of(chunk));
    new (place) Element(std::forward<Arguments>(arguments)...);
    ++size_;
    return *place;
  }
  void push_back(Element element) { emplace_back(std::move(element)); }

 private:
  static std::size_t chunk_of(std::size_t index) {
    return static_cast<std::size_t>(std::bit_width(index / FirstChunk + 1)) - 1;
  }
  static std::size_t start_of(std::size_t chunk) {
    return FirstChunk * ((std::size_t{1} << chunk) - 1);
  }

  std::vector<Element*> chunks_;
  std::size_t size_ = 0;
};

}  // namespace remat::detail
