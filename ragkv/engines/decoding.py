"""Greedy decoding of a stream into text: stops at an end token, a length, or a closed generator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ragkv.engines.base import Stream

if TYPE_CHECKING:
    from ragkv.model import LanguageModel

__all__ = ["Token", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One generated token. `text` is what it adds to the answer; it may be empty while a character is incomplete.

    `winner` is the index of the chunk whose expert proposed it (PCED). `finish_reason` is set on the last one, which
    may be an end token without text.
    """

    token_id: int
    text: str
    winner: int | None = None
    finish_reason: Literal["stop", "length"] | None = None


def decode(model: LanguageModel, stream: Stream, *, max_new_tokens: int) -> Iterator[Token]:
    """Tokens by `stream.best()` until an end-of-sequence token or `max_new_tokens`.

    Text is cut only between characters: bytes of an unfinished one wait for the next token.
    """
    ids: list[int] = []
    shown = ""
    for step in range(1, max_new_tokens + 1):
        token_id = stream.best()
        winner = stream.winner(token_id)
        ended, last = token_id in model.eos_ids, step == max_new_tokens
        if not ended:
            ids.append(token_id)
        # Decoding all ids again keeps spaces right for every tokenizer; answers are short.
        text = model.tokens.decode(ids)
        if not (ended or last):
            text = text.rstrip("\ufffd")
        piece = text[len(shown) :] if text.startswith(shown) else ""
        shown += piece
        yield Token(
            token_id=token_id,
            text=piece,
            winner=winner,
            finish_reason="stop" if ended else "length" if last else None,
        )
        if ended or last:
            return
        stream.advance(token_id)
