#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Reads what remat::save_safetensors wrote: with a parser of 20 lines, and with Python's package if it is there.

The test program writes the file, and beside it what it meant to write: name, dtype, shape and bytes.
"""

import argparse
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

CASE = "writes a file and what is in it*"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
          "U8": "uint8"}
Tensors = dict[str, tuple[str, list[int], bytes]]


def write(program: str, path: pathlib.Path) -> Tensors:
    environment = os.environ | {"REMAT_TEST_SAFETENSORS": str(path)}
    subprocess.run([program, f"--test-case={CASE}"], env=environment, check=True)
    meant = {}
    for line in path.with_name(path.name + ".txt").read_text(encoding="utf-8").splitlines():
        name, dtype, shape, numbers = line.split("\t")
        meant[name] = (dtype, json.loads(shape), bytes(int(number) for number in numbers.split()))
    return meant


def parse(data: bytes) -> tuple[Tensors, dict[str, str]]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size].decode("utf-8"))
    body = data[8 + size:]
    metadata = header.pop("__metadata__")
    tensors = {}
    covered = 0
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        covered += end - begin
        tensors[name] = (DTYPES[entry["dtype"]], entry["shape"], body[begin:end])
    assert covered == len(body), "holes or overlaps"
    return tensors, metadata


def with_package(path: pathlib.Path) -> Tensors | None:
    try:
        import torch
        from safetensors.torch import load_file
    except ImportError as error:
        print(f"not compared with Python's package: {error}")
        return None
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape),
                   bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
            for name, tensor in load_file(path).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True, help="remat_tests")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "written.safetensors"
        meant = write(options.program, path)
        read, metadata = parse(path.read_bytes())
        assert list(read) == list(meant), "names or their order differ"
        assert read == meant, "dtypes, shapes or bytes differ"
        assert metadata == {"made by": "remat"}, metadata
        theirs = with_package(path)
        assert theirs is None or theirs == meant, "Python's package reads something else"
    print(f"{len(meant)} tensors agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
