// SPDX-License-Identifier: MIT
#include "tests/support/compare.hpp"

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace {
namespace programs_test {

namespace nn = torch::nn;
using compare::Mode;
using compare::Run;
using torch::Tensor;

/// A program that is drawn by lot: pure and random operations, edits in place, views, state under no_grad, nested regions, results that
/// are edited later, several backward passes. The same number gives the same program, so that both runs do the same.
class RandomProgram {
 public:
  RandomProgram(Run& run, unsigned number) : run_(run), lot_(number) {}

  void operator()() {
    for (int i = 0; i < 3; ++i) weights_.push_back(torch::randn({4, 4}, torch::requires_grad()));
    for (int i = 0; i < 2; ++i) buffers_.push_back(torch::randn({4, 4}));
    auto x = torch::randn({4, 4}, torch::requires_grad());
    std::vector<Tensor> pool{x * 1, x.sin()};

    run_.throws("forward", [&] {
      for (int region = 0; region < 2 + draw(2); ++region) {
        std::vector<Tensor> inputs{pick(pool), pick(pool)};
        for (const auto& result : wrapped(inputs, 2)) pool.push_back(result);
        if (draw(3) != 0) continue;
        edit(pool.back());
        ++edits_outside_;
      }
    });
    Tensor loss = torch::zeros({});
    for (std::size_t i = 2; i < pool.size(); ++i)
      if (pool[i].requires_grad() && draw(4) != 0) loss = loss + (pool[i] * 0.3).sum();
    std::vector<Tensor> wanted = weights_;
    wanted.push_back(x);
    run_.note("loss", loss);
    run_.count("edits outside", edits_outside_);
    for (const auto& buffer : buffers_) {
      run_.note("buffer", buffer);
      run_.count("version", buffer._version());
    }
    run_.buffers("norm", *norm_);
    run_.generator("after forward");
    if (!loss.requires_grad()) return;

    const int passes = 1 + draw(2);
    const bool creates = draw(5) == 0;
    run_.throws("backward", [&] {
      for (int pass = 0; pass < passes; ++pass) {
        auto gradients = torch::autograd::grad({loss}, wanted, {}, pass + 1 < passes || creates, creates, /*allow_unused=*/true);
        if (creates) {
          Tensor second = torch::zeros({});
          for (const auto& g : gradients)
            if (g.defined()) second = second + g.sin().sum();
          if (second.requires_grad()) gradients = torch::autograd::grad({second}, wanted, {}, true, false, true);
        }
        for (const auto& g : gradients) run_.note("gradient", g);
      }
    });
    run_.buffers("norm after backward", *norm_);
  }

 private:
  int draw(int below) { return static_cast<int>(lot_() % static_cast<unsigned>(below)); }
  Tensor& pick(std::vector<Tensor>& pool) { return pool[static_cast<std::size_t>(draw(static_cast<int>(pool.size())))]; }

  std::vector<Tensor> wrapped(const std::vector<Tensor>& inputs, int depth) {
    const auto body = [this, depth](const std::vector<Tensor>& tensors) { return block(tensors, depth); };
    if (draw(4) == 0) return run_.wrap_keeping(remat::keep::convolutions_and_matmuls{}, body, inputs);
    return run_.wrap(body, inputs);
  }

  void edit(Tensor& t) {
    switch (draw(6)) {
      case 0: t.mul_(0.5); break;
      case 1: t.add_(1); break;
      case 2: t.select(0, 1).mul_(2); break;
      case 3: t.t().narrow(0, 1, 2).add_(0.25); break;
      case 4: t.sigmoid_(); break;
      default: t.clamp_(-1, 1); break;
    }
  }

  std::vector<Tensor> block(const std::vector<Tensor>& inputs, int depth) {
    std::vector<Tensor> pool = inputs;
    const int length = 3 + draw(9);
    for (int i = 0; i < length; ++i) {
      Tensor& a = pick(pool);
      Tensor& b = pick(pool);
      Tensor made;
      switch (draw(24)) {
        case 0: made = a.sin(); break;
        case 1: made = (a * 0.2).exp(); break;
        case 2: made = a.tanh(); break;
        case 3: made = a * b; break;
        case 4: made = a.mm(weights_[static_cast<std::size_t>(draw(3))]) * 0.3; break;
        case 5: made = (a + 1).square() * 0.1; break;
        case 6: made = a + b; break;
        case 7: made = torch::dropout(a, 0.3, true); break;
        case 8: made = norm_(a); break;
        case 9: made = a * torch::rand_like(b); break;
        case 10: made = a.t(); break;
        case 11: made = a.detach().cos(); break;
        case 12: edit(a); continue;
        case 13: edit(a); continue;
        case 14: made = a * 2; edit(made); break;
        case 15: made = a.clone(); made.narrow(0, 0, 2).copy_(b.narrow(0, 1, 2)); break;
        case 16: made = (a + buffers_[0]).sin(); break;
        case 17: {
          torch::NoGradGuard no_grad;
          buffers_[0].mul_(0.9).add_(a.detach() * 0.1);
          continue;
        }
        case 18: {
          torch::NoGradGuard no_grad;
          made = (a * b).cos();
          break;
        }
        case 19: buffers_[1].add_(0.1); made = a * buffers_[1].clone(); break;
        case 20: made = torch::zeros({4, 4}).add_(a).index_put_({torch::tensor({0, 2})}, b.index({torch::tensor({1, 3})})); break;
        case 21: made = torch::cat({a.narrow(1, 0, 2), b.narrow(1, 2, 2)}, 1).relu_(); break;
        default:
          if (depth > 0) {
            for (const auto& result : wrapped({a, b}, depth - 1)) pool.push_back(result);
            continue;
          }
          made = a.softmax(1);
      }
      pool.push_back(made);
    }
    std::vector<Tensor> results{pool.back(), pick(pool)};
    if (draw(3) == 0) results.push_back(pick(pool).narrow(0, 0, 4));
    return results;
  }

  Run& run_;
  std::mt19937 lot_;
  std::vector<Tensor> weights_, buffers_;
  int edits_outside_ = 0;
  nn::BatchNorm1d norm_{4};
};

TEST_CASE("programs drawn by lot leave the same as plain, or name the tensor that was edited outside") {
  // REMAT_PROGRAMS=first:count looks for more; the numbers here were chosen for a few seconds.
  unsigned first = 0, count = 300;
  if (const char* wish = std::getenv("REMAT_PROGRAMS")) {
    const std::string text = wish;
    first = static_cast<unsigned>(std::stoul(text));
    count = static_cast<unsigned>(std::stoul(text.substr(text.find(':') + 1)));
  }
  int refused = 0, compared = 0, complete = 0;
  for (unsigned number = first; number < first + count; ++number) {
    CAPTURE(number);
    auto program = [number](Run& run) { RandomProgram(run, number)(); };
    const Run plain = compare::run_once(Mode::plain, program, number);
    for (const Mode mode : {Mode::drop_everything, Mode::keep_small_results, Mode::debug}) {
      const Run checkpointed = compare::run_once(mode, program, number);
      const auto number_of = [](const Run& run, const char* name) {
        const auto found = run.noted().find(name);
        return found == run.noted().end() ? -1 : found->second.number;
      };
      complete += number_of(plain, "backward throws") == 0;
      // A result that a later region reads may be edited by plain code: plain allows what it did not save, a recompute cannot.
      if (number_of(checkpointed, "backward throws") == 1 && number_of(plain, "backward throws") == 0 && number_of(plain, "edits outside") > 0) {
        ++refused;
        continue;
      }
      ++compared;
      compare::check_same(plain, checkpointed, mode);
    }
  }
  MESSAGE(compared << " runs compared, " << complete << " of all without an error in plain, " << refused << " refused because of an edit outside");
  CHECK(refused * 10 <= compared);
}

}  // namespace programs_test
}  // namespace
