// SPDX-License-Identifier: MIT
#pragma once

#include "remat/config.hpp"
#include "remat/errors.hpp"
#include "remat/plan.hpp"
#include "remat/policies.hpp"
#include "remat/units.hpp"
#include "remat/version.hpp"
