"""How fast are chunks of mixed length prefilled to KV?

ragkv packs them into steps without padding. Baselines: transformers' own prefill (sdpa) one chunk at a time, and in
batches of 8 that are sorted by length and padded on the right. All of them end with the keys and values of every chunk;
reading, chunking and storing are left out. Rounds are interleaved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import random_llama
from ragkv.model.language import LanguageModel

__all__ = ["measure"]

SHORTEST, LONGEST = 32, 512
BATCH = 8

Chunks = Sequence[Sequence[int]]


def measure(
    chunks: int,
    *,
    rounds: int = 3,
    dtype: str = "bfloat16",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds`, in tokens per second."""
    say = on_step or (lambda _: None)
    lm = random_llama(dtype, device)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (chunks,), generator=generator).tolist()
    ids = [torch.randint(3, lm.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    say(
        f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.dtype}, {chunks} chunks of {SHORTEST} to "
        f"{LONGEST} tokens, {sum(lengths)} together"
    )
    works: dict[str, Callable[[LanguageModel, Chunks], int]] = {
        "ragkv": _packed,
        "one chunk at a time": _one_by_one,
        f"padded batches of {BATCH}": _padded,
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):  # the first round warms up
        for name, work in works.items():
            started = time.perf_counter()
            if work(lm, ids) != sum(lengths):
                raise RuntimeError(f"{name} lost tokens")
            times[name].append(time.perf_counter() - started)
    speed = {name: sum(lengths) / statistics.median(found[1:]) for name, found in times.items()}
    ours, *baselines = speed
    rows = tuple(
        Row(
            name=f"encode vs {name}",
            value=round(speed[ours], 1),
            unit="tokens/s",
            baseline=f"transformers, {name}",
            baseline_value=round(speed[name], 1),
            ratio=round(speed[ours] / speed[name], 2),
        )
        for name in baselines
    )
    return Report(bench="ingest", machine=machine(str(lm.device)), versions=versions(), rows=rows)


def _packed(lm: LanguageModel, chunks: Chunks) -> int:
    return sum(kv.tokens for kv in lm.encode_each(chunks))


def _one_by_one(lm: LanguageModel, chunks: Chunks) -> int:
    return sum(_prefill(lm, [ids]) for ids in chunks)


def _padded(lm: LanguageModel, chunks: Chunks) -> int:
    ordered = sorted(chunks, key=len)
    return sum(_prefill(lm, ordered[at : at + BATCH]) for at in range(0, len(ordered), BATCH))


def _prefill(lm: LanguageModel, batch: Chunks) -> int:
    """Keys and values of a batch padded on the right, a copy for every chunk; their tokens, waited for."""
    longest = max(map(len, batch))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch], device=lm.device)
    with lm.plain() as plain:  # causal attention never looks at the padding behind a chunk, so it needs no mask
        cache = plain(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        kvs = [
            [
                (layer.keys[row, :, : len(ids)].clone(), layer.values[row, :, : len(ids)].clone())
                for layer in cache.layers
            ]
            for row, ids in enumerate(batch)
        ]
    return sum(int(kv[-1][0].shape[1]) + 0 * int(kv[-1][0][0, 0, 0].isnan()) for kv in kvs)
