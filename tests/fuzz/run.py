#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fuzzes one reader of weight files with libFuzzer, starting from the corpus under tests/data/fuzz.

A corpus is one file: each input after its length (32 bits, little-endian). The tests of remat/weights feed
all of them to the readers. `--keep` writes it anew, with inputs of all sizes among those that reach different
code. An input that fails is left in the current folder: mend the reader, and make it a test of its own in
tests/unit/weights.
"""

import argparse
import os
import pathlib
import shlex
import struct
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CORPORA = ROOT / "tests" / "data" / "fuzz"
MOST_BYTES = 60_000
FLAGS = ["-std=c++20", "-O1", "-g1", "-fsanitize=fuzzer,address,undefined",
         "-fno-sanitize-recover=undefined", f"-I{ROOT}/include"]
# Only whole archives need LibTorch; its own zip reader leaks when its constructor throws.
LIBTORCH = ["-isystem", "/usr/include/torch/csrc/api/include", "-fno-sanitize=vptr",
            "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]


def unpack(packed: pathlib.Path) -> list[bytes]:
    data = packed.read_bytes() if packed.is_file() else b""
    inputs = []
    while data:
        (size,) = struct.unpack_from("<I", data)
        inputs.append(data[4:4 + size])
        data = data[4 + size:]
    return inputs


def pack(packed: pathlib.Path, inputs: list[bytes]) -> None:
    kept = sorted(set(inputs), key=lambda content: (len(content), content))
    while sum(len(content) + 4 for content in kept) > MOST_BYTES:
        del kept[::10]
    packed_bytes = b"".join(struct.pack("<I", len(content)) + content for content in kept)
    packed.parent.mkdir(parents=True, exist_ok=True)
    packed.write_bytes(packed_bytes)
    print(f"{packed.name}: {len(kept)} inputs, {len(packed_bytes)} bytes")


def read_folder(folder: pathlib.Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=["pickle", "safetensors", "archive"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="update the corpus")
    parser.add_argument("--seeds", type=pathlib.Path, help="a folder of further inputs")
    parser.add_argument("--compiler", default="clang++-14")
    parser.add_argument("--libtorch", default=shlex.join(LIBTORCH), help="flags for `archive`")
    options = parser.parse_args()

    packed = CORPORA / f"{options.target}.corpus"
    with tempfile.TemporaryDirectory() as scratch:
        program, corpus, merged = (pathlib.Path(scratch) / name for name in ("fuzz", "corpus", "merged"))
        corpus.mkdir()
        merged.mkdir()
        seeds = unpack(packed) + (read_folder(options.seeds) if options.seeds else [])
        for index, content in enumerate(seeds):
            (corpus / str(index)).write_bytes(content)
        libtorch = shlex.split(options.libtorch) if options.target == "archive" else []
        subprocess.run([options.compiler, *FLAGS, HERE / f"{options.target}.fuzz.cpp", "-o", program,
                        *libtorch], check=True)
        limits = ["-max_len=4096", "-rss_limit_mb=3000", "-malloc_limit_mb=1024", "-timeout=10",
                  "-print_final_stats=1", *(["-detect_leaks=0"] if libtorch else [])]
        # Containers that LibTorch filled look overflown to code that is instrumented.
        environment = os.environ | {"ASAN_OPTIONS": "detect_container_overflow=0"} if libtorch else None
        words = HERE / f"{options.target}.dict"
        words_flag = [f"-dict={words}"] if words.is_file() else []
        subprocess.run([program, *limits, *words_flag, f"-max_total_time={options.seconds}",
                        corpus], check=True, env=environment)
        if options.keep:
            subprocess.run([program, *limits, "-merge=1", merged, corpus], check=True,
                           env=environment)
            pack(packed, read_folder(merged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
