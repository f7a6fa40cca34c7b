#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles each source of this folder twice: it must be refused with the promised sentence.

The first line of a source states the sentence: `// expect: a rule needs ...`. With -DREMAT_COMPILES
the source must compile, so that it cannot fail for another reason than the one it shows. These twins are
compiled as one, each in a namespace of its own, and one by one only if that fails: with LibTorch's headers a
source takes ten seconds.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", nargs="+", default=[], help="include folders")
    parser.add_argument("--system", nargs="+", default=[], help="system include folders")
    options = parser.parse_args()

    command = [options.compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT}"]
    command += [f"-I{folder}" for folder in options.include]
    for folder in options.system:
        if folder != "/usr/include":  # as a system folder it would come before the compiler's own
            command += ["-isystem", folder]

    def compile_source(source: pathlib.Path, *extra: str) -> subprocess.CompletedProcess[str]:
        # The C locale prints plain quotes.
        return subprocess.run([*command, *extra, str(source)], capture_output=True, text=True,
                              check=False, env={**os.environ, "LC_ALL": "C"})

    def join_twins(sources: list[pathlib.Path]) -> str:
        includes: list[str] = []
        bodies: list[str] = []
        for index, source in enumerate(sources):
            text = source.read_text(encoding="utf-8")
            includes += re.findall(r"^#include .*$", text, re.MULTILINE)
            body = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
            bodies.append(f'namespace twin{index} {{\n#line 1 "{source}"\n{body}\n}}')
        return "\n".join(["#define REMAT_COMPILES", *dict.fromkeys(includes), *bodies]) + "\n"

    def examine(source: pathlib.Path) -> str:
        first_line = source.read_text(encoding="utf-8").splitlines()[0]
        expected = re.fullmatch(r"// expect: (.+)", first_line)
        if expected is None:
            return "its first line is not `// expect: the text`"
        if not twins_compile:
            twin = compile_source(source, "-DREMAT_COMPILES")
            if twin.returncode != 0:
                return f"does not compile with -DREMAT_COMPILES\n{twin.stderr[:4000]}"
        refused = compile_source(source)
        if refused.returncode == 0:
            return "compiles, but must not"
        if expected[1] not in refused.stderr:
            return f"is refused without the text: {expected[1]}\n{refused.stderr[:4000]}"
        return ""

    sources = sorted(FOLDER.glob("*.cpp"))
    twins_compile = subprocess.run([*command, "-x", "c++", "-"], input=join_twins(sources), text=True,
                                   capture_output=True, check=False).returncode == 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        complaints = list(pool.map(examine, sources))
    for source, complaint in zip(sources, complaints):
        print(f"{source.name}: {complaint or 'refused as promised'}")
    failed = sum(map(bool, complaints))
    print(f"{len(sources)} sources, {failed} failed")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
