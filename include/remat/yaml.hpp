// SPDX-License-Identifier: MIT
#pragma once

#include "remat/yaml/check.hpp"
#include "remat/yaml/configuration.hpp"
#include "remat/yaml/keys.hpp"
#include "remat/yaml/read.hpp"
#include "remat/yaml/unknown_key.hpp"
#include "remat/yaml/value.hpp"
#include "remat/yaml/write.hpp"
