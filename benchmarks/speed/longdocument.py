"""How soon is one long document prefilled: in one causal pass, by Star Attention, and by APB (APB §4.3, Figure 4)?

All end with the keys and values of every token, by the same model, kernels and run, in one process; blocks run one
after another, or on ranks side by side. APB has the lengths of `block_lengths`, and from 32K tokens on the paper's too;
Star Attention has the same blocks. Beside each ratio stands that of the operations which the formula counts
(`ragkv.model.apb.flops`). Time is that of one thread of a processor, or of the device where there is one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ragkv.benchmarks.speed.ippd import fast_dtype
from ragkv.benchmarks.speed.rankshare import rank_seconds
from ragkv.benchmarks.speed.report import Report, Row, machine, versions
from ragkv.benchmarks.speed.ttft import random_llama
from ragkv.model.apb import Book, KeyNorm, Layout, Lengths, Sequential, lengths_for, star
from ragkv.model.apb.flops import Shape, apb_flops, full_flops
from ragkv.model.language import LanguageModel

__all__ = ["measure"]

WARM = 256
"""Tokens of a first document, which is not counted."""
BLOCKS = 8
"""Of a document too short for blocks of `MOST`."""
MOST = 2048
"""Tokens of a block: what more tokens at a time pass from layer to layer leaves a processor's caches."""


def block_lengths(tokens: int) -> Lengths:
    """What `apb` is measured with: blocks of an eighth, but short ones, a quarter in the anchor, a sixteenth passed on.

    What is passed on is a share l_p/l_b of what one pass attends to, however short the blocks are. Half of the paper's
    eighth saves as much as blocks and anchors of half the length do (docs/results/speed/long-documents.md).
    """
    block = max(1, min(MOST, -(-tokens // BLOCKS)))
    return Lengths(block=block, anchor=block // 4, passing=block // 16)


def measure(
    lengths: Sequence[int],
    *,
    cut: Lengths | None = None,
    ranks: int = 2,
    rounds: int = 1,
    dtype: str = "auto",
    device: str | None = None,
    on_step: Callable[[str], None] | None = None,
) -> Report:
    """Medians over `rounds`, in seconds, for documents of each of `lengths` tokens.

    `cut`: the lengths of blocks for all of them, else `block_lengths`, and the paper's beside them. With 2 and more
    `ranks`, on a processor, the time of the slowest of so many too.
    """
    say = on_step or (lambda _: None)
    model = random_llama(fast_dtype() if dtype == "auto" else dtype, device)
    ranks = ranks if model.device.type == "cpu" else 1
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    with _one_thread():
        for tokens in (WARM, *lengths):
            ids = tuple(torch.randint(3, model.config.vocab_size, (tokens,), generator=generator).tolist())
            runs = _contenders(model, ids, cut or block_lengths(tokens), ranks)
            if cut is None and (papers := lengths_for(tokens)) is not None:
                runs["apb with the paper's lengths"] = _in_blocks(model, ids, papers)
            times = {name: [run() for _ in range(rounds)] for name, (run, _) in runs.items()}
            if tokens != WARM or WARM in lengths:
                say(f"{tokens} tokens: " + ", ".join(f"{name} {found[0]:.1f} s" for name, found in times.items()))
                seconds = {name: statistics.median(found) for name, found in times.items()}
                rows += _rows(tokens, seconds, {name: flops for name, (_, flops) in runs.items()})
    return Report(bench="apb", machine=machine(str(model.device)), versions=versions(), rows=tuple(rows))


def _contenders(
    model: LanguageModel, ids: tuple[int, ...], cut: Lengths, ranks: int
) -> dict[str, tuple[Callable[[], float], float]]:
    """By name, what measures its seconds once, and its operations; of several ranks those of the one with the most."""
    shape = Shape.of(model.config)
    found = {
        "full": (lambda: _timed(model, lambda: model.encode([ids])), full_flops(shape, len(ids))),
        "star": _in_blocks(model, ids, star(cut.block)),
        "apb": _in_blocks(model, ids, cut),
    }
    if ranks > 1:
        one = _book(model, ids, cut)
        shares = [apb_flops(shape, one.layout, only=range(r, one.layout.blocks, ranks)) for r in range(ranks)]
        found[f"apb on {ranks} ranks"] = (lambda: max(rank_seconds(one, ranks)), max(shares))
    return found


def _rows(tokens: int, seconds: dict[str, float], flops: dict[str, float]) -> list[Row]:
    rows = []
    others = [name for name in seconds if name not in ("full", "star", "apb")]
    pairs = [("apb", "full"), ("star", "full"), ("apb", "star"), *((name, "full") for name in others)]
    for name, baseline in (*pairs, *((name, "apb") for name in others)):
        head = f"{name}, {tokens} tokens vs {baseline}"
        rows.append(_row(head, seconds[name], "s", baseline, seconds[baseline]))
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


def _book(model: LanguageModel, ids: tuple[int, ...], cut: Lengths) -> Book:
    return Book(model=model, layout=Layout(tokens=len(ids), lengths=cut), ids=ids, compressor=KeyNorm())


def _in_blocks(model: LanguageModel, ids: tuple[int, ...], cut: Lengths) -> tuple[Callable[[], float], float]:
    """As in `_contenders`, of blocks that run one after another."""
    book = _book(model, ids, cut)

    def run() -> None:
        for _ in Sequential().run(book):
            continue

    return lambda: _timed(model, run), apb_flops(Shape.of(model.config), book.layout)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Ranks are threads of one torch thread each, and processor time says most where nobody spins: so have all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
