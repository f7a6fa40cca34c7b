// SPDX-License-Identifier: MIT
#pragma once

#include "remat/memory/meter.hpp"
#include "remat/memory/stats.hpp"
#include "remat/memory/timeline.hpp"
