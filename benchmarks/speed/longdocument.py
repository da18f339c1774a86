"""How soon is one long document prefilled: in one causal pass, by Star Attention, and by APB (APB §4.3, Figure 4)?

All three end with the keys and values of every token, by the same model, kernels and run, in one process; blocks run
one after another. APB has the paper's lengths at 32K tokens and their proportions below: 8 blocks, an anchor of a
quarter, and an eighth passed on. Star Attention has the same blocks. Beside each ratio stands that of the operations
which the formula counts (`ragkv.model.apb.flops`). Time is that of the processor, or of the device where there is one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from ragkv.benchmarks.speed.ippd import fast_dtype
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import random_llama
from ragkv.model.apb import Book, KeyNorm, Layout, Lengths, Sequential, scaled_lengths, star
from ragkv.model.apb.flops import Shape, apb_flops, full_flops
from ragkv.model.language import LanguageModel

__all__ = ["measure"]

WARM = 256
"""Tokens of a first document, which is not counted."""


def measure(
    lengths: Sequence[int],
    *,
    rounds: int = 1,
    dtype: str = "auto",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds`, in seconds, for documents of each of `lengths` tokens."""
    say = on_step or (lambda _: None)
    model = random_llama(fast_dtype() if dtype == "auto" else dtype, device)
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for tokens in (WARM, *lengths):
        ids = tuple(torch.randint(3, model.config.vocab_size, (tokens,), generator=generator).tolist())
        cut = scaled_lengths(tokens)
        times: dict[str, list[float]] = {"full": [], "star": [], "apb": []}
        for _ in range(rounds):
            times["full"].append(_timed(model, lambda ids=ids: model.encode([ids])))  # type: ignore[misc]
            times["star"].append(_timed(model, lambda ids=ids, cut=cut: _in_blocks(model, ids, star(cut.block))))  # type: ignore[misc]
            times["apb"].append(_timed(model, lambda ids=ids, cut=cut: _in_blocks(model, ids, cut)))  # type: ignore[misc]
        if tokens != WARM or WARM in lengths:
            say(f"{tokens} tokens: " + ", ".join(f"{name} {found[0]:.1f} s" for name, found in times.items()))
            rows += _rows(model, tokens, cut, {name: statistics.median(found) for name, found in times.items()})
    return Report(bench="apb", machine=machine(str(model.device)), versions=versions(), rows=tuple(rows))


def _rows(model: LanguageModel, tokens: int, cut: Lengths, seconds: dict[str, float]) -> list[Row]:
    shape = Shape.of(model.config)
    flops = {
        "full": full_flops(shape, tokens),
        "star": apb_flops(shape, Layout(tokens=tokens, lengths=star(cut.block))),
        "apb": apb_flops(shape, Layout(tokens=tokens, lengths=cut)),
    }
    rows = []
    for name, baseline in (("apb", "full"), ("star", "full"), ("apb", "star")):
        head = f"{name}, {tokens} tokens vs {baseline}"
        mine, other = seconds[name], seconds[baseline]
        rows.append(_row(head, mine, "s", baseline, other))
        rows.append(_row(f"{head}: operations", flops[name] / 1e12, "Tflop", baseline, flops[baseline] / 1e12))
    return rows


def _row(name: str, value: float, unit: str, baseline: str, other: float) -> Row:
    return Row(
        name=name,
        value=round(value, 3),
        unit=unit,
        baseline=baseline,
        baseline_value=round(other, 3),
        ratio=round(other / value, 2),
    )


def _in_blocks(model: LanguageModel, ids: tuple[int, ...], cut: Lengths) -> None:
    layout = Layout(tokens=len(ids), lengths=cut)
    for _ in Sequential().run(Book(model=model, layout=layout, ids=ids, compressor=KeyNorm())):
        continue


def _timed(model: LanguageModel, work: Callable[[], object]) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(model.device)
        return time.perf_counter() - started
    started = time.process_time()
    work()
    return time.process_time() - started
