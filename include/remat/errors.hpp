// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "remat/config.hpp"
#include "remat/units.hpp"

namespace remat {

/// Builds the four parts of a message: where, what was given and expected, likely cause, cure.
///
/// A part that is not set is left out. `docs/errors.md` has a paragraph for each code.
class ErrorMessage {
 public:
  explicit ErrorMessage(std::string_view code) : code_(code) {}

  /// Names the place: the function, module or region that found the error.
  ErrorMessage& where(std::string_view text) { return set(where_, text); }
  /// States what was given and what was expected, both values.
  ErrorMessage& what(std::string_view text) { return set(what_, text); }
  /// States the likely cause.
  ErrorMessage& cause(std::string_view text) { return set(cause_, text); }
  /// States what to do.
  ErrorMessage& cure(std::string_view text) { return set(cure_, text); }

  /// Returns the stable identifier, for example "remat.recompute.changed".
  const std::string& code() const noexcept { return code_; }

  /// Returns "where: what: cause. cure."
  std::string text() const {
    std::string result = where_;
    append(result, ": ", what_);
    append(result, ": ", cause_);
    append(result, ". ", cure_);
    if (!result.empty() && result.back() != '.') result += '.';
    return result;
  }

 private:
  ErrorMessage& set(std::string& part, std::string_view text) {
    while (!text.empty() && text.back() == '.') text.remove_suffix(1);
    part = text;
    return *this;
  }

  static void append(std::string& result, std::string_view separator, const std::string& part) {
    if (part.empty()) return;
    if (!result.empty()) result += separator;
    result += part;
  }

  std::string code_;
  std::string where_;
  std::string what_;
  std::string cause_;
  std::string cure_;
};

/// Lets a caller ask any of the library's exceptions for its code and text.
///
/// It does not derive from std::exception: each error type derives from the standard type that a
/// caller would expect, and from this.
class REMAT_VISIBLE Error {
 public:
  Error() = default;
  Error(const Error&) = default;
  Error& operator=(const Error&) = default;
  virtual ~Error() = default;

  /// Returns the stable identifier, for example "remat.recompute.changed".
  virtual std::string_view code() const noexcept = 0;
  /// Returns the text without the code.
  virtual std::string_view message() const noexcept = 0;
};

namespace detail {

/// Joins a standard exception type and `Error`; both texts are slices of `what()`, so copies cannot
/// throw.
template <class Standard>
class REMAT_VISIBLE CodedError : public Standard, public Error {
 public:
  CodedError(std::string_view code, std::string_view message)
      : Standard("[" + std::string(code) + "] " + std::string(message)), code_size_(code.size()) {}
  explicit CodedError(const ErrorMessage& message) : CodedError(message.code(), message.text()) {}

  std::string_view code() const noexcept override {
    return std::string_view(this->what()).substr(1, code_size_);
  }
  std::string_view message() const noexcept override {
    return std::string_view(this->what()).substr(code_size_ + 3);
  }

 private:
  std::size_t code_size_;
};

}  // namespace detail

/// Reports an argument that cannot be right: a segment count of 0, an unknown name.
class REMAT_VISIBLE ArgumentError : public detail::CodedError<std::invalid_argument> {
 public:
  using CodedError::CodedError;
};

/// Reports a memory budget below what any plan needs.
class REMAT_VISIBLE BudgetError : public ArgumentError {
 public:
  BudgetError(const ErrorMessage& message, Bytes least) : ArgumentError(message), least_(least) {}

  /// Returns the least budget for which a plan was found.
  Bytes least() const noexcept { return least_; }

 private:
  Bytes least_;
};

/// Reports, in backward, that something which the recompute needs is no longer what it was.
class REMAT_VISIBLE RecomputeError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a weight file that cannot be read, or that does not fit the module: then nothing was
/// changed.
class REMAT_VISIBLE WeightsError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a configuration that cannot be right: an unknown key, a value of another type, a number
/// out of range; the text says where in the file.
class REMAT_VISIBLE ConfigError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports a file with a memory plan that cannot be read or written.
class REMAT_VISIBLE PlanError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Reports that the process does not offer what is asked for: an engine that cannot be installed, a
/// device.
class REMAT_VISIBLE EnvironmentError : public detail::CodedError<std::runtime_error> {
 public:
  using CodedError::CodedError;
};

/// Checks a precondition, always on.
///
/// @throws ArgumentError  with this code and text if `condition` is false
inline void require(bool condition, std::string_view code, std::string_view message) {
  if (!condition) throw ArgumentError(code, message);
}

/// Checks a precondition; the message is built only if it does not hold.
///
/// @param message  callable without arguments that returns an `ErrorMessage`
/// @throws ArgumentError  with that message if `condition` is false
template <class MakeMessage>
  requires requires(MakeMessage make) { ErrorMessage(make()); }
void require(bool condition, MakeMessage&& message) {
  if (!condition) throw ArgumentError(ErrorMessage(std::forward<MakeMessage>(message)()));
}

}  // namespace remat
