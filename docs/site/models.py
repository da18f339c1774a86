"""Writes the table of families in docs/models.md, as `ragkv models` shows it (`make models`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragkv.evaluation.families import COLUMNS, ENGINES, EXACT, Survey

PAGE = Path(__file__).parent.parent / "models.md"
BEGIN, END = "<!-- families -->\n", "<!-- /families -->\n"


def page(text: str, survey: Survey) -> str:
    """The page's text with the table of a survey."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(_lines(survey)) + "\n" + END + rest.split(END)[1]


def _lines(survey: Survey) -> Iterator[str]:
    counts = ", ".join(f"{survey.exact(name)} for `{name}`" for name in ENGINES)
    yield f"Of {len(survey.verdicts)} decoder families of transformers {survey.transformers}, exact are {counts}."
    yield f"*Error* is the largest difference of scores over the largest score in float32, exact up to {EXACT:.0e}."
    yield ""
    for cells in (COLUMNS, ["---"] * len(COLUMNS), *(verdict.cells() for verdict in survey.verdicts)):
        escaped = (cell.replace("|", r"\|").replace("<", r"\<") for cell in cells)
        yield f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), Survey.recorded()), encoding="utf-8")
