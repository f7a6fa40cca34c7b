// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "remat/errors.hpp"
#include "remat/weights/byte_source.hpp"
#include "remat/weights/element_types.hpp"

namespace remat::detail {

/// What a name in a pickle stands for. Python would import and call it; here it only says how its
/// arguments are to be read.
enum class PickleRole : std::uint8_t {
  kDictionary,     ///< makes a dictionary, empty or from a list of pairs
  kTensor,         ///< makes a tensor from a storage, an offset, sizes and strides
  kFirstArgument,  ///< wraps its first argument: a parameter, a tuple, a typed list
  kTypedTensor,    ///< calls its first argument with its third: a tensor of a subclass
  kStorage,        ///< the class of a storage
  kDtype,          ///< a dtype; it is never called
  kIgnored,        ///< makes something that holds no weights
};

struct PickleGlobal {
  std::string_view module;
  std::string_view name;
  PickleRole role;
};

/// All names that a pickle may contain, beside the storage classes and dtypes of `kElementTypes`.
///
/// @par Source  torch/_utils.py, torch/_tensor.py, torch/storage.py; Python's and NumPy's
/// `__reduce__` for the data that training scripts keep beside the weights
inline constexpr std::array kPickleGlobals{
    PickleGlobal{"collections", "OrderedDict", PickleRole::kDictionary},
    PickleGlobal{"collections", "defaultdict", PickleRole::kIgnored},
    PickleGlobal{"collections", "Counter", PickleRole::kIgnored},
    PickleGlobal{"torch._utils", "_rebuild_tensor", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_tensor_v2", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_tensor_v3", PickleRole::kTensor},
    PickleGlobal{"torch._utils", "_rebuild_parameter", PickleRole::kFirstArgument},
    PickleGlobal{"torch._utils", "_rebuild_parameter_with_state", PickleRole::kFirstArgument},
    PickleGlobal{"torch.nn.parameter", "Parameter", PickleRole::kFirstArgument},
    PickleGlobal{"torch.nn.parameter", "Buffer", PickleRole::kFirstArgument},
    PickleGlobal{"torch._tensor", "_rebuild_from_type_v2", PickleRole::kTypedTensor},
    PickleGlobal{"torch", "Tensor", PickleRole::kIgnored},
    PickleGlobal{"torch", "Size", PickleRole::kFirstArgument},
    PickleGlobal{"torch", "device", PickleRole::kIgnored},
    PickleGlobal{"torch.storage", "UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch.storage", "_UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch", "UntypedStorage", PickleRole::kStorage},
    PickleGlobal{"torch.jit._pickle", "restore_type_tag", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_intlist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_doublelist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_boollist", PickleRole::kFirstArgument},
    PickleGlobal{"torch.jit._pickle", "build_tensorlist", PickleRole::kFirstArgument},
    PickleGlobal{"builtins", "set", PickleRole::kIgnored},
    PickleGlobal{"builtins", "frozenset", PickleRole::kIgnored},
    PickleGlobal{"builtins", "complex", PickleRole::kIgnored},
    PickleGlobal{"builtins", "slice", PickleRole::kIgnored},
    PickleGlobal{"builtins", "range", PickleRole::kIgnored},
    PickleGlobal{"builtins", "bytearray", PickleRole::kIgnored},
    PickleGlobal{"builtins", "object", PickleRole::kIgnored},
    PickleGlobal{"builtins", "int", PickleRole::kIgnored},
    PickleGlobal{"builtins", "float", PickleRole::kIgnored},
    PickleGlobal{"builtins", "list", PickleRole::kIgnored},
    PickleGlobal{"builtins", "dict", PickleRole::kIgnored},
    PickleGlobal{"copyreg", "_reconstructor", PickleRole::kIgnored},
    PickleGlobal{"_codecs", "encode", PickleRole::kIgnored},
    PickleGlobal{"argparse", "Namespace", PickleRole::kIgnored},
    PickleGlobal{"types", "SimpleNamespace", PickleRole::kIgnored},
    PickleGlobal{"pathlib", "PosixPath", PickleRole::kIgnored},
    PickleGlobal{"pathlib", "WindowsPath", PickleRole::kIgnored},
    PickleGlobal{"datetime", "datetime", PickleRole::kIgnored},
    PickleGlobal{"datetime", "date", PickleRole::kIgnored},
    PickleGlobal{"datetime", "timedelta", PickleRole::kIgnored},
    PickleGlobal{"numpy", "dtype", PickleRole::kIgnored},
    PickleGlobal{"numpy", "ndarray", PickleRole::kIgnored},
    PickleGlobal{"numpy.core.multiarray", "scalar", PickleRole::kIgnored},
    PickleGlobal{"numpy.core.multiarray", "_reconstruct", PickleRole::kIgnored},
    PickleGlobal{"numpy._core.multiarray", "scalar", PickleRole::kIgnored},
    PickleGlobal{"numpy._core.multiarray", "_reconstruct", PickleRole::kIgnored},
};

/// Returns what the name stands for; nothing if it is not in the table.
constexpr std::optional<PickleRole> find_role(std::string_view module, std::string_view name) {
  // Python 2's names of two modules.
  if (module == "__builtin__") module = "builtins";
  if (module == "copy_reg") module = "copyreg";
  for (const PickleGlobal& global : kPickleGlobals)
    if (global.module == module && global.name == name) return global.role;
  const bool is_torch = module == "torch" || module == "torch.cuda";
  if (is_torch && find_element_type(&ElementType::storage_class, name)) return PickleRole::kStorage;
  if (module == "torch" && find_element_type(&ElementType::dtype, name)) return PickleRole::kDtype;
  return std::nullopt;
}

/// Reports a name that is not in the table: nothing that a file names is ever imported or run.
[[noreturn]] inline void throw_unknown_global(const ByteSource& source, std::string_view module,
                                              std::string_view name) {
  ErrorMessage message("remat.weights.global");
  message.where("\"" + source.name() + "\"")
      .what("it holds an object of Python's " + printable(module) + "." + printable(name) +
            ", and only tensors in dictionaries, numbers and texts are read");
  if (name == "_load_from_bytes")
    message.cause("it was written by pickle, not by torch.save");
  else if (name == "_rebuild_qtensor" || name.find("sparse") != std::string_view::npos)
    message.cause("quantized and sparse tensors are not read");
  else
    message.cause(
        "it was saved as a whole module, or with other Python objects beside the weights");
  throw WeightsError(
      message.cure("In Python, load it and write torch.save(model.state_dict(), path)"));
}

}  // namespace remat::detail
