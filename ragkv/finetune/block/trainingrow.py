"""Training rows of token ids: the parts of an example in the full or in the block layout.

`ragkv.model.prompt` tokenises the parts, and `ragkv.engines.block` gives the blocks' positions. So a row has the same
tokens and positions that the engines `full` and `block` read (tests/finetune/block/test_trainingrow.py).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ragkv.config import PromptConfig
from ragkv.errors import UsageError
from ragkv.finetune.block.trainingexample import TrainingExample
from ragkv.finetune.mask import PAD_SEGMENT

if TYPE_CHECKING:
    from ragkv.model.language import LanguageModel
    from ragkv.model.prompt import Prompt, Tokens

__all__ = ["IGNORED", "Drawn", "Parts", "Row", "collate", "lay_out", "tokenise"]

IGNORED = -100
"""The label of a token that is not a target, as in transformers."""
_MULTIPLE = 8  # rows are padded to a multiple of it, which matrix units prefer


class Parts(NamedTuple):
    """An example in token ids. `response` includes the end token. Arrays save memory: a file may have 1e8 tokens."""

    prefix: tuple[int, ...]
    chunks: tuple[array[int], ...]
    suffix: array[int]
    response: array[int]


class Row(NamedTuple):
    """The columns of a row: `segments` numbers the blocks, `asks` is True from the question on. `block`: its layout."""

    tokens: list[int]
    segments: list[int]
    asks: list[bool]
    positions: list[int]
    labels: list[int]
    block: bool


def tokenise(model: LanguageModel, examples: Iterable[TrainingExample]) -> list[Parts]:
    """The parts of every example, tokenised with the model's own tokenizer and template.

    Raises UsageError, which names the example, if one is longer than the model's positions.
    """
    from ragkv.model.prompt import closing, render

    tokens = model.tokens
    lead, after = closing(tokens)
    end = _end_ids(tokens, after, model)
    prompts: dict[PromptConfig, tuple[Prompt, tuple[int, ...]]] = {}
    found = []
    for example in examples:
        if example.prompt not in prompts:
            prompt = render(example.prompt, tokens)
            prompts[example.prompt] = prompt, prompt.prefix_ids(tokens)
        prompt, prefix = prompts[example.prompt]
        chunks = [array("i", prompt.chunk_ids(tokens, text)) for text in example.blocks]
        suffix = array("i", prompt.suffix_ids(tokens, example.question))
        response = array("i", (*_response_ids(tokens, lead, example.response), *end))
        parts = Parts(prefix, tuple(chunks), suffix, response)
        count = len(prefix) + sum(map(len, parts.chunks)) + len(parts.suffix) + len(parts.response)
        if model.max_positions is not None and count > model.max_positions:
            raise UsageError(
                f"{example.source}: {count} tokens, but model {model.checkpoint.name!r} has {model.max_positions} "
                "positions; shorten the line or leave it out."
            )
        found.append(parts)
    return found


def _response_ids(tokens: Tokens, lead: str, response: str) -> tuple[int, ...]:
    """The ids of the template's `lead` and the answer, as one text unless the lead has control tokens."""
    if tokens.encode(lead) != (ids := tokens.encode(lead, control=True)):
        return ids + tokens.encode(response)
    # a text that begins with a space needs no second one
    return tokens.encode(response if lead.isspace() and response[:1].isspace() else lead + response)


def _end_ids(tokens: Tokens, after: str, model: LanguageModel) -> tuple[int, ...]:
    """The ids that end an answer: the template's own text up to the first end token."""
    ids = tokens.encode(after, control=True)
    for index, token in enumerate(ids):
        if token in model.eos_ids:
            return ids[: index + 1]
    if tokens.eos_id is None:
        raise UsageError(
            f"The tokenizer of model {model.checkpoint.name!r} has no end token, so no answer could end; "
            "set eos_token in its tokenizer_config.json."
        )
    return (tokens.eos_id,)


def lay_out(parts: Parts, *, block: bool, sink: str = "prefix", reencode: bool = True) -> Row:
    """The row of an example as the engine `block` or `full` reads it, followed by the answer (teacher forcing)."""
    from ragkv.engines.block import block_starts, sink_tokens

    first = parts.prefix[: sink_tokens(sink, len(parts.prefix))] if block else parts.prefix
    blocks: list[Sequence[int]] = [first, *(chunk for chunk in parts.chunks if chunk)]
    lengths = [len(ids) for ids in blocks]
    own = [*parts.suffix, *parts.response]
    segments: list[int] = []
    positions: list[int] = []
    for index, (start, length) in enumerate(
        zip(block_starts(lengths, reencode=reencode or not block), lengths, strict=True)
    ):
        segments += [index] * length
        positions += range(start, start + length)
    context = len(segments)
    return Row(
        tokens=[token for ids in blocks for token in ids] + own,
        segments=segments + [len(blocks)] * len(own),
        asks=[False] * context + [True] * len(own),
        positions=[*positions, *range(context, context + len(own))],
        labels=[IGNORED] * (context + len(parts.suffix)) + [*parts.response],
        block=block,
    )


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Pad rows on the left, so that all answers end in the last column and only the last logits are needed.

    Returns `input_ids`, `position_ids`, `segments`, `asks` (rows, tokens); `labels` (rows, kept); `block` (rows,);
    `logits_to_keep` = kept; and `causal`, which is True if no row is padded or in blocks, so that none needs a mask.
    """
    import torch

    longest = max(len(row.tokens) for row in rows)
    width = longest if len(rows) == 1 else -(-longest // _MULTIPLE) * _MULTIPLE
    kept = 1 + max(sum(label != IGNORED for label in row.labels) for row in rows)

    def column(values: Iterable[Sequence[int]], fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([[fill] * (width - len(row)) + list(row) for row in values], dtype=dtype)

    return {
        "input_ids": column([row.tokens for row in rows], 0),
        "position_ids": column([row.positions for row in rows], 0),
        "segments": column([row.segments for row in rows], PAD_SEGMENT),
        "asks": column([row.asks for row in rows], 0, torch.bool),
        "labels": column([row.labels for row in rows], IGNORED)[:, -kept:].contiguous(),
        "block": torch.tensor([row.block for row in rows]),
        "logits_to_keep": kept,
        "causal": all(len(row.tokens) == width and not row.block for row in rows),
    }


class Drawn:
    """A map-style dataset of a training's rows in order. Row k depends only on (seed, k).

    So a resumed run sees the same rows without saving any state of the data. Each epoch has its own order. A row has
    the full layout with probability `full_share`, otherwise the block layout.
    """

    def __init__(
        self, parts: Sequence[Parts], count: int, *, seed: int, full_share: float, sink: str, reencode: bool
    ) -> None:
        self._parts, self._count, self._seed, self._full_share = parts, count, seed, full_share
        self._sink, self._reencode = sink, reencode
        self._epoch, self._order = -1, list(range(len(parts)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        epoch, place = divmod(index, len(self._parts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._parts)))
            random.Random(f"{self._seed}:order:{epoch}").shuffle(self._order)
        block = random.Random(f"{self._seed}:layout:{index}").random() >= self._full_share
        return lay_out(self._parts[self._order[place]], block=block, sink=self._sink, reencode=self._reencode)
