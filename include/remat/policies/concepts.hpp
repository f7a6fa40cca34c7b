// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

#include "remat/detail/literal.hpp"
#include "remat/plan/cost.hpp"
#include "remat/plan/plan.hpp"
#include "remat/policies/keep.hpp"

namespace remat {

namespace detail {

/// Carries its reason into the compiler's message: where the condition is false, GCC and Clang
/// print the arguments, and so the sentence, word for word.
template <bool condition, Literal sentence>
concept Holds = condition;

template <class Candidate>
inline constexpr bool maps_chain_to_plan = requires(const Candidate& rule, const Chain& chain) {
  { rule(chain) } -> std::same_as<Plan>;
};
template <class Candidate>
inline constexpr bool maps_plan_to_plan =
    requires(const Candidate& pattern, const Plan& plan, const Chain& chain) {
      { pattern(plan, chain) } -> std::same_as<Plan>;
    };
template <class Candidate>
inline constexpr bool shares_out_segments =
    requires(const Candidate& pattern, const Chain& chain, std::size_t segment_count) {
      { pattern.segments(chain, segment_count) } -> std::same_as<Plan>;
    };
template <class Candidate>
inline constexpr bool names_default_rule = requires { typename Candidate::DefaultRule; };
template <class Candidate>
inline constexpr bool answers_keep =
    requires(const Candidate& keep, const keep::Operation& operation, Bytes result) {
      { keep(operation, result) } -> std::convertible_to<bool>;
    };

}  // namespace detail

/// Groups the units of a chain into segments.
///
/// The smallest rule is a struct with one member, `remat::Plan operator()(const remat::Chain&)
/// const`. `Chain::unit_costs` is empty until a first forward has measured the units.
template <class Candidate>
concept Rule =
    detail::Holds<std::default_initializable<Candidate>, "a rule needs a default constructor"> &&
    detail::Holds<detail::maps_chain_to_plan<Candidate>,
                  "a rule needs a member remat::Plan operator()(const remat::Chain&) const">;

/// Says which segments of a rule's plan may be dropped.
///
/// The smallest pattern has a `DefaultRule` and a member
/// `remat::Plan operator()(const remat::Plan&, const remat::Chain&) const`, which returns the plan
/// to use. Before the units are measured `Chain::unit_costs` is empty, and what the pattern leaves
/// plain then is never measured. A member
/// `remat::Plan segments(const remat::Chain&, std::size_t segment_count) const`, if there is one,
/// makes the segments of `enable_gradient_checkpointing(segment_count)`; without it they are
/// balanced over the whole chain.
template <class Candidate>
concept Pattern =
    detail::Holds<std::default_initializable<Candidate>, "a pattern needs a default constructor"> &&
    detail::Holds<detail::names_default_rule<Candidate>,
                  "a pattern needs a member type DefaultRule"> &&
    detail::Holds<detail::maps_plan_to_plan<Candidate>,
                  "a pattern needs a member remat::Plan operator()(const remat::Plan&, const "
                  "remat::Chain&) const">;

/// Decides for each result inside a region whether it stays.
template <class Candidate>
concept KeepPolicy =
    detail::Holds<std::copy_constructible<Candidate>, "a keep policy needs a copy constructor"> &&
    detail::Holds<detail::answers_keep<Candidate>,
                  "a keep policy needs a member bool operator()(const remat::keep::Operation&, "
                  "remat::Bytes) const">;

}  // namespace remat
