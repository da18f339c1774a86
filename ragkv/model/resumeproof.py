"""The proof on load of a model that is resumed: going on from a stored cache is what one forward over all tokens gives.

The reference is transformers' own forward over whole sequences without a cache. What is compared went through the form
in which the store keeps it, and between a sequence's pieces others were read, so that whatever a model remembers
beside its cache shows. Which ways of going on are exact differs between families (`Ways`): some take several tokens
at a time, some one by one alone, some mind the padding before a shorter row. The exact ones are found by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.attention.kv import Segment
from ragkv.attention.row import Row
from ragkv.errors import UnsupportedModelError
from ragkv.model.proof import tolerance
from ragkv.model.refusal import chooses_by_index
from ragkv.model.resumed import ResumedModel, Ways

__all__ = ["check_resumed"]

_PREFIX, _CHUNKS, _QUESTION = 5, (9, 16, 9), 6
_WINDOW = 8
_BARELY = 1.5
"""In the half types, how many times further off than one token at a time a way may be."""
_ALL = Ways()
_ALONE = Ways(several=False, ragged=False, ragged_several=False, together=False)


def check_resumed(model: ResumedModel) -> None:
    """Find the ways in which `model` goes on exactly, and set them; UnsupportedModelError where there is none."""
    sizes = {window: min(window, _WINDOW + 2 * rank) for rank, window in enumerate(model.windows)}
    proof = _Proof(model.with_windows(sizes) if sizes else model)
    limit = tolerance(model.dtype)
    if limit > tolerance(torch.float32):  # rounding hides much there: what counts is how far off it need not be
        limit = min(limit, max(_BARELY * proof.off(_ALONE, rows=2), tolerance(torch.float32)))
    model.ways = _ALL
    if chooses_by_index(model.config):  # blocks of keys are counted with the padding, thousands of tokens on
        model.ways = replace(_ALL, ragged=False, ragged_several=False)
    if proof.off(model.ways) <= limit:
        return
    padding = model.ways.ragged
    several = replace(_ALONE, several=True)
    most = several if proof.off(several) <= limit else _ALONE
    ragged = replace(most, together=True, ragged=padding)
    for ways in (ragged, replace(most, together=True), most):
        off = proof.off(ways)
        if off <= limit:
            model.ways = ways
            return
    raise UnsupportedModelError(
        f"a token that is read from its cache differs from the same token read with all before it by {off:.1e} "
        f"(at most {limit:.0e} is accepted)"
    )


class _Proof:
    """The sequences [prefix, question], [prefix, chunk, question] with their logits from whole forwards."""

    def __init__(self, model: ResumedModel) -> None:
        self._model = model
        generator = torch.Generator().manual_seed(0)
        high = min(model.config.vocab_size, 1000)
        sizes = (_PREFIX, *_CHUNKS, _QUESTION)
        self._prefix, *self._chunks, self._question = (
            torch.randint(3, high, (n,), generator=generator).tolist() for n in sizes
        )
        self._expected = [self._whole([*self._prefix, *part, *self._question]) for part in ([], *self._chunks)]
        alone = self._whole(self._prefix)
        if any(not _distance(logits[:_PREFIX], alone) <= tolerance(model.dtype) for logits in self._expected):
            raise UnsupportedModelError("a token's logits depend on the tokens after it")

    def off(self, ways: Ways, *, rows: int | None = None) -> float:
        """The largest distance of what is read in these ways from the whole forwards, in the first `rows` of them.

        Infinite if it cannot be read so.
        """
        model = self._model.with_ways(ways)
        expected = self._expected[:rows]
        try:
            [prefix] = model.encode([self._prefix])
            before = Segment(kv=prefix, start=0)
            chunks = model.encode(self._chunks[: len(expected) - 1], prefix=prefix)
            seen = [(before,), *((before, Segment(kv=chunk, start=_PREFIX)) for chunk in chunks)]
            found = self._ask(model, [Row.over(segments, position=segments[-1].end) for segments in seen])
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
            if ways != _ALONE:
                return torch.inf
            raise UnsupportedModelError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
        return max(_distance(each, whole[-len(each) :]) for each, whole in zip(found, expected, strict=True))

    def _ask(self, model: ResumedModel, rows: Sequence[Row]) -> list[Tensor]:
        """Logits of each row's question: half of it at once, the rest in single tokens, the rows in another order."""
        half = len(self._question) // 2
        found = [[each] for each in self._read(model, rows, self._question[:half])]
        for at in range(half, len(self._question)):
            asked = rows if at % 2 else rows[::-1]
            logits = self._read(model, asked, self._question[at : at + 1])
            for row, each in zip(asked, logits, strict=True):
                found[rows.index(row)].append(each)
        return [torch.cat(each) for each in found]

    def _read(self, model: ResumedModel, rows: Sequence[Row], ids: list[int]) -> list[Tensor]:
        return list(torch.split(model.step(rows, [ids] * len(rows), every=True), len(ids)))

    @torch.inference_mode()
    def _whole(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._model.module(input_ids=tokens, use_cache=False).logits
        return logits[0].float()


def _distance(found: Tensor, expected: Tensor) -> float:
    off = float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20))
    return off if off == off else torch.inf
