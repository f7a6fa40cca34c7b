// SPDX-License-Identifier: MIT
#pragma once

#include "remat/nn/chain.hpp"
#include "remat/nn/chain_layer.hpp"
#include "remat/nn/chain_plan.hpp"
#include "remat/nn/chain_run.hpp"
#include "remat/nn/chain_units.hpp"
#include "remat/nn/checkpoint_sequential.hpp"
#include "remat/nn/checkpointed.hpp"
#include "remat/nn/concepts.hpp"
#include "remat/nn/holder.hpp"
#include "remat/nn/plain.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/nn/toggle.hpp"
