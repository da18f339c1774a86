"""Training data: examples from a user's JSONL file, and the rows of token ids made from them.

A line has one of three forms, all read as blocks | question | response (Block-Attention §2.2: independent parts are
blocks):

- `{"prompt", "blocks", "response"}`: a question, its retrieved passages, the answer. The prompt around them is that of
  `ragkv query`.
- `{"questions", "blocks"}`: several questions about the same passages, each `{"prompt", "response"}`. `finetune block`
  reads them in one row, in which none sees another, so that the passages are computed once.
- `{"messages"}`, optionally with `"documents"`: a chat, rendered as it is written. Without `documents`, the first
  message of the user is cut at its blank lines: the last paragraph is the question, those before it are blocks. Fenced
  code is never cut. As in `ragkv chat`, earlier turns are part of the question.

`ragkv.model.prompt` tokenises the parts, and `ragkv.engines.block` gives the blocks' positions. So a row has the same
tokens and positions that the engines `full` and `block` read (tests/finetune/test_data.py).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ragkv.config import PromptConfig
from ragkv.errors import UsageError
from ragkv.index.conversation import Conversation, Turn
from ragkv.util.files import refusal

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel
    from ragkv.model.prompt import Prompt, Tokens

Progress: TypeAlias = Callable[[Mapping[str, float | int | str]], None]
"""Receives the figures of each training step."""
PAD_SEGMENT = -1
"""The segment of padding in a batch of rows."""
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_AS_WRITTEN = PromptConfig(system="", context="", question="{question}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingExample:
    """A question, its blocks and its answer. `prompt` is the text around them; `others` are more questions about the
    same blocks, with their answers.
    """

    source: str
    prompt: PromptConfig
    blocks: tuple[str, ...]
    question: str
    response: str
    others: tuple[tuple[str, str], ...] = ()


def read_examples(path: Path, prompt: PromptConfig) -> list[TrainingExample]:
    """The examples in `path`, one for each line. Raises UsageError, which names the file and the first bad line."""
    examples: list[TrainingExample] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    examples.append(parse_example(line, f"{path}, line {number}", prompt))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({refusal(error)}); give a JSONL file in UTF-8.") from error
    if not examples:
        raise UsageError(f"{path} holds no example; docs/finetune.md shows what a line looks like.")
    return examples


def parse_example(line: str, source: str, prompt: PromptConfig) -> TrainingExample:
    """Parse one line of JSON. `source` names it in errors. Unknown keys are ignored."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{source}: not JSON ({error}).") from error
    if not isinstance(row, dict) or sum(form in row for form in ("messages", "questions", "prompt")) != 1:
        raise UsageError(f'{source}: a line is one JSON object with one of "messages", "questions" and "prompt".')
    if "messages" in row:
        return _chat(row, source, prompt)
    asked = row.get("questions", [row])
    if not isinstance(asked, list) or not asked or not all(isinstance(one, dict) for one in asked):
        raise UsageError(f'{source}: "questions" must be a list of objects with "prompt" and "response".')
    (question, response), *others = [(_text(one, "prompt", source), _text(one, "response", source)) for one in asked]
    blocks = _texts(row, "blocks", source)
    return TrainingExample(
        source=source, prompt=prompt, blocks=blocks, question=question, response=response, others=tuple(others)
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of the file's bytes, which records the data that a model was tuned on."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chat(row: Mapping[str, Any], source: str, words: PromptConfig) -> TrainingExample:
    messages = row["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UsageError(f'{source}: "messages" must be a list of objects with "role" and "content".')
    prompt, turns = replace(_AS_WRITTEN, bos=words.bos), list(messages)
    if turns and turns[0].get("role") == "system":
        prompt = replace(prompt, system=_text(turns.pop(0), "content", f"{source}, system message"))
    roles = [turn.get("role") for turn in turns]
    if not roles or len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
        raise UsageError(
            f'{source}: "messages" must be an optional system message, then user and assistant in turn, '
            "the assistant last."
        )
    texts = [_text(turn, "content", f"{source}, message {number}") for number, turn in enumerate(turns, start=1)]
    if "documents" in row:
        blocks = _texts(row, "documents", source)
    else:
        *before, texts[0] = _paragraphs(texts[0])
        blocks = tuple(before)
    no_limit = sum(map(len, texts)) * 2 + 100 * len(texts)  # so that no turn is left out
    past = Conversation(prompt, len, history_tokens=no_limit)
    past.turns += [Turn(question=q, answer=a) for q, a in zip(texts[:-2:2], texts[1:-2:2], strict=True)]
    return TrainingExample(
        source=source,
        prompt=prompt,
        blocks=blocks,
        question=past.prompt_text(texts[-2]),
        response=texts[-1],
    )


def _paragraphs(text: str) -> list[str]:
    """At least one paragraph: `text` cut at blank lines, but never inside ``` fences."""
    parts: list[str] = []
    is_open = False
    for block in _BLANK_LINES.split(text.strip()):
        if is_open:
            parts[-1] += f"\n\n{block}"
        else:
            parts.append(block)
        is_open ^= sum(line.lstrip().startswith("```") for line in block.splitlines()) % 2 == 1
    return parts


def _text(found: Mapping[str, Any], key: str, source: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f'{source}: "{key}" must be a text that is not empty.')
    return value


def _texts(found: Mapping[str, Any], key: str, source: str) -> tuple[str, ...]:
    value = found.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) and text.strip() for text in value):
        raise UsageError(f'{source}: "{key}" must be a list of texts, none of them empty.')
    return tuple(value)


IGNORED = -100
"""The label of a token that is not a target, as in transformers."""
_SORTED_BATCHES = 16
_MULTIPLE = 8  # rows are padded to a multiple of it, which matrix units prefer


class ExampleTokens(NamedTuple):
    """An example in token ids. A response includes the end token; `others` has a suffix and a response for each
    additional question. Arrays save memory: a file may have 1e8 tokens.
    """

    prefix: tuple[int, ...]
    chunks: tuple[array[int], ...]
    suffix: array[int]
    response: array[int]
    others: tuple[tuple[array[int], array[int]], ...] = ()


class PackedRow(NamedTuple):
    """The columns of a row: `segments` numbers the blocks, `asks` is True from the question on, `copies` for tokens
    that only their own block sees. `block`: its layout.
    """

    tokens: list[int]
    segments: list[int]
    asks: list[bool]
    copies: list[bool]
    positions: list[int]
    labels: list[int]
    block: bool


def tokenise(model: LanguageModel, examples: Iterable[TrainingExample]) -> list[ExampleTokens]:
    """The parts of every example, tokenised with the model's own tokenizer and template.

    Raises UsageError, which names the example, if one is longer than the model's positions.
    """
    from ragkv.model.prompt import closing, render

    tokens = model.tokens
    lead, after = closing(tokens)
    end = _end_ids(tokens, after, model)
    prompts: dict[PromptConfig, tuple[Prompt, tuple[int, ...]]] = {}
    tokenised = []
    for example in examples:
        if example.prompt not in prompts:
            prompt = render(example.prompt, tokens)
            prompts[example.prompt] = prompt, prompt.prefix_ids(tokens)
        prompt, prefix = prompts[example.prompt]
        chunks = [array("i", prompt.chunk_ids(tokens, text)) for text in example.blocks]
        (suffix, response), *others = [
            (
                array("i", prompt.suffix_ids(tokens, question)),
                array("i", (*_response_ids(tokens, lead, answer), *end)),
            )
            for question, answer in ((example.question, example.response), *example.others)
        ]
        parts = ExampleTokens(prefix, tuple(chunks), suffix, response, tuple(others))
        count = len(prefix) + sum(map(len, chunks)) + max(len(a) + len(b) for a, b in ((suffix, response), *others))
        if model.max_positions is not None and count > model.max_positions:
            raise UsageError(
                f"{example.source}: {count} tokens, but model {model.checkpoint.name!r} has {model.max_positions} "
                "positions; shorten the line or leave it out."
            )
        tokenised.append(parts)
    return tokenised


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


def lay_out(
    parts: ExampleTokens, *, block: bool, sink: str = "prefix", reencode: bool = True, over: str = "standalone"
) -> PackedRow:
    """The row of an example as the engine `block` or `full` reads it, followed by the answer (teacher forcing). Further
    questions and their answers follow, each placed right after the chunks.

    Over `prefixed` chunk KV, every chunk but the first, which follows the prefix, has a copy of the prefix right before
    it. Only the chunk sees it, so one pass computes what the engine reads: only differences of positions matter.
    """
    from ragkv.engines.block import block_starts, sink_tokens

    first = parts.prefix[: sink_tokens(sink, len(parts.prefix))] if block else parts.prefix
    blocks: list[Sequence[int]] = [first, *(chunk for chunk in parts.chunks if chunk)]
    lengths = [len(ids) for ids in blocks]
    context = sum(lengths)
    row = PackedRow([], [], [], [], [], [], block)

    def add(ids: Sequence[int], segment: int, start: int, *, ask: bool = False, copy: bool = False) -> None:
        row.tokens.extend(ids)
        row.segments.extend([segment] * len(ids))
        row.asks.extend([ask] * len(ids))
        row.copies.extend([copy] * len(ids))
        row.positions.extend(range(start, start + len(ids)))

    prefixed = block and over == "prefixed"
    starts = block_starts(lengths, reencode=reencode or not block)
    for index, (ids, start) in enumerate(zip(blocks, starts, strict=True)):
        if prefixed and index > 1:
            add(first, index, start - len(first), copy=True)
        add(ids, 0 if prefixed and index == 1 else index, start)
    row.labels.extend([IGNORED] * len(row.tokens))
    for index, (suffix, response) in enumerate(((parts.suffix, parts.response), *parts.others), start=len(blocks)):
        row.labels.extend([IGNORED] * len(suffix) + [*response])
        add([*suffix, *response], index, context, ask=True)
    return row


def collate(rows: Sequence[PackedRow]) -> dict[str, Any]:
    """Pad rows on the left, so that all answers end in the last column and only the last logits are needed.

    Returns `input_ids`, `position_ids`, `segments`, `asks`, `copies` (rows, tokens); `labels` (rows, kept); `block`
    (rows,); `logits_to_keep` = kept; and `causal`, which is True if no row needs a mask: none is padded, in blocks, or
    has several questions.
    """
    import torch

    longest = max(len(row.tokens) for row in rows)
    width = longest if len(rows) == 1 else -(-longest // _MULTIPLE) * _MULTIPLE
    to_keep = 1 + max(
        len(row.labels) - next(i for i, label in enumerate(row.labels) if label != IGNORED) for row in rows
    )

    def column(values: Iterable[Sequence[int]], fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor([[fill] * (width - len(row)) + list(row) for row in values], dtype=dtype)

    return {
        "input_ids": column([row.tokens for row in rows], 0),
        "position_ids": column([row.positions for row in rows], 0),
        "segments": column([row.segments for row in rows], PAD_SEGMENT),
        "asks": column([row.asks for row in rows], 0, torch.bool),
        "copies": column([row.copies for row in rows], 0, torch.bool),
        "labels": column([row.labels for row in rows], IGNORED)[:, -to_keep:].contiguous(),
        "block": torch.tensor([row.block for row in rows]),
        "logits_to_keep": to_keep,
        "causal": all(row.positions == list(range(width)) and not row.block for row in rows),
    }


class SampledRows:
    """A map-style dataset of a training's rows in order. Row k depends only on (seed, k).

    So a resumed run sees the same rows without saving any state of the data. Each epoch has its own order. A row has
    the full layout with probability `full_share`, otherwise the block layout. `layout` are `lay_out`'s settings.

    Rows of a `batch` are of similar length, since the shorter ones are padded: those of a few batches are sorted, then
    the batches are shuffled.
    """

    def __init__(
        self, parts: Sequence[ExampleTokens], count: int, *, seed: int, full_share: float, batch: int = 1, **layout: Any
    ) -> None:
        self._parts, self._count, self._seed, self._full_share = parts, count, seed, full_share
        self._batch, self._layout = batch, layout
        self._epoch, self._order = -1, list(range(len(parts)))
        self._window, self._rows = -1, list[PackedRow]()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> PackedRow:
        if self._batch == 1:
            return self._row(index)
        size = self._batch * _SORTED_BATCHES
        window, place = divmod(index, size)
        if window != self._window:
            drawn = [self._row(number) for number in range(window * size, min((window + 1) * size, self._count))]
            drawn.sort(key=lambda row: len(row.tokens))
            batches = [drawn[start : start + self._batch] for start in range(0, len(drawn), self._batch)]
            random.Random(f"{self._seed}:batches:{window}").shuffle(batches)
            self._window, self._rows = window, [row for batch in batches for row in batch]
        return self._rows[place]

    def _row(self, index: int) -> PackedRow:
        epoch, place = divmod(index, len(self._parts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._parts)))
            random.Random(f"{self._seed}:order:{epoch}").shuffle(self._order)
        block = random.Random(f"{self._seed}:layout:{index}").random() >= self._full_share
        return lay_out(self._parts[self._order[place]], block=block, **self._layout)
