// SPDX-License-Identifier: MIT
#include "tests/unit/weights/weight_files.hpp"

#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/pickle.hpp"
#include "remat/weights/pickled_state_dict.hpp"

namespace pickle_tests {

using namespace std::string_literals;
using namespace remat::detail;
using weight_files::error_of;

/// A length as opcodes hold it.
std::string number(std::uint64_t value, int byte_count) {
  std::string bytes;
  for (int i = 0; i < byte_count; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}

std::string text(const std::string& content) { return "X" + number(content.size(), 4) + content; }

std::string integer(std::int64_t value) {
  return "\x8a\x08" + number(static_cast<std::uint64_t>(value), 8);
}

std::string integers(const std::vector<std::int64_t>& values) {
  std::string bytes = "(";
  for (const std::int64_t value : values) bytes += integer(value);
  return bytes + "t";
}

struct TensorParts {
  std::string storage_class = "ctorch\nFloatStorage\n";
  std::string key = text("0");
  std::int64_t storage_size = 6;
  std::int64_t offset = 0;
  std::vector<std::int64_t> sizes{2, 3};
  std::vector<std::int64_t> strides{3, 1};
  std::string extra = "";
};

/// The opcodes that torch.save writes for a tensor.
std::string tensor(const TensorParts& parts = {}) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + parts.storage_class +
         parts.key + text("cpu") + integer(parts.storage_size) + "tQ" + integer(parts.offset) +
         integers(parts.sizes) + integers(parts.strides) + "\x89)" + parts.extra + "tR";
}

std::string dictionary(const std::string& items) { return "\x80\x02}(" + items + "u."; }

std::vector<NamedPickledTensor> find(const std::string& bytes) {
  const MemorySource source("bytes", bytes);
  PickleValues values(source);
  ByteCursor cursor(source);
  return PickledStateDict::find(values, Pickle::read(cursor, values));
}

/// What is wrong with the pickle, without the words that all such errors share.
std::string damage(const std::string& bytes) {
  const std::string begin = "[remat.weights.damaged] \"bytes\": ";
  const std::string end =
      ": the file is damaged, or was cut short when it was fetched or copied. Fetch it again or "
      "write it anew.";
  const std::string whole = error_of([&] { find(bytes); });
  if (!whole.starts_with(begin) || !whole.ends_with(end)) return whole;
  return whole.substr(begin.size(), whole.size() - begin.size() - end.size());
}

std::string damage_of_tensor(const TensorParts& parts) {
  return damage(dictionary(text("w") + tensor(parts)));
}

TEST_CASE("a tensor is understood: where it lies, and how") {
  const auto found = find(dictionary(text("w") + tensor()));

  CHECK(found.size() == 1);
  CHECK(found[0].first == "w");
  const PickledTensor& pickled = found[0].second;
  CHECK(pickled.storage.key == "0");
  CHECK(pickled.storage.byte_count == 24);
  CHECK(pickled.type->dtype == "float32");
  CHECK(pickled.sizes == std::vector<std::int64_t>{2, 3});
  CHECK(pickled.strides == std::vector<std::int64_t>{3, 1});
  CHECK(pickled.byte_count() == 24);
}

TEST_CASE("later protocols' ways to write data are read: frames, memoize, short texts, globals") {
  const std::string bytes = "\x80\x04\x95"s + number(99, 8) +
                            "}\x94\x8c\x01w\x94\x8c\x0ctorch._utils\x8c\x12" +
                            "_rebuild_tensor_v2\x93\x94((" + text("storage") +
                            "\x8c\x05torch\x8c\x0c"
                            "FloatStorage\x93\x8c\x01"s +
                            "0\x8c\x03"s + "cpuK\x06tQK\x00K\x06\x85K\x01\x85\x89}t\x52s."s;

  const auto found = find(bytes);

  CHECK(found.size() == 1);
  CHECK(found[0].second.sizes == std::vector<std::int64_t>{6});
}

TEST_CASE("an OrderedDict made from a list of pairs is read, as Python 2 wrote it") {
  const auto found = find(
      "\x80\x02"
      "ccollections\nOrderedDict\n](](" +
      text("w") + tensor() + "e](" + text("n") +
      "K\x07"
      "ee\x85R.");

  CHECK(found.size() == 1);
  CHECK(found[0].first == "w");
}

TEST_CASE("storages from an accelerator are read like those of the CPU") {
  TensorParts parts;
  parts.storage_class = "ctorch.cuda\nHalfStorage\n";

  CHECK(find(dictionary(text("w") + tensor(parts)))[0].second.type->dtype == "float16");
}

TEST_CASE("a tensor may not reach past its storage") {
  TensorParts parts;
  const std::string past = "its tensor \"w\" reaches past the end of its storage of 24 bytes";

  parts.offset = 1;
  CHECK(damage_of_tensor(parts) == past);
  parts = {};
  parts.sizes = {3, 3};
  CHECK(damage_of_tensor(parts) == past);
  parts = {};
  parts.strides = {4, 1};
  CHECK(damage_of_tensor(parts) == past);
  parts = {};
  parts.strides = {std::int64_t{1} << 62, 1};
  CHECK(damage_of_tensor(parts) == past);
  parts = {};
  parts.offset = INT64_MAX;
  CHECK(damage_of_tensor(parts) == past);
  parts = {};
  parts.strides = {0, 1};
  CHECK(damage_of_tensor(parts) == "nothing was thrown");
}

TEST_CASE("sizes that no memory holds are refused before memory is asked for") {
  TensorParts parts;
  parts.sizes = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  parts.strides = {0, 0};
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has more elements than can be counted");
  parts.sizes = {0, std::int64_t{1} << 40, std::int64_t{1} << 40};
  parts.strides = {0, 0, 0};
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has more elements than can be counted");
  parts = {};
  parts.storage_size = INT64_MAX;
  CHECK(damage_of_tensor(parts) ==
        "its tensor \"w\" has a storage of more bytes than can be counted");
}

TEST_CASE("negative sizes, strides and offsets are refused") {
  const std::string refused = "its tensor \"w\" has a size, stride or offset that is no count";
  TensorParts parts;
  parts.sizes = {-2, 3};
  CHECK(damage_of_tensor(parts) == refused);
  parts = {};
  parts.strides = {-3, 1};
  CHECK(damage_of_tensor(parts) == refused);
  parts = {};
  parts.offset = -1;
  CHECK(damage_of_tensor(parts) == refused);
  parts = {};
  parts.storage_size = -6;
  CHECK(damage_of_tensor(parts) == refused);
}

TEST_CASE("a tensor whose parts are of wrong kinds is refused") {
  TensorParts parts;
  parts.strides = {1};
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has not one stride for each size");
  parts = {};
  parts.sizes = std::vector<std::int64_t>(65, 1);
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has sizes or strides that are no short list");
  parts = {};
  parts.key = "N";
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has a storage without class or key");
  parts = {};
  parts.key = text(std::string(257, 'k'));
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has a storage without class or key");
  parts = {};
  parts.storage_class = "ctorch.storage\nUntypedStorage\n";
  CHECK(damage_of_tensor(parts) == "its tensor \"w\" has no dtype");
  CHECK(damage(dictionary(text("w") + "ctorch._utils\n_rebuild_tensor_v2\nK\x01K\x01\x86R")) ==
        "its tensor \"w\" is made from too few arguments");
  CHECK(damage(dictionary(text("w") + "ctorch._utils\n_rebuild_tensor_v2\n(NNNNtR")) ==
        "its tensor \"w\" has no storage");
}

TEST_CASE("a name that occurs twice is an error, not a choice") {
  CHECK(
      error_of([&] { find(dictionary(text("w") + tensor() + text("w") + tensor())); }) ==
      "[remat.weights.duplicate] \"bytes\": two tensors are called \"w\", and a name occurs once. "
      "Give each tensor a name of its own.");
}

TEST_CASE("names from a file are shown in one line and cut") {
  TensorParts parts;
  parts.offset = 1;

  CHECK(damage(dictionary(text("a\nb\x1b[31m") + tensor(parts)))
            .starts_with("its tensor \"a?b?[31m\" reaches"));
  CHECK(damage(dictionary(text(std::string(5000, 'x')) + tensor(parts)))
            .starts_with("its tensor \"" + std::string(120, 'x') + "...\" reaches"));
}

TEST_CASE("a count of bytes that the file does not have is refused before memory is asked for") {
  CHECK(damage("\x80\x02X\xff\xff\xff\xffw"s) ==
        "it ends at byte 8, where 4294967295 bytes from 7 on are announced");
  CHECK(damage("\x80\x02\x8d"s + number(~std::uint64_t{0}, 8)) ==
        "it ends at byte 11, where 18446744073709551615 bytes from 11 on are announced");
  CHECK(damage("\x80\x02\x8b\xff\xff\xff\xff"s) ==
        "it ends at byte 7, where 4294967295 bytes from 7 on are announced");
}

TEST_CASE("opcodes that make no sense are refused") {
  const auto refused = [](const std::string& opcodes) {
    const std::string whole = damage("\x80\x02" + opcodes);
    const auto at = whole.find(" its pickle ");
    return at == std::string::npos ? whole : whole.substr(at + 12);
  };
  CHECK(refused(".") == "takes a value where there is none");
  CHECK(refused("0") == "takes a value where there is none");
  CHECK(refused("K\x01(0") == "takes a value where there is none");
  CHECK(refused("K\x01\x86") == "takes more values than there are");
  CHECK(refused("K\x01(K\x01\x86") == "takes more values than there are");
  CHECK(refused("t") == "ends a group that it never began");
  CHECK(refused("}(K\x01u") == "has a key without a value");
  CHECK(refused("h\x05") == "recalls a value that it never remembered");
  CHECK(refused("]K\x01K\x02s") == "adds items to something that has none");
  CHECK(refused("}K\x01"
                "a") == "adds items to something that has none");
  CHECK(refused("K\x01)R") == "calls something that cannot be called");
  CHECK(refused("ccollections\nOrderedDict\nK\x01R") == "calls something that cannot be called");
  CHECK(refused("ccollections\nOrderedDict\nK\x01\x85R") == "makes a dictionary of no list");
  CHECK(refused("ccollections\nOrderedDict\n]K\x01"
                "a\x85R") == "makes a dictionary of something else than pairs");
  CHECK(refused("ctorch\nSize\n)R") == "wraps nothing");
  CHECK(refused("K\x01Q") == "refers to something outside that is no storage, perhaps a module");
  CHECK(refused("c" + std::string(400, 'm')) == "has a name that does not end");
  CHECK(refused("K\x01K\x01\x93") == "has a name that is none");
  CHECK(refused("\x80\x01") == "has protocol 1, 2 to 5 were expected");
  CHECK(refused("I1\n") == "has the opcode 73, which torch.save does not write");
  CHECK(refused(std::string(1001, '(')) == "is nested too deeply");
}

TEST_CASE("values that contain themselves do no harm") {
  // d = {}; d["state_dict"] = d; d["w"] = tensor
  const auto found =
      find("\x80\x02}q\x00("s + text("state_dict") + "h\x00"s + text("w") + tensor() + "u.");
  CHECK(found.size() == 1);

  // a list of itself, called as a dictionary's pairs
  CHECK(damage("\x80\x02"
               "ccollections\nOrderedDict\n]q\x00h\x00"
               "a\x85R."s)
            .ends_with("makes a dictionary of something else than pairs"));
}

TEST_CASE("a small pickle cannot ask for much memory") {
  // One list of 1000 pairs becomes a dictionary again and again.
  std::string bytes = "\x80\x02]q\x01(";
  for (int i = 0; i < 1000; ++i) bytes += "K\x01K\x02\x86";
  bytes +=
      "e0ccollections\nOrderedDict\nq\x02"
      "0(";
  for (int i = 0; i < 10'000; ++i) bytes += "h\x02h\x01\x85R";

  CHECK(damage(bytes + "t.") == "its pickle has more than 8388608 values");
}

TEST_CASE("what a pickle names and is not in the table is never looked up") {
  for (const char* name : {"os\nsystem", "builtins\neval", "builtins\ngetattr", "posix\nsystem",
                           "torch.storage\n_load_from_bytes", "torch\nload", "__main__\nNet"}) {
    CAPTURE(name);
    CHECK(error_of([&] {
            find(
                "\x80\x02"
                "c"s +
                name + "\n)R.");
          }).starts_with("[remat.weights.global] \"bytes\": it holds an object of Python's "));
  }
  CHECK(error_of([] {
          find(
              "\x80\x02"
              "ctorch.storage\n_load_from_bytes\n.");
        }).find("it was written by pickle, not by torch.save") != std::string::npos);
}

TEST_CASE("integers of any length are read: 1, 2, 4 and 8 bytes, negative ones, longer ones") {
  const auto value_of = [](const std::string& opcodes) {
    const MemorySource source("bytes", opcodes);
    PickleValues values(source);
    ByteCursor cursor(source);
    const PickleId id = Pickle::read(cursor, values);
    CHECK(values.is(id, PickleKind::kInteger));
    return values.number(id);
  };
  CHECK(value_of("K\xff.") == 255);
  CHECK(value_of("M\x01\x02.") == 513);
  CHECK(value_of("J\xff\xff\xff\xff.") == -1);
  CHECK(value_of("\x8a\x00."s) == 0);
  CHECK(value_of("\x8a\x01\x80.") == -128);
  CHECK(value_of("\x8a\x02\xff\x00."s) == 255);
  CHECK(value_of(integer(INT64_MIN) + ".") == INT64_MIN);
  CHECK(value_of("\x8b\x02\x00\x00\x00\x00\x01."s) == 256);
}

}  // namespace pickle_tests
