// SPDX-License-Identifier: MIT
#pragma once

#include "remat/models/multi_view.hpp"
