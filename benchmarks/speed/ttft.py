"""How much sooner does the first token come from stored KV than from prefilling the same tokens?

Baseline: transformers' own sdpa prefill of the whole prompt, same model, dtype and machine, rounds interleaved.
Measured: chunk KV read from LMDB (checksums and decoding included), question prefilled against it, first token
chosen. Retrieval is excluded on both sides.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.model.checkpoint import Checkpoint
from ragkv.model.language import LanguageModel, pick_device
from ragkv.runtime import Stream, runtime_of
from ragkv.store import KVIdentity, Store
from ragkv.types import Encoding

__all__ = ["measure", "random_llama"]

CHUNK_TOKENS = 256
PREFIX_TOKENS = 32
QUESTION_TOKENS = 50
ENGINES = ("block", "ape")


def measure(
    lengths: list[int],
    *,
    rounds: int = 3,
    model: str | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds` for each context length, in milliseconds."""
    say = on_step or (lambda _: None)
    lm = LanguageModel.load(model, dtype=dtype, device=device) if model else random_llama(dtype, device)
    say(f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.dtype}, chunks of {CHUNK_TOKENS} tokens")
    rows = []
    for length in lengths:
        say(f"{length} tokens of context …")
        rows += _measure_length(lm, length, rounds)
    return Report(bench="ttft", machine=machine(str(lm.device)), versions=versions("lmdb"), rows=tuple(rows))


def random_llama(dtype: str = "bfloat16", device: str | None = None) -> LanguageModel:
    """A Llama of 100M parameters with seeded random weights: 12 layers, hidden 768, GQA 12/4."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        bos_token_id=1,
        eos_token_id=2,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype)).to(pick_device(device))
    name = "random Llama"
    return LanguageModel(model, tokenizer, Checkpoint(name=name, location=name, local=True))


def _measure_length(lm: LanguageModel, length: int, rounds: int) -> list[Row]:
    generator = torch.Generator().manual_seed(length)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, lm.config.vocab_size, (n,), generator=generator).tolist())

    prefix, question = ids(PREFIX_TOKENS), ids(QUESTION_TOKENS)
    chunks = [ids(min(CHUNK_TOKENS, length - at)) for at in range(0, length, CHUNK_TOKENS)]
    prompt = [*prefix, *(i for chunk in chunks for i in chunk), *question]
    times: dict[str, list[float]] = {name: [] for name in ("prefill", *ENGINES)}
    with tempfile.TemporaryDirectory(prefix="ragkv-bench-") as folder, Store.create(folder) as store:
        identities = _fill(store, lm, prefix, chunks)
        for _ in range(rounds + 1):  # the first round warms up
            times["prefill"].append(_timed(partial(_prefill, lm, prompt)))
            for name in ENGINES:
                times[name].append(_timed(partial(_answer, lm, store, name, identities, question)))
    median = {name: statistics.median(found[1:]) * 1000 for name, found in times.items()}
    return [
        Row(
            name=f"{name}, {length} tokens",
            value=round(median[name], 2),
            unit="ms",
            baseline="transformers sdpa prefill",
            baseline_value=round(median["prefill"], 2),
            ratio=round(median["prefill"] / median[name], 2),
        )
        for name in ENGINES
    ]


def _fill(
    store: Store, lm: LanguageModel, prefix: tuple[int, ...], chunks: list[tuple[int, ...]]
) -> dict[Encoding, list[KVIdentity]]:
    """Encode the chunks in both encodings and store them. Each list begins with the prefix's identity."""
    [prefix_kv] = lm.encode([prefix])
    head = KVIdentity(model="bench", encoding=Encoding.STANDALONE, prefix_ids=(), chunk_ids=prefix)
    store.stage_kv([(head, prefix_kv)])
    found = {}
    for encoding, before in ((Encoding.STANDALONE, ()), (Encoding.PREFIXED, prefix)):
        kvs = lm.encode(chunks, prefix=prefix_kv if before else None)
        identities = [
            KVIdentity(model="bench", encoding=encoding, prefix_ids=before, chunk_ids=chunk) for chunk in chunks
        ]
        store.stage_kv(zip(identities, kvs, strict=True))
        found[encoding] = [head, *identities]
    return found


def _answer(
    lm: LanguageModel,
    store: Store,
    name: str,
    identities: dict[Encoding, list[KVIdentity]],
    question: tuple[int, ...],
) -> int:
    """Load the KV, read the question, and choose the first token."""
    engine = make_engine(name, {})
    head, *chunks = identities[engine.encoding or Encoding.STANDALONE]

    def loaded(identity: KVIdentity) -> Any:
        kv = store.get_kv(identity)
        if kv is None:
            raise RuntimeError("the benchmark's own store lost a record")
        return kv.to(lm.device)

    request = Request(
        prefix_ids=head.chunk_ids,
        prefix=loaded(head),
        chunks=tuple(ContextChunk(token_ids=i.chunk_ids, score=0.5, kv=loaded(i)) for i in chunks),
        suffix_ids=question,
    )
    return Stream(runtime_of(lm), engine, request).best()


def _prefill(lm: LanguageModel, prompt: list[int]) -> int:
    with lm.plain() as plain:
        tokens = torch.tensor([prompt], device=lm.device)
        logits = plain(input_ids=tokens, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


def _timed(work: Callable[[], int]) -> float:
    start = time.perf_counter()
    work()  # ends with the token on the host, so the device is done
    return time.perf_counter() - start
