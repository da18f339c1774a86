"""`ragkv bench` measures speed beside a baseline, in one run.

A benchmark is a function `measure_NAME` of `ragkv.benchmarks.speed`, whose parameters are the options of its command.
Those modules load torch and FAISS, which takes seconds, so a module is imported when its benchmark is run. The list of
benchmarks takes its sentences from the source.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ragkv.cli.console import note
from ragkv.cli.main import CommandGroup, require_values
from ragkv.cli.options import Json, Quiet, Threads, source_of
from ragkv.errors import UsageError

_SPEED = "ragkv.benchmarks.speed"
_MEASURED_IN = {
    "ttft": "inference",
    "decode": "inference",
    "llama-cpp": "llama_cpp",
    "vllm": "vllm",
    "batch": "batch",
    "ingest": "batch",
    "store": "storage",
}
"""The benchmarks, and the module of each."""


def _function(name: str) -> str:
    return f"measure_{name.replace('-', '_')}"


class _Benchmark(TyperCommand):
    """A benchmark that is imported when it is run or its options are shown."""

    @functools.cached_property
    def _imported(self) -> Any:
        measure = getattr(import_module(f"{_SPEED}.{_MEASURED_IN[str(self.name)]}"), _function(str(self.name)))
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        alone.command(self.name)(bench_command(str(self.name), measure))
        return require_values(typer.main.get_command(alone))

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self._imported.make_context(*arguments, **more)

    def get_params(self, ctx: Any) -> Any:
        return self._imported.get_params(ctx)


class _Benchmarks(CommandGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = {name: _benchmark(name) for name in _MEASURED_IN}


def _benchmark(name: str) -> _Benchmark:
    path = Path(str(import_module(_SPEED).__file__)).with_name(f"{_MEASURED_IN[name]}.py")
    functions = [each for each in ast.parse(path.read_text("utf-8")).body if isinstance(each, ast.FunctionDef)]
    [measure] = [each for each in functions if each.name == _function(name)]
    return _Benchmark(name, help=ast.get_docstring(measure), rich_markup_mode="markdown")


bench = typer.Typer(cls=_Benchmarks, no_args_is_help=True)


@bench.callback()
def choose() -> None:
    """Measure ragkv beside a baseline, in one run."""


_SIZES = ("tokens", "questions", "chunks", "rounds")
"""The options of benchmarks that `--quick` sets."""


def bench_command(name: str, measure: Callable[..., Any]) -> Callable[..., None]:
    """`measure` as a command: its parameters before `on_step` are options, and its report is printed."""

    @functools.wraps(measure)
    def command(*, ctx: typer.Context, threads: int | None, as_json: bool, quiet: bool, **options: Any) -> None:
        silent = quiet or as_json
        given = [each for each in _SIZES if each in options and source_of(ctx, each) == "COMMANDLINE"]
        if options.get("quick") and given:
            raise UsageError(f"--quick chooses --{given[0]} by itself; leave one of them out.")
        report = measure(**options, **({} if silent else {"on_step": note}))
        report.show(as_json=as_json, quiet=quiet)

    signature = inspect.signature(measure, eval_str=True)
    own = list(signature.parameters.values())
    own = own[: [each.name for each in own].index("on_step")]
    printing = [
        inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for each, kind, default in (("threads", Threads, None), ("as_json", Json, False), ("quiet", Quiet, False))
    ]
    printing.append(inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    command.__signature__ = signature.replace(parameters=[*own, *printing], return_annotation=None)  # type: ignore[attr-defined]
    return command
