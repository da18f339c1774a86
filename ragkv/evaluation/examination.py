"""Contenders answer tasks: each chunk is encoded once, and every answer is kept, so that a stopped run continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ragkv.engines import Engine
from ragkv.errors import PromptTooLongError, UsageError
from ragkv.evaluation.answerer import Contender, by_model
from ragkv.evaluation.example import Example, Task
from ragkv.evaluation.journal import Ledger, digest_of
from ragkv.evaluation.loadedmodel import LoadedModel
from ragkv.evaluation.metric import score
from ragkv.evaluation.progress import Progress
from ragkv.evaluation.result import Result, Row, rows_of
from ragkv.evaluation.source import OwnSource, Source
from ragkv.runtime import Generation, runtime_of

__all__ = ["examine", "run"]

SCHEME = 1
"""Increase it when an engine, a codec or the prompt answers differently with the same settings; kept answers expire."""


def run(
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    *,
    source: Source | None = None,
    seed: int = 0,
    baseline: str | None = "full",
    max_new_tokens: int | None = None,
    work: Path | None = None,
    on_progress: Progress | None = None,
) -> list[Row]:
    """The figures of every contender on every task. `seed` draws the intervals; `baseline` names a contender's label.

    The other arguments are those of `examine`.
    """
    results = examine(
        tasks, contenders, source=source, max_new_tokens=max_new_tokens, work=work, on_progress=on_progress
    )
    return rows_of(tasks, contenders, results, seed=seed, baseline=baseline)


def examine(
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    *,
    source: Source | None = None,
    max_new_tokens: int | None = None,
    work: Path | None = None,
    on_progress: Progress | None = None,
) -> list[Result]:
    """Greedy answers of all contenders to all tasks.

    With `source` None, examples bring their chunks; contenders that need an embedder need an `OwnSource` with one.
    `max_new_tokens` None means the task's own. Answers are kept in the folder `work`, under a digest of everything that
    they depend on, and are not computed again; None keeps nothing. Raises UsageError for two tasks of the same name, or
    if a contender lacks something.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise UsageError(f"Two tasks have one name: {', '.join(sorted(task.name for task in tasks))}; give each once.")
    source = source or OwnSource()
    for contender in contenders:
        source.check(contender)
    total = len(contenders) * sum(len(task.examples) for task in tasks)
    done = 0
    results: list[Result] = []
    for (model, dtype), numbers in by_model(contenders):
        loaded = source.model(model, dtype)
        runs = [_ContenderRun(contenders[number], loaded, source, work) for number in numbers]
        for task in tasks:
            limit = max_new_tokens or task.max_new_tokens
            for example in task.examples:
                for each in runs:
                    if on_progress is not None:
                        on_progress(done, total, f"{task.name}, {each.contender.label}")
                    results.append(each.answer(task, example, limit))
                    done += 1
    if on_progress is not None:
        on_progress(done, total, "")
    return results


class _ContenderRun:
    """A contender with its engine, its model, and the answers that are kept."""

    def __init__(self, contender: Contender, loaded: LoadedModel, source: Source, work: Path | None) -> None:
        self.contender = contender
        self._engine: Engine = contender.make()
        self._loaded = loaded
        self._source = source
        self._work = work
        self._ledgers: dict[str, Ledger] = {}

    def answer(self, task: Task, example: Example, max_new_tokens: int) -> Result:
        ledger = self._ledger(task)
        key = "" if ledger is None else self._key(example, max_new_tokens)
        known = None if ledger is None else ledger.get(key)
        if known is None:
            known = self._answer(example, max_new_tokens)
            if ledger is not None:
                ledger.put(key, task=task.name, example=example.example_id, **known)
        text = known["answer"]
        return Result(
            task=task.name,
            example=example,
            contender=self.contender,
            text=text or "",
            score=None if text is None else score(task.metric, text, example),
            chunks=known["chunks"],
            trace=tuple((piece, winner) for piece, winner in known.get("trace", ())),
        )

    def _answer(self, example: Example, max_new_tokens: int) -> dict[str, Any]:
        """The answer as plain data. `answer` is None if the prompt is too long for the model."""
        contender, model = self.contender, self._loaded.model
        placed = self._source.chunks(self._loaded, example, contender)
        reader = self._loaded.reader(contender.prompt, contender.codec)
        read = [position for position, _ in placed]
        read = read if self._engine.most_chunks is None else read[-self._engine.most_chunks :]
        try:
            request = reader.request(
                self._engine, example.question, [chunk for _, chunk in placed], whole=self._source.whole
            )
            tokens = list(runtime_of(model).decode(self._engine, request, Generation(max_new_tokens=max_new_tokens)))
        except PromptTooLongError:
            return {"answer": None, "chunks": len(read)}
        found: dict[str, Any] = {"answer": "".join(token.text for token in tokens).strip(), "chunks": len(read)}
        if self._engine.counts_winners:
            found["trace"] = [(t.text, None if t.winner is None else read[t.winner]) for t in tokens]
        return found

    def _key(self, example: Example, max_new_tokens: int) -> str:
        contender = self.contender
        whole = {"heads": self._loaded.heads} if self._engine.whole_documents else {}
        return digest_of(
            {
                **whole,
                "scheme": SCHEME,
                "model": self._loaded.fingerprint,
                "engine": contender.engine,
                "config": asdict(self._engine.config),
                "codec": contender.codec,
                "prompt": contender.prompt.facts(),
                "question": example.question,
                "chunks": self._source.facts(self._loaded, example, contender),
                "max_new_tokens": max_new_tokens,
            }
        )

    def _ledger(self, task: Task) -> Ledger | None:
        """A file per task and contender with a readable name. Names may collide, since keys are unique."""
        if self._work is None:
            return None
        if task.name not in self._ledgers:
            words = (task.name, self.contender.label, self.contender.codec, self.contender.scoring)
            name = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words)
            self._ledgers[task.name] = Ledger(self._work / "answers" / f"{name[:120]}.jsonl")
        return self._ledgers[task.name]
