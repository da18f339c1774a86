"""Many questions at once: a window of answers is led together, so that they share the runtime's steps and its KV."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from ragkv.errors import AnswerInterruptedError, KVMismatchError, MissingExtraError, ModelLoadError
from ragkv.index.task import Asked
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.index.index import Index
    from ragkv.runtime import Runtime

__all__ = ["Answers", "AsyncAnswers", "Result"]

AT_A_TIME = 16
"""Questions that are prepared between two steps: the first answers need not wait for the last retrieval."""

_LOOK = 0.5
"""Seconds after which a thread whose results nobody takes looks whether its index is still open."""

_FOR_ALL = (AnswerInterruptedError, KVMismatchError, MissingExtraError, ModelLoadError)
"""What every other question would meet too: it is raised, and ends them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one question; `number` counts the questions from 0.

    Either `answer` or `error` is there. `tokens` were generated.
    """

    number: int
    question: str
    answer: Answer | None = None
    error: Exception | None = None
    tokens: int = 0


class Answers(Iterator[Result]):
    """The results of many questions, each as soon as it is there; a context manager, whose end cancels the rest.

    `start` makes the stream of a question, `runtime` answers them. Questions are taken from the iterable as there is
    room for them: their rows and own KV within the runtime's limits, their chunks' KV within `memory_budget`. Whoever
    iterates drives the runtime; nothing goes on between two results unless others wait for it.

    An error of one question is its result. One that all would meet (the model cannot be loaded, the index is closed)
    is raised, and so is one of the iterable itself.
    """

    def __init__(
        self,
        start: Callable[[str | Asked], AnswerStream],
        questions: Iterable[str | Asked],
        runtime: Callable[[], Runtime],
    ) -> None:
        self._start = start
        self._questions = enumerate(questions)
        self._runtime = runtime
        self._cancelled = threading.Event()
        self._running: list[_One] = []
        self._results = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        return next(self._results)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the iteration at the next token, from any thread."""
        self._cancelled.set()
        for one in list(self._running):
            one.cancel()

    def close(self) -> None:
        """End the iteration now, and all answers on their way; for the thread that iterates."""
        self._results.close()

    def in_order(self) -> list[Answer]:
        """All answers in the order of their questions; the first error ends the rest and is raised."""
        found: dict[int, Answer] = {}
        with self:
            for result in self:
                if result.error is not None:
                    raise result.error
                assert result.answer is not None
                found[result.number] = result.answer
        return [found[number] for number in sorted(found)]

    def _run(self) -> Generator[Result]:
        running = self._running
        waiting: _One | None = None  # found its chunks, and waits for room for their KV
        more = True
        try:
            while (more or waiting or running) and not self._cancelled.is_set():
                for _ in range(AT_A_TIME):
                    if running and not self._runtime().has_room:
                        break
                    one = waiting or _next(self._questions)
                    waiting = None
                    if one is None:
                        more = False
                        break
                    running.append(one)  # whatever happens, it is closed
                    result = one.begin(self._start, wait=len(running) == 1)
                    if one.begun:
                        continue
                    running.remove(one)
                    if result is None:
                        waiting = one
                        break
                    yield result
                    if self._cancelled.is_set():
                        return
                if running and not self._runtime().advance():
                    running[0].wait()  # for what others hold
                for one in list(running):
                    if (result := one.collect()) is not None:
                        running.remove(one)
                        yield result
        finally:
            for one in running:
                one.close()


class _One:
    """One question of many, from its number to its result."""

    def __init__(self, number: int, asked: str | Asked) -> None:
        self._number = number
        self._asked = asked
        self._stream: AnswerStream | None = None
        self.begun = False

    def begin(self, start: Callable[[str | Asked], AnswerStream], *, wait: bool) -> Result | None:
        """Start it, if there is room: then it has `begun`. The result when it failed."""
        try:
            if self._stream is None:
                self._stream = start(self._asked)
            self.begun = self._stream.begin(wait=wait)
        except Exception as error:
            return self._failed(error)
        return None

    def collect(self) -> Result | None:
        """The result, if it is there."""
        assert self._stream is not None
        try:
            if not self._stream.collect():
                return None
        except Exception as error:
            return self._failed(error)
        answer = self._stream.answer
        return Result(number=self._number, question=answer.question, answer=answer, tokens=self._stream.tokens)

    def wait(self) -> None:
        """Return when there is something to collect."""
        assert self._stream is not None
        self._stream.wait()

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _failed(self, error: Exception) -> Result:
        self.close()
        if isinstance(error, _FOR_ALL):
            raise error
        question = self._asked if isinstance(self._asked, str) else self._asked.get("question", "")
        tokens = 0 if self._stream is None else self._stream.tokens
        return Result(number=self._number, question=question, error=error, tokens=tokens)


def _next(questions: Iterator[tuple[int, str | Asked]]) -> _One | None:
    found = next(questions, None)
    return None if found is None else _One(*found)


class AsyncAnswers:
    """`Answers` for `async for`: a thread of its own leads them, so that the loop stays free.

    When the iterating task is cancelled or leaves early, the rest is cancelled and the thread waited for. At most
    `AT_A_TIME` results wait for a task that is slow to take them; then no more is generated.
    """

    def __init__(self, index: Index, start: Callable[[], Answers]) -> None:
        self._index = index
        self._start = start
        self._results = self._run()

    def __aiter__(self) -> AsyncIterator[Result]:
        return self._results

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the iteration and all answers on their way, and wait until the thread is done."""
        await self._results.aclose()

    async def in_order(self) -> list[Answer]:
        """As `Answers.in_order`."""
        found: dict[int, Answer] = {}
        async with self:
            async for result in self:
                if result.error is not None:
                    raise result.error
                assert result.answer is not None
                found[result.number] = result.answer
        return [found[number] for number in sorted(found)]

    async def _run(self) -> AsyncGenerator[Result]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Result | BaseException | None] = asyncio.Queue()
        room = threading.Semaphore(AT_A_TIME)
        left = threading.Event()
        answers: Answers | None = None

        def tell(item: Result | BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:  # the loop was closed, so nobody waits any more
                left.set()

        def work() -> None:
            nonlocal answers
            end: BaseException | None = None
            try:
                with self._start() as answers:
                    for result in answers:
                        tell(result)
                        while not (left.is_set() or room.acquire(timeout=_LOOK)):
                            self._index.require_open()
                        if left.is_set():
                            break
            except BaseException as error:
                end = error
            tell(end)

        # not the loop's executor: its few threads would let only as many questions into a batch
        thread = self._index.start_thread(partial(contextvars.copy_context().run, work), name="ragkv-answers")
        ended = False
        try:
            while not ended:
                item = await queue.get()
                if isinstance(item, Result):
                    yield item
                    room.release()
                    continue
                ended = True
                if item is not None:
                    raise item
        finally:
            left.set()
            if answers is not None:
                answers.cancel()
            while not ended:
                room.release()
                ended = not isinstance(await queue.get(), Result)
            thread.join()
