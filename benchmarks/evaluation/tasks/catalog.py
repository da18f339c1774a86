"""The built-in tasks, by the names used on the command line. All are generated, and determined by their seed.

Questions about fictional worlds, many-shot labels and variables use names that no model has seen, so that an answer can
come only from the chunks; distractors are of the same world. Many-shot labels follow APE Table 3, the tasks in words of
one token each APB Table 3. Needles, variable tracking and counting words are RULER's, the secret code is PCED's. Cloze
questions are about English text.
"""

from __future__ import annotations

import inspect
import math
import random
import re
import string
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ragkv.benchmarks.evaluation.worlds.text import (
    GROUPS,
    Shots,
    asked,
    clozes,
    english_sentences,
    neutral_sentence,
    reference_texts,
    shot_text,
    variable_list,
)
from ragkv.benchmarks.evaluation.worlds.world import QuestionKind, Split, World, WorldDocument, WorldQuestion, listed
from ragkv.doctor.io import Spec
from ragkv.doctor.metrics import Example, Task
from ragkv.errors import UsageError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated haystack (`type_haystack: noise`)."""


ADJECTIVES = listed(
    "amber bitter bold brave brief bright broad calm careful cheap clever cold common cool crisp curious dark "
    "deep distant dry eager early empty fair faint famous fast fierce firm flat fresh gentle giant glad golden "
    "grand gray green happy hard heavy hidden high hollow honest huge humble idle keen kind large late lazy "
    "light little lonely long loud lucky mellow mild modern narrow neat noble odd old open pale patient plain "
    "polite proud quick quiet rapid rare red rich rough round rural sharp short shy silent simple slow small "
    "smooth soft solid steady steep still strange strong sudden sweet swift tall tame thick thin tidy tiny vast "
    "warm weary wet wide wild wise young"
)
NOUNS = listed(
    "acorn anchor apple arrow badge barrel basket beacon bell bench bottle branch bridge brook bucket button "
    "cabin candle canoe carpet castle cellar chain chair cherry circle clock cloud coat comet copper corner "
    "cottage cradle crane crown curtain daisy desert door drum eagle engine falcon farm feather fence ferry "
    "field finger flag flame flute forest fountain garden gate glove goose grain guitar hammer harbor hat hill "
    "horse house island jacket jar kettle key kite ladder lake lamp lantern leaf lemon letter library lion lock "
    "lumber magnet map market meadow melon mill mirror mountain needle nest oak ocean orchard otter oven owl "
    "paddle palace paper parrot path pearl pebble pencil piano pillow planet plow pocket pond puzzle quilt "
    "rabbit railway ribbon river road robin rocket roof rope rose saddle sail salmon school shelf ship shoe "
    "signal silver spoon spring stable statue stone street summer table teapot temple thimble thunder ticket "
    "tiger timber tower trail train tulip tunnel turtle valley velvet village violin wagon walnut water whale "
    "wheel whistle willow window winter wolf yard"
)


def require(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise UsageError if a size is out of range."""
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} of the task must be {bounds}, not {value}.")


def require_sizes(limit: int, chunks: int, words: int) -> None:
    """Raise UsageError if a size of a task with chunks of `words` words is out of range."""
    require("limit", limit, 1)
    require("chunks", chunks, 1, 1024)
    require("words", words, 1, 10_000)


def match_all(name: str, examples: Sequence[Example], chunks: int, tokens: int, seed: int) -> Task:
    """A task that scores the share of gold answers in an answer of at most `tokens` tokens."""
    return Task(name=f"{name}/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=tokens, seed=seed)


def gathered(limit: int, context: Callable[[int], Sequence[Example]], *, patience: int, barren: str) -> list[Example]:
    """`limit` examples of contexts 0, 1, 2, …; raises UsageError(`barren`) after `patience` contexts without any."""
    examples: list[Example] = []
    number = last = 0
    while len(examples) < limit:
        found = context(number)[: limit - len(examples)]
        number += 1
        if found:
            examples += found
            last = number
        elif number - last == patience:
            raise UsageError(barren)
    return examples


def filler(rng: random.Random, words: int) -> list[str]:
    """Sentences of about `words` words in all, without numbers or names."""
    found: list[str] = []
    while sum(len(sentence.split()) for sentence in found) < words:
        first, second = rng.sample(NOUNS, 2)
        found.append(f"The {rng.choice(ADJECTIVES)} {first} stood beside the {rng.choice(ADJECTIVES)} {second}.")
    return found


def cut(items: Sequence[str], chunks: int) -> tuple[str, ...]:
    """Join `items` in order into `chunks` texts of nearly equally many items."""
    edges = [len(items) * at // chunks for at in range(chunks + 1)]
    return tuple(" ".join(items[left:right]) for left, right in pairwise(edges))


def scatter(rng: random.Random, chunks: list[list[str]], sentences: Sequence[str]) -> tuple[int, ...]:
    """Insert `sentences` in order at random places of the chunks, and return the chunks that they are in."""
    places = sorted((at, rng.randint(0, len(chunks[at]))) for at in rng.choices(range(len(chunks)), k=len(sentences)))
    for (chunk, gap), sentence in reversed(list(zip(places, sentences, strict=True))):
        chunks[chunk].insert(gap, sentence)  # from the end, so that earlier gaps keep their indices
    return tuple(chunk for chunk, _ in places)


def scattered(
    name: str,
    text: Callable[[random.Random], list[str]],
    plant: Callable[[random.Random], tuple[str, Sequence[str], Sequence[str]]],
    *,
    seed: int,
    limit: int,
    chunks: int,
    joint: str = "\n",
) -> list[Example]:
    """`limit` examples of `chunks` texts. `plant` draws a question, its answers, and the sentences among the texts."""
    examples = []
    for number in range(limit):
        rng = random.Random(f"{name}:{seed}:{chunks}:{number}")
        texts = [text(rng) for _ in range(chunks)]
        question, answers, sentences = plant(rng)
        needed = dict.fromkeys(scatter(rng, texts, sentences))
        examples.append(
            Example(
                example_id=str(number),
                question=question,
                chunks=tuple(joint.join(text) for text in texts),
                answers=tuple(answers),
                needed=tuple(needed),
            )
        )
    return examples


def noise(words: int) -> list[str]:
    """RULER's repeated sentences, about `words` words of them."""
    return [NOISE] * max(1, words // len(NOISE.split()))


_COMMON, _COMMON_TIMES, _UNCOMMON_TIMES = 10, 30, 3  # RULER's num_cw, freq_cw, freq_ucw


def vt(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60, hops: int = 4) -> Task:
    """RULER's variable tracking: a chain of assignments among repeated sentences, of which all variables are asked."""
    require_sizes(limit, chunks, words)
    require("hops", hops, 1, 100)

    def plant(rng: random.Random) -> tuple[str, list[str], list[str]]:
        names: dict[str, None] = {}
        while len(names) <= hops:
            names.setdefault("".join(rng.choices(string.ascii_uppercase, k=5)))
        value = str(rng.randint(10000, 99999))
        chain = list(names)
        lines = [f"VAR {chain[0]} = {value}"]
        lines += [f"VAR {name} = VAR {before}" for before, name in pairwise(chain)]
        return f"Find all variables that are assigned the value {value} in the text above.", chain, lines

    examples = scattered("vt", lambda _: noise(words), plant, seed=seed, limit=limit, chunks=chunks)
    return match_all("vt", examples, chunks, 30, seed)


def cwe(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 120) -> Task:
    """RULER's common words: a list with ten words 30 times and others 3 times; the question asks for the ten.

    If there are fewer than 480 places, the ten words fill five eighths of them.
    """
    require_sizes(limit, chunks, words)
    places = chunks * (words // 2)  # "12. word" counts as two words
    times = min(_COMMON_TIMES, places * 5 // 8 // _COMMON)
    if times <= _UNCOMMON_TIMES:
        raise UsageError(f"cwe: {chunks} chunks of {words} words have no room for common words; give more.")
    rare = (places - times * _COMMON) // _UNCOMMON_TIMES
    pool = dict.fromkeys((*NOUNS, *ADJECTIVES, *(one + other for one in NOUNS for other in NOUNS)))
    if _COMMON + rare > len(pool):
        raise UsageError(f"cwe: {chunks} chunks of {words} words need more words than there are; give fewer.")
    examples = []
    for number in range(limit):
        rng = random.Random(f"cwe:{seed}:{chunks}:{number}")
        chosen = rng.sample(list(pool)[: max(300, _COMMON + rare)], _COMMON + rare)
        listed = chosen[:_COMMON] * times + chosen[_COMMON:] * _UNCOMMON_TIMES
        rng.shuffle(listed)
        examples.append(
            Example(
                example_id=str(number),
                question="What are the 10 most common words in the above list?",
                chunks=cut([f"{at}. {word}" for at, word in enumerate(listed, start=1)], chunks),
                answers=tuple(chosen[:_COMMON]),
            )
        )
    return match_all("cwe", examples, chunks, 120, seed)


def fwe(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60, alpha: float = 2.0) -> Task:
    """RULER's frequent words: coded words with a zeta distribution; the question asks for ranks 2 to 4 (1 is dots)."""
    require_sizes(limit, chunks, words)
    if not 1 < alpha <= 10:
        raise UsageError(f"alpha of the task must be in (1, 10], not {alpha}.")
    total = math.fsum(rank**-alpha for rank in range(1, 100_000)) + 100_000 ** (1 - alpha) / (alpha - 1)
    counts = [int(chunks * words * rank**-alpha / total) for rank in range(1, chunks * words + 1)]
    if len(counts) < 5 or not counts[1] > counts[2] > counts[3] > counts[4]:
        raise UsageError(f"fwe: in {chunks} chunks of {words} words no three are the most frequent; give more.")
    examples = []
    for number in range(limit):
        rng = random.Random(f"fwe:{seed}:{chunks}:{number}")
        coded: dict[str, None] = {"...": None}
        while len(coded) < sum(count > 0 for count in counts):
            coded.setdefault("".join(rng.choices(string.ascii_lowercase, k=6)))
        text = [word for word, count in zip(coded, counts, strict=False) for _ in range(count)]
        rng.shuffle(text)
        examples.append(
            Example(
                example_id=str(number),
                question="Do not provide any explanation. Please ignore the dots '....'. What are the three most "
                "frequently appeared words in the above coded text?",
                chunks=cut(text, chunks),
                answers=tuple(list(coded)[1:4]),
            )
        )
    return match_all("fwe", examples, chunks, 50, seed)


_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
_TOKENS = 128  # RULER's `tokens_to_generate`


def niah_single_1(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60) -> Task:
    """RULER's needle in a haystack of repeated sentences: a number for one key."""
    require_sizes(limit, chunks, words)

    def plant(rng: random.Random) -> tuple[str, list[str], list[str]]:
        key, value = _key(rng), _number(rng)
        needle = _NEEDLE.format(kind="numbers", key=key, value=value)
        return _QUESTION.format(kind="number", key=key), [value], [needle]

    examples = scattered("niah_single_1", lambda _: noise(words), plant, seed=seed, limit=limit, chunks=chunks)
    return match_all("niah_single_1", examples, chunks, _TOKENS, seed)


def niah_multikey_2(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60, asks: int = 1) -> Task:
    """RULER's haystack that consists of needles: many keys, each with a number. Each haystack gets `asks` questions."""
    return _multikey("niah_multikey_2", "number", _key, _number, seed, limit, chunks, words, asks)


def niah_multikey_3(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60, asks: int = 1) -> Task:
    """Like niah_multikey_2 with UUIDs as keys and values, so that only copying helps."""
    return _multikey("niah_multikey_3", "uuid", _uuid, _uuid, seed, limit, chunks, words, asks)


def secret_code(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60) -> Task:
    """PCED's documents of filler text, one of which contains a secret code."""
    require_sizes(limit, chunks, words)

    def plant(rng: random.Random) -> tuple[str, list[str], list[str]]:
        code = _number(rng)
        return "What is the secret code?", [code], [f"The secret code is {code}."]

    sizes = {"seed": seed, "limit": limit, "chunks": chunks}
    examples = scattered("secret-code", lambda rng: filler(rng, words), plant, joint=" ", **sizes)
    return Task(name=f"secret-code/{chunks}", metric="subspan_em", examples=examples, max_new_tokens=32, seed=seed)


def _multikey(
    name: str,
    kind: str,
    make_key: Callable[[random.Random], str],
    make_value: Callable[[random.Random], str],
    seed: int,
    limit: int,
    chunks: int,
    words: int,
    asks: int,
) -> Task:
    require_sizes(limit, chunks, words)
    each = max(1, words // len(_NEEDLE.split()))
    require("asks", asks, 1, each * chunks)
    examples: list[Example] = []
    for number in range(-(-limit // asks)):
        rng = random.Random(f"{name}:{seed}:{chunks}:{number}")
        pairs: dict[str, str] = {}
        while len(pairs) < each * chunks:
            pairs.setdefault(make_key(rng), make_value(rng))
        lines = [_NEEDLE.format(kind=f"{kind}s", key=key, value=value) for key, value in pairs.items()]
        texts = tuple("\n".join(lines[at : at + each]) for at in range(0, len(lines), each))
        for place, (key, value) in rng.sample(list(enumerate(pairs.items())), asks)[: limit - len(examples)]:
            examples.append(
                Example(
                    example_id=f"{number}-{place}",
                    question=_QUESTION.format(kind=kind, key=key),
                    chunks=texts,
                    answers=(value,),
                    needed=(place // each,),
                )
            )
    return match_all(name, examples, chunks, _TOKENS, seed)


def _key(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_WORLD_PATIENCE = 200  # consecutive worlds without a fitting question


def worlds(*, seed: int = 0, limit: int = 100, chunks: int = 8, split: Split = "heldout", kinds: str = "") -> Task:
    """Fictional worlds: a document per chunk, evidence among distractors of the same world; slices by kind of question.

    `kinds` selects the kinds, as in "one hop+two hops"; others are comparison, list (scored by the share that is given)
    and unanswerable. Every context is asked one question of each kind, about different facts, if its evidence fits into
    the chunks. Names of the `heldout` split occur in no training world.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    wanted = [kind.strip() for kind in kinds.split("+") if kind.strip()]

    def context(number: int) -> list[Example]:
        world = World.generate(seed * 1_000_003 + number, split=split, size=max(24, chunks + 8))
        rng = random.Random(f"worlds:{seed}:{split}:{chunks}:{number}")
        return _world_context(rng, world, chunks, number, wanted)

    barren = f"worlds: no question of kind {kinds or 'any'} has its evidence in {chunks} chunks."
    examples = gathered(limit, context, patience=_WORLD_PATIENCE, barren=barren)
    return Task(name=f"worlds/{chunks}", metric="string_match_all", examples=examples, max_new_tokens=64, seed=seed)


def _world_context(rng: random.Random, world: World, chunks: int, number: int, wanted: Sequence[str]) -> list[Example]:
    """One question of each kind about one set of chunks in random order.

    Questions of one and two hops determine the documents; the other kinds are asked about the documents that result.
    """
    by_kind: dict[str, list[WorldQuestion]] = {}
    for question in world.questions:
        by_kind.setdefault(question.kind, []).append(question)
    hops = sorted(kind for kind in by_kind if not wanted or kind in wanted)
    turn = number % max(1, len(hops))  # the first kind has the most choice
    asked: list[WorldQuestion] = []
    titles: dict[str, None] = {}
    for kind in hops[turn:] + hops[:turn]:
        used = {sentence for question in asked for sentence in question.support}
        for question in rng.sample(by_kind[kind], len(by_kind[kind])):
            together = dict.fromkeys((*titles, *question.titles))
            if len(together) <= chunks and not used.intersection(question.support):
                asked.append(question)
                titles = together
                break
    rest = [document for document in world.documents if document.title not in titles]
    evidence = [world.document(title) for title in titles]
    chosen = evidence + rng.sample(rest, chunks - len(evidence))
    rng.shuffle(chosen)
    stated = world.stated([document.text for document in chosen])
    asked += [
        question
        for question in world.ask(rng, stated, 1)
        if question.kind not in by_kind and (not wanted or question.kind in wanted)
    ]
    texts = [f"# {document.title}\n\n{document.text}" for document in chosen]
    return [_example(question, texts, f"{number}-{place}") for place, question in enumerate(asked)]


def _example(question: WorldQuestion, texts: Sequence[str], name: str) -> Example:
    return Example(
        example_id=name,
        question=question.question,
        chunks=tuple(texts),
        answers=question.golds or (question.gold,),
        kind=question.kind,
        needed=tuple(at for at, text in enumerate(texts) if any(line in text for line in question.support)),
    )


_SENTENCES = 5  # most sentences per passage; with its heading about 60 tokens of the mini model
_CORE = 8  # related passages, which all questions of one hop, two hops and comparisons are about
_PASSAGE_PATIENCE = 40  # consecutive contexts without a question of the kind


def passages(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    kind: QuestionKind = "one hop",
    pool: int = 0,
    per_context: int = 4,
    split: Split = "heldout",
) -> Task:
    """Questions of one `kind` about passages of a world, `per_context` of them for each context of `chunks` passages.

    The first 8 passages are related, so that chains and comparisons can be asked; the others are drawn from the same
    world. With the same `pool` (at least `chunks`), larger contexts contain the smaller ones, and the questions about
    the 8 passages are the same at every size. A list is scored by the share of its members that are named.
    """
    require("limit", limit, 1)
    require("per_context", per_context, 1)
    pool = pool or chunks
    require("pool", pool, chunks, 1024)
    require("chunks", chunks, 1, pool)
    examples = gathered(
        limit,
        lambda number: _passage_context(seed, number, chunks, kind, pool, per_context, split),
        patience=_PASSAGE_PATIENCE,
        barren=f"passages: no question of kind {kind} can be asked of {chunks} chunks; give more.",
    )
    metric = "string_match_all" if kind == "list" else "subspan_em"
    return Task(name=f"passages/{chunks}", metric=metric, examples=examples, max_new_tokens=64, seed=seed)


def _passage_context(
    seed: int, number: int, chunks: int, kind: QuestionKind, pool: int, per_context: int, split: Split
) -> list[Example]:
    world, texts = _pool(seed * 1_000_003 + number, pool, split)
    shown = list(texts[:chunks])
    # lists and unanswerable questions depend on all passages; the others are about the related ones alone, so that
    # they are the same at every size
    stated = world.stated(shown if kind in ("list", "unanswerable") else shown[:_CORE])
    asked = world.ask(random.Random(f"ask:{seed}:{number}:{kind}"), stated, per_context)
    random.Random(f"order:{seed}:{number}:{chunks}").shuffle(shown)
    of_kind = [question for question in asked if question.kind == kind]
    return [_example(question, shown, f"{number}-{place}") for place, question in enumerate(of_kind)]


@lru_cache(maxsize=64)
def _pool(seed: int, pool: int, split: Split) -> tuple[World, tuple[str, ...]]:
    """A world and `pool` of its passages, with those of related entities first."""
    world = World.generate(seed, split=split, size=max(24, pool))
    rng = random.Random(f"passages:{split}:{pool}:{seed}")
    titles = _related(rng, world)
    core = [text for title in titles for text in _cut(world.document(title))][:_CORE]
    others = [text for document in world.documents for text in _cut(document) if text not in core]
    return world, tuple(core + rng.sample(others, pool - len(core)) if pool > len(core) else core[:pool])


def _related(rng: random.Random, world: World) -> list[str]:
    """Titles of related documents: each names, or is named by, a document before it."""
    known = {document.title for document in world.documents}
    links: dict[str, list[str]] = {}
    for fact in world.facts:
        if fact.value in known:
            links.setdefault(fact.subject, []).append(fact.value)
            links.setdefault(fact.value, []).append(fact.subject)
    found = [rng.choice([document.title for document in world.documents if document.title in links])]
    for title in found:  # the list grows during the iteration
        near = [other for other in dict.fromkeys(links.get(title, ())) if other not in found]
        found += rng.sample(near, min(2, len(near)))
        if len(found) >= _CORE:
            break
    return found


def _cut(document: WorldDocument) -> list[str]:
    """The document cut into passages of nearly equal length, each with its heading."""
    texts = cut(document.sentences, -(-len(document.sentences) // _SENTENCES))
    return [f"# {document.title}\n\n{text}" for text in texts]


_LABELS = listed("brask dolin fenup garo hivel jumat kesto lorip mavun noxel pidra quern")
_PLACES = listed(
    "in the yard|by the road|near the river|behind the house|under the bridge|at the market|on the hill", "|"
)


def icl(*, seed: int = 0, limit: int = 100, chunks: int = 8, shots: int = 4, classes: int = 3) -> Task:
    """Many-shot learning: `shots` sentences per chunk with meaningless labels; the question is the label of a new one.

    The label depends on the kind of thing in the sentence. In the slice "seen" the thing is in a shot, so looking it up
    is enough. In "unseen" it is not, so the rule must be learned. With 0 `chunks` nothing is read.
    """
    require("limit", limit, 1)
    require("chunks", chunks, 0, 1024)
    require("shots", shots, 1, 1000)
    require("classes", classes, 2, len(GROUPS))
    examples = []
    for number in range(limit):
        rng = random.Random(f"icl:{seed}:{chunks}:{shots}:{number}")
        drawn = Shots(rng, count=chunks * shots, classes=classes, labels=_LABELS)
        seen = bool(drawn.shown) and number % 2 == 0
        group, thing = rng.choice(drawn.shown) if seen else drawn.fresh(rng)
        texts = drawn.chunks([neutral_sentence(rng, shown, _PLACES) for _, shown in drawn.shown], shots)
        examples.append(
            Example(
                example_id=str(number),
                question=shot_text(neutral_sentence(rng, thing, _PLACES)),
                chunks=tuple(texts),
                answers=(drawn.labels[group],),
                kind="seen" if seen else "unseen",
                needed=tuple(dict.fromkeys(at // shots for at, (_, shot) in enumerate(drawn.shown) if shot == thing)),
                classes=tuple(sorted(drawn.labels.values())),
            )
        )
    return Task(name=f"icl/{chunks}", metric="classification", examples=examples, max_new_tokens=32, seed=seed)


def variables(
    *,
    seed: int = 0,
    limit: int = 100,
    chunks: int = 8,
    words: int = 60,
    kind: Literal["value", "reference"] = "reference",
) -> Task:
    """What a variable stands for, in a list of nothing but variables.

    `kind` "value" asks for a line that contains the value itself, as in RULER's niah_multikey_3. "reference" is RULER's
    variable tracking: the line names an earlier variable, which gets another value later; the question asks for what it
    stood for at that line. Lists of both kinds are drawn alike.
    """
    require_sizes(limit, chunks, words)
    require("words", words, 4)  # each chunk has a line
    require("chunks x words", chunks * words, 120, 570)  # both kinds are there; names suffice
    examples = []
    for number in range(limit):
        rng = random.Random(f"variables:{kind}:{seed}:{chunks}:{words}:{number}")
        drawn = variable_list(rng, chunks * words // 2 - 1)
        line = rng.choice([each for each in drawn.known if each.refers == (kind == "reference")])
        examples.append(
            Example(
                example_id=str(number),
                question=asked(line.name),
                chunks=cut(drawn.texts(), chunks),
                answers=(line.value,),
                kind=kind,
            )
        )
    return match_all("variables", examples, chunks, 2, seed)


_QUESTIONS = 4  # per context, whose KV is then encoded once for all of them
_RUN = 3  # consecutive passages of a text, which are the hardest distractors

_TEXT_PATIENCE = 500  # consecutive contexts without a question


def cloze(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 50, folder: str = "") -> Task:
    """Words left out of a sentence of plain English, from Python's language reference or the texts of a `folder`.

    A chunk has about `words` words. `folder` is searched for .txt, .md and .rst files.
    """
    require("chunks", chunks, 1, 1024)
    require("limit", limit, 1)
    require("words", words, 20, 2000)
    passages = [_passages(text, words) for text in (_files(folder) if folder else reference_texts())]
    passages = [cut for cut in passages if cut]
    if sum(map(len, passages)) < chunks or not any(english_sentences(p) for cut in passages for p in cut):
        raise UsageError(f"cloze: {folder or 'the reference'} holds too little plain English for {chunks} chunks.")
    rng = random.Random(f"cloze:{seed}:{chunks}:{words}")
    examples = gathered(
        limit,
        lambda number: _text_context(rng, _drawn(rng, passages, chunks), number),
        patience=_TEXT_PATIENCE,
        barren=f"cloze: {folder or 'the reference'} has no sentence to ask about in {chunks} chunks.",
    )
    return Task(name=f"cloze/{chunks}", metric="contains", examples=examples, max_new_tokens=96, seed=seed)


def _files(folder: str) -> list[str]:
    root = Path(folder).expanduser()
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".txt", ".md", ".rst") and path.is_file())
    if not paths:
        raise UsageError(f"cloze: {folder} holds no .txt, .md or .rst file.")
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def _passages(text: str, words: int) -> list[str]:
    """Passages of whole paragraphs or sentences with about `words` words; longer units are cut between words."""
    units = re.split(r"\n\s*\n|(?<=\.)\s", text)
    found: list[str] = []
    held: list[str] = []
    for unit in units:
        own = unit.split()
        if held and len(held) + len(own) > words:
            found.append(" ".join(held))
            held = []
        held += own
        while len(held) > words:
            found.append(" ".join(held[:words]))
            held = held[words:]
    return [*found, " ".join(held)] if held else found


def _drawn(rng: random.Random, passages: Sequence[Sequence[str]], chunks: int) -> list[str]:
    """Distinct passages in random order, drawn in runs of up to `_RUN` passages of one text."""
    chosen: dict[str, None] = {}
    while len(chosen) < chunks:
        cut = rng.choice(passages)
        at = rng.randrange(len(cut))
        for passage in cut[at : at + _RUN]:
            if len(chosen) < chunks:
                chosen[passage] = None
    drawn = list(chosen)
    rng.shuffle(drawn)
    return drawn


def _text_context(rng: random.Random, texts: list[str], number: int) -> list[Example]:
    """Questions about different sentences, each of which only one chunk contains."""
    found = [(index, sentence) for index, text in enumerate(texts) for sentence in english_sentences(text)]
    found = [pair for pair in found if sum(pair[1] in text for text in texts) == 1]
    rng.shuffle(found)
    asked = [(index, blank) for index, sentence in found for blank in clozes(rng, sentence)][:_QUESTIONS]
    return [
        Example(
            example_id=f"{number}-{place}",
            question=blank.question,
            chunks=tuple(texts),
            answers=(blank.gold,),
            kind="cloze",
            needed=(index,),
        )
        for place, (index, blank) in enumerate(asked)
    ]


TASKS: Mapping[str, Callable[..., Task]] = {
    "worlds": worlds,
    "cloze": cloze,
    "secret-code": secret_code,
    "niah_single_1": niah_single_1,
    "niah_multikey_2": niah_multikey_2,
    "niah_multikey_3": niah_multikey_3,
    "vt": vt,
    "variables": variables,
    "cwe": cwe,
    "fwe": fwe,
    "icl": icl,
    "passages": passages,
}
"""Functions of `seed`, `limit` (examples), `chunks` (per example) and further keyword options."""


def make_task(spec: Spec, *, seed: int, limit: int, chunks: int) -> Task:
    """Make the task that `spec` names. Its options override the arguments. Raises UsageError for unknown ones."""
    if spec.name not in TASKS:
        raise UsageError(f"Unknown task {spec.name!r}; choose one of {', '.join(TASKS)}, or give a file.")
    function = TASKS[spec.name]
    hints = typing.get_type_hints(function)
    known = inspect.signature(function).parameters
    for key, value in spec.options.items():
        if key not in known:
            raise UsageError(f"Task {spec.name} has no option {key!r}; it has {', '.join(known)}.")
        if typing.get_origin(hint := hints[key]) is typing.Literal:
            if value not in typing.get_args(hint):
                choices = ", ".join(map(str, typing.get_args(hint)))
                raise UsageError(f"{key} of task {spec.name} must be one of {choices}, not {value!r}.")
        elif not isinstance(value, (int, float) if hint is float else hint) or (
            isinstance(value, bool) and hint is not bool
        ):
            raise UsageError(f"{key} of task {spec.name} must be of type {hint.__name__}, not {value!r}.")
    task = function(**{"seed": seed, "limit": limit, "chunks": chunks, **spec.options})
    return replace(task, name=f"{spec}/{spec.options.get('chunks', chunks)}") if spec.options else task


def described() -> list[tuple[str, str, dict[str, object]]]:
    """(name, first line of the function's docstring, options with their defaults) of every task."""
    return [
        (
            name,
            (inspect.getdoc(function) or "").split("\n")[0],
            {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()},
        )
        for name, function in TASKS.items()
    ]
