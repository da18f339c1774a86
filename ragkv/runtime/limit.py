"""How much a runtime does at a time: what a user has set, the rest from the model's size and the memory at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel

__all__ = ["Limits", "limits_for"]

MOST_ROWS = 256
"""Rows at a time unless told: a decode step gains little from more."""
OWN_SHARE = 8
"""One part in so many of the memory is for own KV: questions, and what is generated."""
WORK_SHARE = 16
"""One part in so many is for the numbers of one step, which follow from its tokens."""
LEAST_TOKENS, MOST_TOKENS = 256, {"cuda": 8192}
"""Tokens in a step unless told; beside a device that is not named, 4096 at most: matrices are large enough then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """At most `batch_tokens` tokens in a step; `max_rows` rows, `own_tokens` tokens of own KV and `budget` bytes of
    chunk KV at a time. `strict`: a request that needs more rows is refused; else it runs alone.
    """

    batch_tokens: int = 4096
    max_rows: int = MOST_ROWS
    own_tokens: int = 1 << 20
    budget: int = 8 << 30
    strict: bool = False


def limits_for(
    model: LanguageModel, *, memory: int, budget: int, batch_tokens: int | None = None, max_rows: int | None = None
) -> Limits:
    """The limits for a model on a machine (or device) with `memory` bytes, of which `budget` are for chunk KV.

    `batch_tokens` and `max_rows` are the user's, which hold strictly.
    """
    hidden, inner = model.config.hidden_size, getattr(model.config, "intermediate_size", None)
    # residuals, queries and parts in fp32, the MLP's inner numbers: an estimate that errs to the safe side
    working = 4 * (12 * hidden + 4 * (inner if isinstance(inner, int) else 4 * hidden))
    most = MOST_TOKENS.get(model.device.type, 4096)
    tokens = min(most, max(LEAST_TOKENS, memory // WORK_SHARE // working))
    shape = model.kv_shape
    rows = MOST_ROWS if batch_tokens is None else batch_tokens  # each row has a token in every step
    if batch_tokens is None and shape.state_bytes:
        rows = max(min(rows, memory // OWN_SHARE // shape.state_bytes), 1)
    return Limits(
        batch_tokens=tokens if batch_tokens is None else batch_tokens,
        max_rows=rows if max_rows is None else max_rows,
        own_tokens=max(memory // OWN_SHARE // max(shape.token_bytes, 1), 1),
        budget=budget if model.joins else budget // 2,  # each row has a copy of the KV that it goes on from
        strict=batch_tokens is not None or max_rows is not None,
    )
