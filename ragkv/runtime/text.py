"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from ragkv.model.prompt import Tokens

__all__ = ["Detokenizer", "StopGate"]


class Detokenizer:
    """Decodes a window instead of all ids at each step; the pieces together equal the decoding of all ids.

    The window is the ids of the last piece, as left context, and those whose text is not out yet. The context keeps
    what depends on neighbours right: a SentencePiece decoder drops the space before the first token it is given. A
    piece waits while the window ends in U+FFFD, which may be the beginning of a character, and while it ends in byte
    tokens (`<0xE4>`): those decoders judge a whole run of them at once, so the run has to be over.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._window: list[int] = []
        self._context = 0  # ids at the window's start whose text is out
        self._shown = 0  # characters of that text
        self._text = ""  # of the whole window
        self._in_run = False

    def push(self, token_id: int) -> str:
        """What this token adds for certain; it may be empty."""
        self._window.append(token_id)
        text = self._tokens.decode(self._window)
        if token_id in self._tokens.byte_ids:
            self._in_run = True
        elif text != self._text:  # a control token shows nothing and does not end a run
            self._in_run = False
        self._text = text
        if self._in_run or len(text) <= self._shown or text.endswith("\ufffd"):
            return ""
        piece = text[self._shown :]
        del self._window[: self._context]
        self._context = len(self._window)
        self._text = self._tokens.decode(self._window)
        self._shown = len(self._text)
        return piece

    def flush(self) -> str:
        """What was waiting when no more tokens come; an unfinished character is U+FFFD, as in any decoding."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece


class StopGate:
    """Lets text through up to the first stop string; a possible beginning of one waits until it is decided.

    First is the one that is complete first (the longest of those), so the cut is the same however the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.closed = False

    def push(self, text: str) -> str:
        """The text that may be shown now; `closed` once a stop string was met."""
        if self.closed or not self._stops:
            return "" if self.closed else text
        held = self._held + text
        met = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if met:
            self.closed = True
            self._held = ""
            return held[: min(met)[1]]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """What waited and turns out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, `stop` itself excluded."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
