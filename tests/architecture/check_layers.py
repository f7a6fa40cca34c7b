#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Checks the floors of include/remat: includes point downwards, umbrellas list everything.

The rules and their reasons are in docs/architecture.md. Prints every breach and exits with 1.
`--fix` rewrites the umbrellas.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include"

# A part is a folder of include/remat with its umbrella, or a header beside the folders.
FLOORS = {
    "version": 0, "config": 0, "errors": 0, "units": 0,
    "plan": 1, "policies": 1,
    "libtorch": 2, "memory": 2, "amp": 2,
    "engine": 3, "checkpoint": 3, "explain": 3,
    "nn": 4, "weights": 4,
    "backbones": 5,
    "models": 6, "yaml": 6, "training": 6,
    "remat": 7,
}
# Steps between parts of one floor; on floor 0 any.
SIDEWAYS = {
    ("policies", "plan"), ("memory", "libtorch"), ("amp", "libtorch"), ("checkpoint", "engine"),
    ("explain", "engine"), ("explain", "checkpoint"),
    ("training", "models"),
}
# Parts and headers that need another library than LibTorch: included by name, in no umbrella above
# their own. A name stands for all that begin with it.
OPTIONAL = (
    "remat/yaml", "remat/weights/safetensors", "remat/training/memory_report_json",
    "remat/training/frontier_json", "remat/plan/memory_plan_json")
# Folders without an umbrella: nobody includes them as a whole.
NO_UMBRELLA = {"libtorch", "engine"}

LIBTORCH = re.compile(r"^(torch|ATen|c10|caffe2)/")
HEAVY = {"torch/torch.h", "torch/all.h", "torch/types.h"}
INTERNALS = re.compile(r"^(torch/csrc/|torch/library\.h|ATen/core/dispatch/|ATen/core/op_registration/)")
INCLUDE_LINE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
UMBRELLA_LINE = re.compile(r'^(//.*|#pragma once|#include "[^"]+"|)$')


def part_of(header: str) -> str:
    """The part that `remat/...` belongs to."""
    return header.split("/")[1].removesuffix(".hpp")


def umbrella_text(members: list[str]) -> str:
    lines = ["// SPDX-License-Identifier: MIT", "#pragma once", ""]
    return "\n".join(lines + [f'#include "{member}"' for member in members]) + "\n"


def umbrellas(headers: list[str]) -> dict[str, list[str]]:
    """What each umbrella must list."""
    top = [h for h in headers if h.count("/") == 1 and h != "remat/remat.hpp"]
    folders = {part_of(h) for h in headers if h.count("/") > 1} - NO_UMBRELLA - {"detail"}
    top = sorted(set(top) | {f"remat/{folder}.hpp" for folder in folders})
    wanted = {"remat/remat.hpp": [h for h in top if not h.startswith(OPTIONAL)]}
    for folder in folders:
        umbrella = f"remat/{folder}.hpp"
        wanted[umbrella] = [h for h in headers if h.startswith(f"remat/{folder}/")
                            and (umbrella.startswith(OPTIONAL) or not h.startswith(OPTIONAL))]
    return wanted


def check_includes(header: str, text: str, headers: set[str]) -> list[str]:
    breaches = []
    part = part_of(header)
    if part not in FLOORS and part != "detail":
        return [f"{header}: the part {part} has no floor in check_layers.py"]
    floor = FLOORS.get(part, 0)
    for quote, name in INCLUDE_LINE.findall(text):
        if name.startswith("remat/"):
            other = part_of(name)
            step_ok = (other == part or FLOORS.get(other, 0) < floor
                       or (part, other) in SIDEWAYS or (floor == 0 == FLOORS.get(other, 0)))
            if quote != '"':
                breaches.append(f'{header}: own headers are included as "{name}"')
            if name not in headers:
                breaches.append(f"{header}: there is no {name}")
            elif not step_ok:
                breaches.append(f"{header} (floor {floor}) may not include {name} "
                                f"(floor {FLOORS.get(other)})")
        elif quote == '"':
            breaches.append(f'{header}: "{name}" is neither a full path from the root nor <...>')
        elif name in HEAVY:
            breaches.append(f"{header}: <{name}> costs every user 8 to 14 s, include narrower")
        elif LIBTORCH.match(name) and floor < 2:
            breaches.append(f"{header}: floor {floor} knows no LibTorch, but includes <{name}>")
        elif INTERNALS.match(name) and part != "libtorch":
            breaches.append(f"{header}: <{name}> is an internal of LibTorch, only "
                            f"remat/libtorch/ may name it")
    return breaches


def find_cycle(graph: dict[str, list[str]]) -> list[str]:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node):] + [node]
        if node in done:
            return []
        for other in graph.get(node, []):
            if cycle := visit(other, path + [node]):
                return cycle
        done.add(node)
        return []

    for node in graph:
        if cycle := visit(node, []):
            return cycle
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="rewrite the umbrellas")
    options = parser.parse_args()

    texts = {str(path.relative_to(INCLUDE)): path.read_text(encoding="utf-8")
             for path in sorted(INCLUDE.rglob("*.hpp"))}
    breaches = []
    for name, members in umbrellas(sorted(set(texts) | {"remat/remat.hpp"})).items():
        if options.fix:
            (INCLUDE / name).write_text(umbrella_text(members), encoding="utf-8")
            texts[name] = umbrella_text(members)
        text = texts.get(name, "")
        if [found for _, found in INCLUDE_LINE.findall(text)] != members:
            breaches.append(f"include/{name} must list, in this order: {' '.join(members)} "
                            f"(python3 tests/architecture/check_layers.py --fix)")
        elif not all(UMBRELLA_LINE.match(line) for line in text.splitlines()):
            breaches.append(f"include/{name}: an umbrella lists headers and nothing else")
    graph = {}
    for header, text in texts.items():
        if not text.startswith("// SPDX-License-Identifier: MIT\n#pragma once\n"):
            breaches.append(f"{header}: the first two lines are the licence and #pragma once")
        if re.search(r"^using namespace", text, re.MULTILINE):
            breaches.append(f"{header}: using namespace in a header")
        breaches += check_includes(header, text, set(texts))
        graph[header] = [name for _, name in INCLUDE_LINE.findall(text) if name.startswith("remat/")]
    if cycle := find_cycle(graph):
        breaches.append("a cycle: " + " -> ".join(cycle))

    for breach in breaches:
        print(breach)
    print(f"{len(texts)} headers, {len(breaches)} breaches")
    return 1 if breaches or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
