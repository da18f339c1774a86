"""Questions that no single chunk answers: RULER's variable tracking and its two tasks of counting words."""

from __future__ import annotations

import math
import random
import string
from itertools import pairwise

from ragkv.errors import UsageError
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.synthetic.wording import ADJECTIVES, NOISE, NOUNS, cut, match_all, require, require_sizes, scatter

__all__ = ["cwe", "fwe", "vt"]

_COMMON, _COMMON_TIMES, _UNCOMMON_TIMES = 10, 30, 3  # RULER's num_cw, freq_cw, freq_ucw


def vt(*, seed: int = 0, limit: int = 100, chunks: int = 8, words: int = 60, hops: int = 4) -> Task:
    """RULER's variable tracking: a chain of assignments among repeated sentences, of which all variables are asked."""
    require_sizes(limit, chunks, words)
    require("hops", hops, 1, 100)
    examples = []
    for number in range(limit):
        rng = random.Random(f"vt:{seed}:{chunks}:{number}")
        names: dict[str, None] = {}
        while len(names) <= hops:
            names.setdefault("".join(rng.choices(string.ascii_uppercase, k=5)))
        value = str(rng.randint(10000, 99999))
        chain = list(names)
        lines = [f"VAR {chain[0]} = {value}"]
        lines += [f"VAR {name} = VAR {before}" for before, name in pairwise(chain)]
        texts = [[NOISE] * max(1, words // len(NOISE.split())) for _ in range(chunks)]
        needed = scatter(rng, texts, lines)
        examples.append(
            Example(
                example_id=str(number),
                question=f"Find all variables that are assigned the value {value} in the text above.",
                chunks=tuple("\n".join(text) for text in texts),
                answers=tuple(chain),
                needed=tuple(dict.fromkeys(needed)),
            )
        )
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
