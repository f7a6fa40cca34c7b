// SPDX-License-Identifier: MIT
#pragma once

#include "remat/policies/concepts.hpp"
#include "remat/policies/each_stage.hpp"
#include "remat/policies/each_unit.hpp"
#include "remat/policies/every_nth.hpp"
#include "remat/policies/keep.hpp"
#include "remat/policies/keep_all.hpp"
#include "remat/policies/segments.hpp"
#include "remat/policies/sequential.hpp"
#include "remat/policies/square_root.hpp"
#include "remat/policies/staged_hybrid.hpp"
#include "remat/policies/transformer_layers.hpp"
