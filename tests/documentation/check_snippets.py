#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compiles every C++ snippet of the documentation, as one source.

Each snippet becomes the body of a function, after the declarations of SCENE: what a reader brings along. Its includes
move to the top. Errors name the page and the line there.
"""

import argparse
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ["README.md", "README.zh-CN.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
INCLUDES = ["#include <cassert>", "#include <iostream>", "#include <memory>", "#include <string>", "#include <vector>"]
SCENE = """
struct Batch { torch::Tensor data, target; };
extern std::vector<Batch> loader;
extern torch::Tensor images, labels;
extern std::shared_ptr<remat::Backbone> net;
extern torch::optim::AdamW optimizer;
torch::Tensor my_operation(torch::Tensor);
void train_one_epoch();
"""


def snippets(page: str) -> list[tuple[int, str]]:
    """The line of its first character, and the text, of each C++ fence."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1))
            for match in re.finditer(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def join() -> tuple[str, int]:
    includes, bodies = [*INCLUDES], []
    for page in PAGES:
        for line, text in snippets(page):
            # Blank lines take their place, so that line numbers stay right.
            includes += re.findall(r"^#include <[^>]*>", text, re.MULTILINE)
            body = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
            bodies.append(f'void snippet{len(bodies)}() {{\n#line {line} "{page}"\n{body}}}')
    return "\n".join([*dict.fromkeys(includes), "namespace {", SCENE, *bodies, "}"]) + "\n", len(bodies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", nargs="+", default=[], help="include folders")
    parser.add_argument("--system", nargs="+", default=[], help="system include folders")
    options = parser.parse_args()

    command = [options.compiler, "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in options.include)]
    for folder in options.system:
        if folder != "/usr/include":  # as a system folder it would come before the compiler's own
            command += ["-isystem", folder]
    text, count = join()
    if count == 0:
        print("no snippet was found: has the documentation moved?")
        return 1
    result = subprocess.run([*command, "-x", "c++", "-"], input=text, text=True, check=False)
    if result.returncode == 0:
        print(f"{count} snippets of {len(PAGES)} pages compile")
    return 1 if result.returncode != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
