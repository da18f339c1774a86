"""How many answers each codec of the store costs, for each engine that reads stored KV."""

from __future__ import annotations

from ragkv.benchmarks.papers.calibration import with_searched_pair
from ragkv.benchmarks.papers.definition import Ask, Column, Line, Order, Table, across

__all__ = ["CODECS"]

_SEARCHED = "ape, T and S searched"
_ENGINES = {"block": "block", "ape, T = S = 1": "ape(temperature=1, scale=1)", _SEARCHED: "ape", "pced": "pced"}
"""Engines, by the beginning of their lines' labels."""
_CODECS = ("raw", "zstd", "int8", "int4")
_KINDS = ("one hop", "two hops")


def _column(kind: str) -> Column:
    return Column(label=kind, task=f'passages(kind="{kind}")')


def _same(kind: str) -> Column:
    return Column(label=f"{kind}, same as raw", task=f'passages(kind="{kind}")', measure="same")


def _orders(name: str) -> list[Order]:
    exact = "zstd is lossless (docs/formats.md)"
    close = "8 bits keep the answers (docs/formats.md); no table of a paper"
    return [
        *across(_KINDS, f"{name}, zstd", "~", f"{name}, raw", exact),
        *across(_KINDS, f"{name}, int8", "~", f"{name}, raw", close, within=2),
    ]


def _searched(table: Table, ask: Ask) -> Table:
    return with_searched_pair(table, ask, [f"{_SEARCHED}, {codec}" for codec in _CODECS], chunks=8)


CODECS = Table(
    name="codecs",
    title="Codecs of the store and engines that read it",
    follows="no table of a paper: what storing KV in fewer bytes costs",
    lines=tuple(
        Line(
            label=f"{name}, {codec}",
            engine=engine,
            codec=codec,
            retrieval="dense",
            rerank=True,
            same_as="" if codec == "raw" else f"{name}, raw",
        )
        for name, engine in _ENGINES.items()
        for codec in _CODECS
    ),
    columns=(*map(_column, _KINDS), *map(_same, _KINDS)),
    orders=tuple(order for name in _ENGINES for order in _orders(name)),
    prepare=_searched,
    limit=60,
    remarks=("Chunks are ranked by dense vectors and the reranker; each is read through its codec and back.",),
)
