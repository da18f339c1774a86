"""How long does a token take over a long cached context?

Baseline: transformers' own decode step (sdpa) over the same KV, in a `DynamicCache` (what `generate` uses) and in a
`StaticCache` (filled once, never copied): same model, dtype, machine and run, steps interleaved. Measured: the block
engine's step and the choice of the token, after the question was read. The KV is random: its values cost nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ragkv.attention.kv import ChunkKV
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import CHUNK_TOKENS, PREFIX_TOKENS, QUESTION_TOKENS, random_llama
from ragkv.engines import ContextChunk, Request
from ragkv.engines.block import BlockAttention
from ragkv.model.language import LanguageModel
from ragkv.runtime import Stream, runtime_of

__all__ = ["measure", "random_request"]

STEPS = 8


def measure(
    lengths: list[int],
    *,
    rounds: int = 3,
    dtype: str = "bfloat16",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds` of 8 steps each for every context length, in milliseconds per token."""
    say = on_step or (lambda _: None)
    lm = random_llama(dtype, device)
    say(f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.dtype}, chunks of {CHUNK_TOKENS} tokens")
    rows = []
    for length in lengths:
        say(f"{length} tokens of context …")
        rows += _measure_length(lm, length, rounds)
    return Report(bench="decode", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def _measure_length(lm: LanguageModel, length: int, rounds: int) -> list[Row]:
    from transformers import StaticCache

    engine, request = BlockAttention(), random_request(lm, length)
    stream = Stream(runtime_of(lm), engine, request)
    inputs = engine.cache(lm, request)
    context, question = length + PREFIX_TOKENS, torch.tensor([request.suffix_ids], device=lm.device)
    dynamic = inputs["past_key_values"]
    static = StaticCache(config=lm.config, max_cache_len=context + QUESTION_TOKENS + rounds * STEPS + 1)
    for layer, held in enumerate(dynamic.layers):
        static.update(held.keys, held.values, layer)
    caches = {"DynamicCache": dynamic, "StaticCache": static}
    for cache in caches.values():
        _step(lm, cache, question, context)
    token = stream.best()
    once = time.perf_counter()
    stream.advance(token)  # lays the context out; `first step` tells what that costs
    token = stream.best()
    once = time.perf_counter() - once
    times: dict[str, list[float]] = {name: [] for name in ("ragkv", *caches)}
    at = context + QUESTION_TOKENS
    for _ in range(rounds * STEPS):
        start = time.perf_counter()
        stream.advance(token)
        chosen = stream.best()
        times["ragkv"].append(time.perf_counter() - start)
        for name, cache in caches.items():
            start = time.perf_counter()
            _step(lm, cache, torch.tensor([[token]], device=lm.device), at)
            times[name].append(time.perf_counter() - start)
        token, at = chosen, at + 1
    median = {name: statistics.median(found) * 1000 for name, found in times.items()}
    return [_row(f"token, {length} tokens", median["ragkv"], name, median[name]) for name in caches] + [
        _row(f"second token, {length} tokens", once * 1000, "DynamicCache", median["DynamicCache"])
    ]


def random_request(lm: LanguageModel, length: int, *, seed: int = 0) -> Request:
    """A question over `length` tokens in chunks whose KV is random: its values cost nothing."""
    generator = torch.Generator().manual_seed(length + (seed << 32))
    shape = (lm.config.num_key_value_heads, lm.config.hidden_size // lm.config.num_attention_heads)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, lm.config.vocab_size, (n,), generator=generator).tolist())

    def kv(n: int) -> ChunkKV:
        def tensors() -> tuple[torch.Tensor, ...]:
            made = (torch.randn(shape[0], n, shape[1], generator=generator) for _ in range(lm.layers))
            return tuple(t.to(lm.device, lm.dtype) for t in made)

        return ChunkKV(keys=tensors(), values=tensors())

    chunks = [min(CHUNK_TOKENS, length - at) for at in range(0, length, CHUNK_TOKENS)]
    return Request(
        prefix_ids=ids(PREFIX_TOKENS),
        prefix=kv(PREFIX_TOKENS),
        chunks=tuple(ContextChunk(token_ids=ids(n), score=0.5, kv=kv(n)) for n in chunks),
        suffix_ids=ids(QUESTION_TOKENS),
    )


def _step(lm: LanguageModel, cache: Any, ids: torch.Tensor, at: int) -> int:
    positions = torch.arange(at, at + ids.shape[1], device=lm.device)[None]
    with lm.plain() as plain:
        logits = plain(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return int(logits[0, -1].argmax())


def _row(name: str, value: float, baseline: str, baseline_value: float) -> Row:
    return Row(
        name=name,
        value=round(value, 2),
        unit="ms",
        baseline=f"transformers {baseline}",
        baseline_value=round(baseline_value, 2),
        ratio=round(baseline_value / value, 2),
    )
