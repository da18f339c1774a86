"""Writes the table of families in docs/models.md, as `ragkv models` shows it (`make models`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ragkv.evaluation.family import ENGINES, EXACT
from ragkv.evaluation.survey import Survey

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
    yield f"| family | {' | '.join(f'`{name}`' for name in ENGINES)} | error | why refused |"
    yield f"| --- |{' --- |' * len(ENGINES)} --- | --- |"
    for verdict in survey.verdicts:
        error = "" if verdict.error is None else f"{verdict.error:.0e}"
        told = " | ".join(verdict.engine(name) for name in ENGINES)
        why = verdict.why.replace("|", r"\|").replace("<", r"\<")
        yield f"| {verdict.family} | {told} | {error} | {why} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), Survey.recorded()), encoding="utf-8")
