"""Decode steps as one CUDA graph: a step of an 8B model launches 1,500 kernels, which takes longer than they run.

A step of the same sequences as the last ones, of one token each, differs from those in the tokens, the positions and
the lengths alone, and these are numbers on the device (`ragkv.attention.batch.Step`, `fixed`). So the third such step
in a row is captured, and those that follow are replays, until a sequence joins or leaves or its memory is full.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragkv.attention import varlen
from ragkv.attention.sequence import TokenSequence

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

logger = logging.getLogger(__name__)

ALIKE, MOST_ALIKE = 3, 48
"""So many steps of the same sequences in a row, and the last of them is captured; up to so many, while captured steps
have too few replays to be worth their capture.
"""
WORTH = 6
"""Replays that are worth a capture, which takes as long as two steps."""


def capture(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What runs the kernels of `work` again and returns the same tensor, filled anew; `work` itself runs none."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may copy KV meanwhile
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class DecodeGraph:
    """Runs a model's steps, and captures those that repeat. Of one thread at a time."""

    def __init__(self) -> None:
        self._seen: list[object] = []
        """What the last steps ran on: their sequences, what these read, and the memory of their own KV."""
        self._at: list[tuple[int, int]] = []
        """The length and the position of each after the last of them: what the graph has counted up to."""
        self._alike, self._wanted, self._replays = 0, ALIKE, 0
        self._captured: tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]] | None = None
        """Where the tokens' ids are written, what computes their logits, and what was captured, which holds all memory
        that the graph's kernels read.
        """
        self._off = False

    def forget(self) -> None:
        """Let go of the sequences: one of them has ended. For any thread."""
        if self._captured is not None:
            self._wanted = ALIKE if self._replays >= WORTH else min(2 * self._wanted, MOST_ALIKE)
        self._seen, self._alike, self._replays, self._captured = [], 0, 0, None

    def step(self, model: LanguageModel, rows: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        """`model.step(rows, ids)`."""
        able = not self._off and model.joins and model.device.type in varlen.DEVICES
        seen = _seen(rows, ids) if able else None
        if seen is None:
            self.forget()
            return model.step(rows, ids)
        same = len(seen) == len(self._seen) and all(map(operator.is_, seen, self._seen))
        if not same or [(row.cache.length, row.position) for row in rows] != self._at:
            self.forget()
            self._seen = seen
        self._alike += 1
        logits = self._next(model, rows, ids)
        self._at = [(row.cache.length, row.position) for row in rows]
        return logits

    def _next(self, model: LanguageModel, rows: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> Tensor:
        captured = self._captured
        if captured is not None:
            tokens, replay, _ = captured
            tokens.copy_(torch.tensor([i for each in ids for i in each]), non_blocking=True)
            logits = replay().clone()
            self._replays += 1
            for row in rows:
                row.cache.commit(1)
                row.position += 1
            return logits
        if self._alike < self._wanted:
            return model.step(rows, ids)
        logits, tokens, again = model.repeatable(rows, ids)
        self._off = again is None
        if again is not None:
            try:
                self._captured = tokens, capture(again), again
            except Exception as error:  # a model that asks the device something, or leaves torch
                self._off = True
                logger.info("decode steps of this model run kernel by kernel: they cannot be captured: %s", error)
        return logits


def _seen(rows: Sequence[TokenSequence], ids: Sequence[Sequence[int]]) -> list[object] | None:
    """What a step of these runs on; None unless they are ordinary sequences that take a token and have room for it."""
    found: list[object] = []
    for row, each in zip(rows, ids, strict=True):
        if type(row) is not TokenSequence or row.silent or len(each) != 1:
            return None
        place = row.cache.lies_in()
        if place is None or not 0 < row.cache.length < place[0].capacity:
            return None
        found += (row, row.groups, next(iter(place[0].keys.values()), None))
    return found
