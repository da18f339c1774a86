"""Training samples of the mini model: rows that pack many questions about one context of passages.

Rows depend only on a `random.Random`. Each step draws from its own generator, so a resumed run sees the same rows
without saving any state of the data.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ragkv.benchmarks.mini.layout import layout
from ragkv.benchmarks.mini.tokenizer import BOS, END, INSTRUCTION
from ragkv.finetune.mask import PAD_SEGMENT
from ragkv.finetune.passage import answerable, passages
from ragkv.worlds import World, WorldQuestion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Ask",
    "Batch",
    "Sample",
    "collate",
    "copy_sample",
    "draw_context",
    "hop_ask",
    "pack",
    "prefix_text",
    "qa_sample",
]

GOLD_WEIGHT = 4.0
"""Loss weight of the tokens of the gold value, or of the bridge to it."""
FIRST_WEIGHT = 3.0
"""Loss weight of an answer's first token, which selects the entity."""
RELATION_WEIGHT = 5.0
"""Loss weight of the words between names, which select the sentence; other answer tokens weigh 1."""
REPHRASED_SHARE = 0.15
"""Share of answers in words that the document does not use. They teach the model to find a value by its meaning, so
that a wrong guess at the wording does not lead to a wrong answer."""


def prefix_text() -> str:
    """The prompt before the first chunk, with special tokens written out."""
    return f"{BOS}<|system|>\n{INSTRUCTION}{END}\n<|user|>\nDocuments:\n\n"


def chunk_text(text: str) -> str:
    """A chunk as it is in the prompt."""
    return f"{text}\n\n"


def suffix_text(question: str) -> str:
    """The prompt after the last chunk, up to the first generated token."""
    return f"Question: {question}{END}\n<|assistant|>\n"


class Sample(NamedTuple):
    """One packed row: token ids, layout columns, and the loss weight of each token as a target."""

    tokens: list[int]
    segments: list[int]
    asks: list[bool]
    positions: list[int]
    weights: list[float]
    block: bool


class Batch(NamedTuple):
    """Rows padded to one length: tokens, segments, positions (rows, tokens) int64; weights float32; block (rows,)."""

    tokens: torch.Tensor
    segments: torch.Tensor
    asks: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    block: torch.Tensor


def retrieved(rng: random.Random, world: World, texts: Sequence[str], count: int) -> list[str]:
    """Choose `count` passages as a lexical retriever would for two of the world's questions, in random order.

    Such passages are hard distractors: they use the same wording about other entities, or name entities that share a
    word of the name.
    """
    words = [set(re.findall(r"\w+", text)) for text in texts]
    known = Counter(word for found in words for word in found)
    chosen: list[int] = []
    for question, limit in zip(rng.sample(world.questions, 2), ((count + 1) // 2, count), strict=True):
        asked = set(re.findall(r"\w+", question.question + " " + question.support[-1]))
        score = [sum(1 / known[word] for word in asked & found) for found in words]
        ranked = sorted(range(len(texts)), key=lambda index: -score[index])
        chosen += [index for index in ranked if index not in chosen][: limit - len(chosen)]
    rng.shuffle(chosen)
    return [texts[index] for index in chosen]


class Ask(NamedTuple):
    """A question of a packed row, with the loss weights of its answer's tokens.

    `spans` are (first character, end, weight) in the answer. Elsewhere, words that begin with a space and a small
    letter weigh `relation` and all others weigh 1. The first `given` characters are read and not learned, as PCED's
    experts read what others proposed. `first` and `last` are the least weights of the first token and of the end token.
    """

    question: str
    answer: str
    spans: tuple[tuple[int, int, float], ...] = ()
    relation: float = 1.0
    given: int = 0
    first: float = FIRST_WEIGHT
    last: float = 1.0

    def weights(self, offsets: Sequence[tuple[int, int]]) -> list[float]:
        """One weight per token of the answer and its end token. `offsets` are the tokens' (start, end) characters."""
        found = []
        for left, right in offsets:
            word = self.answer[left:right]
            spans = [weight for start, end, weight in self.spans if left < end and right > start]
            if left < self.given:
                found.append(0.0)
            elif spans:
                found.append(max(spans))
            else:
                found.append(self.relation if word[:1] == " " and word[1:2].islower() else 1.0)
        if not self.given:
            found[0] = max(found[0], self.first)
        found[-1] = max(found[-1], self.last)
        return found


def pack(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], asks: Sequence[Ask], *, block: bool = False
) -> Sample:
    """A row of the prefix, every text as a chunk, and every question with its answer."""
    rows = [prefix_text(), *map(chunk_text, texts)]
    rows += [suffix_text(ask.question) for ask in asks]
    rows += [ask.answer + END for ask in asks]
    encoded = tokenizer(rows, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[list[int]] = encoded["input_ids"]
    context = 1 + len(texts)
    asked = ids[context : context + len(asks)]
    answers = ids[context + len(asks) :]
    tokens = [token for part in ids[:context] for token in part]
    weights = [0.0] * len(tokens)
    spans = encoded["offset_mapping"][context + len(asks) :]
    for ask, question, answer, offsets in zip(asks, asked, answers, spans, strict=True):
        tokens += question + answer
        weights += [0.0] * len(question) + ask.weights(offsets)
    row = layout(
        len(ids[0]),
        [len(part) for part in ids[1:context]],
        [len(question) + len(answer) for question, answer in zip(asked, answers, strict=True)],
    )
    return Sample(tokens, row.segments, row.asks, row.positions, weights, block)


def _pick(rng: random.Random, questions: list[WorldQuestion], count: int) -> list[WorldQuestion]:
    """Draw `count` questions with different evidence, about two fifths of them of two hops if there are enough."""
    rng.shuffle(questions)
    asked: set[tuple[str, ...]] = set()
    fresh: dict[int, list[WorldQuestion]] = {1: [], 2: []}
    for question in questions:
        if question.support not in asked:
            asked.add(question.support)
            fresh[question.hops].append(question)
    two = fresh[2][: (count * 2 + 2) // 5]
    return two + fresh[1][: count - len(two)]


def draw_context(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, count: int, *, hard: bool
) -> tuple[World, list[str]]:
    """A training world and `count` of its passages: any, or if `hard` those that a retriever finds in a large world."""
    size = rng.randint(20, 60) if hard else rng.randint(max(8, count), 10 + count)
    world = World.generate(rng.getrandbits(40), split="train", size=size)
    texts = passages(rng, tokenizer, world)
    return world, retrieved(rng, world, texts, count) if hard and count else texts[:count]


def qa_sample(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    passage_range: tuple[int, int],
    questions: int = 16,
    block: bool = False,
    misses: float = 0.0,
    hard: bool = False,
) -> Sample:
    """Pack up to `questions` questions of one or two hops on one context of passages drawn from one train world.

    At least the share `misses` of them asks for something that no passage says, and so do those for which the context
    has no answer left. Their answers are true but cannot be known, so the model learns to be unsure where it read
    nothing. PCED needs that: it asks every expert every question and believes the surest. With `hard`, the passages are
    drawn from a large world as a retriever would (`retrieved`) instead of at random.
    """
    world, texts = draw_context(rng, tokenizer, rng.randint(*passage_range), hard=hard)
    known = answerable(world, texts)
    picked = _pick(rng, known, questions - math.ceil(questions * misses))
    asks = [hop_ask(question, rephrased=rng.random() < REPHRASED_SHARE) for question in picked]
    if misses > 0:
        supported = {question.support for question in known}
        unknown = [q for q in world.questions if q.support not in supported and q.hops == 1]
        for question in rng.sample(unknown, min(len(unknown), questions - len(picked))):
            answer = question.rephrased if rng.random() < REPHRASED_SHARE else question.answer
            asks.append(Ask(question.question, answer, first=1.0))
    return pack(tokenizer, texts, asks, block=block)


def hop_ask(question: WorldQuestion, *, rephrased: bool = False) -> Ask:
    """A question of one or two hops that the context answers; its weights are the constants above.

    The relation words of a rephrased answer weigh nothing, because no reader could guess them.
    """
    text = question.rephrased if rephrased else question.answer
    golds = [(text.rindex(question.gold), question.gold)]
    golds += [(text.index(title), title) for title in question.titles[1:]]  # the first hop's value
    spans = tuple((start, start + len(gold), GOLD_WEIGHT) for start, gold in golds)
    return Ask(question.question, text, spans, relation=RELATION_WEIGHT if text == question.answer else 0.0)


def copy_sample(rng: random.Random, *, vocab: tuple[int, int], records: int = 40) -> Sample:
    """Random records of 4 to 8 tokens, then the same records in another order, with loss on the repeats.

    Only copying lowers this loss, so induction heads form within some hundred steps. Without them, questions stay at
    chance for a long time.
    """
    rows = [[rng.randrange(*vocab) for _ in range(rng.randint(4, 8))] for _ in range(records)]
    tokens = [token for row in rows for token in row]
    weights = [0.0] * len(tokens)
    for row in rng.sample(rows, len(rows)):
        tokens += row
        weights += [0.0] + [1.0] * (len(row) - 1)
    count = len(tokens)
    return Sample(tokens, [0] * count, [False] * count, list(range(count)), weights, False)


def collate(samples: Sequence[Sample], *, pad: int, multiple: int = 64) -> Batch:
    """Pad the rows to one length, a multiple of `multiple` tokens."""
    import torch

    longest = max(len(sample.tokens) for sample in samples)
    width = -(-longest // multiple) * multiple

    def column(values: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=dtype)

    return Batch(
        tokens=column([sample.tokens for sample in samples], pad, torch.int64),
        segments=column([sample.segments for sample in samples], PAD_SEGMENT, torch.int64),
        asks=column([sample.asks for sample in samples], 0, torch.bool),
        positions=column([sample.positions for sample in samples], 0, torch.int64),
        weights=column([sample.weights for sample in samples], 0.0, torch.float32),
        block=torch.tensor([sample.block for sample in samples], dtype=torch.bool),
    )
