"""How many more questions or chunks does batching process per second?

Questions: the engine block over stored chunks of 256 tokens, 16 new tokens for every question, end tokens ignored.
Baselines: the same questions one by one, and transformers' own sdpa decoding of all questions as one batch over one
cache that holds the context, expanded to the batch. Chunk KV is ready on both sides and retrieval is left out.

Prefill: ragkv packs chunks of mixed length into steps without padding. Baselines: transformers' own prefill (sdpa) one
chunk at a time, and in batches of 8 that are sorted by length and padded on the right. All of them end with the keys
and values of every chunk; reading, chunking and storing are left out.

Common contexts (IPPD §5, Table 1): the baselines are transformers' `generate` on full prompts in batches, padded on the
left, sdpa; and one question at a time over a `DynamicCache` of its context, which is prefilled once and cropped after
every question. All answer the same questions with the same number of tokens; end tokens count as any other. The paper's
contexts are replaced by random tokens, because the cost of a pass does not depend on the text.

Rounds of all sides are interleaved, with the same model, dtype and machine.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from ragkv.benchmarks.speed.inference import (
    CHUNK_TOKENS,
    PREFIX_TOKENS,
    QUESTION_TOKENS,
    cached_step,
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
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.engines.block import BlockAttention
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Generation, Runtime, runtime_of

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
    at = PREFIX_TOKENS + sum(len(chunk.token_ids) for chunk in request.chunks)
    ids = torch.tensor(asked, device=lm.device)
    with transformers_model(lm) as plain:
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


PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IPPDShape:
    """A data set of the paper's: tokens of each part, contexts, and how many questions they have, in turns.

    `instruction` and `context` are already divided by `divisor`, to fit the machine. `batches` are the sizes that are
    tried for `generate`, of which the best counts.
    """

    number: int
    name: str
    instruction: int
    context: int
    question: int
    answer: int
    contexts: int
    questions: tuple[int, ...]
    batches: tuple[int, ...]
    divisor: int = 1

    def shorter(self) -> IPPDShape:
        """For a quick run: half as many contexts, shortened parts halved again, one batch size."""
        half = 1 if self.divisor == 1 else 2
        return replace(
            self,
            instruction=self.instruction // (half if self.instruction > 1000 else 1),
            context=self.context // half,
            contexts=(self.contexts + 1) // 2,
            batches=self.batches[:1],
            divisor=self.divisor * half,
        )

    def __str__(self) -> str:
        scale = f", long parts at 1/{self.divisor} of the paper's" if self.divisor > 1 else ""
        asked = " or ".join(map(str, self.questions))
        return (
            f"shape {self.number}, {self.name}: {self.contexts} x {self.context} tokens after {self.instruction}, "
            f"{asked} questions of {self.question} each, {self.answer} new tokens{scale}"
        )


SHAPES = (
    IPPDShape(
        number=1,
        name="few shots (NarrativeQA)",
        instruction=2754 // 2,
        context=737 // 2,
        question=12,
        answer=6,
        contexts=2,
        questions=(30,),
        batches=(8, 4, 16),
        divisor=2,
    ),
    IPPDShape(
        number=2,
        name="short contexts (SQuAD)",
        instruction=47,
        context=178,
        question=13,
        answer=4,
        contexts=8,
        questions=(9,),
        batches=(32, 8, 16),
    ),
    IPPDShape(
        number=3,
        name="one-token answers (RACE)",
        instruction=40,
        context=344,
        question=40,
        answer=1,
        contexts=8,
        questions=(3, 4),
        batches=(8, 4, 16),
    ),
    IPPDShape(
        number=4,
        name="a long context (LongHealth)",
        instruction=73,
        context=11720 // 4,
        question=73,
        answer=1,
        contexts=1,
        questions=(20,),
        batches=(4, 1, 2),
        divisor=4,
    ),
)


@dataclass(frozen=True, slots=True)
class Work:
    """The contexts, each with its questions."""

    instruction: tuple[int, ...]
    contexts: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
    answer: int

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The full prompt of every question."""
        return [
            (*self.instruction, *context, *question) for context, questions in self.contexts for question in questions
        ]


# Ways to answer: each gives the new tokens of every question, in order.


def by_ippd(work: Work, runtime: Runtime) -> list[list[int]]:
    """ragkv: all questions at once; contexts that `runtime` has seen before are reused."""
    engine = make_engine("ippd", {})
    generation = Generation(max_new_tokens=work.answer)
    jobs = [
        runtime.submit(
            engine,
            Request(
                prefix_ids=work.instruction,
                chunks=(ContextChunk(token_ids=context, score=0.5),),
                suffix_ids=question,
            ),
            generation,
        )
        for context, questions in work.contexts
        for question in questions
    ]
    return [[token.token_id for token in runtime.tokens(job)] for job in jobs]


def by_generate(lm: LanguageModel, work: Work, batch: int) -> list[list[int]]:
    """transformers: full prompts, padded on the left, `batch` at a time."""
    prompts, found = work.prompts, []
    with transformers_model(lm) as plain:
        for at in range(0, len(prompts), batch):
            part = prompts[at : at + batch]
            longest = max(map(len, part))
            ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in part], device=lm.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=lm.device)
            out = plain.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=work.answer,
                do_sample=False,
                pad_token_id=PAD,
            )
            found += out[:, longest:].tolist()
    return found


def context_caches(lm: LanguageModel, work: Work) -> list[Any]:
    """transformers: a cache of instruction and context for each context; the instruction is prefilled once."""
    first = DynamicCache()
    cached_step(lm, first, work.instruction, 0)
    caches = []
    for context, _ in work.contexts:
        cache = copy.deepcopy(first)
        cached_step(lm, cache, context, len(work.instruction))
        caches.append(cache)
    return caches


def by_cache(lm: LanguageModel, work: Work, caches: Sequence[Any]) -> list[list[int]]:
    """transformers: each question over its context's cache, which is cropped afterwards."""
    found = []
    for (context, questions), cache in zip(work.contexts, caches, strict=True):
        start = len(work.instruction) + len(context)
        for question in questions:
            answer, ids, at = [], question, start
            for _ in range(work.answer):
                answer.append(cached_step(lm, cache, ids, at))
                at, ids = at + len(ids), (answer[-1],)
            cache.crop(start - cache.get_seq_length())
            found.append(answer)
    return found


def measure_ippd(
    rounds: Annotated[int, typer.Option(help="Rounds per shape; medians are shown.", min=1)] = 3,
    dtype: AutoDtype = "auto",
    quick: Quick = False,
    device: Device = None,
    on_step: OnStep = unseen,
    shapes: Sequence[IPPDShape] = SHAPES,
) -> Report:
    """Many questions about common contexts, compared with transformers' generate in batches and with a prefix cache.

    The four data sets of the IPPD paper in their sizes, the longest scaled down. Example: `ragkv bench ippd --quick`
    """
    lm = random_llama(dtype, device)
    lm.eos_ids = frozenset()  # all answers are of one length
    lm.module.generation_config.eos_token_id = None
    on_step(described(lm))
    rows = []
    for shape in [each.shorter() for each in shapes] if quick else shapes:
        on_step(f"{shape} …")
        rows += measure_shape(lm, shape, 1 if quick else rounds, on_step)
    return Report(bench="ippd", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def work_of(shape: IPPDShape, vocabulary: int, other: int = 0) -> Work:
    """Random tokens of the shape's sizes; `other` ones on demand."""
    ids = partial(random_ids, vocabulary, torch.Generator().manual_seed(shape.number + 100 * other))
    counts = (shape.questions[i % len(shape.questions)] for i in range(shape.contexts))
    contexts = tuple((ids(shape.context), tuple(ids(shape.question) for _ in range(count))) for count in counts)
    return Work(ids(shape.instruction), contexts, shape.answer)


def measure_shape(lm: LanguageModel, shape: IPPDShape, rounds: int, on_step: OnStep) -> list[BenchRow]:
    """Questions per second for a model whose answers have no end tokens, beside both baselines, cold and warm."""
    work, before = (work_of(shape, lm.config.vocab_size, other) for other in (0, 1))
    questions = len(work.prompts)
    batch = _best_batch(lm, work, shape.batches)
    on_step(f"  generate takes {batch} prompts at a time")
    times: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        start, used = time.perf_counter(), time.process_time()
        done = run(*arguments)  # returns tokens on the host, so the device has finished
        times.setdefault(name, []).append(time.perf_counter() - start)
        on_step(f"  {name}: {times[name][-1]:.2f} s, of the processor {time.process_time() - used:.2f} s")
        return done

    for _ in range(rounds):
        runtime = Runtime(lm)
        by_ippd(before, runtime)  # a runtime that has run before, on other contexts: its passes are captured
        timed("ippd", by_ippd, work, runtime)
        caches = timed("caches", context_caches, lm, work)
        timed("one by one", by_cache, lm, work, caches)
        timed("ippd, contexts ready", by_ippd, work, runtime)
        del caches, runtime
        timed("generate", by_generate, lm, work, batch)
    times["prefix cache"] = [sum(both) for both in zip(times["caches"], times["one by one"], strict=True)]
    rates = {way: questions / statistics.median(seconds) for way, seconds in times.items()}
    scale = f", 1/{shape.divisor} scale" if shape.divisor > 1 else ""
    batched, cached = f"transformers generate by {batch}{scale}", f"transformers DynamicCache, one by one{scale}"
    pairs = (
        (" vs generate", "ippd", batched, "generate"),
        (" vs prefix cache", "ippd", cached, "prefix cache"),
        (", contexts ready, against generate", "ippd, contexts ready", batched, "generate"),
        (", contexts ready, against prefix cache", "ippd, contexts ready", cached, "one by one"),
    )
    return [
        BenchRow.of(
            f"shape {shape.number}{what}", rates[own], "questions/s", baseline, rates[other], rates[own] / rates[other]
        )
        for what, own, baseline, other in pairs
    ]


def _best_batch(lm: LanguageModel, work: Work, batches: Sequence[int]) -> int:
    """The batch with which `generate` answers most questions per second; afterwards everything is warm."""
    one = _first(work, 1)
    by_ippd(one, Runtime(lm))
    by_cache(lm, one, context_caches(lm, one))
    by_generate(lm, one, 1)
    rates: dict[int, float] = {}
    for batch in batches if len(batches) > 1 else ():
        part = _first(work, batch)
        start = time.perf_counter()
        by_generate(lm, part, batch)
        rates[batch] = len(part.prompts) / (time.perf_counter() - start)
    return max(batches, key=lambda batch: rates.get(batch, 0.0))


def _first(work: Work, count: int) -> Work:
    """The first `count` questions."""
    contexts = []
    for context, questions in work.contexts:
        if count > 0:
            contexts.append((context, questions[:count]))
        count -= len(questions)
    return Work(work.instruction, tuple(contexts), work.answer)
