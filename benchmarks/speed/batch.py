"""How many more questions or chunks does batching process per second?

Questions: the engine block over stored chunks of 256 tokens, 16 new tokens for every question, end tokens ignored.
Baselines: the same questions one by one, and transformers' own sdpa decoding of all questions as one batch over one
cache that holds the context, expanded to the batch. Chunk KV is ready on both sides and retrieval is left out.

Prefill: ragkv packs chunks of mixed length into steps without padding. Baselines: transformers' own prefill (sdpa) one
chunk at a time, and in batches of 8 that are sorted by length and padded on the right. All of them end with the keys
and values of every chunk; reading, chunking and storing are left out.

Rounds of all sides are interleaved, with the same model, dtype and machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from ragkv.benchmarks.speed.inference import (
    CHUNK_TOKENS,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    random_ids,
    random_llama,
    random_request,
    transformers_model,
)
from ragkv.benchmarks.speed.report import (
    AutoDtype,
    BenchRow,
    OnStep,
    Quick,
    Report,
    alternating,
    described,
    machine,
    unseen,
    versions,
)
from ragkv.cli.options import Device, given_numbers
from ragkv.engines import Request
from ragkv.engines.block import BlockAttention
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Generation, runtime_of

NEW_TOKENS = 16


def measure_batch(
    questions: Annotated[str, typer.Option(help="Numbers of questions asked together.")] = "16",
    chunks: Annotated[int, typer.Option(help="Chunks of 256 tokens that a question reads.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
) -> Report:
    """Many questions at once (engine block), beside one by one and beside transformers with one cache for all.

    Example: `ragkv bench batch --questions 4,16`
    """
    lm = random_llama(dtype, device)
    lm.eos_ids = frozenset()
    chunks = 2 if quick else chunks
    on_step(
        f"{described(lm)}, {chunks} chunks of {CHUNK_TOKENS} tokens, {QUESTION_TOKENS} tokens a question, "
        f"{NEW_TOKENS} new tokens"
    )
    rows = []
    for number in [4] if quick else given_numbers("--questions", questions):
        on_step(f"{number} questions …")
        rows += _measure(lm, number, chunks, 1 if quick else rounds)
    return Report(bench="batch", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def _measure(lm: LanguageModel, number: int, chunks: int, rounds: int) -> list[BenchRow]:
    generator = torch.Generator().manual_seed(number)
    tokens = chunks * CHUNK_TOKENS
    asked = [random_ids(lm.config.vocab_size, generator, QUESTION_TOKENS) for _ in range(number)]
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
    median = alternating(works, rounds)
    pairs = (
        ("same chunks vs one by one", "same", "same, one by one", "ragkv, one by one"),
        ("own chunks vs one by one", "own", "own, one by one", "ragkv, one by one"),
        ("same chunks vs shared cache", "same", "shared cache", "transformers, one cache expanded"),
    )
    return [
        BenchRow.of(f"{number} questions, {name}", median[ours], "s", baseline, median[theirs])
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
    cache = DynamicCache()
    for number, layer in enumerate(ready.layers):
        cache.update(*(t.expand(len(asked), -1, -1, -1) for t in (layer.keys, layer.values)), number)
    position = PREFIX_TOKENS + sum(len(chunk.token_ids) for chunk in request.chunks)
    ids = torch.tensor(asked, device=lm.device)
    with transformers_model(lm) as plain:
        for _ in range(NEW_TOKENS):
            positions = torch.arange(position, position + ids.shape[1], device=lm.device).expand(len(asked), -1)
            logits = plain(
                input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
            position, ids = position + ids.shape[1], logits[:, -1].argmax(-1, keepdim=True)
    _count(len(ids.tolist()) * NEW_TOKENS // len(asked))


def _count(tokens: int) -> None:
    if tokens != NEW_TOKENS:
        raise RuntimeError(f"an answer of the benchmark has {tokens} tokens, not {NEW_TOKENS}")


SHORTEST, LONGEST = 32, 512
BATCH = 8

Chunks = Sequence[Sequence[int]]


def measure_ingest(
    chunks: Annotated[int, typer.Option(help="Chunks of 32 to 512 tokens.", min=1)] = 48,
    rounds: Annotated[int, typer.Option(help="Rounds; medians are shown.", min=1)] = 3,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
) -> Report:
    """Chunks of mixed length prefilled to KV, beside one at a time and beside padded batches of 8.

    Example: `ragkv bench ingest --chunks 48`
    """
    lm = random_llama(dtype, device)
    chunks, rounds = (16, 1) if quick else (chunks, rounds)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (chunks,), generator=generator).tolist()
    ids = [random_ids(lm.config.vocab_size, generator, n) for n in lengths]
    on_step(f"{described(lm)}, {chunks} chunks of {SHORTEST} to {LONGEST} tokens, {sum(lengths)} together")

    def checked(work: Callable[[LanguageModel, Chunks], int]) -> None:
        if work(lm, ids) != sum(lengths):
            raise RuntimeError(f"{work.__name__} lost tokens")

    works = {
        "ragkv": partial(checked, _packed),
        "one chunk at a time": partial(checked, _encode_one_by_one),
        f"padded batches of {BATCH}": partial(checked, _padded),
    }
    speed = {name: sum(lengths) / seconds for name, seconds in alternating(works, rounds).items()}
    ours, *baselines = speed
    rows = tuple(
        BenchRow.of(
            f"encode vs {name}",
            speed[ours],
            "tokens/s",
            f"transformers, {name}",
            speed[name],
            speed[ours] / speed[name],
            digits=1,
        )
        for name in baselines
    )
    return Report(bench="ingest", machine=machine(str(lm.device)), versions=versions(), rows=rows)


def _packed(lm: LanguageModel, chunks: Chunks) -> int:
    return sum(kv.tokens for kv in lm.encode_each(chunks))


def _encode_one_by_one(lm: LanguageModel, chunks: Chunks) -> int:
    return sum(_prefill_chunks(lm, [ids]) for ids in chunks)


def _padded(lm: LanguageModel, chunks: Chunks) -> int:
    ordered = sorted(chunks, key=len)
    return sum(_prefill_chunks(lm, ordered[at : at + BATCH]) for at in range(0, len(ordered), BATCH))


def _prefill_chunks(lm: LanguageModel, batch: Chunks) -> int:
    """Prefill a batch padded on the right, with a copy of each chunk's KV; returns the tokens, after synchronising."""
    longest = max(map(len, batch))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in batch], device=lm.device)
    # causal attention never sees the padding after a chunk, so it needs no mask
    with transformers_model(lm) as plain:
        cache = plain(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values
        kvs = [
            [
                (layer.keys[row, :, : len(ids)].clone(), layer.values[row, :, : len(ids)].clone())
                for layer in cache.layers
            ]
            for row, ids in enumerate(batch)
        ]
    return sum(int(kv[-1][0].shape[1]) + 0 * int(kv[-1][0][0, 0, 0].isnan()) for kv in kvs)
