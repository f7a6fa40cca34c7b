#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs host.py, in both orders of loading, by the Python whose torch is the LibTorch of this build.

Exits with 77, which ctest counts as skipped, if there is no such Python: LibTorch may come without one.
"""

import argparse
import os
import pathlib
import subprocess
import sys

HOST = pathlib.Path(__file__).resolve().with_name("host.py")
SKIPPED = 77
# The LibTorch that a process with torch has loaded.
PRINT_LIBTORCH = """
import torch
print(next(line.split()[-1] for line in open("/proc/self/maps") if "/libtorch_cpu.so" in line))
"""


def find_python(libtorch: pathlib.Path) -> str | None:
    # A wheel lies at <prefix>/lib/python3.x/site-packages/torch/lib.
    candidates = [parent / "bin" / "python3" for parent in libtorch.parents[4:6]]
    for candidate in [*candidates, pathlib.Path(sys.executable)]:
        if not candidate.exists():
            continue
        done = subprocess.run([candidate, "-c", PRINT_LIBTORCH], capture_output=True, text=True,
                              check=False)
        if done.returncode == 0 and pathlib.Path(done.stdout.strip()).resolve() == libtorch:
            return str(candidate)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libtorch", required=True, type=pathlib.Path,
                        help="the folder of libtorch_cpu.so")
    parser.add_argument("--library", help="the library to load, if it was built")
    options = parser.parse_args()

    python = find_python((options.libtorch / "libtorch_cpu.so").resolve()) if options.library else None
    if python is None:
        print(f"skipped: no Python here has the LibTorch in {options.libtorch} as its torch")
        return SKIPPED
    failed = 0
    for first in ("torch", "library"):
        print(f"{first} first", flush=True)
        # One thread: on a busy machine, those of tiny operations would wait for each other.
        done = subprocess.run([python, "-B", HOST, options.library, first], check=False,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        failed += done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
