"""Sequences that several requests have in common: prefilled once, by the first that asks, and kept in the pool."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import Any

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row
from ragkv.engines.program import Ask, Leave, Program, Read, Shared, Until
from ragkv.runtime.pool import Pool

__all__ = ["with_shared"]


def with_shared(program: Program, pool: Pool) -> Generator[Ask, Any, None]:
    """The program with its `Shared` asks answered by reads of rows, or by what the pool has."""
    answer: Any = None
    try:
        while True:
            ask = program.send(answer)
            answer = None  # logits are gone when the program is done with them
            answer = (yield from _prefilled(ask, pool)) if isinstance(ask, Shared) else (yield ask)
    except StopIteration:
        return
    finally:
        program.close()


def _prefilled(ask: Shared, pool: Pool) -> Generator[Ask, Any, tuple[Segment, ...]]:
    segments = ask.before
    at = max((segment.end for segment in segments), default=0)
    for key, ids in zip(ask.keys, ask.parts, strict=True):
        if not ids:
            continue
        while (kv := pool.shared(key)) is None and not pool.begin(key):
            yield Until(partial(pool.landed, key))
        if kv is None:
            try:
                row = Row.for_kv(segments, position=at)
                yield Read((row,), (ids,))
                kv = row.own.chunk_kv(encoded_at=at)
                pool.keep(key, kv, segments)
                yield Leave((row,))
            finally:
                pool.land(key)
        segments = (*segments, Segment(kv=kv, start=at))
        at += kv.tokens
    return segments
