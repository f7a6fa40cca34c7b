// SPDX-License-Identifier: MIT
#pragma once

#include "remat/training/compare_memory.hpp"
#include "remat/training/frontier.hpp"
#include "remat/training/frontier_svg.hpp"
#include "remat/training/memory_report.hpp"
#include "remat/training/memory_report_svg.hpp"
#include "remat/training/plan.hpp"
#include "remat/training/step_recorder.hpp"
#include "remat/training/svg_chart.hpp"
#include "remat/training/svg_elements.hpp"
