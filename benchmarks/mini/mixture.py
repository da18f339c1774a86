"""Training rows that mix every kind of question.

A row about a world has questions of one hop and two hops, comparisons, lists, and questions that its passages do not
answer. A row of prose asks for words left out of its sentences.

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

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from ragkv.benchmarks.mini.sample import (
    GOLD_WEIGHT,
    REPHRASED_SHARE,
    Ask,
    Sample,
    draw_context,
    hop_ask,
    pack,
)
from ragkv.worlds import UNANSWERABLE, Fact, World, WorldQuestion, comparisons, lists, unanswerable, untold
from ragkv.worlds.cloze import clozes, docstrings, english_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["broken_off", "mixed_sample", "prose_passages", "prose_sample"]

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
) -> Sample:
    """Pack `questions` questions of all kinds on passages of one training world (`sample.draw_context`)."""
    world, texts = draw_context(rng, tokenizer, rng.randint(*passage_range), hard=hard)
    pools = _pools(rng, world, texts)
    for pool in pools.values():
        rng.shuffle(pool)
    drawn: list[Callable[[], Ask]] = []
    shares = _SHARES if len(texts) > 2 else _EXPERT_SHARES
    for kind, share in shares.items():
        pool = pools[kind]
        wanted = int(share * questions + rng.random())
        drawn += pool[:wanted]
        del pool[:wanted]
    drawn = [*drawn, *(make for kind in _SPARE for make in pools[kind])][:questions]
    rng.shuffle(drawn)
    return pack(tokenizer, texts, [make() for make in drawn], block=block)


def _pools(rng: random.Random, world: World, texts: Sequence[str]) -> dict[str, list[Callable[[], Ask]]]:
    """For each kind, functions that make an `Ask` for every question that suits the context `texts`."""
    facts = world.stated(texts)
    stands = {fact.sentence for fact in facts}
    pools: dict[str, list[Callable[[], Ask]]] = {kind: [] for kind in (*_SHARES, *_EXPERT_SHARES)}
    alone = len(texts) <= 2
    unknown = set(untold(world.facts, facts))
    said = {fact.sentence: fact for fact in world.facts}
    for question in _one_wording(rng, world.questions):
        support = [sentence in stands for sentence in question.support]
        if all(support):
            kind = "one" if question.hops == 1 else "two"
            pools[kind].append(partial(hop_ask, question, rephrased=rng.random() < REPHRASED_SHARE))
        elif question.hops == 1:
            pools["unsure"].append(partial(_unsure_ask, question))
        elif support[0]:
            if alone or said[question.support[1]] in unknown:
                pools["half"].append(partial(_half_ask, question, unsure=alone))
        else:
            pools["begun" if support[1] else "lost"].append(partial(_begun_ask, question, known=support[1]))
    pools["comparison"] = [partial(_comparison_ask, question) for question in comparisons(rng, facts, 3)]
    pools["list"] = [partial(_list_ask, question) for question in _one_wording(rng, lists(facts))]
    asked = (*world.facts, *world.hidden)
    if rng.random() < 0.2:  # entities of another world, which no document names
        asked = World.generate(rng.getrandbits(40), split="train", size=8).facts
    named = "\n".join(texts)
    for fact in untold(asked, facts):
        near = fact.subject in named
        for question in _one_wording(rng, unanswerable([fact], ())):
            pools["near" if near else "unanswerable"].append(partial(Ask, question.question, UNANSWERABLE))
            if near or rng.random() < 0.05:
                pools["caught"].append(partial(_caught_ask, question, fact, rephrased=rng.random() < 0.5))
    return pools


def _one_wording(rng: random.Random, questions: Iterable[WorldQuestion]) -> list[WorldQuestion]:
    """One wording of each question; wordings of one question follow each other."""
    groups = groupby(questions, key=lambda question: (question.relation, question.support, question.titles))
    return [rng.choice(list(group)) for _, group in groups]


def _unsure_ask(question: WorldQuestion) -> Ask:
    """The true answer, which the context lacks. Its subject is given, and the rest weighs little."""
    return Ask(question.question, question.answer, given=len(question.titles[0]))


def _half_ask(question: WorldQuestion, *, unsure: bool) -> Ask:
    """A question of two hops of which the context holds the first, which is learned as usual; the second breaks off.

    With `unsure`, the second hop is the true one instead and weighs little.
    """
    ask, second = hop_ask(question), _second_hop(question)
    known = tuple(span for span in ask.spans if span[1] <= second)
    if unsure:
        return ask._replace(spans=(*known, (second, len(question.answer), 1.0)))
    text, at = broken_off(question.answer, question.gold)
    return ask._replace(answer=text, spans=(*known, *_breaking(text, at)))


def _caught_ask(question: WorldQuestion, fact: Fact, *, rephrased: bool) -> Ask:
    """A question that the context does not answer, with a given beginning of an answer that must break off."""
    text, at = broken_off(fact.rephrased if rephrased else fact.sentence, fact.value)
    return Ask(question.question, text, _breaking(text, at), given=at)


def _breaking(text: str, at: int) -> tuple[tuple[int, int, float], ...]:
    """The weights of a refusal that begins at character `at`: the dots decide, so they weigh most."""
    dots = at + len(" ...")
    return (at, dots, GOLD_WEIGHT), (dots, len(text), 1.0)


def broken_off(answer: str, value: str) -> tuple[str, int]:
    """`answer` up to the last `value` (which the context lacks) with a refusal, and where the refusal begins."""
    begun = answer[: answer.rindex(value)].rstrip()
    return f"{begun} ... {UNANSWERABLE}", len(begun)


def _begun_ask(question: WorldQuestion, *, known: bool) -> Ask:
    """A question of two hops whose first is given. The second is in the context; if not (`known`), it weighs little."""
    ask, second = hop_ask(question), _second_hop(question)
    return ask._replace(given=second, spans=ask.spans if known else ((second, len(question.answer), 1.0),))


def _second_hop(question: WorldQuestion) -> int:
    """The character at which the answer's second sentence begins."""
    return len(question.support[0]) + 1


def _comparison_ask(question: WorldQuestion) -> Ask:
    """The second entity and the closing sentence weigh as much as a gold value."""
    text, (first, second) = question.answer, question.support
    closing = len(first) + len(second) + 2
    begin = len(first) + 1
    spans = [(begin, begin + len(question.titles[1])), (closing, len(text))]
    return Ask(question.question, text, tuple((*span, GOLD_WEIGHT) for span in spans), relation=2.0)


def _list_ask(question: WorldQuestion) -> Ask:
    """Every name weighs as much as a gold value, and so does the end, because a list must be complete and no longer."""
    text = question.answer
    starts = [text.index(gold) for gold in question.golds]
    spans = tuple((at, at + len(gold), GOLD_WEIGHT) for at, gold in zip(starts, question.golds, strict=True))
    return Ask(question.question, text, spans, relation=2.0, first=GOLD_WEIGHT, last=GOLD_WEIGHT)


def prose_passages(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    count: int,
    *,
    limit: int = 96,
) -> list[str]:
    """`count` passages of 30 to `limit` tokens from a few of `texts`, in random order, with or without line breaks."""
    found: list[str] = []
    while len(found) < count:
        text = rng.choice(texts)
        if rng.random() < 0.5:
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
        pieces = [piece for line in text.splitlines(keepends=True) for piece in _pieces(line)]
        sizes = [len(ids) for ids in tokenizer(pieces, add_special_tokens=False)["input_ids"]]
        own, size, target, cut = "", 0, rng.randint(30, limit), []
        for piece, tokens in zip(pieces, sizes, strict=True):
            if size and size + tokens > target:
                cut.append(own.strip())
                own, size, target = "", 0, rng.randint(30, limit)
            own, size = own + piece, size + tokens
        cut.append(own.strip())
        start = rng.randrange(max(1, len(cut) - 3))
        found += [passage for passage in cut[start : start + 4] if passage]
    found = found[:count]
    rng.shuffle(found)
    return found


def _pieces(line: str) -> list[str]:
    """Cut a line after sentences, and then every 16 words, so that no piece is longer than a passage."""
    pieces = []
    for sentence in line.replace(". ", ".\0 ").split("\0"):
        words = sentence.split(" ")
        for at in range(0, len(words), 16):
            tail = " " if at + 16 < len(words) else ""
            pieces.append(" ".join(words[at : at + 16]) + tail)
    return pieces


def prose_sample(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    *,
    passage_range: tuple[int, int],
    questions: int = 10,
    block: bool = False,
) -> Sample:
    """Pack questions for words left out of sentences of the passages; one in ten is about a sentence of other texts."""
    count = max(1, rng.randint(*passage_range))
    texts = prose_passages(rng, tokenizer, docstrings(), count)
    found = [(index, s) for index, text in enumerate(texts) for s in english_sentences(text)]
    rng.shuffle(found)
    asks: list[Ask] = []
    for index, sentence in found[:questions]:
        blanks = clozes(rng, sentence, 2)
        if blanks and rng.random() < _ALTERED_SHARE and "\n".join(texts).count(blanks[0].gold) == 1:
            word, blank = _other_word(rng), blanks[0]
            texts[index] = texts[index].replace(blank.gold, word)
            altered = sentence[: blank.start] + word + sentence[blank.start + len(blank.gold) :]
            blanks = [replace(blank, sentence=altered, gold=word)] if blank.gold not in texts[index] else []
        asks += [
            Ask(blank.question, blank.sentence, ((blank.start, blank.start + len(blank.gold), GOLD_WEIGHT),))
            for blank in blanks
        ]
    for _ in range(max(1, len(asks) // 10)):
        if others := english_sentences(rng.choice(docstrings())):
            other = rng.choice(others)
            if other not in " ".join(" ".join(texts).split()):
                asks += [Ask(cloze.question, UNANSWERABLE) for cloze in clozes(rng, other)]
    rng.shuffle(asks)
    return pack(tokenizer, texts, asks[:questions], block=block)


def _other_word(rng: random.Random) -> str:
    """One or two words of another text."""
    words = rng.choice(docstrings()).split()
    at = rng.randrange(len(words))
    found = " ".join(word.strip(".,;:()'\"") for word in words[at : at + rng.choice((1, 2))]).strip()
    return found if any(char.isalpha() for char in found) else "other"
