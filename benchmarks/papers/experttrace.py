"""PCED Figure 2: an answer to a question of two hops, and the expert that proposed each of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ragkv.benchmarks.papers.definition import Cell, Column, Line, Table
from ragkv.benchmarks.papers.plot.trace import Trace

if TYPE_CHECKING:
    from ragkv.evaluation.result import Result

__all__ = ["PCED_2", "chosen", "told", "traced"]

_CELL = Cell("PCED", "two hops")

PCED_2 = Table(
    name="pced-2",
    title="PCED Figure 2: which expert proposes each token of an answer over two hops",
    follows="PCED Figure 2",
    lines=(Line(label=_CELL.line, engine="pced", retrieval="dense", rerank=True),),
    columns=(Column(label=_CELL.column, task='passages(kind="two hops")'),),
    limit=40,
    remarks=(
        "Chunks are ranked by dense vectors and the reranker. The question shown is the first that is answered right "
        "with tokens of both gold chunks' experts; if there is none, the first answered right; else the first.",
    ),
)


def chosen(results: Sequence[Result]) -> Result:
    """The answer to show. Raises ValueError if there is no answer."""
    return max(results, key=lambda result: (result.score == 1.0, result.score == 1.0 and _hops(result)))


def traced(result: Result) -> Trace:
    """The picture of an answer."""
    return Trace(
        title="PCED, which expert proposed each token of the answer (as in the paper's Figure 2)",
        question=result.example.question,
        experts=_titles(result.example.chunks),
        gold=frozenset(result.example.needed),
        tokens=[token for token in result.trace if token[0]],
    )


def told(results: Sequence[Result]) -> str:
    """The answer as text, one run of tokens per expert, and how often experts take turns in all answers."""
    result = chosen(results)
    titles = _titles(result.example.chunks)
    tokens = [token for token in result.trace if token[0]]
    lines = []
    for winner, run in groupby(tokens, key=lambda token: token[1]):
        text = "".join(piece for piece, _ in run).strip().replace("|", "\\|")
        name = "" if winner is None else titles[winner]
        gold = "gold" if winner in result.example.needed else ""
        lines.append(f"| {text} | {name} | {gold} |\n")
    verdict = "right" if result.score == 1.0 else "wrong"
    both = sum(_hops(each) for each in results)
    won = Counter(winner in each.example.needed for each in results for piece, winner in each.trace if piece)
    share = 100 * won[True] / max(1, won.total())
    return (
        f"Question: {result.example.question}\n\nAnswer ({verdict}; gold: {', '.join(result.example.answers)}): "
        f"{result.text}\n\n| tokens | proposed by the expert of | |\n| --- | --- | --- |\n{''.join(lines)}\n"
        f"In {both} of {len(results)} answers the experts of both gold chunks proposed tokens; gold experts proposed "
        f"{share:.0f} % of all {won.total()} tokens."
    )


def _hops(result: Result) -> bool:
    """Whether the expert of every needed chunk proposed a token."""
    won = {winner for piece, winner in result.trace if piece.strip()}
    return len(result.example.needed) > 1 and won.issuperset(result.example.needed)


def _titles(chunks: Sequence[str]) -> list[str]:
    """The first line of each chunk, numbered if it occurs twice."""
    names = [chunk.strip().split("\n")[0].lstrip("# ") for chunk in chunks]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} ({seen[name]})" if counts[name] > 1 else name)
    return found
