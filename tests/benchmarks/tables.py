# SPDX-License-Identifier: MIT
"""Figures of compare as Markdown tables."""

import json
import pathlib

HEADER = """| network | batch | policy | peak MiB | saving | step time | processor time | recomputed operations |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def is_plain(row: dict) -> bool:
    return row["strategy"].endswith("plain")


def line_of(row: dict, first_cells: list[str]) -> str:
    ratios = ["", "1", "1", ""] if is_plain(row) else [
        f"{100 * row['saving']:.1f} %", f"{row['time_ratio']:.2f}", f"{row['cpu_ratio']:.2f}",
        str(row.get("recomputed", ""))]
    policy = row["strategy"] if "recomputed" in row else f"*{row['strategy']}*"
    if not row["gradients_equal"]:
        policy += " (gradients differ from plain's)"
    cells = [*first_cells, policy, f"{row['peak_mib']:.1f}", *ratios]
    return "| " + " | ".join(cells) + " |\n"


def markdown_of(rows: list[dict], default_batch: int) -> str:
    """Rows of one network stay together; its name and batch stand in the first of them only."""
    lines, previous = "", None
    for row in rows:
        name, _, batch = row["model"].partition(":")
        lines += line_of(row, [name, batch or str(default_batch)] if row["model"] != previous else ["", ""])
        previous = row["model"]
    return HEADER + lines


def joined(paths: list[str]) -> str:
    """One table of what several runs wrote with --json."""
    results = [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in paths]
    return HEADER + "".join(markdown_of(result["steps"], result["batch"]).removeprefix(HEADER) for result in results)
