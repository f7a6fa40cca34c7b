// SPDX-License-Identifier: MIT
#include "tests/unit/weights/weight_files.hpp"

#include "remat/weights/zip_directory.hpp"

namespace zip_directory_tests {

using namespace remat::detail;
using weight_files::contents_of;
using weight_files::data_file;
using weight_files::error_of;

struct Part {
  std::string name;
  std::uint64_t size = 4;
  std::uint64_t packed_size = 4;
  std::uint64_t method = 0;
  std::uint64_t local = 0;
  std::uint64_t flags = 0;
  std::string extra = "";
};

std::string number(std::uint64_t value, int byte_count) {
  std::string bytes;
  for (int i = 0; i < byte_count; ++i, value >>= 8) bytes += static_cast<char>(value & 0xff);
  return bytes;
}

/// A zip file of this directory; what lies before it are `content_size` zeros.
std::string zip(const std::vector<Part>& parts, std::size_t content_size = 200,
                std::size_t count = ~std::size_t{0}) {
  std::string directory;
  for (const Part& part : parts)
    directory += "PK\x01\x02" + number(0, 4) + number(part.flags, 2) + number(part.method, 2) +
                 number(0, 8) + number(part.packed_size, 4) + number(part.size, 4) +
                 number(part.name.size(), 2) + number(part.extra.size(), 2) + number(0, 10) +
                 number(part.local, 4) + part.name + part.extra;
  const std::size_t shown = count == ~std::size_t{0} ? parts.size() : count;
  return std::string(content_size, '\0') + directory + "PK\x05\x06" + number(0, 4) +
         number(shown, 2) + number(shown, 2) + number(directory.size(), 4) +
         number(content_size, 4) + number(0, 2);
}

std::string damage(const std::string& bytes) {
  const MemorySource source("bytes", bytes);
  const std::string text = error_of([&] { ZipDirectory directory(source); });
  const std::string begin = "[remat.weights.damaged] \"bytes\": it ";
  return text.starts_with(begin) ? text.substr(begin.size(), text.find(": the file") - begin.size())
                                 : text;
}

TEST_CASE("the directory of a file of torch.save is read, without the folder around it") {
  const std::string bytes = contents_of(data_file("zip.pth"));
  const MemorySource source("bytes", bytes);

  const ZipDirectory directory(source);

  CHECK(directory.find("data.pkl") != nullptr);
  CHECK(directory.find("data/0")->size == 24);
  CHECK_FALSE(directory.find("data/0")->is_packed);
  CHECK(directory.find("archive/data.pkl") == nullptr);
}

TEST_CASE("sizes of 64 bits are read from the extra field") {
  const std::string big = number(1, 2) + number(16, 2) + number(70, 8) + number(70, 8);
  const std::string other = number(7, 2) + number(3, 2) + "abc";
  const std::string bytes =
      zip({{.name = "a/x", .size = 0xffffffff, .packed_size = 0xffffffff, .extra = other + big}});
  const MemorySource source("bytes", bytes);

  CHECK(ZipDirectory(source).find("x")->size == 70);
}

TEST_CASE("an entry that claims more than the file can hold is refused") {
  const auto refused = [](std::uint64_t size) {
    return "has the zip entry \"x\" of " + std::to_string(size) +
           " bytes, which the file cannot hold";
  };
  CHECK(damage(zip({{.name = "a/x", .size = 171, .packed_size = 171}})) == refused(171));
  CHECK(damage(zip({{.name = "a/x", .size = 170, .packed_size = 170}})) == "nothing was thrown");
  CHECK(damage(zip({{.name = "a/x", .local = 170}})) == refused(4));
  CHECK(damage(zip({{.name = "a/x", .local = 0xfffffffe}})) == refused(4));
  CHECK(damage(zip({{.name = "a/x", .size = 5}})) == refused(5));
  CHECK(damage(zip({{.name = "a/x", .size = 5160, .method = 8}})) == refused(5160));
  CHECK(damage(zip({{.name = "a/x",
                     .size = 0xffffffff,
                     .method = 8,
                     .extra = number(1, 2) + number(8, 2) + number(std::uint64_t{1} << 60, 8)}})) ==
        refused(std::uint64_t{1} << 60));
}

TEST_CASE("entries may not share their bytes") {
  std::vector<Part> parts;
  for (int i = 0; i < 3; ++i)
    parts.push_back({.name = "a/" + std::to_string(i), .size = 100, .packed_size = 100});

  CHECK(damage(zip(parts)) == "has the zip entry \"2\" of 100 bytes, which the file cannot hold");
}

TEST_CASE("what is no directory is refused") {
  CHECK(damage("PK\x03\x04") == "is a zip file without its directory, which ends the file");
  CHECK(damage(std::string(100'000, 'x')) ==
        "is a zip file without its directory, which ends the file");
  CHECK(damage(zip({{.name = "a/x"}}, 200, 2)) ==
        "has a zip directory that does not fit into the file");
  CHECK(damage(zip({{.name = "a/x"}, {.name = "a/x"}})) == "has two zip entries of the name \"x\"");
  CHECK(damage(zip({{.name = "a/x"}, {.name = "b/y"}})) ==
        "has zip entries that are not in one folder");
  CHECK(damage(zip({{.name = "a/x", .flags = 1}})) == "has encrypted zip entries");
  CHECK(damage(zip({{.name = "a/x", .size = 0xffffffff}})) == "has a zip entry without its size");
  std::string bytes = zip({{.name = "a/x"}});
  bytes[200] = 'Q';
  CHECK(damage(bytes) == "has a damaged zip directory");
  bytes = zip({{.name = "a/x"}});
  bytes[200 + 28] = 50;
  CHECK(damage(bytes) == "has a zip directory that is cut short");
}

TEST_CASE("a directory of 64 bits may not lie outside of the file") {
  std::string bytes = zip({{.name = "a/x"}});
  const std::string end = bytes.substr(bytes.size() - 22);
  const auto with_locator = [&](std::uint64_t position) {
    return bytes.substr(0, bytes.size() - 22) + "PK\x06\x07" + number(0, 4) + number(position, 8) +
           number(1, 4) + end;
  };
  CHECK(damage(with_locator(~std::uint64_t{0})) ==
        "has a zip directory that lies outside of the file");
  CHECK(damage(with_locator(0)) == "has a damaged zip directory");
}

}  // namespace zip_directory_tests
