// SPDX-License-Identifier: MIT
#pragma once

#include "remat/backbones/backbone.hpp"
#include "remat/backbones/chain_backbone.hpp"
#include "remat/backbones/convnext.hpp"
#include "remat/backbones/efficientnet.hpp"
#include "remat/backbones/family.hpp"
#include "remat/backbones/maxvit.hpp"
#include "remat/backbones/mobilenet_v2.hpp"
#include "remat/backbones/mobilenet_v3.hpp"
#include "remat/backbones/position_embedding.hpp"
#include "remat/backbones/pretrained.hpp"
#include "remat/backbones/published.hpp"
#include "remat/backbones/registry.hpp"
#include "remat/backbones/regnet.hpp"
#include "remat/backbones/resnet.hpp"
#include "remat/backbones/swin.hpp"
#include "remat/backbones/vision_transformer.hpp"
