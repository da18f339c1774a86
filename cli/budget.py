"""`ragkv plan --index`: which budget of KV gives which share of hits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragkv.cli.console import count, draw, note, print_json, say, size
from ragkv.cli.grid import plain
from ragkv.cli.questionfile import read_questions
from ragkv.errors import UsageError

if TYPE_CHECKING:
    from ragkv.index.task import Asked

__all__ = ["tell_budgets"]


def tell_budgets(
    index: Path,
    questions: Path | None,
    zipf: float | None,
    *,
    top_k: int | None,
    seed: int,
    device: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Simulate budgets for the index and print them."""
    from ragkv.pipeline import RagKV
    from ragkv.planning.hitrate import plan_budgets

    if questions is not None and zipf is not None:
        raise UsageError("--questions is a log, and --zipf assumes one: give one of them.")
    with RagKV.open(index, device=device) as rag:
        asked: list[Asked] | None = None
        if questions is not None:
            lines, bad = read_questions(questions, rag.config.default_engine)
            for line in bad if not quiet else ():
                note(f"{line.where}: {line.error}")
            asked = [cast("Asked", {**line.options, "question": line.text}) for line in lines if not line.context]
        found = plan_budgets(rag, questions=asked, zipf=zipf, top_k=top_k, seed=seed)
    if as_json:
        print_json(found.to_json())
        return
    say(
        f"{index}: {count(found.chunks, 'chunk')}, {size(found.bytes)} of KV in one encoding; by {found.source}, "
        f"{count(found.reads, 'read')} of {count(found.distinct, 'chunk')}."
    )
    say()
    table = plain("kv_budget", "of all KV", "hits", "in the second half", "saved in 1,000 questions")
    for room in found.rooms:
        saved = "?" if room.saved_seconds is None else f"{room.saved_seconds:,.1f} s"
        table.add_row(size(room.bytes), f"{room.share:.0%}", f"{room.hits:.1%}", f"{room.later:.1%}", saved)
    draw(table)
