#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Builds and runs a small program by each way of consuming the library, in fresh folders.

find_package after an install to another place, add_subdirectory, FetchContent, a plain include path,
the single header; and two shared libraries with a copy of the header each in one process.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import time

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SHIPPED = ("CMakeLists.txt", "LICENSE", "cmake", "include", "single_include")


def run(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-6000:]}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--remat-build", required=True, help="the build folder to install from")
    parser.add_argument("--work", required=True, type=pathlib.Path, help="where to build; emptied")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--torch-prefix", required=True, help="the prefix of LibTorch")
    parser.add_argument("--torch-config", required=True, help="the folder of TorchConfig.cmake")
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--launcher", default="")
    options = parser.parse_args()

    work: pathlib.Path = options.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)

    # The package, moved after the install, and the archive that FetchContent unpacks: both far from
    # the sources, so that a path into them cannot help.
    run(options.cmake, "--install", options.remat_build, "--prefix", str(work / "staged"))
    prefix = (work / "staged").rename(work / "moved")
    for path in prefix.rglob("*.cmake"):
        if re.search(rf"{re.escape(str(ROOT))}|lib(torch|torch_cpu|c10)\.so", path.read_text(encoding="utf-8")):
            sys.exit(f"{path.name} of the installed package holds a path of this machine")
    archive = work / "remat.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in SHIPPED:
            tar.add(ROOT / name, arcname=f"remat/{name}")

    def build(name: str, source: str, *definitions: str) -> pathlib.Path:
        folder = work / name
        run(options.cmake, "-G", "Ninja", "-S", str(FOLDER / source), "-B", str(folder),
            f"-DCMAKE_PREFIX_PATH={options.torch_prefix}", f"-DTorch_DIR={options.torch_config}",
            f"-DCMAKE_CXX_COMPILER={options.compiler}",
            f"-DCMAKE_CXX_COMPILER_LAUNCHER={options.launcher}", *definitions)
        run(options.cmake, "--build", str(folder))
        return folder

    def consume(name: str, source: str, *definitions: str) -> None:
        begin = time.monotonic()
        folder = build(name, source, *definitions)
        print(f"{name}: {run(str(folder / 'consumer')).strip()} "
              f"({time.monotonic() - begin:.0f} s)", flush=True)

    consume("find_package", "package", f"-Dremat_ROOT={prefix}")
    consume("add_subdirectory", "subdirectory", f"-DREMAT_SOURCE={ROOT}")
    consume("FetchContent", "fetch_content", f"-DREMAT_SOURCE={archive}")
    consume("include_path", "include_path", f"-DREMAT_INCLUDE={ROOT / 'include'}")
    consume("single_header", "include_path", f"-DREMAT_INCLUDE={ROOT / 'single_include'}")

    folder = build("two_libraries", "two_libraries", f"-DREMAT_SOURCE={ROOT}")
    print(run(str(folder / "linked")).strip())
    libraries = [str(next(folder.glob(f"*{name}.so"))) for name in ("first", "second")]
    print(run(str(folder / "loaded"), *libraries).strip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
