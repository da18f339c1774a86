"""The form of a benchmark's result: each figure beside its baseline."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ragkv.cli.console import draw, note, plain, print_json
from ragkv.model.checkpoint import processor_units

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel


OnStep = Callable[[str], None]
"""Called with a line about each step of a benchmark."""
Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds: at most a minute on two cores.")]
Lengths = Annotated[str, typer.Option(help="Context lengths.")]
Rounds = Annotated[int, typer.Option(help="Rounds per length; medians are shown.", min=1)]
AutoDtype = Annotated[
    str, typer.Option(help="auto (bfloat16 if the processor supports it), float32, bfloat16, float16 or int8.")
]


def unseen(*_: object) -> None:
    """An `on_step` that shows nothing."""


def described(lm: LanguageModel) -> str:
    """The model's name, size and data type."""
    return f"{lm.checkpoint.name}: {lm.parameters / 1e6:.0f}M parameters, {lm.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One figure. `ratio` > 1 means better than the baseline."""

    name: str
    value: float
    unit: str
    baseline: str
    baseline_value: float
    ratio: float

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        unit: str,
        baseline: str,
        other: float,
        ratio: float | None = None,
        *,
        digits: int = 3,
        ratio_digits: int = 2,
    ) -> BenchRow:
        """`value` beside `other`; without a `ratio`, less is better.

        Rounded to `digits` decimals, or to three significant digits if those would show less.
        """
        return cls(
            name=name,
            value=_rounded(value, digits),
            unit=unit,
            baseline=baseline,
            baseline_value=_rounded(other, digits),
            ratio=_rounded(other / value if ratio is None else ratio, ratio_digits),
        )


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.3g}") if abs(value) < 10 ** (2 - digits) else round(value, digits)


def seconds_of(work: Callable[[], object], *, processor: bool = False) -> float:
    """How long `work` takes, or its processor time; freeing its result is not part of it."""
    now = time.process_time if processor else time.perf_counter
    start = now()
    result = work()
    end = now()
    del result
    return end - start


def alternating(
    works: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Mapping[str, Callable[[], object]] | None = None,
    processor: bool = False,
) -> dict[str, float]:
    """The median seconds of each work, or its `processor` time; they take turns in every round.

    The first round warms up; `before` runs before each work and is not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            if before is not None and name in before:
                before[name]()
            times[name].append(seconds_of(work, processor=processor))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of one run."""

    bench: str
    machine: str
    versions: dict[str, str]
    rows: tuple[BenchRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv bench NAME --json` prints."""
        return asdict(self)

    def show(self, *, as_json: bool, quiet: bool) -> None:
        """Print the report as JSON, or as a table with the machine below it."""
        if as_json:
            print_json(self.to_json())
            return
        table = plain("what", "value", "baseline", "", "ratio")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{shown(row.value)} {row.unit}",
                row.baseline,
                f"{shown(row.baseline_value)} {row.unit}",
                f"{row.ratio:,.{1 if row.ratio >= 10 else 2}f}x",
            )
        draw(table)
        self.note_machine(quiet=quiet)

    def note_machine(self, *, quiet: bool) -> None:
        if not quiet:
            note(f"{self.machine}; " + ", ".join(f"{name} {version}" for name, version in self.versions.items()))


def shown(number: float) -> str:
    """One decimal, or two significant digits below one."""
    return f"{number:,.1f}" if abs(number) >= 1 or number == 0 else f"{number:.2g}"


def machine(device: str) -> str:
    """A line that names the processor, its units for half types, its cores and the device."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 - not a file of ours
            name = next((line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")), name)
    except OSError:
        name = platform.machine()
    gpu = f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""
    units = " ".join(sorted(processor_units())) or "no units for half types"
    return f"{name} ({units}), {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}"


def versions(*packages: str) -> dict[str, str]:
    """The versions of the packages that a figure depends on."""
    return {package: version(package) for package in ("ragkv", "torch", "transformers", *packages)}
