# SPDX-License-Identifier: MIT
"""Figures of compare as Markdown tables."""

import json
import pathlib

HEADER = """| network | batch | policy | peak MiB | saving | step time | processor time | recomputed operations |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def is_plain(row: dict) -> bool:
    return row["strategy"].endswith("plain")


def is_infeasible(row: dict) -> bool:
    """Whether there was no plan for the row's budget, so that nothing was measured."""
    return "least_part" in row


def line_of(row: dict, first_cells: list[str]) -> str:
    if is_infeasible(row):
        note = f"{row['strategy']} (infeasible, least {row['least_part']:.3f} of plain)"
        return "| " + " | ".join([*first_cells, note, "", "", "", "", ""]) + " |\n"
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


def read_results(paths: list[str]) -> list[dict]:
    return [json.loads(pathlib.Path(path).read_text(encoding="utf-8")) for path in paths]


def joined(paths: list[str]) -> str:
    """One table of what several runs wrote with --json."""
    results = read_results(paths)
    return HEADER + "".join(markdown_of(result["steps"], result["batch"]).removeprefix(HEADER) for result in results)


BUDGET_HEADER = """| method | peak / plain, predicted | measured | recomputed share, predicted | measured | step time / plain | gradients |
| --- | --- | --- | --- | --- | --- | --- |
"""


def cell(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def budget_line(row: dict, plain_peak: float) -> str:
    if is_infeasible(row):
        return f"| {row['strategy']} | infeasible: the least is {row['least_part']:.3f} | | | | | |\n"
    predicted_peak = row.get("predicted_peak_mib")
    cells = [row["strategy"], cell(None if predicted_peak is None else predicted_peak / plain_peak, ".3f"),
             f"{row['peak_mib'] / plain_peak:.3f}", cell(row.get("predicted_recomputed"), ".1%"),
             cell(row.get("recomputed_share"), ".1%"), f"{row['time_ratio']:.3f}",
             "equal" if row["gradients_equal"] else "differ"]
    return "| " + " | ".join(cells) + " |\n"


def budget_tables(rows: list[dict], default_batch: int) -> str:
    """A table per network: what each method needs beside the plain step of its own program."""
    text = ""
    for model in dict.fromkeys(row["model"] for row in rows):
        name, _, batch = model.partition(":")
        text += f"{chr(10) if text else ''}### {name}, batch {batch or default_batch}\n\n{BUDGET_HEADER}"
        plain_peak = 0.0
        for row in rows:
            if row["model"] != model:
                continue
            if is_plain(row):
                plain_peak = row["peak_mib"]
            text += budget_line(row, plain_peak)
    return text


def joined_budgets(paths: list[str]) -> str:
    """The tables of what several runs wrote with --budgets --json."""
    return "\n".join(budget_tables(result["steps"], result["batch"]) for result in read_results(paths))
