#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes the API reference without a warning, and finds public names without a comment.

Every class, free function, alias and enumeration needs one, and every member function whose name does not say it all.
Fields, constructors, operators, overrides and the names in CUSTOMARY are read beside the comment of their class.
Exits with 77, which ctest takes for skipped, where Doxygen is not installed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CUSTOMARY = {"begin", "end", "size", "empty", "is_empty", "forward", "reset", "designs"}
MEMBER = re.compile(r"Member (?P<member>.*) \((?P<kind>[a-z]+)\) of (class|struct) (?P<of>.*) is not documented")


def run_doxygen(output: pathlib.Path, *more: str) -> tuple[int, str]:
    settings = "\n".join([f"@INCLUDE = {ROOT / 'docs' / 'Doxyfile'}", f"OUTPUT_DIRECTORY = {output}", *more])
    result = subprocess.run(["doxygen", "-"], input=settings, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.returncode, (result.stdout + result.stderr).strip()


def needs_comment(line: str) -> bool:
    """Says which of Doxygen's complaints of a missing comment count."""
    member = MEMBER.search(line)
    if member is None:
        return " is not documented" in line
    text, name = member["member"], re.split(r"[(<]", member["member"])[0]
    of = re.split(r"<", member["of"])[0].split("::")[-1].strip()
    if member["kind"] in ("variable", "typedef", "friend"):
        return False
    if "operator" in name or " override" in text or text.endswith("=default"):
        return False
    return name not in CUSTOMARY and name != of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, help="folder for the reference (default: a temporary one)")
    options = parser.parse_args()
    if shutil.which("doxygen") is None:
        print("skipped: Doxygen is not installed (apt-get install doxygen)")
        return 77

    with tempfile.TemporaryDirectory() as folder:
        code, text = run_doxygen(options.output or pathlib.Path(folder))
        if code != 0:
            print(text)
            return 1
        _, text = run_doxygen(pathlib.Path(folder), "GENERATE_HTML = NO", "GENERATE_XML = YES", "WARN_AS_ERROR = NO",
                              "WARN_IF_UNDOCUMENTED = YES")
    # Once per class that inherits it.
    missing = list(dict.fromkeys(line.replace(f"{ROOT}/", "") for line in text.splitlines() if needs_comment(line)))
    print(*missing, sep="\n", end="\n" if missing else "")
    if not missing:
        print("the reference is made without a warning, and public names have their comments")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
