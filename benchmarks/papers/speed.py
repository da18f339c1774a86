"""What the papers' speed is measured with: common contexts (IPPD), long documents in blocks (APB), and transformers.

Common contexts (IPPD §5, Table 1): the baselines are transformers' `generate` on full prompts in batches, padded on the
left, sdpa; and one question at a time over a `DynamicCache` of its context, which is prefilled once and cropped after
every question. All answer the same questions with the same number of tokens; end tokens count as any other. The paper's
contexts are replaced by random tokens, because the cost of a pass does not depend on the text.

A long document (APB §4.3, Figure 4) is prefilled in one causal pass, by Star Attention, and by APB, whose blocks run
one after another. All end with the keys and values of every token, with the same model, kernels and run.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from ragkv.benchmarks.speed.inference import cached_step, random_ids, transformers_model
from ragkv.benchmarks.speed.report import BenchRow, OnStep
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.model.apb.compressors import KeyNorm
from ragkv.model.apb.document import BlockLayout, BlockLengths, LongDocument, SequentialExecutor, star
from ragkv.model.language_model import LanguageModel
from ragkv.runtime import Generation, Runtime

PAD = 0


@dataclass(frozen=True, slots=True)
class IPPDShape:
    """A data set of the paper's: tokens of each part, contexts, and how many questions they have, in turns.

    `batches` are the sizes that are tried for `generate`, of which the best counts.
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

    def shorter(self) -> IPPDShape:
        """For a run in miniature: an eighth of the context and of a long instruction, half as many, one batch size."""
        return replace(
            self,
            instruction=self.instruction // (8 if self.instruction > 1000 else 1),
            context=self.context // 8,
            contexts=(self.contexts + 1) // 2,
            batches=self.batches[:1],
        )


# tokens of instruction, context, question and answer; contexts, questions of each, batch sizes
SHAPES = (
    IPPDShape(1, "few shots (NarrativeQA)", 2754, 737, 12, 6, 2, (30,), (8, 4, 16)),
    IPPDShape(2, "short contexts (SQuAD)", 47, 178, 13, 4, 8, (9,), (32, 8, 16)),
    IPPDShape(3, "one-token answers (RACE)", 40, 344, 40, 1, 8, (3, 4), (8, 4, 16)),
    IPPDShape(4, "a long context (LongHealth)", 73, 11720, 73, 1, 1, (20,), (4, 1, 2)),
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
    prompts, answers = work.prompts, []
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
            answers += out[:, longest:].tolist()
    return answers


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
    answers = []
    for (context, questions), cache in zip(work.contexts, caches, strict=True):
        start = len(work.instruction) + len(context)
        for question in questions:
            answer, ids, at = [], question, start
            for _ in range(work.answer):
                answer.append(cached_step(lm, cache, ids, at))
                at, ids = at + len(ids), (answer[-1],)
            cache.crop(start - cache.get_seq_length())
            answers.append(answer)
    return answers


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
    batched, cached = f"transformers generate by {batch}", "transformers DynamicCache, one by one"
    pairs = (
        (" vs generate", "ippd", batched, "generate"),
        (" vs prefix cache", "ippd", cached, "prefix cache"),
        (", contexts ready, against generate", "ippd, contexts ready", batched, "generate"),
        (", contexts ready, against prefix cache", "ippd, contexts ready", cached, "one by one"),
    )
    return [
        BenchRow.of(f"{shape.name}{what}", rates[own], "questions/s", baseline, rates[other], rates[own] / rates[other])
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


BLOCKS, MAX_BLOCK_TOKENS = 8, 2048
"""Blocks of a document that is too short for blocks of the most tokens: with more, the activations between layers no
longer fit a CPU's caches.
"""


def block_lengths(tokens: int) -> BlockLengths:
    """The lengths to measure `apb` with where the paper names none: a quarter of a block in the anchor, a sixteenth
    passed on.

    The KV passed on is a share l_p/l_b of what one pass attends to, however short the blocks are. Halving the paper's
    eighth saves as much as halving the lengths of blocks and anchors (docs/results/speed/long-documents.md).
    """
    block = max(1, min(MAX_BLOCK_TOKENS, -(-tokens // BLOCKS)))
    return BlockLengths(block=block, anchor=block // 4, passing=block // 16)


def apb_entrants(model: LanguageModel, ids: tuple[int, ...], lengths: BlockLengths) -> dict[str, Callable[[], float]]:
    """Name -> a function that measures its seconds once."""

    def in_blocks(lengths: BlockLengths) -> None:
        layout = BlockLayout(tokens=len(ids), lengths=lengths)
        for _ in SequentialExecutor().run(LongDocument(model=model, layout=layout, ids=ids, compressor=KeyNorm())):
            continue

    works: dict[str, Callable[[], object]] = {
        "full": lambda: model.encode([ids]),
        "star": lambda: in_blocks(star(lengths.block)),
        "apb": lambda: in_blocks(lengths),
    }
    return {name: partial(_seconds, model, work) for name, work in works.items()}


def _seconds(model: LanguageModel, work: Callable[[], object]) -> float:
    """The device's seconds, or those of the processor."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(model.device)
        return time.perf_counter() - started
    started = time.process_time()
    work()
    return time.process_time() - started


def sequential_seconds(lm: LanguageModel, prompt: Sequence[int], answer: int) -> tuple[float, float]:
    """Seconds to an answer's first token and last, by transformers: the prompt in one pass, then a DynamicCache."""
    cache, started = DynamicCache(config=lm.config), time.perf_counter()
    token = cached_step(lm, cache, prompt, 0)
    first = time.perf_counter() - started
    for at in range(len(prompt), len(prompt) + answer - 1):
        token = cached_step(lm, cache, [token], at)
    return first, time.perf_counter() - started
