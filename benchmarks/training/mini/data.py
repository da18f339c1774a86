"""The mini model's tokenizer and training rows.

The tokenizer is byte-level BPE in which a space before a capital letter or a digit is a separate token. So "Halden" has
the same token ids after a space, after a newline and at the start of a chunk, and copying a name out of a document
means matching equal tokens. Any UTF-8 text round-trips; there is no unknown token.

A row packs many questions about one context of passages and depends only on a `random.Random`. Each step draws from a
generator seeded by its number, so a resumed run sees the same rows without saving any state of the data. A row about a
world has questions of one hop and two hops, comparisons, lists, and questions that its passages do not answer. A row of
prose asks for words left out of its sentences; a many-shot row has meaningless labels that depend on the kind of thing
in a sentence.

The model decides twice whether the context answers a question: at the answer's first token, and again where the value
would be. A sentence whose value is missing breaks off there (`broken_off`): "X is based in ... The documents do not
say."

Four more kinds train the model as one of PCED's experts, or as its amateur. Each of them reads one passage or none, and
the tokens that the others proposed. If there is evidence, the answer is learned as usual: the first of two hops, or the
second after a given first. If there is none, the answer's tokens weigh little: an expert that read nothing learns how a
sentence continues and to be unsure of the value. PCED's maximum then ignores it, and PCED's contrast stays bounded. If
such an expert broke off with certainty, as a reader of many passages should, it would outvote the expert that knows the
value.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ragkv.benchmarks.evaluation.worlds.passages import answerable, passages
from ragkv.benchmarks.evaluation.worlds.text import (
    Shots,
    clozes,
    docstrings,
    english_sentences,
    neutral_sentence,
    shot_text,
)
from ragkv.benchmarks.evaluation.worlds.world import (
    UNANSWERABLE,
    Fact,
    World,
    WorldQuestion,
    comparisons,
    listed,
    lists,
    unanswerable,
    unstated,
)
from ragkv.config import PromptConfig
from ragkv.finetune.data import PAD_SEGMENT

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, END, "<|system|>", "<|user|>", "<|assistant|>")
"""In the order of their ids; padding is 0."""

INSTRUCTION = PromptConfig().system

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

_SPLIT = (
    r"\n+"  # a paragraph break is one token
    r"| (?=[\p{Lu}\p{Lt}\p{N}])"  # the space before a name or number stands alone
    r"| ?[\p{Ll}\p{Lo}\p{Lm}][\p{L}\p{M}]*"
    r"|[\p{Lu}\p{Lt}][\p{L}\p{M}]*"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+"
)


def train_bpe(
    texts: Iterable[str],
    vocab: int,
    special: Sequence[Any],
    *,
    splits: Sequence[Any],
    normalizer: Any = None,
    **bpe: Any,
) -> Tokenizer:
    """Train byte-level BPE on `texts`, normalised and cut by `splits`; `bpe` are settings of the model."""
    core = Tokenizer(models.BPE(**bpe))
    if normalizer is not None:
        core.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    return core


def train_tokenizer(texts: Iterable[str], vocab_size: int = 3072) -> PreTrainedTokenizerFast:
    """Train a tokenizer on `texts`, with the special tokens and the chat template."""
    core = train_bpe(
        texts,
        vocab_size,
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        splits=[pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class SampleLayout(NamedTuple):
    """The columns of one row: segment (0 prefix, 1..n chunks, then questions), question flag, position."""

    segments: list[int]
    asks: list[bool]
    positions: list[int]


def layout(prefix: int, chunks: Sequence[int], questions: Sequence[int]) -> SampleLayout:
    """Lay out a row from the token counts of the prefix, of each chunk, and of each question with its answer."""
    segments = [0] * prefix
    for index, tokens in enumerate(chunks, start=1):
        segments += [index] * tokens
    context = len(segments)
    positions = list(range(context))
    for index, tokens in enumerate(questions, start=len(chunks) + 1):
        segments += [index] * tokens
        positions += range(context, context + tokens)
    asks = [False] * context + [True] * (len(segments) - context)
    return SampleLayout(segments, asks, positions)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """`mask` as 0 and the most negative finite number of `dtype`, converted once instead of in every layer."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


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


class TrainingSample(NamedTuple):
    """One packed row: token ids, layout columns, and the loss weight of each token as a target."""

    tokens: list[int]
    segments: list[int]
    asks: list[bool]
    positions: list[int]
    weights: list[float]
    block: bool


class TrainingBatch(NamedTuple):
    """Rows padded to one length: tokens, segments, positions (rows, tokens) int64; weights float32; block (rows,)."""

    tokens: Tensor
    segments: Tensor
    asks: Tensor
    positions: Tensor
    weights: Tensor
    block: Tensor


def retrieved(rng: random.Random, world: World, texts: Sequence[str], count: int) -> list[str]:
    """Choose `count` passages as a lexical retriever would for two of the world's questions, in random order.

    Such passages are hard distractors: they use the same wording about other entities, or name entities that share a
    word of the name.
    """
    words = [set(re.findall(r"\w+", text)) for text in texts]
    known = Counter(word for own in words for word in own)
    chosen: list[int] = []
    for question, limit in zip(rng.sample(world.questions, 2), ((count + 1) // 2, count), strict=True):
        asked = set(re.findall(r"\w+", question.question + " " + question.support[-1]))
        score = [sum(1 / known[word] for word in asked & own) for own in words]
        ranked = sorted(range(len(texts)), key=lambda index: -score[index])
        chosen += [index for index in ranked if index not in chosen][: limit - len(chosen)]
    rng.shuffle(chosen)
    return [texts[index] for index in chosen]


class QASample(NamedTuple):
    """A question of a packed row, with the loss weights of its answer's tokens.

    `spans` are (first character, end, weight) in the answer. Elsewhere, words that begin with a space and a small
    letter weigh `relation` and all others weigh 1. The first `read_chars` characters are read and not learned,
    as PCED's experts read what others proposed. `first` and `last` are the least weights of the first token and of the
    end token.
    """

    question: str
    answer: str
    spans: tuple[tuple[int, int, float], ...] = ()
    relation: float = 1.0
    read_chars: int = 0
    first: float = FIRST_WEIGHT
    last: float = 1.0

    def weights(self, offsets: Sequence[tuple[int, int]]) -> list[float]:
        """One weight per token of the answer and its end token. `offsets` are the tokens' (start, end) characters."""
        weights = []
        for left, right in offsets:
            word = self.answer[left:right]
            spans = [weight for start, end, weight in self.spans if left < end and right > start]
            if left < self.read_chars:
                weights.append(0.0)
            elif spans:
                weights.append(max(spans))
            else:
                weights.append(self.relation if word[:1] == " " and word[1:2].islower() else 1.0)
        if not self.read_chars:
            weights[0] = max(weights[0], self.first)
        weights[-1] = max(weights[-1], self.last)
        return weights


def pack(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], asks: Sequence[QASample], *, block: bool = False
) -> TrainingSample:
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
    return TrainingSample(tokens, row.segments, row.asks, row.positions, weights, block)


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
) -> TrainingSample:
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
            asks.append(QASample(question.question, answer, first=1.0))
    return pack(tokenizer, texts, asks, block=block)


def hop_ask(question: WorldQuestion, *, rephrased: bool = False) -> QASample:
    """A question of one or two hops that the context answers; its weights are the constants above.

    The relation words of a rephrased answer weigh nothing, because no reader could guess them.
    """
    text = question.rephrased if rephrased else question.answer
    golds = [(text.rindex(question.gold), question.gold)]
    golds += [(text.index(title), title) for title in question.titles[1:]]  # the first hop's value
    spans = tuple((start, start + len(gold), GOLD_WEIGHT) for start, gold in golds)
    return QASample(question.question, text, spans, relation=RELATION_WEIGHT if text == question.answer else 0.0)


def copy_sample(rng: random.Random, *, vocab: tuple[int, int], records: int = 40) -> TrainingSample:
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
    return TrainingSample(tokens, [0] * count, [False] * count, list(range(count)), weights, False)


def collate(samples: Sequence[TrainingSample], *, pad: int, multiple: int = 64) -> TrainingBatch:
    """Pad the rows to one length, a multiple of `multiple` tokens."""
    longest = max(len(sample.tokens) for sample in samples)
    width = -(-longest // multiple) * multiple

    def column(values: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in values], dtype=dtype)

    return TrainingBatch(
        tokens=column([sample.tokens for sample in samples], pad, torch.int64),
        segments=column([sample.segments for sample in samples], PAD_SEGMENT, torch.int64),
        asks=column([sample.asks for sample in samples], 0, torch.bool),
        positions=column([sample.positions for sample in samples], 0, torch.int64),
        weights=column([sample.weights for sample in samples], 0.0, torch.float32),
        block=torch.tensor([sample.block for sample in samples], dtype=torch.bool),
    )


_SHARES = {
    "one": 0.27, "two": 0.13, "comparison": 0.09, "list": 0.11, "near": 0.16, "unanswerable": 0.07,
    "begun": 0.03, "half": 0.04, "caught": 0.10,
}  # fmt: skip
"""The share of each kind in a row. If a context has too few questions of a kind, kinds of `_SPARE` fill the row.

"near" are unanswerable questions about entities that the passages name; they are rare and hard. In "caught", the
sentence up to the value is given and the answer must break off; so must the second hop of "half".
"""
_EXPERT_SHARES = {
    "one": 0.20, "two": 0.07, "comparison": 0.04, "list": 0.05, "near": 0.10, "unanswerable": 0.12,
    "begun": 0.14, "half": 0.10, "lost": 0.13, "unsure": 0.05,
}  # fmt: skip
"""The shares for at most two passages, which is what an expert reads."""
_SPARE = ("one", "two", "list", "near", "unanswerable")
_ALTERED_SHARE = 0.3
"""Share of prose questions whose missing words are replaced by others, in passage and answer, so that they can only be
read from the passage."""


def mixed_sample(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    passage_range: tuple[int, int],
    questions: int = 14,
    block: bool = False,
    hard: bool = False,
) -> TrainingSample:
    """Pack `questions` questions of all kinds on passages of one training world (`draw_context`)."""
    world, texts = draw_context(rng, tokenizer, rng.randint(*passage_range), hard=hard)
    pools = _pools(rng, world, texts)
    for pool in pools.values():
        rng.shuffle(pool)
    drawn: list[Callable[[], QASample]] = []
    shares = _SHARES if len(texts) > 2 else _EXPERT_SHARES
    for kind, share in shares.items():
        pool = pools[kind]
        wanted = int(share * questions + rng.random())
        drawn += pool[:wanted]
        del pool[:wanted]
    drawn = [*drawn, *(make for kind in _SPARE for make in pools[kind])][:questions]
    rng.shuffle(drawn)
    return pack(tokenizer, texts, [make() for make in drawn], block=block)


def _pools(rng: random.Random, world: World, texts: Sequence[str]) -> dict[str, list[Callable[[], QASample]]]:
    """For each kind, functions that make an `Ask` for every question that suits the context `texts`."""
    facts = world.stated(texts)
    stands = {fact.sentence for fact in facts}
    pools: dict[str, list[Callable[[], QASample]]] = {kind: [] for kind in (*_SHARES, *_EXPERT_SHARES)}
    alone = len(texts) <= 2
    unknown = set(unstated(world.facts, facts))
    stated = {fact.sentence: fact for fact in world.facts}
    for question in _one_wording(rng, world.questions):
        support = [sentence in stands for sentence in question.support]
        if all(support):
            kind = "one" if question.hops == 1 else "two"
            pools[kind].append(partial(hop_ask, question, rephrased=rng.random() < REPHRASED_SHARE))
        elif question.hops == 1:
            # the true answer, which the context lacks: its subject is given, and the rest weighs little
            subject = len(question.titles[0])
            pools["unsure"].append(partial(QASample, question.question, question.answer, read_chars=subject))
        elif support[0]:
            if alone or stated[question.support[1]] in unknown:
                pools["half"].append(partial(_half_ask, question, unsure=alone))
        else:
            pools["begun" if support[1] else "lost"].append(partial(_begun_ask, question, known=support[1]))
    pools["comparison"] = [partial(_comparison_ask, question) for question in comparisons(rng, facts, 3)]
    pools["list"] = [partial(_list_ask, question) for question in _one_wording(rng, lists(facts))]
    asked = (*world.facts, *world.hidden)
    if rng.random() < 0.2:  # entities of another world, which no document names
        asked = World.generate(rng.getrandbits(40), split="train", size=8).facts
    named = "\n".join(texts)
    for fact in unstated(asked, facts):
        near = fact.subject in named
        for question in _one_wording(rng, unanswerable([fact], ())):
            pools["near" if near else "unanswerable"].append(partial(QASample, question.question, UNANSWERABLE))
            if near or rng.random() < 0.05:
                pools["caught"].append(partial(_caught_ask, question, fact, rephrased=rng.random() < 0.5))
    return pools


def _one_wording(rng: random.Random, questions: Iterable[WorldQuestion]) -> list[WorldQuestion]:
    """One wording of each question; wordings of one question follow each other."""
    groups = groupby(questions, key=lambda question: (question.relation, question.support, question.titles))
    return [rng.choice(list(group)) for _, group in groups]


def _half_ask(question: WorldQuestion, *, unsure: bool) -> QASample:
    """A question of two hops of which the context holds the first, which is learned as usual; the second breaks off.

    With `unsure`, the second hop is the true one instead and weighs little.
    """
    ask, second = hop_ask(question), _second_hop(question)
    known = tuple(span for span in ask.spans if span[1] <= second)
    if unsure:
        return ask._replace(spans=(*known, (second, len(question.answer), 1.0)))
    text, at = broken_off(question.answer, question.gold)
    return ask._replace(answer=text, spans=(*known, *_breaking(text, at)))


def _caught_ask(question: WorldQuestion, fact: Fact, *, rephrased: bool) -> QASample:
    """A question that the context does not answer, with a given beginning of an answer that must break off."""
    text, at = broken_off(fact.rephrased if rephrased else fact.sentence, fact.value)
    return QASample(question.question, text, _breaking(text, at), read_chars=at)


def _breaking(text: str, at: int) -> tuple[tuple[int, int, float], ...]:
    """The weights of a refusal that begins at character `at`: the dots decide, so they weigh most."""
    dots = at + len(" ...")
    return (at, dots, GOLD_WEIGHT), (dots, len(text), 1.0)


def broken_off(answer: str, value: str) -> tuple[str, int]:
    """`answer` up to the last `value` (which the context lacks) with a refusal, and where the refusal begins."""
    begun = answer[: answer.rindex(value)].rstrip()
    return f"{begun} ... {UNANSWERABLE}", len(begun)


def _begun_ask(question: WorldQuestion, *, known: bool) -> QASample:
    """A question of two hops whose first is given. The second is in the context; if not (`known`), it weighs little."""
    ask, second = hop_ask(question), _second_hop(question)
    return ask._replace(read_chars=second, spans=ask.spans if known else ((second, len(question.answer), 1.0),))


def _second_hop(question: WorldQuestion) -> int:
    """The character at which the answer's second sentence begins."""
    return len(question.support[0]) + 1


def _comparison_ask(question: WorldQuestion) -> QASample:
    """The second entity and the closing sentence weigh as much as a gold value."""
    text, (first, second) = question.answer, question.support
    closing = len(first) + len(second) + 2
    begin = len(first) + 1
    spans = [(begin, begin + len(question.titles[1])), (closing, len(text))]
    return QASample(question.question, text, tuple((*span, GOLD_WEIGHT) for span in spans), relation=2.0)


def _list_ask(question: WorldQuestion) -> QASample:
    """Every name weighs as much as a gold value, and so does the end, because a list must be complete and no longer."""
    text = question.answer
    starts = [text.index(gold) for gold in question.golds]
    spans = tuple((at, at + len(gold), GOLD_WEIGHT) for at, gold in zip(starts, question.golds, strict=True))
    return QASample(question.question, text, spans, relation=2.0, first=GOLD_WEIGHT, last=GOLD_WEIGHT)


def prose_passages(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], count: int
) -> list[str]:
    """`count` passages of 30 to 96 tokens from a few of `texts`, in random order, with or without line breaks."""
    chosen: list[str] = []
    while len(chosen) < count:
        text = rng.choice(texts)
        if rng.random() < 0.5:
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        sentences = [sentence for line in text.splitlines(keepends=True) for sentence in _cut_line(line)]
        sizes = [len(ids) for ids in tokenizer(sentences, add_special_tokens=False)["input_ids"]]
        own, size, target, cut = "", 0, rng.randint(30, 96), []
        for sentence, tokens in zip(sentences, sizes, strict=True):
            if size and size + tokens > target:
                cut.append(own.strip())
                own, size, target = "", 0, rng.randint(30, 96)
            own, size = own + sentence, size + tokens
        cut.append(own.strip())
        start = rng.randrange(max(1, len(cut) - 3))
        chosen += [passage for passage in cut[start : start + 4] if passage]
    chosen = chosen[:count]
    rng.shuffle(chosen)
    return chosen


def _cut_line(line: str) -> list[str]:
    """Cut a line after sentences, and then every 16 words, so that no sentence is longer than a passage."""
    sentences = []
    for sentence in line.replace(". ", ".\0 ").split("\0"):
        words = sentence.split(" ")
        for at in range(0, len(words), 16):
            tail = " " if at + 16 < len(words) else ""
            sentences.append(" ".join(words[at : at + 16]) + tail)
    return sentences


def prose_sample(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    passage_range: tuple[int, int],
    block: bool = False,
) -> TrainingSample:
    """Pack ten questions for words left out of sentences of the passages; one in ten is about other texts."""
    count = max(1, rng.randint(*passage_range))
    texts = prose_passages(rng, tokenizer, docstrings(), count)
    found = [(index, s) for index, text in enumerate(texts) for s in english_sentences(text)]
    rng.shuffle(found)
    asks: list[QASample] = []
    for index, sentence in found[:10]:
        blanks = clozes(rng, sentence, 2)
        if blanks and rng.random() < _ALTERED_SHARE and "\n".join(texts).count(blanks[0].gold) == 1:
            word, blank = _other_word(rng), blanks[0]
            texts[index] = texts[index].replace(blank.gold, word)
            altered = sentence[: blank.start] + word + sentence[blank.start + len(blank.gold) :]
            blanks = [replace(blank, sentence=altered, gold=word)] if blank.gold not in texts[index] else []
        asks += [
            QASample(blank.question, blank.sentence, ((blank.start, blank.start + len(blank.gold), GOLD_WEIGHT),))
            for blank in blanks
        ]
    for _ in range(max(1, len(asks) // 10)):
        if others := english_sentences(rng.choice(docstrings())):
            other = rng.choice(others)
            if other not in " ".join(" ".join(texts).split()):
                asks += [QASample(cloze.question, UNANSWERABLE) for cloze in clozes(rng, other)]
    rng.shuffle(asks)
    return pack(tokenizer, texts, asks[:10], block=block)


def _other_word(rng: random.Random) -> str:
    """One or two words of another text."""
    words = rng.choice(docstrings()).split()
    at = rng.randrange(len(words))
    found = " ".join(word.strip(".,;:()'\"") for word in words[at : at + rng.choice((1, 2))]).strip()
    return found if any(char.isalpha() for char in found) else "other"


_PLACES = listed("on the table|in the garden|at home|under a tree|near the wall|in the street|by the sea|up there", "|")
_ONSETS, _ENDS = listed("b d f g h k l m n p r s t v z st gr"), listed("al en ip or ux ad im ost ek un arn id")


def shot_sample(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, *, chunks: int, questions: int = 18, block: bool = False
) -> TrainingSample:
    """Pack questions about the labels of things on chunks of a few shots each. Half of the things are in a shot.

    The answer restates a shot, as other answers restate facts: one about the same thing, else about another thing of
    its kind. When only the label was the answer, the same model had learned nothing after a hundred steps.
    """
    size, classes = rng.randint(2, 5), rng.randint(2, 4)
    labels = {f"{rng.choice(_ONSETS)}{rng.choice(_ENDS)}{rng.choice(_ENDS)}" for _ in range(20)}
    drawn = Shots(rng, count=chunks * size, classes=classes, labels=sorted(labels))
    sentences = [neutral_sentence(rng, thing, _PLACES) for _, thing in drawn.shown]
    asks = []
    for number in range(questions):
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        same = [sentence for (_, shown), sentence in zip(drawn.shown, sentences, strict=True) if shown == thing]
        alike = [sentence for (kind, _), sentence in zip(drawn.shown, sentences, strict=True) if kind == group]
        question = shot_text(neutral_sentence(rng, thing, _PLACES))
        if alike:
            asks.append(_ask(question, rng.choice(same or alike), drawn.labels[group]))
        else:
            asks.append(QASample(question, UNANSWERABLE))
    return pack(tokenizer, drawn.chunks(sentences, size), asks, block=block)


def _ask(question: str, sentence: str, label: str) -> QASample:
    """The thing and its place decide which shot is read; they weigh half as much as the label, which is the answer."""
    text = f"{sentence} Label: {label}"
    shot = len("The "), len(sentence) - 1, GOLD_WEIGHT / 2
    return QASample(question, text, (shot, (len(text) - len(label), len(text), GOLD_WEIGHT)))
