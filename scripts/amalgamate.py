#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Joins the headers under include/ into single_include/remat/remat.hpp.

From the umbrella on, every own header comes in once and in order; `#pragma once` and repeated
unconditional includes go. `--check` only compares. The product holds no date and no path of this
machine, so that equal sources give equal bytes.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "include"
PRODUCT = ROOT / "single_include" / "remat" / "remat.hpp"
UMBRELLA = "remat/remat.hpp"
# Parts and headers that need another library than LibTorch: left to those who include them by name.
OPTIONAL = (
    "remat/yaml", "remat/weights/safetensors", "remat/training/memory_report_json",
    "remat/training/frontier_json", "remat/plan/memory_plan_json")

INCLUDE_LINE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]')
OWN_LINE = re.compile(r'^#include "(remat/[\w/]+\.hpp)"\s*(//.*)?$')


def fail(message: str) -> None:
    sys.exit(f"amalgamate.py: {message}")


class Amalgamation:
    def __init__(self) -> None:
        self.order: list[str] = []     # own headers, each before those that include it
        self.lines: list[str] = []
        self.foreign: set[str] = set() # unconditional includes that are in already

    def add(self, header: str) -> None:
        if header in self.order:
            return
        path = INCLUDE / header
        if not path.is_file():
            fail(f"{header} is included, but does not exist")
        body: list[str] = []
        depth = 0
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            place = f"include/{header}:{number}"
            if re.match(r"^\s*#\s*if", line):
                depth += 1
            elif re.match(r"^\s*#\s*endif", line):
                depth -= 1
            if re.match(r"^\s*#\s*pragma\s+once", line) or line.startswith("// SPDX-License-Id"):
                continue
            include = INCLUDE_LINE.match(line)
            if include is None:
                body.append(line)
            elif include[1] == '"' or include[2].startswith("remat/"):
                own = OWN_LINE.match(line)
                if own is None:
                    fail(f'{place}: an own include is written as #include "remat/..."')
                if depth:
                    fail(f"{place}: an own include may not be conditional")
                self.flush(body)
                self.add(own[1])
            elif depth:
                body.append(line)
            elif include[2] not in self.foreign:
                self.foreign.add(include[2])
                body.append(line)
        self.flush(body)
        self.order.append(header)

    def flush(self, body: list[str]) -> None:
        self.lines += body
        body.clear()

    def text(self) -> str:
        version = (INCLUDE / "remat/version.hpp").read_text(encoding="utf-8")
        numbers = re.findall(r"#define REMAT_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", version)
        head = [
            "// SPDX-License-Identifier: MIT",
            "#pragma once",
            "",
            f"// remat {'.'.join(numbers)} in one file, made by scripts/amalgamate.py: do not edit.",
            "//",
            *(f"//   {header}" for header in self.order),
            "",
        ]
        # One blank line where the dropped lines leave several.
        joined = re.sub(r"\n{3,}", "\n\n", "\n".join(self.lines)).strip("\n")
        return "\n".join(head) + "\n" + joined + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed product")
    options = parser.parse_args()

    amalgamation = Amalgamation()
    amalgamation.add(UMBRELLA)
    headers = {str(path.relative_to(INCLUDE)) for path in INCLUDE.rglob("*.hpp")}
    missed = sorted(header for header in headers - set(amalgamation.order)
                    if not header.startswith(OPTIONAL))
    if missed:
        fail(f"not reached from {UMBRELLA}: {' '.join(missed)}")

    text = amalgamation.text()
    if not options.check:
        PRODUCT.parent.mkdir(parents=True, exist_ok=True)
        PRODUCT.write_text(text, encoding="utf-8")
    elif not PRODUCT.is_file() or PRODUCT.read_text(encoding="utf-8") != text:
        print(f"{PRODUCT.relative_to(ROOT)} is not what include/ makes of it; to mend it:\n"
              f"  python3 scripts/amalgamate.py")
        return 1
    print(f"{len(amalgamation.order)} headers, {text.count(chr(10))} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
