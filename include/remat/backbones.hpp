// SPDX-License-Identifier: MIT
#pragma once

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/chain_backbone.hpp"
#include "remat/backbones/registry.hpp"
#include "remat/backbones/resnet.hpp"
