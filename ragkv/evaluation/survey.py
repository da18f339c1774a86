"""All families of the installed transformers, judged one by one in a process of its own: a crash or a hang is a row."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv.evaluation.family import Verdict, examine
from ragkv.model.small import any_tokenizer, families, parameters, small_model

__all__ = ["RECORD", "Survey", "choose", "judge", "survey"]

RECORD = Path(__file__).parent / "families.json"
"""What the whole survey found for the version of transformers that ragkv was released with."""
_MOST_PARAMETERS = 120_000_000
PATIENCE = 900.0
"""Seconds after which a family that has not come to an end is given up; it takes a few on an idle core."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The rows of a survey, and the version of transformers that they are true for."""

    transformers: str
    verdicts: tuple[Verdict, ...]

    @classmethod
    def recorded(cls) -> Survey:
        """The survey that came with this version of ragkv."""
        return cls.from_json(json.loads(RECORD.read_text(encoding="utf-8")))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Survey:
        return cls(found["transformers"], tuple(Verdict.from_json(row) for row in found["families"]))

    def to_json(self) -> dict[str, Any]:
        """As `ragkv models --json` prints it, and as the record keeps it."""
        return {"transformers": self.transformers, "families": [verdict.to_json() for verdict in self.verdicts]}

    def exact(self, engine: str) -> int:
        """How many families an engine answers exactly for."""
        return sum(verdict.engine(engine) == "exact" for verdict in self.verdicts)


def choose(names: str) -> list[str]:
    """The families of a list with commas, or "all" of them; ConfigError for one that transformers does not know."""
    known = families()
    if names == "all":
        return known
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise ConfigError(
            f"The installed transformers has no decoder family {unknown[0]!r}; `--families all` tries all that it has."
        )
    return list(dict.fromkeys(chosen))


def survey(names: Sequence[str], *, seed: int = 0, patience: float = PATIENCE) -> Iterator[Verdict]:
    """Judge small random models of these families, in the order given."""
    worker: _Worker | None = None
    try:
        for name in names:
            worker = worker or _Worker()
            told = worker.ask((name, seed), patience)
            if isinstance(told, str):  # the process is gone
                worker.end()
                worker = None
                yield Verdict.refused(name, told)
            else:
                yield told
    finally:
        if worker is not None:
            worker.end()


def judge(family: str, seed: int = 0) -> Verdict:
    """The verdict on one family, in this process. Whatever goes wrong in it is a refusal with its reason."""
    try:
        size = parameters(family, size=seed)
        if size > _MOST_PARAMETERS:
            return Verdict.refused(family, f"Not tried: no small model of it can be made ({size:,} parameters).")
        model = small_model(family, seed=seed, size=seed)
    except Exception as error:  # of a configuration whose fields depend on each other in a way of their own
        return Verdict.refused(family, f"Not tried: no small model of it can be made ({_said(error)}).")
    try:
        return examine(family, model, any_tokenizer(), seed=seed)
    except Exception as error:
        return Verdict.refused(family, f"Not judged: {_said(error)}.")


class _Worker:
    """A process that judges one family after the other."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, question: tuple[str, int], patience: float) -> Verdict | str:
        """The verdict, or why there is none."""
        try:
            self._pipe.send(question)
            if not self._pipe.poll(patience):
                return f"Not judged: it came to no end within {patience:.0f} s."
            found: Verdict = self._pipe.recv()
            return found
        except (EOFError, OSError):
            self._process.join()
            return f"Not judged: the process that tried it ended (code {self._process.exitcode})."

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _work(pipe: Connection) -> None:
    """Judge what is asked until nobody asks; what libraries print goes nowhere."""
    import torch

    from ragkv.model.loading import quiet_loading

    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with _ending(pipe), quiet_loading(reports=False):
        while True:
            family, seed = pipe.recv()
            pipe.send(judge(family, seed))


@contextmanager
def _ending(pipe: Connection) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, KeyboardInterrupt):
        pipe.close()


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}"
