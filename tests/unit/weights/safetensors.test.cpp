// SPDX-License-Identifier: MIT
#include "tests/unit/weights/weight_files.hpp"

#include <cstdlib>
#include <filesystem>

#include "remat/weights/load.hpp"
#include "remat/weights/safetensors.hpp"

namespace safetensors_tests {

using namespace weight_files;

std::string safetensors(const std::string& header, const std::string& data = "") {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + data;
}

/// What is wrong with the file, without the words that all such errors share.
std::string damage(const std::string& bytes) {
  const std::string whole = error_of_bytes(bytes);
  const std::string begin = "[remat.weights.damaged] \"bytes\": ";
  return whole.starts_with(begin)
             ? whole.substr(begin.size(), whole.find(": the file is") - begin.size())
             : whole;
}

std::string entry(const std::string& name, const std::string& shape, const std::string& offsets,
                  const std::string& dtype = "U8") {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST_CASE("a file of Python's package loads with exact values") {
  const auto state_dict = remat::read_state_dict(data_file("tiny.safetensors"));
  auto module = tiny_module();

  remat::load_weights(module, data_file("tiny.safetensors"));

  CHECK(state_dict.size() == 7);
  CHECK(is_tiny(remat::state_dict(module)));
}

TEST_CASE("every dtype of Python's package loads; the metadata is there") {
  const auto state_dict = remat::read_state_dict(data_file("dtypes.safetensors"));
  const auto same = remat::read_state_dict(data_file("dtypes.pth"));

  CHECK(state_dict.size() == same.size());
  for (const auto& item : state_dict) {
    const std::string& name = item.first;
    const torch::Tensor& tensor = item.second;
    CAPTURE(name);
    CHECK(tensor.dtype() == same.at(name).dtype());
    CHECK(torch::equal(tensor, same.at(name)));
  }
  CHECK(remat::safetensors_metadata(data_file("dtypes.safetensors")) ==
        std::map<std::string, std::string>{{"format", "pt"}, {"made by", "Python"}});
}

TEST_CASE("a dtype that this LibTorch lacks is named") {
  if (remat::detail::scalar_type("uint16")) {
    const auto state_dict = remat::read_state_dict(data_file("new_dtypes.safetensors"));
    CHECK(state_dict.at("uint16").to(torch::kInt64).equal(torch::tensor({1, 65535})));
    CHECK(state_dict.at("float8").to(torch::kFloat32).equal(torch::tensor({1.5f, -2.0f})));
  } else {
    CHECK(
        error_of_reading("new_dtypes.safetensors")
            .starts_with("[remat.weights.dtype] \"new_dtypes.safetensors\": its tensor \"uint16\" "
                         "has the dtype uint16, which tensors of this LibTorch cannot have"));
  }
  CHECK(error_of_bytes(safetensors("{" + entry("w", "[2]", "[0,1]", "F4") + "}", "x")) ==
        "[remat.weights.dtype] \"bytes\": its tensor \"w\" has the dtype F4, which tensors of this "
        "LibTorch cannot have. In Python, convert it before saving, for example with "
        "tensor.float().");
}

TEST_CASE("bits of halves: bf16 0x3F80 and 0xC000 are 1 and -2, fp16 0x3C00 is 1") {
  const auto state_dict = remat::read_state_dict(data_file("halves.safetensors"));

  CHECK(state_dict.at("bf16").dtype() == torch::kBFloat16);
  CHECK(torch::equal(state_dict.at("bf16").to(torch::kFloat32), torch::tensor({1.0f, -2.0f})));
  CHECK(torch::equal(state_dict.at("fp16").to(torch::kFloat32), torch::tensor({1.0f})));
}

TEST_CASE("data at any offset of the file lies aligned in memory") {
  for (int padding = 0; padding < 4; ++padding) {
    CAPTURE(padding);
    const auto state_dict =
        remat::read_state_dict(data_file("unaligned_" + std::to_string(padding) + ".safetensors"));
    const auto& floats = state_dict.at("floats");
    CHECK(torch::equal(floats, torch::tensor({{0.5f, -1.5f}, {2.5f, 1e-3f}})));
    CHECK(reinterpret_cast<std::uintptr_t>(floats.data_ptr()) % 64 == 0);
    CHECK(torch::equal(state_dict.at("bytes"), torch::tensor({1, 2, 3}, torch::kUInt8)));
  }
}

TEST_CASE("a module goes to a file and back with all bits, buffers included") {
  torch::manual_seed(5);
  auto module = tiny_module();
  module->forward(torch::randn({8, 3}));
  module->eval();
  const auto x = torch::randn({4, 3});
  Folder folder;

  remat::save_safetensors(module, folder / "m.safetensors");
  auto other = tiny_module();
  const auto report = remat::load_weights(other, folder / "m.safetensors");
  other->eval();

  CHECK(torch::equal(module->forward(x), other->forward(x)));
  CHECK(report.matched == remat::state_dict(module).names());
  CHECK(other->buffers().size() == module->buffers().size());
  CHECK(torch::equal(other->buffers()[2], torch::tensor(1)));
  CHECK(remat::safetensors_metadata(folder / "m.safetensors") ==
        std::map<std::string, std::string>{{"format", "pt"}});
}

TEST_CASE("any layout is written: views, transposed, conjugate, empty, tied, halves") {
  remat::StateDict stored;
  const auto base = torch::randn({3, 4});
  stored.add("transposed", base.t());
  stored.add("tied", base);
  stored.add("expanded", torch::ones({1, 2}).expand({3, 2}));
  stored.add("conjugate", torch::randn(3, torch::kComplexFloat).conj());
  stored.add("empty", torch::empty({0, 3}));
  stored.add("scalar", torch::tensor(3));
  stored.add("half", base.to(torch::kHalf));
  stored.add("flags", torch::tensor({true, false, true}));
  Folder folder;

  remat::save_safetensors(stored, folder / "s.safetensors", {});
  const auto read = remat::read_state_dict(folder / "s.safetensors");

  CHECK(read.names() == stored.names());
  for (const auto& item : stored) {
    const std::string& name = item.first;
    const torch::Tensor& tensor = item.second;
    CAPTURE(name);
    CHECK(read.at(name).dtype() == tensor.dtype());
    CHECK(torch::equal(read.at(name), tensor));
  }
  CHECK(remat::safetensors_metadata(folder / "s.safetensors").empty());
}

TEST_CASE("each tensor begins at a multiple of its element's size, which Python's reader needs") {
  remat::StateDict stored;
  stored.add("byte", torch::ones(1, torch::kUInt8));
  stored.add("half", torch::ones(3, torch::kHalf));
  stored.add("long", torch::ones(1, torch::kInt64));
  stored.add("float", torch::ones(1));
  Folder folder;
  remat::save_safetensors(stored, folder / "s.safetensors");

  const remat::detail::FileSource source(folder / "s.safetensors");
  const auto contents = remat::detail::read_safetensors_header(source);

  CHECK(contents.data_begin % 8 == 0);
  for (const auto& item : contents.entries) {
    CAPTURE(item.name);
    CHECK(item.begin %
              remat::detail::find_element_type(&remat::detail::ElementType::safetensors, item.dtype)
                  ->byte_count ==
          0);
  }
}

TEST_CASE("what cannot be written is refused, and the file that was there stays") {
  Folder folder;
  const auto path = folder / "s.safetensors";
  remat::StateDict good;
  good.add("w", torch::ones(2));
  remat::save_safetensors(good, path);
  const std::string before = contents_of(path);
  const auto refused = [&](const std::string& name, const torch::Tensor& tensor) {
    remat::StateDict state_dict;
    state_dict.add("first", torch::ones(2));
    state_dict.add(name, tensor);
    std::string text = error_of([&] { remat::save_safetensors(state_dict, path); });
    const std::string begin = "[remat.weights.write] \"" + path.string() + "\": ";
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  };

  CHECK(refused("w", torch::ones(2, torch::kComplexDouble)) ==
        "the tensor \"w\" is complex128, for which safetensors has no name. Convert it, or leave "
        "it out.");
  CHECK(refused("w", torch::eye(2).to_sparse()) ==
        "the tensor \"w\" is sparse float32, for which safetensors has no name. Convert it, or "
        "leave it out.");
  CHECK(refused("w", torch::Tensor()) ==
        "the tensor \"w\" is undefined, for which safetensors has no name. Convert it, or leave it "
        "out.");
  CHECK(refused("__metadata__", torch::ones(1)) ==
        "a tensor is called __metadata__, a name that safetensors keeps. Give it another name.");
  CHECK(refused("\xff", torch::ones(1)) ==
        "a name or the metadata is no UTF-8. Name tensors in UTF-8.");
  CHECK(contents_of(path) == before);
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a folder that does not exist, or a name that is a folder's, is an error") {
  Folder folder;
  remat::StateDict state_dict;
  state_dict.add("w", torch::ones(2));
  std::filesystem::create_directories(folder / "taken" / "inside");

  CHECK(error_of([&] {
          remat::save_safetensors(state_dict, folder / "none" / "s.safetensors");
        }).find("no file can be made there. Check that the folder exists") != std::string::npos);
  CHECK(error_of([&] {
          remat::save_safetensors(state_dict, folder / "taken");
        }).find("the file cannot get its name: ") != std::string::npos);
  CHECK(folder.file_count() == 1);
}

TEST_CASE("a header that is longer than the file or the format allows is refused") {
  std::string bytes = safetensors("{}");
  bytes[0] = 3;
  CHECK(damage(bytes) == "its header of 3 bytes is longer than the file");
  bytes[4] = 1;
  CHECK(damage(bytes) == "its header of 4294967299 bytes is longer than the format allows");
}

TEST_CASE("tensors fill the file without holes, overlaps or rest") {
  const auto two = [](const std::string& first, const std::string& second,
                      const std::string& data = "abcd") {
    return damage(
        safetensors("{" + entry("a", "[2]", first) + "," + entry("b", "[2]", second) + "}", data));
  };
  CHECK(two("[0,2]", "[2,4]") == "nothing was thrown");
  CHECK(two("[2,4]", "[0,2]") == "nothing was thrown");
  CHECK(two("[0,2]", "[2,4]", "abcde") == "its tensors have 4 bytes, and the file has 5 for them");
  CHECK(two("[0,2]", "[3,5]") ==
        "its tensor \"b\" lies at bytes 3 to 5, and byte 2 of 4 is the next");
  CHECK(two("[0,2]", "[1,3]") ==
        "its tensor \"b\" lies at bytes 1 to 3, and byte 2 of 4 is the next");
  CHECK(two("[0,2]", "[2,1]") ==
        "its tensor \"b\" lies at bytes 2 to 1, and byte 2 of 4 is the next");
  CHECK(two("[0,2]", "[2,5]") ==
        "its tensor \"b\" lies at bytes 2 to 5, and byte 2 of 4 is the next");
  CHECK(two("[0,3]", "[3,4]") ==
        "its tensor \"a\" has 3 bytes, which its shape and dtype do not need");
  CHECK(two("[0,2]", "[2,18446744073709551615]").starts_with("its header has a number"));
}

TEST_CASE("sizes that no memory holds are refused before memory is asked for") {
  CHECK(damage(safetensors(
            "{" + entry("w", "[4611686018427387904,4611686018427387904]", "[0,1]") + "}", "x")) ==
        "its tensor \"w\" has 1 bytes, which its shape and dtype do not need");
  CHECK(damage(safetensors("{" + entry("w", "[1099511627776]", "[0,1099511627776]") + "}", "x"))
            .starts_with("its tensor \"w\" lies at bytes 0 to 1099511627776"));
}

TEST_CASE("a header that is not of the format's shape is refused") {
  const auto refused = [](const std::string& header) {
    const std::string text = damage(safetensors(header, "x"));
    const std::string begin = "its header has ";
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  };
  const auto tensor = [](const std::string& fields) { return "{\"w\":{" + fields + "}}"; };
  CHECK(refused("{") == "no JSON at its byte 2");
  CHECK(refused("{}}") == "no JSON at its byte 3");
  CHECK(refused("{\"w\":3}") == "a number in a wrong place");
  CHECK(refused("{\"w\":null}") == "a null where the format has none");
  CHECK(refused("{\"w\":true}") == "a boolean where the format has none");
  CHECK(refused("{\"w\":[]}") == "a list in a wrong place");
  CHECK(refused("{\"w\":\"x\"}") == "a text in a wrong place");
  CHECK(refused(tensor("")) == "a tensor without dtype, shape or data_offsets, at \"w\"");
  CHECK(refused(tensor("\"shape\":[1.5]")) == "a number that is no count, at \"w\"");
  CHECK(refused(tensor("\"shape\":[-1]")) == "a negative number, at \"w\"");
  CHECK(refused(tensor("\"shape\":[[1]]")) == "a list in a wrong place, at \"w\"");
  CHECK(refused(tensor("\"shape\":{}")) == "an object in a wrong place, at \"w\"");
  CHECK(refused(tensor("\"shape\":[1],\"shape\":[1]")) == "the field \"shape\" twice, at \"w\"");
  CHECK(refused(tensor("\"size\":1")) == "the unknown field \"size\", at \"w\"");
  CHECK(refused(tensor("\"data_offsets\":[0]")) == "fewer than two offsets, at \"w\"");
  CHECK(refused(tensor("\"data_offsets\":[0,1,2]")) == "more than two offsets, at \"w\"");
  std::string dimensions = "1";
  for (int i = 0; i < 64; ++i) dimensions += ",1";
  CHECK(refused(tensor("\"shape\":[" + dimensions + "]")) ==
        "a tensor of too many dimensions, at \"w\"");
  CHECK(refused("{\"__metadata__\":{\"a\":{}}}") == "an object in a wrong place");
  CHECK(refused("{\"w\":" + std::string(100'000, '[')) == "a list in a wrong place");
}

TEST_CASE("a name that occurs twice in the header is an error, not a choice") {
  const std::string header =
      "{" + entry("w", "[1]", "[0,1]") + "," + entry("w", "[1]", "[1,2]") + "}";

  CHECK(
      error_of_bytes(safetensors(header, "xy")) ==
      "[remat.weights.duplicate] \"bytes\": two tensors are called \"w\", and a name occurs once. "
      "Give each tensor a name of its own.");
}

TEST_CASE("bytes of bools are 0 and 1, or the file is damaged") {
  CHECK(damage(safetensors("{" + entry("w", "[2]", "[0,2]", "BOOL") + "}", "\x01\x02")) ==
        "one of its tensors of bools has a byte that is neither 0 nor 1");
}

TEST_CASE("a file that was cut short anywhere is an error of ours, and so is any changed byte") {
  const std::string whole = contents_of(data_file("tiny.safetensors"));
  for (std::size_t size = 0; size < whole.size(); ++size)
    CHECK(error_of_bytes(std::string_view(whole).substr(0, size)).starts_with("[remat.weights."));
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0xff);
    CHECK_NOTHROW(error_of_bytes(changed));
  }
}

TEST_CASE("a program without this header is told to include it") {
  auto* registered = remat::detail::first_weight_format.exchange(nullptr);
  const std::string text = error_of_reading("tiny.safetensors");
  remat::detail::first_weight_format = registered;

  CHECK(
      text ==
      "[remat.weights.kind] \"tiny.safetensors\": it is a safetensors file, whose reader needs "
      "nlohmann-json and is not compiled in, and a state dict was expected, written by Python's "
      "torch.save or as safetensors. Add #include \"remat/weights/safetensors.hpp\" to one source "
      "of the program.");
}

TEST_CASE("writes a file and what is in it, for tests/integration/safetensors_python.py") {
  const char* path = std::getenv("REMAT_TEST_SAFETENSORS");
  if (path == nullptr) return;
  torch::manual_seed(11);
  remat::StateDict stored;
  for (const auto& [name, tensor] : remat::state_dict(tiny_module())) stored.add(name, tensor);
  stored.add("half", torch::randn({3}).to(torch::kHalf));
  stored.add("bfloat", torch::randn({2, 2}).to(torch::kBFloat16));
  stored.add("bytes", torch::arange(5, torch::kUInt8));
  stored.add("transposed", torch::randn({2, 3}).t());
  stored.add("empty", torch::empty({0, 2}));
  stored.add("na\xc3\xafve \"name\"", torch::ones(1, torch::kFloat64));
  remat::save_safetensors(stored, path, {{"made by", "remat"}});
  std::ofstream list(std::string(path) + ".txt");
  for (const auto& [name, tensor] : stored) {
    const auto dense = tensor.contiguous();
    const auto* bytes = static_cast<const unsigned char*>(dense.data_ptr());
    list << name << '\t' << remat::detail::dtype_name(tensor.scalar_type()) << '\t'
         << tensor.sizes() << '\t';
    for (std::size_t i = 0; i < dense.nbytes(); ++i) list << int{bytes[i]} << ' ';
    list << '\n';
  }
  CHECK(list.good());
}

}  // namespace safetensors_tests
