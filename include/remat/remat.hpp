// SPDX-License-Identifier: MIT
#pragma once

#include "remat/amp.hpp"
#include "remat/backbones.hpp"
#include "remat/checkpoint.hpp"
#include "remat/config.hpp"
#include "remat/errors.hpp"
#include "remat/explain.hpp"
#include "remat/memory.hpp"
#include "remat/models.hpp"
#include "remat/nn.hpp"
#include "remat/plan.hpp"
#include "remat/policies.hpp"
#include "remat/training.hpp"
#include "remat/units.hpp"
#include "remat/version.hpp"
#include "remat/weights.hpp"
