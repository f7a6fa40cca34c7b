// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace remat::detail {

/// What Python and the file formats call one kind of number.
struct ElementType {
  std::string_view dtype;          ///< Python's name without `torch.`
  std::string_view storage_class;  ///< torch.save's name, or empty: then the dtype is written out
  std::string_view safetensors;    ///< safetensors' name, or empty
  std::uint64_t byte_count;        ///< of one element
};

/// @par Source  torch/storage.py (`_dtype_to_storage_type_map`), torch/_utils.py
/// (`_rebuild_tensor_v3`), safetensors/src/tensor.rs (`Dtype`)
inline constexpr std::array kElementTypes{
    ElementType{"float32", "FloatStorage", "F32", 4},
    ElementType{"float64", "DoubleStorage", "F64", 8},
    ElementType{"float16", "HalfStorage", "F16", 2},
    ElementType{"bfloat16", "BFloat16Storage", "BF16", 2},
    ElementType{"int64", "LongStorage", "I64", 8},
    ElementType{"int32", "IntStorage", "I32", 4},
    ElementType{"int16", "ShortStorage", "I16", 2},
    ElementType{"int8", "CharStorage", "I8", 1},
    ElementType{"uint8", "ByteStorage", "U8", 1},
    ElementType{"bool", "BoolStorage", "BOOL", 1},
    ElementType{"complex64", "ComplexFloatStorage", "C64", 8},
    ElementType{"complex128", "ComplexDoubleStorage", "", 16},
    ElementType{"complex32", "", "", 4},
    ElementType{"uint16", "", "U16", 2},
    ElementType{"uint32", "", "U32", 4},
    ElementType{"uint64", "", "U64", 8},
    ElementType{"float8_e4m3fn", "", "F8_E4M3", 1},
    ElementType{"float8_e5m2", "", "F8_E5M2", 1},
    ElementType{"float8_e4m3fnuz", "", "F8_E4M3FNUZ", 1},
    ElementType{"float8_e5m2fnuz", "", "F8_E5M2FNUZ", 1},
    ElementType{"float8_e8m0fnu", "", "F8_E8M0", 1},
    ElementType{"qint8", "QInt8Storage", "", 1},
    ElementType{"quint8", "QUInt8Storage", "", 1},
    ElementType{"qint32", "QInt32Storage", "", 4},
    ElementType{"quint4x2", "QUInt4x2Storage", "", 1},
    ElementType{"quint2x4", "QUInt2x4Storage", "", 1},
};

/// Returns the row whose `column` is `name`, or null.
constexpr const ElementType* find_element_type(std::string_view ElementType::* column,
                                               std::string_view name) {
  if (name.empty()) return nullptr;
  for (const ElementType& type : kElementTypes)
    if (type.*column == name) return &type;
  return nullptr;
}

}  // namespace remat::detail
