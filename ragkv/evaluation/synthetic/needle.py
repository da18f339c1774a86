"""One fact in a long text: RULER's synthetic needles, and PCED's secret code."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable

from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import (
    ADJECTIVES,
    NOISE,
    NOUNS,
    filler,
    match_all,
    require,
    require_sizes,
    scatter,
)

__all__ = ["niah_multikey_2", "niah_multikey_3", "niah_single_1", "secret_code"]

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_QUESTION = "What is the special magic {kind} for {key} mentioned in the provided text?"
_TOKENS = 128  # RULER's `tokens_to_generate`


def niah_single_1(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60) -> Task:
    """RULER's needle in a haystack of repeated sentences: a number for one key."""
    require_sizes(limit, chunks, words)
    examples = []
    for number in range(limit):
        rng = random.Random(f"niah_single_1:{seed}:{chunks}:{number}")
        texts = [[NOISE] * max(1, words // len(NOISE.split())) for _ in range(chunks)]
        key, value = _key(rng), _number(rng)
        needed = scatter(rng, texts, [_NEEDLE.format(kind="numbers", key=key, value=value)])
        examples.append(
            Example(
                example_id=str(number),
                question=_QUESTION.format(kind="number", key=key),
                chunks=tuple("\n".join(text) for text in texts),
                answers=(value,),
                needed=needed,
            )
        )
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
    examples = []
    for number in range(limit):
        rng = random.Random(f"secret-code:{seed}:{chunks}:{number}")
        texts = [filler(rng, words) for _ in range(chunks)]
        code = _number(rng)
        needed = scatter(rng, texts, [f"The secret code is {code}."])
        examples.append(
            Example(
                example_id=str(number),
                question="What is the secret code?",
                chunks=tuple(" ".join(text) for text in texts),
                answers=(code,),
                needed=needed,
            )
        )
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
