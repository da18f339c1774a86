"""Judge the statements of order of a written page again and read its notes again, without measuring anything."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragkv.benchmarks.papers.definition import Cell, Order
from ragkv.benchmarks.papers.figure import Difference, with_width
from ragkv.benchmarks.papers.origin import COMMAND
from ragkv.benchmarks.papers.page import NOTES, ORDER, end_of_page, notes_path, order_json
from ragkv.benchmarks.papers.plot import OTHER_FOLDER
from ragkv.benchmarks.papers.verdict import Verdict, decide
from ragkv.errors import ConfigError
from ragkv.evaluation.writing import write_whole

__all__ = ["revise_table"]

_END = re.compile(rf"^(?:{re.escape(ORDER)}|{re.escape(NOTES)})$", re.MULTILINE)


def revise_table(name: str, folder: Path) -> list[Verdict]:
    """Judge the orders in `folder`/NAME.json by the current rule and write them, with NAME.notes.md, into both files.

    The figures, their differences and their origin do not change. Raises ConfigError if a file is missing or does not
    have the command's format, and RagkvError if a file cannot be written.
    """
    report_path, page_path, notes = folder / f"{name}.json", folder / f"{name}.md", notes_path(folder, name)
    try:
        report = json.loads(report_path.read_text(encoding="utf-8"))
        page = page_path.read_text(encoding="utf-8")
        written = notes.read_text(encoding="utf-8") if notes.exists() else ""
    except FileNotFoundError as error:
        raise ConfigError(f"There is no {error.filename}; {COMMAND} {name} makes it.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Table {name} in {folder} cannot be read ({error}); make it anew.") from error
    try:
        counts = {Cell(row["line"], row["column"]): int(row["n"]) for row in report["rows"]}
        verdicts = [_verdict(told, counts) for told in report["orders"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{report_path} is not what {COMMAND} writes ({type(error).__name__}: {error}); make it anew."
        ) from error
    report["orders"] = [order_json(verdict) for verdict in verdicts]
    end = _END.search(page)
    parts = [page[: end.start() if end else None], *end_of_page(name, verdicts, written)]
    write_whole(report_path, json.dumps(report, ensure_ascii=False, indent=1) + "\n", instead=OTHER_FOLDER)
    write_whole(page_path, "\n\n".join(part.rstrip("\n") for part in parts) + "\n", instead=OTHER_FOLDER)
    return verdicts


def _verdict(told: Mapping[str, Any], counts: Mapping[Cell, int]) -> Verdict:
    order = Order(
        left=Cell(**told["left"]),
        relation=told["relation"],
        right=Cell(**told["right"]),
        source=told["source"],
        within=float(told["within"]),
    )
    found = told["difference"]
    if found is None:
        return decide(order, None)
    value, (low, high), paired = float(found["value"]), map(float, found["ci95"]), bool(found["paired"])
    if "n" in found:
        n, identical = int(found["n"]), bool(found["identical"])
    else:  # files of 0.1 lack `n`; an interval without width means that all questions differ by the same amount
        n = min(counts[order.left], counts[order.right])
        identical = paired and value == low == high == 0
    if n < 1:
        raise ValueError(f"{order} was asked {n} questions")
    return decide(
        order,
        Difference(value=value, ci95=with_width(value, (low, high), n), n=n, paired=paired, identical=identical),
    )
