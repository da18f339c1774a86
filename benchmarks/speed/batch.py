"""How much sooner are many questions answered together than one by one?

The engine block over stored chunks of 256 tokens, 16 new tokens for every question, end tokens ignored. Baselines: the
same questions one by one, and transformers' own sdpa decoding of all questions as one batch over one cache that holds
the context, expanded to the batch. Chunk KV is ready on both sides and retrieval is left out. Rounds are interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ragkv.benchmarks.speed.decode import random_request
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import CHUNK_TOKENS, PREFIX_TOKENS, QUESTION_TOKENS, random_llama
from ragkv.engines import Request
from ragkv.engines.block import BlockAttention
from ragkv.model.language import LanguageModel
from ragkv.runtime import Generation, runtime_of

__all__ = ["measure"]

NEW_TOKENS = 16


def measure(
    questions: Sequence[int],
    *,
    chunks: int = 8,
    rounds: int = 3,
    dtype: str = "bfloat16",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds` for each number of questions, in seconds for all of them."""
    say = on_step or (lambda _: None)
    lm = random_llama(dtype, device)
    lm.eos_ids = frozenset()
    say(
        f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.dtype}, {chunks} chunks of {CHUNK_TOKENS} "
        f"tokens, {QUESTION_TOKENS} tokens a question, {NEW_TOKENS} new tokens"
    )
    rows = []
    for number in questions:
        say(f"{number} questions …")
        rows += _measure(lm, number, chunks, rounds)
    return Report(bench="batch", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def _measure(lm: LanguageModel, number: int, chunks: int, rounds: int) -> list[Row]:
    generator = torch.Generator().manual_seed(number)
    tokens = chunks * CHUNK_TOKENS

    def question() -> tuple[int, ...]:
        return tuple(torch.randint(3, lm.config.vocab_size, (QUESTION_TOKENS,), generator=generator).tolist())

    asked = [question() for _ in range(number)]
    first = random_request(lm, tokens)
    same = [replace(first, suffix_ids=ids) for ids in asked]
    own = [
        replace(random_request(lm, tokens, seed=seed), prefix=first.prefix, prefix_ids=first.prefix_ids, suffix_ids=ids)
        for seed, ids in enumerate(asked)
    ]
    ready = BlockAttention().cache(lm, first)["past_key_values"]
    works: dict[str, Callable[[], object]] = {
        "same": lambda: _together(lm, same),
        "same, one by one": lambda: _one_by_one(lm, same),
        "own": lambda: _together(lm, own),
        "own, one by one": lambda: _one_by_one(lm, own),
        "shared cache": lambda: _shared_cache(lm, first, ready, asked),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):  # the first round warms up
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    median = {name: statistics.median(found[1:]) for name, found in times.items()}
    pairs = (
        ("same chunks vs one by one", "same", "same, one by one", "ragkv, one by one"),
        ("own chunks vs one by one", "own", "own, one by one", "ragkv, one by one"),
        ("same chunks vs shared cache", "same", "shared cache", "transformers, one cache expanded"),
    )
    return [
        Row(
            name=f"{number} questions, {name}",
            value=round(median[ours], 3),
            unit="s",
            baseline=baseline,
            baseline_value=round(median[theirs], 3),
            ratio=round(median[theirs] / median[ours], 2),
        )
        for name, ours, theirs, baseline in pairs
    ]


def _together(lm: LanguageModel, requests: Sequence[Request]) -> None:
    runtime, generation = runtime_of(lm), Generation(max_new_tokens=NEW_TOKENS)
    jobs = [runtime.submit(BlockAttention(), request, generation) for request in requests]
    for job in jobs:
        _count(sum(1 for _ in runtime.tokens(job)))


def _one_by_one(lm: LanguageModel, requests: Sequence[Request]) -> None:
    for request in requests:
        _together(lm, [request])


def _shared_cache(lm: LanguageModel, request: Request, ready: Any, asked: Sequence[tuple[int, ...]]) -> None:
    """Greedy decoding of all questions as one batch by transformers, over the keys and values of a `ready` cache."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, layer in enumerate(ready.layers):
        cache.update(*(t.expand(len(asked), -1, -1, -1) for t in (layer.keys, layer.values)), number)
    at = PREFIX_TOKENS + sum(len(chunk.token_ids) for chunk in request.chunks)
    ids = torch.tensor(asked, device=lm.device)
    with lm.plain() as plain:
        for _ in range(NEW_TOKENS):
            positions = torch.arange(at, at + ids.shape[1], device=lm.device).expand(len(asked), -1)
            logits = plain(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            at, ids = at + ids.shape[1], logits[:, -1].argmax(-1, keepdim=True)
    _count(len(ids.tolist()) * NEW_TOKENS // len(asked))


def _count(tokens: int) -> None:
    if tokens != NEW_TOKENS:
        raise RuntimeError(f"an answer of the benchmark has {tokens} tokens, not {NEW_TOKENS}")
