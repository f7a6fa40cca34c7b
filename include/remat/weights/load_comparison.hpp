// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "remat/detail/nearest_names.hpp"
#include "remat/errors.hpp"
#include "remat/libtorch/nn.hpp"
#include "remat/weights/load_report.hpp"
#include "remat/weights/module_tensors.hpp"
#include "remat/weights/state_dict.hpp"

namespace remat {

/// Says what may differ between a file and the module it is loaded into.
struct LoadOptions {
  /// Whether each key must be in both. Without it, keys of one side only are left alone; another
  /// shape is an error all the same.
  bool is_strict = true;
  /// Keys that are left alone on both sides: "fc" stands for fc and for all that begins with "fc.".
  std::vector<std::string> skip = {};
  /// Asked for each key whose shapes differ; what it returns is loaded. An undefined tensor, or one
  /// of another shape than the given one, means that they do not fit.
  std::function<at::Tensor(const std::string& key, const at::Tensor& stored, at::IntArrayRef shape)>
      fit = {};
};

namespace detail {

/// A tensor of the module and what goes into it: an entry of the file, or numbers that are here.
struct Planned {
  at::Tensor target;
  std::optional<std::size_t> entry;
  at::Tensor source;
  bool is_counter = false;
};

/// Compares what a file announces with what a module has, and plans what goes where. Changes
/// nothing.
class LoadComparison {
 public:
  /// @throws WeightsError  with all problems at once
  LoadComparison(const torch::nn::Module& module, StateDictReader& reader,
                 const LoadOptions& options)
      : reader_(reader), options_(options), targets_(module_tensors(module)) {
    remove_common_prefix();
    compare();
    tolerate_counters();
    tolerate_shared();
    refuse_problems();
  }

  const LoadReport& report() const { return report_; }
  std::vector<Planned>& plan() { return plan_; }

 private:
  static constexpr std::string_view kParallelPrefix = "module.";
  static constexpr std::string_view kCounter = "num_batches_tracked";

  /// DataParallel wraps the module in another one, whose only child is called "module". A module
  /// that has such a child itself keeps its names.
  void remove_common_prefix() {
    const auto begins = [](const auto& name) { return name.starts_with(kParallelPrefix); };
    const auto& entries = reader_.entries();
    const bool is_common = !entries.empty() &&
                           std::all_of(entries.begin(), entries.end(),
                                       [&](const auto& e) { return begins(e.name); }) &&
                           std::none_of(targets_.begin(), targets_.end(),
                                        [&](const auto& t) { return begins(t.first); });
    if (is_common) report_.removed_prefix = kParallelPrefix;
    for (const TensorEntry& entry : entries)
      names_.push_back(entry.name.substr(report_.removed_prefix.size()));
  }

  bool is_skipped(std::string_view key) const {
    return std::any_of(options_.skip.begin(), options_.skip.end(), [&](const std::string& prefix) {
      return key.starts_with(prefix) && !prefix.empty() &&
             (key.size() == prefix.size() || prefix.back() == '.' || key[prefix.size()] == '.');
    });
  }

  void compare() {
    std::unordered_map<std::string_view, std::size_t> stored;
    for (std::size_t i = 0; i < names_.size(); ++i) stored.emplace(names_[i], i);
    std::unordered_set<std::string_view> known;
    for (const auto& [key, target] : targets_) {
      known.insert(key);
      const auto found = stored.find(key);
      if (is_skipped(key))
        report_.skipped.push_back(key);
      else if (found == stored.end())
        report_.missing.push_back(key);
      else
        compare_one(key, target, found->second);
    }
    for (const std::string& name : names_) {
      if (known.contains(name)) continue;
      (is_skipped(name) ? report_.skipped : report_.unexpected).push_back(name);
    }
  }

  void compare_one(const std::string& key, const at::Tensor& target, std::size_t index) {
    const TensorEntry& entry = reader_.entries()[index];
    const bool is_complex = at::isComplexType(entry.dtype);
    const bool fits_kind = !is_complex || at::isComplexType(target.scalar_type());
    // Before PyTorch 0.4 there were no tensors without dimensions.
    const bool is_old_scalar = target.dim() == 0 && entry.shape == std::vector<std::int64_t>{1};
    if (fits_kind && (target.sizes() == entry.shape || is_old_scalar)) {
      report_.matched.push_back(key);
      plan_.push_back({target, index, {}, is_counter(key)});
      return;
    }
    at::Tensor fitted;
    if (fits_kind && options_.fit) fitted = options_.fit(key, reader_.read(index), target.sizes());
    if (fitted.defined() && fitted.sizes() == target.sizes()) {
      report_.fitted.push_back(key);
      plan_.push_back({target, std::nullopt, fitted, is_counter(key)});
    } else {
      report_.mismatched.push_back(
          {key, entry.shape, target.sizes().vec(), entry.dtype, target.scalar_type()});
    }
  }

  static bool is_counter(std::string_view key) {
    return key == kCounter || key.ends_with("." + std::string(kCounter));
  }

  /// Batch normalisation counts since PyTorch 0.4.1: older files have no counters, and modules
  /// that count nothing need none.
  void tolerate_counters() {
    std::erase_if(report_.unexpected, [&](const std::string& key) {
      if (is_counter(key)) report_.tolerated.push_back(key);
      return is_counter(key);
    });
    for (const auto& [key, target] : targets_)
      if (is_counter(key) && std::erase(report_.missing, key) != 0) {
        report_.tolerated.push_back(key);
        plan_.push_back({target, std::nullopt, target.detach().clone().zero_(), true});
      }
  }

  /// A tensor with two names may be in a file under one of them: safetensors drops the other.
  void tolerate_shared() {
    std::unordered_set<const c10::TensorImpl*> loaded;
    for (const Planned& planned : plan_) loaded.insert(planned.target.unsafeGetTensorImpl());
    for (const auto& [key, target] : targets_)
      if (loaded.contains(target.unsafeGetTensorImpl()) && std::erase(report_.missing, key) != 0)
        report_.tolerated.push_back(key);
  }

  void refuse_problems() const {
    const auto is_wanted = [&](const NamedTensor& t) {
      return !is_counter(t.first) && !is_skipped(t.first);
    };
    const auto is_loaded = [&](const Planned& planned) { return !planned.is_counter; };
    const auto wanted = std::count_if(targets_.begin(), targets_.end(), is_wanted);
    const bool is_any_loaded = std::any_of(plan_.begin(), plan_.end(), is_loaded);
    if (wanted != 0 && !is_any_loaded && report_.mismatched.empty())
      refuse_all(static_cast<std::size_t>(wanted));
    const bool has_one_sided = !report_.missing.empty() || !report_.unexpected.empty();
    if (!report_.mismatched.empty() || (options_.is_strict && has_one_sided)) refuse_some();
  }

  [[noreturn]] void refuse_all(std::size_t wanted) const {
    std::ostringstream what;
    what << "0 of " << wanted << " keys of the module are among the " << names_.size()
         << " of the file";
    print_keys(what, report_.missing, "keys of the module");
    print_keys(what, report_.unexpected, "keys of the file");
    throw WeightsError(ErrorMessage("remat.weights.none")
                           .where(quoted_source())
                           .what(what.str())
                           .cause("it belongs to another network, or its names have another prefix")
                           .cure("Build the module that the file belongs to, or give its tensors "
                                 "the module's names in a remat::StateDict"));
  }

  [[noreturn]] void refuse_some() const {
    std::ostringstream what;
    what << report_.loaded_count() << " of " << targets_.size() << " keys match";
    print_problems(what, report_);
    what << "; nothing was changed";
    throw WeightsError(
        ErrorMessage("remat.weights.keys")
            .where(quoted_source())
            .what(what.str())
            .cause(likeness())
            .cure(
                "Build the module that the file belongs to; LoadOptions has is_strict = false for "
                "keys of one side only, skip for keys to leave alone, fit for other shapes"));
  }

  /// Says which unexpected names are spelled like missing ones.
  std::string likeness() const {
    constexpr std::size_t kAsked = 3, kCandidates = 300, kLongest = 200;
    std::vector<std::string> candidates;
    for (const std::string& name : report_.unexpected)
      if (name.size() <= kLongest && candidates.size() < kCandidates) candidates.push_back(name);
    std::string text;
    if (candidates.empty()) return text;
    for (std::size_t i = 0; i < std::min(kAsked, report_.missing.size()); ++i) {
      const std::string nearest = nearest_names(report_.missing[i], candidates, 1).front();
      text += (i == 0 ? "most like \"" : ", most like \"") + printable(report_.missing[i]) +
              "\" is \"" + printable(nearest) + "\"";
    }
    return text;
  }

  std::string quoted_source() const { return "\"" + reader_.source_name() + "\""; }

  StateDictReader& reader_;
  const LoadOptions& options_;
  std::vector<NamedTensor> targets_;
  std::vector<std::string> names_;
  std::vector<Planned> plan_;
  LoadReport report_;
};

}  // namespace detail

}  // namespace remat
