"""How many questions about common contexts are answered in a second (IPPD §5, Table 1)?

Baselines, same model, dtype, machine and run, in turns: transformers' `generate` on full prompts in batches, padded on
the left, sdpa; and one question at a time over a `DynamicCache` of its context, which is prefilled once and cropped
after every question. All contenders answer the same questions with the same number of tokens; end tokens count as any
other. The paper's contexts are random tokens here: what a pass costs does not depend on the text.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import random_llama
from ragkv.engines import ContextChunk, Request, make_engine
from ragkv.model.language import LanguageModel
from ragkv.runtime import Generation, Runtime

__all__ = ["SHAPES", "Contender", "Shape", "Work", "fast_dtype", "measure", "work_of"]

PAD = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
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

    def shorter(self) -> Shape:
        """For a quick run: half as many contexts, what was shortened halved once more, one size of batches."""
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
    Shape(
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
    Shape(
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
    Shape(
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
    Shape(
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
    """What is asked: each context with its questions."""

    instruction: tuple[int, ...]
    contexts: tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
    answer: int

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The full prompt of every question."""
        return [
            (*self.instruction, *context, *question) for context, questions in self.contexts for question in questions
        ]


class Contender:
    """One way to answer; every method gives the new tokens of each question, in order."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def ippd(self, work: Work, runtime: Runtime) -> list[list[int]]:
        """ragkv: all questions at once; contexts that `runtime` has met are there already."""
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

    def generate(self, work: Work, batch: int) -> list[list[int]]:
        """transformers: full prompts, padded on the left, `batch` at a time."""
        prompts, found = work.prompts, []
        with self.lm.plain() as plain:
            for at in range(0, len(prompts), batch):
                part = prompts[at : at + batch]
                longest = max(map(len, part))
                ids = torch.tensor([[PAD] * (longest - len(p)) + list(p) for p in part], device=self.lm.device)
                mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in part], device=self.lm.device)
                out = plain.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=work.answer,
                    do_sample=False,
                    pad_token_id=PAD,
                )
                found += out[:, longest:].tolist()
        return found

    def caches(self, work: Work) -> list[Any]:
        """transformers: a cache of instruction and context for each context; the instruction is prefilled once."""
        from transformers import DynamicCache

        first = DynamicCache()
        self._forward(first, work.instruction, 0)
        caches = []
        for context, _ in work.contexts:
            cache = copy.deepcopy(first)
            self._forward(cache, context, len(work.instruction))
            caches.append(cache)
        return caches

    def one_by_one(self, work: Work, caches: Sequence[Any]) -> list[list[int]]:
        """transformers: each question over its context's cache, which is cropped afterwards."""
        found = []
        for (context, questions), cache in zip(work.contexts, caches, strict=True):
            start = len(work.instruction) + len(context)
            for question in questions:
                answer, ids, at = [], question, start
                for _ in range(work.answer):
                    answer.append(self._forward(cache, ids, at))
                    at, ids = at + len(ids), (answer[-1],)
                cache.crop(start - cache.get_seq_length())
                found.append(answer)
        return found

    def _forward(self, cache: Any, ids: Sequence[int], at: int) -> int:
        positions = torch.arange(at, at + len(ids), device=self.lm.device)[None]
        with self.lm.plain() as plain:
            logits = plain(
                input_ids=torch.tensor([list(ids)], device=self.lm.device),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            return int(logits[0, -1].argmax())


def measure(
    *,
    shapes: Sequence[Shape] = SHAPES,
    rounds: int = 3,
    dtype: str = "auto",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Questions per second, medians over `rounds` of each shape; `dtype` auto is bf16 where the processor has it."""
    say = on_step or (lambda _: None)
    lm = random_llama(fast_dtype() if dtype == "auto" else dtype, device)
    lm.eos_ids = frozenset()  # all answers are of one length
    lm.module.generation_config.eos_token_id = None
    say(f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.dtype}")
    rows = []
    for shape in shapes:
        say(f"{shape} …")
        rows += _measure_shape(lm, shape, rounds, say)
    return Report(bench="ippd", machine=machine(str(lm.device)), versions=versions(), rows=tuple(rows))


def work_of(shape: Shape, vocabulary: int) -> Work:
    """Random tokens of the shape's sizes."""
    generator = torch.Generator().manual_seed(shape.number)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist())

    counts = (shape.questions[i % len(shape.questions)] for i in range(shape.contexts))
    contexts = tuple((ids(shape.context), tuple(ids(shape.question) for _ in range(count))) for count in counts)
    return Work(ids(shape.instruction), contexts, shape.answer)


def _measure_shape(lm: LanguageModel, shape: Shape, rounds: int, say: Callable[[str], None]) -> list[Row]:
    work, contender = work_of(shape, lm.config.vocab_size), Contender(lm)
    questions = len(work.prompts)
    batch = _best_batch(contender, work, shape.batches)
    say(f"  generate takes {batch} prompts at a time")
    times: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        start, used = time.perf_counter(), time.process_time()
        done = run(*arguments)  # ends with tokens on the host, so the device is done
        times.setdefault(name, []).append(time.perf_counter() - start)
        say(f"  {name}: {times[name][-1]:.2f} s, of the processor {time.process_time() - used:.2f} s")
        return done

    for _ in range(rounds):
        runtime = Runtime(lm)
        timed("ippd", contender.ippd, work, runtime)
        caches = timed("caches", contender.caches, work)
        timed("one by one", contender.one_by_one, work, caches)
        timed("ippd, contexts ready", contender.ippd, work, runtime)
        del caches, runtime
        timed("generate", contender.generate, work, batch)
    whole = [encoding + asking for encoding, asking in zip(times["caches"], times["one by one"], strict=True)]
    scale = f", 1/{shape.divisor} scale" if shape.divisor > 1 else ""
    batched, cached = f"transformers generate by {batch}{scale}", f"transformers DynamicCache, one by one{scale}"
    name = f"shape {shape.number}"
    return [
        _row(f"{name} vs generate", questions, times["ippd"], batched, times["generate"]),
        _row(f"{name} vs prefix cache", questions, times["ippd"], cached, whole),
        _row(
            f"{name}, contexts ready, against generate",
            questions,
            times["ippd, contexts ready"],
            batched,
            times["generate"],
        ),
        _row(
            f"{name}, contexts ready, against prefix cache",
            questions,
            times["ippd, contexts ready"],
            cached,
            times["one by one"],
        ),
    ]


def _best_batch(contender: Contender, work: Work, batches: Sequence[int]) -> int:
    """The batch with which `generate` answers most questions in a second; everything is warm afterwards."""
    one = _first(work, 1)
    contender.ippd(one, Runtime(contender.lm))
    contender.one_by_one(one, contender.caches(one))
    contender.generate(one, 1)
    rates: dict[int, float] = {}
    for batch in batches if len(batches) > 1 else ():
        part = _first(work, batch)
        start = time.perf_counter()
        contender.generate(part, batch)
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


def _row(name: str, questions: int, own: list[float], baseline: str, other: list[float]) -> Row:
    value, baseline_value = questions / statistics.median(own), questions / statistics.median(other)
    return Row(
        name=name,
        value=round(value, 2),
        unit="questions/s",
        baseline=baseline,
        baseline_value=round(baseline_value, 2),
        ratio=round(value / baseline_value, 2),
    )


def fast_dtype() -> str:
    return "bfloat16" if torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() else "float32"
