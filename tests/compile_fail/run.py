#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles each source of this folder twice: it must be refused with the promised sentence.

The first line of a source states the sentence: `// expect: a rule needs ...`. With -DREMAT_COMPILES
the source must compile, so that it cannot fail for another reason than the one it shows. Parsing
LibTorch takes ten seconds, so the sources are compiled as one, each in a namespace of its own: once with
-DREMAT_COMPILES and once without. Only those that come out wrong are compiled alone.
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


def join(sources: list[pathlib.Path], texts: list[str]) -> str:
    """Puts the includes first, then each source in a namespace and an error that marks its end."""
    includes: list[str] = []
    bodies: list[str] = []
    for index, (source, text) in enumerate(zip(sources, texts)):
        includes += re.findall(r"^#include .*$", text, re.MULTILINE)
        body = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
        bodies.append(f'namespace source{index} {{\n#line 1 "{source}"\n{body}\n}}\n'
                      '#ifndef REMAT_COMPILES\nstatic_assert(false, "end of source");\n#endif')
    return "\n".join([*dict.fromkeys(includes), *bodies]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", nargs="+", default=[], help="include folders")
    parser.add_argument("--system", nargs="+", default=[], help="system include folders")
    options = parser.parse_args()

    command = [options.compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT}"]
    version = subprocess.run([options.compiler, "--version"], capture_output=True, text=True, check=True)
    if "clang" in version.stdout:
        command.append("-ferror-limit=0")  # else it stops at 20; GCC does not
    command += [f"-I{folder}" for folder in options.include]
    for folder in options.system:
        if folder != "/usr/include":  # as a system folder it would come before the compiler's own
            command += ["-isystem", folder]

    def compile_text(text: str, *extra: str) -> subprocess.CompletedProcess[str]:
        # The C locale prints plain quotes.
        return subprocess.run([*command, *extra, "-x", "c++", "-"], input=text, capture_output=True,
                              text=True, check=False, env={**os.environ, "LC_ALL": "C"})

    sources = sorted(FOLDER.glob("*.cpp"))
    texts = [source.read_text(encoding="utf-8") for source in sources]
    joined = join(sources, texts)
    are_twins_right = compile_text(joined, "-DREMAT_COMPILES").returncode == 0
    # Compilers report in the order of the text, up to the error that ends each source; last come the
    # bodies of function templates.
    reports = re.split(r"^.*error:.*end of source.*$", compile_text(joined).stderr, flags=re.MULTILINE)
    if len(reports) != len(sources) + 1:
        reports = [""] * (len(sources) + 1)

    def examine(source: pathlib.Path, text: str, report: str) -> str:
        expected = re.match(r"// expect: (.+)\n", text)
        if expected is None:
            return "its first line is not `// expect: the text`"
        alone = f'#line 1 "{source}"\n{text}'
        if not are_twins_right:
            twin = compile_text(alone, "-DREMAT_COMPILES")
            if twin.returncode != 0:
                return f"does not compile with -DREMAT_COMPILES\n{twin.stderr[:4000]}"
        if any("error:" in part and expected[1] in part
               for part in [report, reports[-1] if str(source) in reports[-1] else ""]):
            return ""
        refused = compile_text(alone)
        if refused.returncode == 0:
            return "compiles, but must not"
        if expected[1] not in refused.stderr:
            return f"is refused without the text: {expected[1]}\n{refused.stderr[:4000]}"
        return ""

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        complaints = list(pool.map(examine, sources, texts, reports))
    for source, complaint in zip(sources, complaints):
        print(f"{source.name}: {complaint or 'refused as promised'}")
    failed = sum(map(bool, complaints))
    print(f"{len(sources)} sources, {failed} failed")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
