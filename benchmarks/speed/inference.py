"""How long do the first token from stored KV and a token over a long context take?

First token: the baseline is transformers' own sdpa prefill of the whole prompt, same model, dtype and machine, rounds
interleaved. Measured: chunk KV read from LMDB (checksums and decoding included), question prefilled against it, first
token chosen. Retrieval is excluded on both sides.

Later tokens: the baseline is transformers' own decode step (sdpa) over the same KV, in a `DynamicCache` (what
`generate` uses) and in a `StaticCache` (filled once, never copied): same model, dtype, machine and run, steps
interleaved. Measured: the block engine's step and the choice of the token, after the question was read. The KV is
random: its values cost nothing.
"""

from __future__ import annotations

import copy
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from ragkv.attention.kv import ChunkKV, PackedTensors
from ragkv.attention.pages import PAGE, PagePool
from ragkv.benchmarks.speed.report import (
    AutoDtype,
    BenchRow,
    Lengths,
    OnStep,
    Quick,
    Report,
    Rounds,
    alternating,
    described,
    machine,
    unseen,
    versions,
)
from ragkv.cli.options import Device, given_numbers
from ragkv.config import DTYPES, TierConfig, one_of
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.engines.block import BlockAttention
from ragkv.errors import RagkvError
from ragkv.index.index import memory_budget
from ragkv.model.checkpoint import Checkpoint, computes_in, pick_device
from ragkv.model.language_model import LanguageModel, shallow_copy
from ragkv.model.linear import int8_weights, optimize_layers, ordinary_layers
from ragkv.model.self_check import load_model
from ragkv.runtime import Stream, runtime_of
from ragkv.store import Half, KVIdentity, Store
from ragkv.store.tier import SharedTiers
from ragkv.types import Encoding

CHUNK_TOKENS = 256
PREFIX_TOKENS = 32
QUESTION_TOKENS = 50
ENGINES = ("block", "ape", "blend")


def measure_ttft(
    tokens: Lengths = "512,2048,8192",
    rounds: Rounds = 3,
    model: Annotated[
        str | None, typer.Option(help="Model to measure.", show_default="a random Llama of 100M parameters")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            help="Also measure a cold replica, whose KV is in this tier (redis://…, file:///…).", metavar="URL"
        ),
    ] = None,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
) -> Report:
    """Time to the first token from stored KV, compared with transformers' own sdpa prefill of the same tokens.

    Loading from the store is included, retrieval is not. Example: `ragkv bench ttft --tokens 512,8192`
    """
    lengths = [512, 2048] if quick else given_numbers("--tokens", tokens)
    lm = load_model(model, dtype=dtype, device=device) if model else random_llama(dtype, device)
    on_step(f"{described(lm)}, chunks of {CHUNK_TOKENS} tokens")
    rows = []
    for length in lengths:
        on_step(f"{length} tokens of context …")
        rows += _measure_length(lm, length, 1 if quick else rounds, tier)
    return Report(bench="ttft", machine=machine(str(lm.device)), versions=versions("lmdb"), rows=tuple(rows))


SHAPE: Mapping[str, Any] = {
    "vocab_size": 16000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 65536,
}
"""The fields of `LlamaConfig` for a Llama of 100M parameters."""


def random_llama(dtype: str = "auto", device: str | None = None, shape: Mapping[str, Any] = SHAPE) -> LanguageModel:
    """A Llama with seeded random weights in bfloat16, as in checkpoints, made on its device.

    "auto" is the dtype that such a checkpoint would run in.
    """
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    one_of("--dtype", dtype, DTYPES)
    torch.manual_seed(0)
    config = LlamaConfig(bos_token_id=1, eos_token_id=2, **shape)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    place = pick_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if computes_in(place, torch.bfloat16) else "float32"
    with place:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to(getattr(torch, "float32" if dtype == "int8" else dtype))
    name = "random Llama"
    lm = LanguageModel(model, tokenizer, Checkpoint(name=name, location=name, local=True))
    if dtype == "int8":
        int8_weights(lm)
    else:
        optimize_layers(lm)
    return lm


def _measure_length(lm: LanguageModel, length: int, rounds: int, tier: str | None) -> list[BenchRow]:
    prefix, chunks, question = random_prompt(lm, length)
    prompt = [*prefix, *(i for chunk in chunks for i in chunk), *question]
    with (
        ExitStack() as opened,
        tempfile.TemporaryDirectory(prefix="ragkv-bench-") as folder,
        Store.create(folder, codec=Half()) as store,
    ):
        identities = fill(store, lm, prefix, chunks)

        def answer(get: GetKV, name: str) -> int:
            return stream(lm, get, name, identities, question).best()

        read = partial(store.get_many, device=lm.place, shape=lm.kv_shape)
        works = {name: partial(answer, read, name) for name in ENGINES}
        if tier is not None:
            encoding = make_engine("block", {}).encoding or Encoding.STANDALONE
            there = opened.enter_context(_in_tier(tier, store, identities[encoding]))
            works["block, cold from a tier"] = partial(answer, there, "block")
        times = alternating({"prefill": partial(prefill, lm, prompt), **works}, rounds)
    median = {name: seconds * 1000 for name, seconds in times.items()}
    return [
        BenchRow.of(
            f"{name}, {length} tokens", median[name], "ms", "transformers sdpa prefill", median["prefill"], digits=2
        )
        for name in works
    ]


def random_prompt(lm: LanguageModel, length: int) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    """The ids of a prefix, of chunks with `length` tokens in all, and of a question."""
    ids = partial(random_ids, lm.config.vocab_size, torch.Generator().manual_seed(length))
    prefix, question = ids(PREFIX_TOKENS), ids(QUESTION_TOKENS)
    return prefix, [ids(min(CHUNK_TOKENS, length - at)) for at in range(0, length, CHUNK_TOKENS)], question


def random_ids(vocabulary: int, generator: torch.Generator, count: int) -> tuple[int, ...]:
    """Token ids on the generator's device; the first three of a vocabulary are special."""
    return tuple(torch.randint(3, vocabulary, (count,), generator=generator, device=generator.device).tolist())


GetKV = Callable[[Sequence[KVIdentity]], Mapping[KVIdentity, ChunkKV]]


@contextmanager
def _in_tier(url: str, store: Store, identities: Sequence[KVIdentity]) -> Iterator[GetKV]:
    """A function that gets KV from a tier, like a replica with empty memory and store; the KV is written first."""
    tiers = SharedTiers([TierConfig(url=url, namespace=f"bench-{secrets.token_hex(4)}", timeout=60.0)], store.codec)
    try:
        kvs = {identity: store.get_kv(identity) for identity in identities}
        for identity, kv in kvs.items():
            assert kv is not None
            tiers.offer([(identity, kv)], patient=True)
        if not tiers.settle(600.0):
            raise RagkvError(f"The tier {url} takes too long to write.")
        yield lambda wanted: {each: kv for each, (_, kv) in tiers.fetch(wanted).items()}
    finally:
        tiers.delete([identity.key() for identity in identities])
        tiers.close()


def fill(
    store: Store,
    lm: LanguageModel,
    prefix: tuple[int, ...],
    chunks: list[tuple[int, ...]],
    encodings: Sequence[Encoding] = (Encoding.STANDALONE, Encoding.PREFIXED),
    *,
    model: str = "bench",
) -> dict[Encoding, list[KVIdentity]]:
    """Encode the chunks in these encodings and store them. Each list begins with the prefix's identity."""
    [prefix_kv] = lm.encode([prefix])
    head = KVIdentity(model=model, encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=prefix)
    store.stage_kv([(head, prefix_kv)])
    identities_of = {}
    for encoding in encodings:
        before = prefix if encoding is Encoding.PREFIXED else ()
        kvs = lm.encode(chunks, prefix=prefix_kv if before else None)
        identities = [
            KVIdentity(model=model, encoding=encoding, prefix_ids=before, chunk_ids=chunk) for chunk in chunks
        ]
        store.stage_kv(zip(identities, kvs, strict=True))
        identities_of[encoding] = [head, *identities]
    return identities_of


def stream(
    lm: LanguageModel,
    get: GetKV,
    name: str,
    identities: dict[Encoding, list[KVIdentity]],
    question: tuple[int, ...],
) -> Stream:
    """Load the KV, all at once as an index does; returns the stream of an answer that has not begun."""
    engine, pages = make_engine(name, {}), lm.companion(_pages)
    head, *chunks = wanted = identities[engine.encoding or Encoding.STANDALONE]
    found = get(wanted)
    if len(found) < len(wanted):
        raise RuntimeError("the benchmark's own store lost a record")
    kvs = {identity: pages.hold(kv.to(lm.place)) for identity, kv in found.items()}
    request = Request(
        prefix_ids=head.chunk_ids,
        prefix=kvs[head],
        chunks=tuple(ContextChunk(token_ids=i.chunk_ids, score=0.5, kv=kvs[i]) for i in chunks),
        suffix_ids=question,
    )
    return Stream(runtime_of(lm), engine, request)


def _pages(lm: LanguageModel) -> PagePool:
    return PagePool(lm.place, memory_budget("auto", lm.place))


@contextmanager
def transformers_model(lm: LanguageModel) -> Iterator[Any]:
    """transformers' own model over the same weights, with its own linear layers (`ragkv.model.linear`)."""
    with lm.companion(_ordinary).plain() as plain:
        yield plain


def _ordinary(lm: LanguageModel) -> LanguageModel:
    found = copy.copy(lm)
    found._model = ordinary_layers(shallow_copy(lm.module))
    return found


def prefill(lm: LanguageModel, prompt: Sequence[int]) -> int:
    """The first token, by transformers' own pass over the whole prompt."""
    with transformers_model(lm) as plain:
        tokens = torch.tensor([list(prompt)], device=lm.device)
        logits = plain(input_ids=tokens, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())  # on the host, so the device has finished


STEPS = 8


def measure_decode(
    tokens: Lengths = "2048,16384",
    rounds: Annotated[int, typer.Option(help="Rounds of 8 tokens per length; medians are shown.", min=1)] = 3,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
) -> Report:
    """Time of one decode step over cached chunks (engine block), compared with transformers' own over the same KV.

    The baselines are transformers' DynamicCache and StaticCache. Example: `ragkv bench decode --tokens 16384`
    """
    lm = random_llama(dtype, device)
    on_step(f"{described(lm)}, chunks of {CHUNK_TOKENS} tokens")
    rows = []
    for length in [2048] if quick else given_numbers("--tokens", tokens):
        on_step(f"{length} tokens of context …")
        rows += _measure_decode_length(lm, length, 1 if quick else rounds)
    return Report(bench="decode", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def _measure_decode_length(lm: LanguageModel, length: int, rounds: int) -> list[BenchRow]:
    from transformers import StaticCache

    engine, request = BlockAttention(), random_request(lm, length)
    stream = Stream(runtime_of(lm), engine, request)
    inputs = engine.cache(lm, request)
    context = length + PREFIX_TOKENS
    dynamic = inputs["past_key_values"]
    static = StaticCache(config=lm.config, max_cache_len=context + QUESTION_TOKENS + rounds * STEPS + 1)
    for layer, held in enumerate(dynamic.layers):
        static.update(held.keys, held.values, layer)
    caches = {"DynamicCache": dynamic, "StaticCache": static}
    for cache in caches.values():
        cached_step(lm, cache, request.suffix_ids, context)
    token = stream.best()
    once = time.perf_counter()
    stream.advance(token)  # lays the context out, whose cost is `first step`
    token = stream.best()
    once = time.perf_counter() - once
    times: dict[str, list[float]] = {name: [] for name in ("ragkv", *caches)}
    position = context + QUESTION_TOKENS
    for _ in range(rounds * STEPS):
        start = time.perf_counter()
        stream.advance(token)
        chosen = stream.best()
        times["ragkv"].append(time.perf_counter() - start)
        for name, cache in caches.items():
            start = time.perf_counter()
            cached_step(lm, cache, [token], position)
            times[name].append(time.perf_counter() - start)
        token, position = chosen, position + 1
    median = {name: statistics.median(found) * 1000 for name, found in times.items()}
    first = "DynamicCache"
    return [
        *(
            BenchRow.of(
                f"token, {length} tokens", median["ragkv"], "ms", f"transformers {name}", median[name], digits=2
            )
            for name in caches
        ),
        BenchRow.of(
            f"second token, {length} tokens", once * 1000, "ms", f"transformers {first}", median[first], digits=2
        ),
    ]


def random_request(
    lm: LanguageModel,
    length: int,
    *,
    seed: int = 0,
    chunk: int = CHUNK_TOKENS,
    question: int = QUESTION_TOKENS,
    prefix: int = PREFIX_TOKENS,
) -> Request:
    """A question over `length` tokens in chunks of random KV, stored as in an index's memory."""
    generator = torch.Generator(lm.device).manual_seed(length)
    shape = (lm.config.num_key_value_heads, lm.config.hidden_size // lm.config.num_attention_heads)
    token = 2 * lm.layers * shape[0] * shape[1] * lm.dtype.itemsize
    pages = PagePool(lm.place, token * (length + prefix + PAGE * (2 + length // chunk)))
    ids = partial(random_ids, lm.config.vocab_size, generator)

    def kv(n: int) -> ChunkKV:
        def tensors() -> tuple[torch.Tensor, ...]:
            sizes = shape[0], n, shape[1]
            random_kv = (torch.randn(sizes, generator=generator, device=lm.device) for _ in range(lm.layers))
            return tuple(t.to(lm.dtype) for t in random_kv)

        random_kv = ChunkKV(keys=tensors(), values=tensors())
        if lm.dtype == torch.float32 and lm.device.type == "cpu":  # as with the codec `half`
            return replace(
                random_kv,
                keys=PackedTensors([t.half() for t in random_kv.keys], torch.float32),
                values=PackedTensors([t.half() for t in random_kv.values], torch.float32),
            )
        return pages.hold(random_kv)

    chunks = [min(chunk, length - at) for at in range(0, length, chunk)]
    return Request(
        prefix_ids=ids(prefix),
        prefix=kv(prefix) if prefix else None,
        chunks=tuple(ContextChunk(token_ids=ids(n), score=0.5, kv=kv(n)) for n in chunks),
        suffix_ids=ids(question),
    )


def cached_step(lm: LanguageModel, cache: Any, ids: Sequence[int], at: int) -> int:
    """The next token after `ids` from position `at` on, by transformers' own step over its cache."""
    tokens = torch.tensor([list(ids)], device=lm.device)
    positions = torch.arange(at, at + len(ids), device=lm.device)[None]
    with transformers_model(lm) as plain:
        logits = plain(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return int(logits[0, -1].argmax())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread, so that none spin-waits and processor time is a fair measure."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
