// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "train/cases.hpp"
#include "train/random_numbers.hpp"
#include "train/transform.hpp"

namespace train {

/// What goes through the network at once.
struct Batch {
  torch::Tensor images;      // (B, 3, S, S), or (B, V, 3, S, S) for several views
  torch::Tensor is_present;  // (B, V) boolean; undefined if no view is absent
  torch::Tensor labels;      // (B) int64

  std::int64_t size() const { return labels.size(0); }
  Batch to(c10::Device device) const {
    return {images.to(device), is_present.defined() ? is_present.to(device) : is_present,
            labels.to(device)};
  }
};

/// What a loader has to know besides the cases.
struct LoaderOptions {
  std::int64_t batch_size;
  std::int64_t workers;
  std::int64_t num_views;  // 0: images without a dimension for views
  std::int64_t seed;
};

/// Gives one batch after the other; threads read the files of the next one meanwhile.
///
/// The threads read and decode only: LibTorch's operations would start threads of their own in
/// each.
class Loader {
 public:
  Loader(Cases cases, Transform transform, const LoaderOptions& options)
      : cases_(std::move(cases)), transform_(std::move(transform)), options_(options) {}

  ~Loader() { stop(); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  const Cases& cases() const { return cases_; }

  /// Begins a pass.
  ///
  /// @param order        indices of the cases
  /// @param first_batch  where to begin
  /// @param epoch        of training, for augmentation; none: as in validation
  void start(std::vector<std::size_t> order, std::int64_t first_batch,
             std::optional<std::int64_t> epoch) {
    stop();
    order_ = std::move(order);
    epoch_ = epoch;
    next_ = static_cast<std::size_t>(first_batch * options_.batch_size);
    read_ahead();
  }

  /// Returns the next batch; empty at the end.
  std::optional<Batch> next() {
    if (!ahead_.valid()) return {};
    const std::vector<std::vector<Image>> images = ahead_.get();
    const std::vector<std::size_t> indices = std::exchange(indices_ahead_, {});
    read_ahead();
    return make_batch(indices, images);
  }

 private:
  using Images = std::vector<std::vector<Image>>;

  void stop() {
    if (ahead_.valid()) ahead_.wait();
    ahead_ = {};
  }

  void read_ahead() {
    const auto size = static_cast<std::size_t>(options_.batch_size);
    const std::size_t end = std::min(next_ + size, order_.size());
    if (next_ >= end) return;
    indices_ahead_.assign(order_.begin() + static_cast<std::ptrdiff_t>(next_),
                          order_.begin() + static_cast<std::ptrdiff_t>(end));
    next_ = end;
    ahead_ =
        std::async(std::launch::async, [this, indices = indices_ahead_] { return read(indices); });
  }

  Images read(const std::vector<std::size_t>& indices) const {
    Images images(indices.size());
    const auto stride = static_cast<std::size_t>(options_.workers);
    const auto read_some = [&](std::size_t first) {
      for (std::size_t i = first; i < indices.size(); i += stride)
        images[i] = cases_.read(indices[i]);
    };
    std::vector<std::future<void>> others;
    for (std::size_t first = 1; first < std::min(stride, indices.size()); ++first)
      others.push_back(std::async(std::launch::async, read_some, first));
    read_some(0);
    for (auto& other : others) other.get();
    return images;
  }

  Batch make_batch(const std::vector<std::size_t>& indices, const Images& images) const {
    std::vector<torch::Tensor> rows;
    std::vector<std::int64_t> labels;
    const auto batch_size = std::ssize(indices);
    const std::int64_t views = std::max<std::int64_t>(options_.num_views, 1);
    const auto is_present = torch::zeros({batch_size, views}, torch::kBool);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      labels.push_back(cases_.labels[indices[i]]);
      std::vector<torch::Tensor> of_case = views_of(indices[i], images[i]);
      is_present[static_cast<std::int64_t>(i)].slice(0, 0, std::ssize(of_case)).fill_(true);
      while (std::ssize(of_case) < views) of_case.push_back(torch::zeros_like(of_case[0]));
      rows.push_back(options_.num_views == 0 ? of_case[0] : torch::stack(of_case));
    }
    const bool has_all = is_present.all().item<bool>();
    return {torch::stack(rows), has_all ? torch::Tensor() : is_present, torch::tensor(labels)};
  }

  std::vector<torch::Tensor> views_of(std::size_t index, const std::vector<Image>& images) const {
    std::vector<torch::Tensor> views;
    for (const Image& image : images) {
      auto generator =
          generator_of({static_cast<std::uint64_t>(options_.seed),
                        static_cast<std::uint64_t>(epoch_.value_or(0)), index, views.size()});
      views.push_back(transform_(image, epoch_ ? &generator : nullptr));
    }
    return views;
  }

  Cases cases_;
  Transform transform_;
  LoaderOptions options_;
  std::vector<std::size_t> order_, indices_ahead_;
  std::size_t next_ = 0;
  std::optional<std::int64_t> epoch_;
  std::future<Images> ahead_;
};

}  // namespace train
