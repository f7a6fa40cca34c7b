// SPDX-License-Identifier: MIT
#pragma once

#include "remat/plan/balance.hpp"
#include "remat/plan/budget_text.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/graph.hpp"
#include "remat/plan/keep_search.hpp"
#include "remat/plan/memory_budget.hpp"
#include "remat/plan/memory_plan.hpp"
#include "remat/plan/plan.hpp"
#include "remat/plan/plan_fingerprint.hpp"
#include "remat/plan/plan_outcome.hpp"
#include "remat/plan/recompute_time.hpp"
#include "remat/plan/segment_keeps.hpp"
#include "remat/plan/simulate.hpp"
#include "remat/plan/step_points.hpp"
#include "remat/plan/step_simulation.hpp"
#include "remat/plan/step_trace.hpp"
