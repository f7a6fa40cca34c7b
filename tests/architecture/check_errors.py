#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares three lists of error codes: those in include/, in docs/errors.md and in the tests.

A code is a string literal "remat.word.word". Each has a paragraph of its own in docs/errors.md, under a
heading with the code, and a test that names it.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LITERAL = re.compile(r'"(remat(?:\.[a-z_]+){2,})"')
# Reports a defect of remat itself: no test can call for it.
DEFECTS = {"remat.recompute.lost"}
MENTION = re.compile(r"\b(remat(?:\.[a-z_]+){2,})\b")
HEADING = re.compile(r"^### `(remat(?:\.[a-z_]+){2,})`$", re.MULTILINE)


def collect(folder: str, pattern: re.Pattern[str], glob: str) -> set[str]:
    codes: set[str] = set()
    for path in (ROOT / folder).rglob(glob):
        codes.update(pattern.findall(path.read_text(encoding="utf-8")))
    return codes


def main() -> int:
    thrown = collect("include", LITERAL, "*.hpp")
    tested = collect("tests", MENTION, "*.cpp")
    documented = set(HEADING.findall((ROOT / "docs" / "errors.md").read_text(encoding="utf-8")))

    complaints = [f"{code}: no paragraph in docs/errors.md" for code in thrown - documented]
    complaints += [f"{code}: in docs/errors.md, but nothing throws it" for code in documented - thrown]
    complaints += [f"{code}: no test names it" for code in thrown - tested - DEFECTS]
    for complaint in sorted(complaints):
        print(complaint)
    print(f"{len(thrown)} codes, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
