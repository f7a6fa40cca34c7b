// SPDX-License-Identifier: MIT
#pragma once

#include "remat/amp/autocast.hpp"
#include "remat/amp/grad_scaler.hpp"
#include "remat/amp/grad_scaler_state.hpp"
