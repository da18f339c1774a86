"""RULER's synthetic tasks, and PCED's secret code: needles, variable tracking and counting words in filler text."""

from __future__ import annotations

import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from itertools import pairwise

from ragkv.errors import UsageError
from ragkv.evaluation.metrics import Example, Task
from ragkv.worlds.world import listed

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


def cut(items: Sequence[str], chunks: int, joint: str = " ") -> tuple[str, ...]:
    """Join `items` in order into `chunks` texts of nearly equally many items."""
    edges = [len(items) * at // chunks for at in range(chunks + 1)]
    return tuple(joint.join(items[left:right]) for left, right in pairwise(edges))


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
        raise UsageError(f"alpha of the task must lie in (1, 10], not {alpha}.")
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
