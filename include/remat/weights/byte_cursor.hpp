// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "remat/weights/byte_source.hpp"

namespace remat::detail {

/// Reads a source from front to back through a small buffer.
class ByteCursor {
 public:
  explicit ByteCursor(const ByteSource& source, std::uint64_t position = 0)
      : source_(source), position_(std::min(position, source.size())) {}

  const ByteSource& source() const { return source_; }
  std::uint64_t position() const { return position_; }
  std::uint64_t remaining() const { return source_.size() - position_; }

  void skip(std::uint64_t count) {
    require_more(count);
    position_ += count;
  }

  /// Reads an unsigned number of `ByteCount` bytes, least significant byte first.
  template <std::size_t ByteCount>
    requires(ByteCount >= 1 && ByteCount <= 8)
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < ByteCount; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(next())} << (8 * i);
    return value;
  }

  /// Appends `count` bytes to `text`.
  void append_to(std::string& text, std::uint64_t count) {
    require_more(count);  // before memory is asked for: a count may be anything
    const std::size_t begin = text.size();
    text.resize(begin + static_cast<std::size_t>(count));
    source_.read(position_, text.data() + begin, static_cast<std::size_t>(count));
    position_ += count;
  }

  char next() {
    if (position_ < buffer_begin_ || position_ >= buffer_begin_ + buffer_.size()) fill();
    return buffer_[static_cast<std::size_t>(position_++ - buffer_begin_)];
  }

 private:
  static constexpr std::uint64_t kBufferBytes = 1 << 16;

  void require_more(std::uint64_t count) const {
    if (count > remaining())
      source_.damaged("it ends at byte " + std::to_string(source_.size()) + ", where " +
                      std::to_string(count) + " bytes from " + std::to_string(position_) +
                      " on are announced");
  }

  void fill() {
    require_more(1);
    buffer_.resize(static_cast<std::size_t>(std::min(remaining(), kBufferBytes)));
    source_.read(position_, buffer_.data(), buffer_.size());
    buffer_begin_ = position_;
  }

  const ByteSource& source_;
  std::uint64_t position_;
  std::uint64_t buffer_begin_ = 0;
  std::string buffer_;
};

}  // namespace remat::detail
