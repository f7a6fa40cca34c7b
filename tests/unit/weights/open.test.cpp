// SPDX-License-Identifier: MIT
#include "tests/unit/weights/weight_files.hpp"

#include <sstream>

namespace open_tests {

using namespace weight_files;

const std::string kExpected =
    ", and a state dict was expected, written by Python's torch.save or as safetensors. ";
const std::string kSaveAgain = "In Python, load it and write torch.save(model.state_dict(), path).";

TEST_CASE("state dicts of torch.save load with exact values, with and without metadata") {
  for (const char* name : {"zip.pth", "plain_dict.pth", "protocol4.pth", "deflated.pth"}) {
    CAPTURE(name);
    CHECK(is_tiny(remat::read_state_dict(data_file(name))));
  }
}

TEST_CASE("the form before the zip file loads with the same values") {
  for (const char* name : {"legacy.pth", "protocol4_legacy.pth"}) {
    CAPTURE(name);
    CHECK(is_tiny(remat::read_state_dict(data_file(name))));
  }
}

TEST_CASE(
    "weights nested under state_dict, model or model_state_dict are found beside other data") {
  for (const char* name :
       {"nested_state_dict.pth", "nested_model.pth", "nested_model_state_dict.pth"}) {
    CAPTURE(name);
    CHECK(is_tiny(remat::read_state_dict(data_file(name))));
  }
}

TEST_CASE("parameters load as tensors, whatever Python keeps with them") {
  const auto state_dict = remat::read_state_dict(data_file("parameters.pth"));

  CHECK(state_dict.size() == 4);
  CHECK(torch::equal(state_dict.at("plain"), ramp(0, {2})));
  CHECK(torch::equal(state_dict.at("with_state"), ramp(1, {2})));
  CHECK(torch::equal(state_dict.at("frozen"), ramp(3, {2})));
  CHECK(torch::equal(state_dict.at("with_attribute"), ramp(2, {2})));
  CHECK_FALSE(state_dict.at("plain").requires_grad());
}

TEST_CASE("every kind of number loads under its own dtype") {
  const auto state_dict = remat::read_state_dict(data_file("dtypes.pth"));
  const auto expected = torch::tensor({1, 2, 100}, torch::kInt64);

  CHECK(state_dict.size() == 11);
  for (const auto& item : state_dict) {
    const std::string& name = item.first;
    const torch::Tensor& tensor = item.second;
    CAPTURE(name);
    CHECK(remat::detail::dtype_name(tensor.scalar_type()) == name);
    if (name != "bool" && name != "complex64")
      CHECK(torch::equal(tensor, expected.to(tensor.dtype())));
  }
  CHECK(torch::equal(state_dict.at("bool"), torch::tensor({true, false, true})));
  CHECK(torch::equal(torch::view_as_real(state_dict.at("complex64")),
                     torch::tensor({{1.0f, 2.0f}, {0.0f, -0.5f}})));
}

TEST_CASE("a dtype that this LibTorch lacks is named, and one that it has loads") {
  if (!remat::detail::scalar_type("uint16")) {
    CHECK(error_of_reading("new_dtypes.pth") ==
          "[remat.weights.dtype] \"new_dtypes.pth\": its tensor \"uint16\" has the dtype uint16, "
          "which tensors of this LibTorch cannot have. In Python, convert it before saving, for "
          "example with tensor.float().");
    return;
  }
  const auto state_dict = remat::read_state_dict(data_file("new_dtypes.pth"));
  CHECK(state_dict.at("uint16").to(torch::kInt64).equal(torch::tensor({1, 65535})));
  CHECK(state_dict.at("float8").to(torch::kFloat32).equal(torch::tensor({1.5f, -2.0f})));
}

TEST_CASE("tensors lie in their storages as they did: tied, sliced, transposed, expanded, empty") {
  for (const char* name : {"layouts.pth", "layouts_legacy.pth"}) {
    CAPTURE(name);
    const auto state_dict = remat::read_state_dict(data_file(name));
    const auto base = ramp(0, {3, 4});
    CHECK(torch::equal(state_dict.at("base"), base));
    CHECK(torch::equal(state_dict.at("tied"), base));
    CHECK(torch::equal(state_dict.at("transposed"), base.t()));
    CHECK(torch::equal(state_dict.at("slice"), torch::tensor({1.5f, 2.5f})));
    CHECK(torch::equal(state_dict.at("every_second"), base.slice(1, 0, 4, 2)));
    CHECK(torch::equal(state_dict.at("expanded"), ramp(5, {1, 2}).expand({3, 2})));
    CHECK(state_dict.at("empty").sizes() == at::IntArrayRef({0, 3}));
    CHECK(torch::equal(state_dict.at("scalar"), torch::tensor(2.5f)));
    CHECK(state_dict.at("tied").is_alias_of(state_dict.at("transposed")));
  }
}

TEST_CASE("marks of conjugation and negation are honoured") {
  const auto state_dict = remat::read_state_dict(data_file("marks.pth"));

  const auto conjugate = torch::view_as_real(state_dict.at("conjugate").resolve_conj());
  CHECK(torch::equal(conjugate, torch::tensor({{1.0f, -2.0f}, {3.0f, 1.0f}})));
  CHECK(torch::equal(state_dict.at("negative").resolve_neg(), torch::tensor({-2.0f, 1.0f})));
}

TEST_CASE("a reader announces names, shapes, dtypes and bytes before it reads anything") {
  const auto reader = remat::open_state_dict(data_file("layouts.pth"));

  std::ostringstream text;
  for (const auto& entry : reader->entries())
    text << entry.name << ' ' << at::IntArrayRef(entry.shape) << ' '
         << remat::detail::dtype_name(entry.dtype) << ' ' << entry.bytes << '\n';
  CHECK(text.str() ==
        "base [3, 4] float32 48\ntied [3, 4] float32 48\ntransposed [4, 3] float32 48\n"
        "slice [2] float32 8\nevery_second [3, 2] float32 24\nexpanded [3, 2] float32 24\n"
        "empty [0, 3] float32 0\nscalar [] float32 4\n");
  CHECK_THROWS_AS(reader->read(8), std::out_of_range);
}

TEST_CASE("what C++'s torch::pickle_save writes loads") {
  c10::Dict<std::string, torch::Tensor> dictionary;
  dictionary.insert("weight", ramp(1, {2, 3}));

  const std::vector<char> bytes = torch::pickle_save(dictionary);

  const auto reader = open_bytes({bytes.data(), bytes.size()});
  CHECK(reader->entries().size() == 1);
  CHECK(torch::equal(reader->read(0), ramp(1, {2, 3})));
}

TEST_CASE("an archive of TorchScript or of C++'s torch::save is named, with the cure") {
  const std::string text =
      "it is an archive of TorchScript, as torch.jit.save and torch::save of C++ write it" +
      kExpected +
      "Read it with torch::load(module, path) if C++ wrote it, else with torch::jit::load; or in "
      "Python write torch.save(torch.jit.load(path).state_dict(), other).";
  std::ostringstream archive;
  torch::save(tiny_module(), archive);

  CHECK(error_of_reading("script.pt") == "[remat.weights.kind] \"script.pt\": " + text);
  CHECK(error_of_bytes(archive.str()) == "[remat.weights.kind] \"bytes\": " + text);
}

TEST_CASE("a file of another kind is named by its first bytes, with the cure") {
  const auto kind = [](std::string_view bytes) {
    const std::string text = error_of_bytes(bytes);
    const std::string begin = "[remat.weights.kind] \"bytes\": it is ";
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  };
  const std::string fetch =
      kExpected +
      "Open the address in a browser to see what it answers, and fetch the file itself.";
  std::string tar(512, '\0');
  tar.replace(257, 5, "ustar");

  CHECK(kind("") == "empty" + kExpected + "Fetch it again.");
  CHECK(kind("\n <!DOCTYPE HTML><html>404</html>") == "a web page" + fetch);
  CHECK(kind("<HTML>") == "a web page" + fetch);
  CHECK(kind("version https://git-lfs.github.com/spec/v1\noid sha256:0\n") ==
        "a pointer of Git LFS, not the file it stands for" + kExpected +
            "Run git lfs pull where the file came from.");
  CHECK(kind(tar) == "a tar archive: unpack it, or, if torch.save wrote it before 2017," +
                         kExpected + kSaveAgain);
  CHECK(kind("\x1f\x8b\x08") == "compressed by gzip" + kExpected + "Unpack it first.");
  CHECK(kind("weights = 3") ==
        "of an unknown kind, and begins with \"weights = 3\"" + kExpected + kSaveAgain);
  CHECK(kind("\x89HDF\r\n") == "an HDF5 file, as Keras writes it" + kExpected + kSaveAgain);
  CHECK(error_of_reading("pickle_dump.pkl") ==
        "[remat.weights.kind] \"pickle_dump.pkl\": it is a pickle that pickle.dump wrote" +
            kExpected + kSaveAgain);
  CHECK(error_of_reading("numpy.npz") ==
        "[remat.weights.kind] \"numpy.npz\": it is a zip file that torch.save did not write" +
            kExpected + "Unpack it first.");
}

TEST_CASE("big-endian numbers are refused rather than read wrongly") {
  CHECK(
      error_of_reading("big_endian.pth") ==
      "[remat.weights.kind] \"big_endian.pth\": its numbers have the byte order \"big\", and only "
      "\"little\" is read. In Python, load it and save it on a little-endian machine.");
}

TEST_CASE("a path without a file is an error that says so") {
  CHECK(error_of_reading("none.pth") ==
        "[remat.weights.file] \"none.pth\": there is no such file. Check the path.");
  CHECK(error_of_reading("") ==
        "[remat.weights.file] \"\": a file was expected, and this is a directory or a device. Give "
        "the path of the file itself.");
}

TEST_CASE("objects that are no tensors in a dictionary are named, and never made") {
  const std::string cure = " In Python, load it and write torch.save(model.state_dict(), path).";
  const auto expected = [&](const std::string& file, const std::string& object,
                            const std::string& cause) {
    return "[remat.weights.global] \"" + file + "\": it holds an object of Python's " + object +
           ", and only tensors in dictionaries, numbers and texts are read: " + cause + "." + cure;
  };
  const std::string module =
      "it was saved as a whole module, or with other Python objects beside the weights";

  CHECK(error_of_reading("whole_module.pth") ==
        expected("whole_module.pth", "torch.nn.modules.container.Sequential", module));
  CHECK(error_of_reading("evil.pth") == expected("evil.pth", "__builtin__.eval", module));
  CHECK(error_of_reading("quantized.pth") == expected("quantized.pth",
                                                      "torch._utils._rebuild_qtensor",
                                                      "quantized and sparse tensors are not read"));
  CHECK(error_of_reading("sparse.pth") == expected("sparse.pth",
                                                   "torch._utils._rebuild_sparse_tensor",
                                                   "quantized and sparse tensors are not read"));
}

TEST_CASE("a file without a dictionary of tensors says what it holds instead") {
  const std::string cure =
      ". In Python, write torch.save(model.state_dict(), path); a state dict may also lie under "
      "the "
      "key state_dict, model or model_state_dict.";

  CHECK(error_of_reading("bare_tensor.pth") ==
        "[remat.weights.content] \"bare_tensor.pth\": it holds one tensor without a name, a "
        "dictionary of tensors was expected" +
            cure);
  CHECK(error_of_reading("list.pth") ==
        "[remat.weights.content] \"list.pth\": it holds a list, a dictionary of tensors was "
        "expected" +
            cure);
  CHECK(error_of_reading("no_tensors.pth") ==
        "[remat.weights.content] \"no_tensors.pth\": its dictionary holds no tensors, but 2 other "
        "values: \"epoch\", \"name\"" +
            cure);
}

TEST_CASE("a storage that is shorter than its tensor is damage") {
  CHECK(error_of_reading("short_storage.pth") ==
        "[remat.weights.damaged] \"short_storage.pth\": a tensor's bytes are 8, and its pickle "
        "announces 24: the file is damaged, or was cut short when it was fetched or copied. Fetch "
        "it again or write it anew.");
}

TEST_CASE("a file that was cut short anywhere is an error of ours, and so is any changed byte") {
  for (const char* name : {"zip.pth", "legacy.pth", "deflated.pth", "layouts_legacy.pth"}) {
    CAPTURE(name);
    const std::string whole = contents_of(data_file(name));
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const std::string text = error_of_bytes(std::string_view(whole).substr(0, size));
      if (!text.starts_with("[remat.weights.")) FAIL_CHECK(size << ": " << text);
    }
    // Bytes of numbers may change unnoticed; whatever happens, nothing else comes out.
    const LibTorchMayLeak in_constructors;
    for (std::size_t at = 0; at < whole.size(); ++at) {
      std::string changed = whole;
      changed[at] = static_cast<char>(changed[at] ^ 0xff);
      CHECK_NOTHROW(error_of_bytes(changed));
    }
  }
}

TEST_CASE("names are looked up, and a wrong one brings the nearest") {
  const auto state_dict = remat::read_state_dict(data_file("zip.pth"));

  CHECK(state_dict.contains("0.weight"));
  CHECK(state_dict.find("0.weights") == nullptr);
  CHECK_THROWS_WITH_AS(
      state_dict.at("0.weights"),
      "[remat.weights.name] remat::StateDict: none of its 7 tensors is called "
      "\"0.weights\". The nearest names are \"0.weight\", \"1.weight\", \"0.bias\".",
      remat::ArgumentError);
}

TEST_CASE("a name is given once") {
  remat::StateDict state_dict;
  state_dict.add("a", torch::ones(1));

  CHECK(error_of([&] { state_dict.add("a", torch::ones(2)); }) ==
        "[remat.weights.duplicate] remat::StateDict: two tensors are called \"a\", and a name "
        "occurs once. Give each tensor a name of its own.");
  CHECK(state_dict.size() == 1);
}

}  // namespace open_tests
