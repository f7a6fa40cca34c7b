// SPDX-License-Identifier: MIT
#include "tests/unit/weights/weight_files.hpp"

#include <algorithm>
#include <sstream>

#include "remat/nn/checkpointed.hpp"
#include "remat/nn/sequential.hpp"
#include "remat/weights/load.hpp"

namespace load_tests {

using namespace weight_files;

using Names = std::vector<std::string>;

/// A module that a test can compare with itself later.
remat::StateDict copy_of(const torch::nn::Module& module) {
  remat::StateDict copy;
  for (const auto& [name, tensor] : remat::state_dict(module)) copy.add(name, tensor.clone());
  return copy;
}

bool are_equal(const remat::StateDict& left, const remat::StateDict& right) {
  if (left.names() != right.names()) return false;
  return std::all_of(left.begin(), left.end(), [&](const auto& item) {
    return torch::equal(item.second, right.at(item.first));
  });
}

/// A reader that fails at one tensor, as a file does whose disk breaks.
class BrokenReader : public remat::StateDictReader {
 public:
  BrokenReader(const remat::StateDict& state_dict, std::size_t broken_index)
      : StateDictReader("broken"), state_dict_(state_dict), broken_index_(broken_index) {
    std::vector<remat::TensorEntry> entries;
    for (const auto& [name, tensor] : state_dict)
      entries.push_back({name, tensor.sizes().vec(), tensor.scalar_type(), tensor.nbytes()});
    announce(std::move(entries));
  }

  torch::Tensor read(std::size_t index) override {
    if (index == broken_index_) throw remat::WeightsError("remat.weights.file", "the disk broke");
    return state_dict_.at(entries()[index].name);
  }

 private:
  const remat::StateDict& state_dict_;
  std::size_t broken_index_;
};

TEST_CASE("a file loads into a module: values are exact, and the report counts them") {
  auto module = tiny_module();

  const auto report = remat::load_weights(module, data_file("zip.pth"));

  CHECK(is_tiny(remat::state_dict(module)));
  CHECK(report.matched == remat::state_dict(module).names());
  CHECK(report.loaded_count() == 7);
  std::ostringstream text;
  text << report;
  CHECK(text.str() == "7 keys matched");
}

TEST_CASE("the tensors of the module stay the same, with dtype and requires_grad") {
  auto module = tiny_module();
  module->to(torch::kFloat64);
  module->parameters()[1].set_requires_grad(false);
  const auto parameters = module->parameters();
  const std::vector<const void*> data{parameters[0].data_ptr(), parameters[1].data_ptr()};

  remat::load_weights(module, data_file("zip.pth"));

  CHECK(module->parameters()[0].is_same(parameters[0]));
  CHECK(parameters[0].data_ptr() == data[0]);
  CHECK(parameters[1].data_ptr() == data[1]);
  CHECK(parameters[0].requires_grad());
  CHECK_FALSE(parameters[1].requires_grad());
  CHECK(parameters[0].is_leaf());
  CHECK(torch::equal(parameters[0], ramp(0, {2, 3}).to(torch::kFloat64)));
}

TEST_CASE("a backward that needs the old weights notices that others were loaded") {
  auto module = tiny_module();
  auto x = torch::ones({4, 3}).set_requires_grad(true);
  const auto loss = module->forward(x).sum();

  remat::load_weights(module, data_file("zip.pth"));

  CHECK_THROWS_AS(loss.backward(), c10::Error);
}

TEST_CASE("halves become what the parameter is: bf16 0x3F80 and 0xC000, fp16 0x3C00") {
  remat::StateDict halves;
  halves.add("weight", torch::tensor({0x3f80, -0x4000}, torch::kInt16).view(torch::kBFloat16));
  halves.add("bias", torch::tensor({0x3c00, 0x3c00}, torch::kInt16).view(torch::kFloat16));
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({2}));

  remat::load_weights(norm, halves);

  CHECK(torch::equal(norm->weight, torch::tensor({1.0f, -2.0f})));
  CHECK(torch::equal(norm->bias, torch::tensor({1.0f, 1.0f})));
  CHECK(norm->weight.requires_grad());
}

TEST_CASE("one error lists all missing, unexpected and wrongly shaped keys; nothing was changed") {
  torch::nn::Sequential module(torch::nn::Linear(3, 4), torch::nn::ReLU(),
                               torch::nn::BatchNorm1d(4));
  remat::StateDict stored;
  stored.add("0.weight", torch::zeros({2, 3}));
  stored.add("0.bias", torch::zeros(4));
  stored.add("1.weight", torch::zeros(4));
  stored.add("1.bias", torch::zeros(4));
  const auto before = copy_of(*module);

  const std::string text = error_of([&] { remat::load_weights(module, stored); });

  CHECK(text ==
        "[remat.weights.keys] \"a remat::StateDict\": 1 of 7 keys match; 4 missing: \"2.weight\", "
        "\"2.bias\", \"2.running_mean\", \"2.running_var\"; 2 unexpected: \"1.weight\", "
        "\"1.bias\"; 1 of another shape: \"0.weight\" is [2, 3] in the file and [4, 3] in the "
        "module; nothing was changed: most like \"2.weight\" is \"1.weight\", most like \"2.bias\" "
        "is \"1.bias\", most like \"2.running_mean\" is \"1.weight\". Build the module that the "
        "file belongs to; LoadOptions has is_strict = false for keys of one side only, skip for "
        "keys to leave alone, fit for other shapes.");
  CHECK(are_equal(before, copy_of(*module)));
}

TEST_CASE("long lists of keys are cut, with their counts") {
  torch::nn::Sequential module;
  remat::StateDict stored;
  for (int i = 0; i < 20; ++i) module->push_back(torch::nn::Linear(1, 1));
  stored.add("0.weight", torch::zeros({1, 1}));

  const std::string text = error_of([&] { remat::load_weights(module, stored); });

  CHECK(text.find("1 of 40 keys match; 39 missing: \"0.bias\", ") != std::string::npos);
  CHECK(text.find(" and 31 more; nothing was changed") != std::string::npos);
  CHECK(text.size() < 600);
}

TEST_CASE("not strict: keys of one side only are left alone and reported") {
  torch::nn::Sequential module(torch::nn::Linear(3, 2), torch::nn::ReLU(), torch::nn::Linear(2, 2));
  const auto before = copy_of(*module);
  remat::LoadOptions options;
  options.is_strict = false;

  const auto report = remat::load_weights(module, data_file("zip.pth"), options);

  CHECK(report.matched == Names{"0.weight", "0.bias"});
  CHECK(report.missing == Names{"2.weight", "2.bias"});
  CHECK(report.unexpected == Names{"1.weight", "1.bias", "1.running_mean", "1.running_var"});
  CHECK(report.tolerated == Names{"1.num_batches_tracked"});
  CHECK(torch::equal(remat::state_dict(module).at("0.weight"), ramp(0, {2, 3})));
  CHECK(torch::equal(remat::state_dict(module).at("2.weight"), before.at("2.weight")));
}

TEST_CASE("not strict: another shape is an error all the same") {
  torch::nn::Sequential module(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(3));
  const auto before = copy_of(*module);
  remat::LoadOptions options;
  options.is_strict = false;

  const std::string text =
      error_of([&] { remat::load_weights(module, data_file("zip.pth"), options); });

  CHECK(
      text.starts_with("[remat.weights.keys] \"zip.pth\": 3 of 7 keys match; 4 of another shape: "
                       "\"1.weight\" is [2] in the file and [3] in the module, "));
  CHECK(are_equal(before, copy_of(*module)));
}

TEST_CASE("no key at all is an error even when not strict: 0 of N") {
  torch::nn::Linear linear(3, 2);
  const auto before = copy_of(*linear);

  for (const bool is_strict : {true, false}) {
    remat::LoadOptions options;
    options.is_strict = is_strict;
    CHECK(error_of([&] { remat::load_weights(linear, data_file("zip.pth"), options); }) ==
          "[remat.weights.none] \"zip.pth\": 0 of 2 keys of the module are among the 7 of the "
          "file; 2 keys of the module: \"weight\", \"bias\"; 6 keys of the file: \"0.weight\", "
          "\"0.bias\", \"1.weight\", \"1.bias\", \"1.running_mean\", \"1.running_var\": it belongs "
          "to another network, or its names have another prefix. Build the module that the file "
          "belongs to, or give its tensors the module's names in a remat::StateDict.");
  }
  CHECK(are_equal(before, copy_of(*linear)));
}

TEST_CASE("counters alone do not count as weights") {
  torch::nn::BatchNorm1d norm(2);
  remat::StateDict stored;
  stored.add("num_batches_tracked", torch::tensor(3));
  remat::LoadOptions options;
  options.is_strict = false;

  CHECK(error_of([&] {
          remat::load_weights(norm, stored, options);
        }).starts_with("[remat.weights.none] \"a remat::StateDict\": 0 of 4 keys"));
  CHECK(norm->num_batches_tracked.item<std::int64_t>() == 0);
}

TEST_CASE("module. is taken off if all names begin with it") {
  auto module = tiny_module();

  const auto report = remat::load_weights(module, data_file("parallel.pth"));

  CHECK(is_tiny(remat::state_dict(module)));
  CHECK(report.removed_prefix == "module.");
  std::ostringstream text;
  text << report;
  CHECK(text.str() == "7 keys matched; \"module.\" taken off all names of the file");
}

TEST_CASE("module. stays if only some names begin with it, or if the module's own do") {
  auto module = tiny_module();
  CHECK(error_of([&] {
          remat::load_weights(module, data_file("partly_parallel.pth"));
        }).starts_with("[remat.weights.none] \"partly_parallel.pth\": 0 of 6 keys"));

  struct WrapperImpl : torch::nn::Module {
    torch::nn::Sequential inner = register_module("module", tiny_module());
  };
  WrapperImpl wrapper;
  CHECK(remat::load_weights(wrapper, data_file("parallel.pth")).removed_prefix.empty());
  CHECK(is_tiny(remat::state_dict(wrapper.inner)));
}

TEST_CASE("files without num_batches_tracked load strictly, and the count becomes 0") {
  auto module = tiny_module();
  module->forward(torch::ones({4, 3}));
  auto stored = remat::read_state_dict(data_file("zip.pth"));
  remat::StateDict old;
  for (const auto& [name, tensor] : stored)
    if (!name.ends_with("num_batches_tracked")) old.add(name, tensor);

  const auto report = remat::load_weights(module, old);

  CHECK(report.tolerated == Names{"1.num_batches_tracked"});
  CHECK(report.missing.empty());
  CHECK(remat::state_dict(module).at("1.num_batches_tracked").item<std::int64_t>() == 0);
  CHECK(torch::equal(remat::state_dict(module).at("1.running_var"), ramp(5, {2})));
}

TEST_CASE("files with a num_batches_tracked that the module lacks load strictly") {
  torch::nn::Linear linear(3, 2);
  remat::StateDict stored;
  stored.add("weight", ramp(0, {2, 3}));
  stored.add("bias", ramp(1, {2}));
  stored.add("norm.num_batches_tracked", torch::tensor(3));

  CHECK(remat::load_weights(linear, stored).tolerated == Names{"norm.num_batches_tracked"});
  CHECK(torch::equal(linear->bias, ramp(1, {2})));
}

TEST_CASE("skipped keys are left alone on both sides") {
  torch::nn::Sequential module(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(5));
  const auto before = copy_of(*module);
  remat::LoadOptions options;
  options.skip = {"1"};

  const auto report = remat::load_weights(module, data_file("zip.pth"), options);

  CHECK(report.matched == Names{"0.weight", "0.bias"});
  CHECK(report.skipped ==
        Names{"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"});
  CHECK(torch::equal(remat::state_dict(module).at("1.weight"), before.at("1.weight")));
  CHECK(torch::equal(remat::state_dict(module).at("0.bias"), ramp(1, {2})));
}

TEST_CASE("a prefix to skip ends at a dot: fc does not stand for fc2") {
  struct TwoImpl : torch::nn::Module {
    torch::nn::Linear fc = register_module("fc", torch::nn::Linear(2, 2));
    torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(2, 2));
  };
  TwoImpl stored, module;
  for (const char* prefix : {"fc", "fc."}) {
    remat::LoadOptions options;
    options.skip = {prefix};
    const auto report = remat::load_weights(module, remat::state_dict(stored), options);
    CHECK(report.matched == Names{"fc2.weight", "fc2.bias"});
    CHECK(report.skipped == Names{"fc.weight", "fc.bias"});
  }
  remat::LoadOptions whole_key;
  whole_key.skip = {"fc.bias"};
  CHECK(remat::load_weights(module, remat::state_dict(stored), whole_key).skipped ==
        Names{"fc.bias"});
}

TEST_CASE("fit is asked for keys whose shapes differ, and for no other") {
  torch::nn::Sequential module(torch::nn::Linear(6, 2), torch::nn::BatchNorm1d(2));
  Names asked;
  remat::LoadOptions options;
  options.fit = [&](const std::string& key, const torch::Tensor& stored, at::IntArrayRef shape) {
    asked.push_back(key);
    CHECK(torch::equal(stored, ramp(0, {2, 3})));
    CHECK(shape == at::IntArrayRef({2, 6}));
    return stored.repeat({1, 2}) / 2;
  };

  const auto report = remat::load_weights(module, data_file("zip.pth"), options);

  CHECK(asked == Names{"0.weight"});
  CHECK(report.fitted == asked);
  CHECK(report.matched.size() == 6);
  CHECK(report.loaded_count() == 7);
  CHECK(torch::equal(remat::state_dict(module).at("0.weight"), ramp(0, {2, 3}).repeat({1, 2}) / 2));
}

TEST_CASE("what fit does not fit is a mismatch, and nothing was changed") {
  torch::nn::Sequential module(torch::nn::Linear(6, 2), torch::nn::BatchNorm1d(2));
  const auto before = copy_of(*module);
  remat::LoadOptions options;
  torch::Tensor answer;
  options.fit = [&](const std::string&, const torch::Tensor&, at::IntArrayRef) { return answer; };

  for (const auto& unfit : {torch::Tensor(), torch::zeros({2, 5})}) {
    answer = unfit;
    CHECK(error_of([&] { remat::load_weights(module, data_file("zip.pth"), options); })
              .starts_with("[remat.weights.keys] \"zip.pth\": 6 of 7 keys match; 1 of another "
                           "shape: \"0.weight\" is [2, 3] in the file and [2, 6] in the module"));
  }
  CHECK(are_equal(before, copy_of(*module)));
}

TEST_CASE("complex numbers do not go into real parameters") {
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({2}));
  remat::StateDict stored;
  stored.add("weight", torch::ones(2, torch::kComplexFloat));
  stored.add("bias", torch::ones(2));

  CHECK(error_of([&] {
          remat::load_weights(norm, stored);
        }).find("\"weight\" is [2] complex64 in the file and [2] float32 in the module") !=
        std::string::npos);
}

TEST_CASE("a read that fails half way leaves the module as it was") {
  auto stored = remat::read_state_dict(data_file("zip.pth"));
  auto module = tiny_module();
  const auto before = copy_of(*module);
  const auto version = module->parameters()[0]._version();

  for (std::size_t broken = 0; broken < stored.size(); ++broken) {
    BrokenReader reader(stored, broken);
    CHECK(error_of([&] { remat::load_weights(module, reader); }) ==
          "[remat.weights.file] the disk broke");
    CHECK(are_equal(before, copy_of(*module)));
  }
  CHECK(module->parameters()[0]._version() == version);
}

TEST_CASE("a copy that fails half way is undone, and its error passes unchanged") {
  struct ExpandedImpl : torch::nn::Module {
    ExpandedImpl() {
      register_parameter("first", torch::zeros(2));
      // Its elements share one number, so nothing can be copied into it.
      register_buffer("second", torch::zeros(1).expand(2));
    }
  };
  ExpandedImpl module;
  remat::StateDict stored;
  stored.add("first", torch::ones(2));
  stored.add("second", torch::ones(2));

  CHECK_THROWS_AS(remat::load_weights(module, stored), c10::Error);
  CHECK(torch::equal(module.parameters()[0], torch::zeros(2)));
}

TEST_CASE("scalars that were saved with one dimension load, as in Python") {
  struct ScaleImpl : torch::nn::Module {
    torch::Tensor scale = register_parameter("scale", torch::zeros({}));
  };
  ScaleImpl module;
  remat::StateDict stored;
  stored.add("scale", torch::tensor({2.5f}));

  remat::load_weights(module, stored);

  CHECK(torch::equal(module.scale, torch::tensor(2.5f)));
}

TEST_CASE("a tensor with two names may be in the file under one of them") {
  struct TiedImpl : torch::nn::Module {
    torch::nn::Linear left = register_module("left", torch::nn::Linear(2, 2));
    torch::nn::Linear right = register_module("right", left);
  };
  TiedImpl module;
  remat::StateDict stored;
  stored.add("right.weight", ramp(0, {2, 2}));
  stored.add("right.bias", ramp(1, {2}));

  const auto report = remat::load_weights(module, stored);

  CHECK(report.tolerated == Names{"left.weight", "left.bias"});
  CHECK(torch::equal(module.left->weight, ramp(0, {2, 2})));
}

TEST_CASE("names come in the order of Python's state_dict, own buffers before children") {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      register_module("child", torch::nn::Linear(2, 2));
      register_buffer("buffer", torch::zeros(1));
      register_parameter("parameter", torch::zeros(1));
    }
  };
  MixedImpl module;

  CHECK(remat::state_dict(module).names() ==
        Names{"parameter", "buffer", "child.weight", "child.bias"});
  CHECK_FALSE(remat::state_dict(module).at("parameter").requires_grad());
  CHECK(remat::state_dict(module).at("buffer").is_alias_of(module.buffers()[0]));
}

TEST_CASE("files fit with checkpointing on, off and in other segments, and the bare module too") {
  using Chain = remat::Checkpointed<remat::Sequential>;
  Chain chain(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  auto bare = tiny_module();

  for (const std::int64_t segments : {0, 1, 2}) {
    if (segments == 0)
      chain->disable_gradient_checkpointing();
    else
      chain->enable_gradient_checkpointing(segments);
    CHECK(remat::state_dict(chain).names() == remat::state_dict(bare).names());
    remat::load_weights(chain, data_file("zip.pth"));
    CHECK(is_tiny(remat::state_dict(chain)));
    chain->parameters()[0].data().add_(1);
    remat::load_weights(bare, remat::state_dict(chain));
    CHECK(are_equal(copy_of(*bare), copy_of(*chain)));
  }
}

}  // namespace load_tests
