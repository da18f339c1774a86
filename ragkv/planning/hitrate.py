"""Which budget of KV gives which share of hits: what the index would do, simulated over questions that are known, or
assumed to follow Zipf's law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ragkv.errors import UsageError
from ragkv.pipeline import Asked, RagKV
from ragkv.store.worth import simulate

__all__ = ["Budgets", "Room", "plan_budgets"]

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
READS = 200_000
"""Chunks that are read in a simulation at most, ten for each chunk of the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A budget, as a share of all KV in one encoding and in bytes.

    `hits` is the share of chunks whose KV is there when a question reads them, from an empty start; `later` that of the
    second half, when most of what is wanted has been made once. `saved_seconds` are those of a thousand questions of
    the second half; None while no rate of encoding is known.
    """

    share: float
    bytes: int
    hits: float
    later: float
    saved_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The budgets, and what they are simulated over: `reads` of `distinct` chunks among `chunks`, by `source`."""

    source: str
    chunks: int
    bytes: int
    reads: int
    distinct: int
    top_k: int
    rooms: tuple[Room, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv plan --index --json` prints."""
        return asdict(self)


def plan_budgets(
    rag: RagKV,
    *,
    questions: Sequence[Asked] | None = None,
    zipf: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
) -> Budgets:
    """Simulate budgets over a log of `questions`, draws by Zipf's law with exponent `zipf`, or the uses on record.

    Raises UsageError when there is nothing to go by.
    """
    sizes = {c.chunk_id: (len(c.token_ids), rag.index.shape.nbytes(len(c.token_ids))) for c in rag.store.chunks()}
    most = rag.config.top_k if top_k is None else top_k
    draw = np.random.default_rng(seed)
    reads = min(10 * len(sizes), READS)
    names = sorted(sizes)
    if questions is not None:
        source = f"{len(questions)} questions"
        found = [rag.retrieve(each["question"], top_k=each.get("top_k") or most) for each in questions]
        asked = [scored.chunk.chunk_id for each in found for scored in each]
    elif zipf is not None:
        if not 0 <= zipf <= 10:
            raise UsageError(f"--zipf must lie between 0 and 10, not {zipf:g}.")
        source = f"Zipf {zipf:g}, seed {seed}"
        asked = _drawn(names, np.arange(1, len(names) + 1) ** -zipf, reads, draw, shuffle=True)
    else:
        source = "recorded uses"
        weights = _recorded(rag)
        asked = _drawn(list(weights), np.array(list(weights.values())), reads, draw) if weights else []
    if not asked:
        raise UsageError(
            "There are no questions to go by: give a log with --questions FILE, or assume a law with --zipf 1.0."
        )
    rate = rag.store.ledger().seconds_per_token
    total = sum(nbytes for _, nbytes in sizes.values())
    rooms = tuple(_room(share, total, asked, sizes, most, rate) for share in SHARES)
    return Budgets(
        source=source,
        chunks=len(sizes),
        bytes=total,
        reads=len(asked),
        distinct=len(set(asked)),
        top_k=most,
        rooms=rooms,
    )


def _room(
    share: float, total: int, asked: Sequence[str], sizes: Mapping[str, tuple[int, int]], top_k: int, rate: float
) -> Room:
    room, half = int(share * total), len(asked) // 2
    whole, first = simulate(asked, room, sizes), simulate(asked[:half], room, sizes)
    later = (whole.hits - first.hits) / max(len(asked) - half, 1)
    tokens = sum(sizes[name][0] for name in asked[half:]) / max(len(asked) - half, 1)
    saved = round(1000 * top_k * later * tokens * rate, 3) if rate else None
    return Room(share=share, bytes=room, hits=round(whole.rate, 4), later=round(later, 4), saved_seconds=saved)


def _drawn(
    names: Sequence[str], weights: np.ndarray[Any, Any], reads: int, draw: np.random.Generator, *, shuffle: bool = False
) -> list[str]:
    """So many draws of these names by their weights, which are given to them in a random order or as they come."""
    order = draw.permutation(len(names)) if shuffle else np.arange(len(names))
    return [names[order[n]] for n in draw.choice(len(names), reads, p=weights / weights.sum())] if len(names) else []


def _recorded(rag: RagKV) -> dict[str, float]:
    """How much each chunk was used and how lately, by its id; chunks that are gone are left out."""
    rows = list(rag.store.uses())
    chunks = rag.store.chunks_of({row.owner for _, row in rows})
    top = max((row.weight for _, row in rows), default=0.0)
    found: dict[str, float] = {}
    for _, row in sorted(rows, key=lambda each: each[0]):
        if row.owner in chunks:
            name = chunks[row.owner].chunk_id
            found[name] = found.get(name, 0.0) + 2.0 ** max(row.weight - top, -1000.0)
    return found
