#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the weight files beside it that the tests of remat/weights read.

Needs torch 2.13, NumPy and safetensors. The numbers are simple, so that the tests can state them: element i
of a tensor made by `ramp(start, ...)` is start + i / 4.
"""

import argparse
import collections
import io
import json
import pathlib
import pickle
import struct
import zipfile

import numpy
import torch
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).resolve().parent


def ramp(start: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(numpy.prod(shape))
    return (start + torch.arange(count, dtype=torch.float64) / 4).reshape(shape).to(dtype)


def tiny_module() -> torch.nn.Module:
    """Linear(3, 2) and BatchNorm1d(2); tensor k is ramp(k), the counter is 7."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = module.state_dict()
    for index, (key, value) in enumerate(state.items()):
        value.copy_(torch.tensor(7) if key.endswith("tracked") else ramp(index, *value.shape))
    return module


def layouts() -> dict[str, torch.Tensor]:
    base = ramp(0, 3, 4)
    return {
        "base": base, "tied": base, "transposed": base.t(), "slice": base[1:, 2],
        "every_second": base[:, ::2], "expanded": ramp(5, 1, 2).expand(3, 2),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5),
    }


def dtypes() -> dict[str, torch.Tensor]:
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
             torch.int16, torch.int8, torch.uint8]
    tensors = {str(kind).removeprefix("torch."): torch.tensor([1, 2, 100]).to(kind) for kind in kinds}
    tensors["bool"] = torch.tensor([True, False, True])
    tensors["complex64"] = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64)
    return tensors


class Evil:
    """Python would run the call while it loads the file."""

    def __reduce__(self):
        return eval, ("print('the file ran code')",)


def rezip(data: bytes, change, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The zip file with the contents that `change(name, content)` returns."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            if name.endswith(".debug_pkl"):  # names paths of the machine that wrote it
                continue
            new.writestr(zipfile.ZipInfo(name), change(name, old.read(name)), compression)
    return out.getvalue()


def saved(value, **options) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def pickled_files() -> dict[str, bytes]:
    module = tiny_module()
    state = module.state_dict()
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    module.load_state_dict(tiny_module().state_dict())
    parallel = collections.OrderedDict((f"module.{key}", value) for key, value in state.items())
    partly = collections.OrderedDict(parallel)
    partly["extra"] = ramp(9, 2)
    with_state = torch.nn.Parameter(ramp(1, 2))
    with_state.note = "kept by Python as an attribute"
    with_attribute = ramp(2, 2)
    with_attribute.note = 3
    zip_form = saved(state)
    return {
        "zip.pth": zip_form,
        "legacy.pth": saved(state, _use_new_zipfile_serialization=False),
        "protocol4.pth": saved(state, pickle_protocol=4),
        "protocol4_legacy.pth": saved(state, pickle_protocol=4, _use_new_zipfile_serialization=False),
        "plain_dict.pth": saved(dict(state)),
        "deflated.pth": rezip(zip_form, lambda name, data: data, zipfile.ZIP_DEFLATED),
        "big_endian.pth": rezip(zip_form, lambda name, data: b"big" if "byteorder" in name else data),
        "short_storage.pth": rezip(zip_form, lambda name, data: data[:8] if name.endswith("data/0") else data),
        "parameters.pth": saved({"plain": torch.nn.Parameter(ramp(0, 2)), "with_state": with_state,
                                 "frozen": torch.nn.Parameter(ramp(3, 2), requires_grad=False),
                                 "with_attribute": with_attribute}),
        "dtypes.pth": saved(dtypes()),
        "new_dtypes.pth": saved({"uint16": torch.tensor([1, 65535], dtype=torch.uint16),
                                 "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)}),
        "layouts.pth": saved(layouts()),
        "layouts_legacy.pth": saved(layouts(), _use_new_zipfile_serialization=False),
        "marks.pth": saved({"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
                            "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag}),
        "nested_state_dict.pth": saved({"epoch": 3, "best": torch.tensor(0.5), "arch": "tiny",
                                        "state_dict": state, "optimizer": optimizer.state_dict()}),
        "nested_model.pth": saved({"model": state, "args": argparse.Namespace(lr=0.1, names=["a"]),
                                   "score": numpy.float64(0.25), "array": numpy.arange(3),
                                   "when": torch.device("cpu"), "size": torch.Size([1, 2]),
                                   "kinds": {1, 2}, "dtype": torch.float32, "big": 1 << 70, "none": None}),
        "nested_model_state_dict.pth": saved({"model_state_dict": state, "loss": [0.5, 0.25]}),
        "parallel.pth": saved(parallel),
        "partly_parallel.pth": saved(partly),
        "whole_module.pth": saved(module),
        "bare_tensor.pth": saved(ramp(0, 2)),
        "list.pth": saved([ramp(0, 2), ramp(1, 2)]),
        "no_tensors.pth": saved({"epoch": 3, "name": "nothing"}),
        "quantized.pth": saved({"w": torch.quantize_per_tensor(ramp(0, 4), 0.1, 0, torch.qint8)}),
        "sparse.pth": saved({"w": torch.eye(3).to_sparse()}),
        "evil.pth": saved({"weight": ramp(0, 2), "trap": Evil()}),
        "pickle_dump.pkl": pickle.dumps({"weight": ramp(0, 2)}),
        "numpy.npz": numpy_archive(),
    }


def numpy_archive() -> bytes:
    out = io.BytesIO()
    numpy.savez(out, a=numpy.arange(3))
    return out.getvalue()


def safetensors_bytes(header: dict, data: bytes, padding: int = 0) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + data


def write_safetensors() -> None:
    save_file(dtypes() | {"uint16": torch.tensor([1, 65535], dtype=torch.uint16),
                          "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)},
              HERE / "new_dtypes.safetensors")
    save_file(dtypes(), HERE / "dtypes.safetensors", metadata={"format": "pt", "made by": "Python"})
    save_file(tiny_module().state_dict(), HERE / "tiny.safetensors")
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [3, 19]}
    first = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    data = bytes([1, 2, 3]) + struct.pack("<4f", 0.5, -1.5, 2.5, 1e-3)
    # One byte more or less in the header decides at which address the floats begin.
    for padding in range(4):
        text = safetensors_bytes({"bytes": first, "floats": entry}, data, padding)
        (HERE / f"unaligned_{padding}.safetensors").write_bytes(text)
    halves = {"bf16": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
              "fp16": {"dtype": "F16", "shape": [1], "data_offsets": [4, 6]}}
    data = struct.pack("<HHH", 0x3F80, 0xC000, 0x3C00)
    (HERE / "halves.safetensors").write_bytes(safetensors_bytes(halves, data))


def main() -> None:
    for name, data in pickled_files().items():
        (HERE / name).write_bytes(data)
    out = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), out)
    (HERE / "script.pt").write_bytes(rezip(out.getvalue(), lambda name, data: data))
    write_safetensors()


if __name__ == "__main__":
    main()
