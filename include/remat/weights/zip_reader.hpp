// SPDX-License-Identifier: MIT
#pragma once

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "remat/errors.hpp"
#include "remat/libtorch/archive.hpp"
#include "remat/weights/byte_cursor.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/pickle.hpp"
#include "remat/weights/pickled_reader.hpp"
#include "remat/weights/pickled_state_dict.hpp"
#include "remat/weights/zip_directory.hpp"

namespace remat::detail {

/// Reads what torch.save has written since PyTorch 1.6: a zip file with a pickle, `data.pkl`, and
/// one entry for each storage.
class ZipReader final : public PickledReader {
 public:
  ZipReader(std::shared_ptr<const ByteSource> bytes, ZipDirectory directory)
      : PickledReader(std::move(bytes)),
        directory_(std::move(directory)),
        archive_(open_archive()) {
    const c10::Storage pickle = entry("data.pkl");
    const MemorySource pickle_source(source().name(), view(pickle));
    PickleValues values(pickle_source);
    ByteCursor cursor(pickle_source);
    const PickleId root = Pickle::read(cursor, values);
    require_little_endian();
    take(PickledStateDict::find(values, root));
  }

 private:
  static std::string_view view(const c10::Storage& storage) {
    return {static_cast<const char*>(storage.data()), storage.nbytes()};
  }

  c10::Storage fetch(const std::string& key) override { return entry("data/" + key); }

  Archive open_archive() const {
    return translated([&] {
      return Archive(source().size(), [this](std::uint64_t offset, void* into, std::size_t count) {
        source().read(offset, into, count);
      });
    });
  }

  c10::Storage entry(const std::string& name) {
    const ZipEntry* known = directory_.find(name);
    if (known == nullptr) source().damaged("it has no entry \"" + printable(name) + "\"");
    c10::Storage storage = translated([&] { return archive_.fetch(name); });
    if (storage.nbytes() != known->size)
      source().damaged("its entry \"" + printable(name) + "\" has another size than announced");
    return storage;
  }

  void require_little_endian() {
    if (directory_.find("byteorder") == nullptr) return;
    const c10::Storage order = entry("byteorder");
    if (view(order) == "little") return;
    throw WeightsError(ErrorMessage("remat.weights.kind")
                           .where("\"" + source().name() + "\"")
                           .what("its numbers have the byte order \"" + printable(view(order), 20) +
                                 "\", and only \"little\" is read")
                           .cure("In Python, load it and save it on a little-endian machine"));
  }

  template <class Call>
  std::invoke_result_t<Call> translated(Call call) const {
    try {
      return call();
    } catch (const WeightsError&) {
      throw;
    } catch (const std::exception& error) {
      source().damaged("LibTorch's zip reader reports: " + printable(error.what(), 300));
    }
  }

  ZipDirectory directory_;
  Archive archive_;
};

}  // namespace remat::detail
