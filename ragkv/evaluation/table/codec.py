"""What codecs of the store cost in answers: engines that read stored KV, each with each codec."""

from __future__ import annotations

from ragkv.evaluation.table.definition import Column, Line, Order, Table, across

__all__ = ["CODECS"]

_ENGINES = ("block", "ape", "pced")
_CODECS = ("raw", "zstd", "int8", "int4")
_KINDS = ("one hop", "two hops")


def _column(kind: str) -> Column:
    return Column(label=kind, task=f'passages(kind="{kind}")')


def _same(kind: str) -> Column:
    return Column(label=f"{kind}, same as raw", task=f'passages(kind="{kind}")', measure="same")


def _orders(engine: str) -> list[Order]:
    exact = "zstd is lossless (docs/formats.md)"
    close = "8 bits keep the answers (docs/formats.md); no table of a paper"
    return [
        *across(_KINDS, f"{engine}, zstd", "~", f"{engine}, raw", exact),
        *across(_KINDS, f"{engine}, int8", "~", f"{engine}, raw", close, within=2),
    ]


CODECS = Table(
    name="codecs",
    title="Codecs of the store and engines that read it",
    follows="no table of a paper: what storing KV in fewer bytes costs",
    lines=tuple(
        Line(
            label=f"{engine}, {codec}",
            engine=engine,
            codec=codec,
            retrieval="dense",
            rerank=True,
            same_as="" if codec == "raw" else f"{engine}, raw",
        )
        for engine in _ENGINES
        for codec in _CODECS
    ),
    columns=(*map(_column, _KINDS), *map(_same, _KINDS)),
    orders=tuple(order for engine in _ENGINES for order in _orders(engine)),
    limit=60,
    remarks=("Chunks are ranked by dense vectors and the reranker; each is read through its codec and back.",),
)
