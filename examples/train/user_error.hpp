// SPDX-License-Identifier: MIT
#pragma once

#include <stdexcept>

namespace train {

/// Reports a mistake in arguments, configuration or data: the user's to mend.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace train
