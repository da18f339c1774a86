"""Answer many questions at once, and answer from an event loop.

A batch advances a window of answers together, so that they share the runtime's forward passes and its KV. For an event
loop an answer is decoded in a thread, and cancelled when the caller is gone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ragkv.errors import AnswerInterruptedError, KVMismatchError, MissingExtraError, ModelLoadError
from ragkv.index.answer import AnswerBackend, AnswerStream, validate_task
from ragkv.question import Asked, text_of
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.config import IndexConfig
    from ragkv.index.index import Index
    from ragkv.types import Source, TracedToken

T = TypeVar("T")

AT_A_TIME = 16
"""Questions prepared between two steps, so that the first answers do not wait for the last retrieval."""

_LOOK = 0.5
"""Seconds after which a thread that waits for its results to be taken checks whether its index is still open."""

_FOR_ALL = (AnswerInterruptedError, KVMismatchError, MissingExtraError, ModelLoadError)
"""Errors that every other question would meet too; they are raised and end the iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one question; `number` counts the questions from 0.

    Either `answer` or `error` is set. `tokens` is the number of generated tokens.
    """

    number: int
    question: str
    answer: Answer | None = None
    error: Exception | None = None
    tokens: int = 0


def _answer_of(result: Result) -> Answer:
    if result.error is not None:
        raise result.error
    assert result.answer is not None
    return result.answer


class Answers(Iterator[Result]):
    """An iterator of the results of many questions in order of completion; leaving its context cancels the rest.

    `config` has the defaults of the common `options`, which a question may override. Questions are taken from the
    iterable as there is room: sequences and own KV within the runtime's limits, chunk KV within `memory_budget`. The
    iterating thread drives the runtime, so nothing happens between two results unless another thread drives it.

    An error of one question is its result. An error that all would meet (the model cannot be loaded, the index is
    closed) is raised, and so is an error of the iterable.
    """

    def __init__(
        self,
        backend: AnswerBackend,
        config: IndexConfig,
        questions: Iterable[Asked],
        options: Mapping[str, Any],
    ) -> None:
        validate_task(config, "?", **options)  # options that are wrong for all questions raise now
        self._backend = backend
        self._start = lambda asked: AnswerStream(backend, validate_task(config, asked, **options))
        self._questions = enumerate(questions)
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
        """End the iteration and all running answers now; call it in the iterating thread."""
        self._results.close()

    def in_order(self) -> list[Answer]:
        """All answers in question order; the first error ends the rest and is raised."""
        with self:
            found = {result.number: _answer_of(result) for result in self}
        return [found[number] for number in sorted(found)]

    def _run(self) -> Generator[Result]:
        running = self._running
        waiting: _One | None = None  # has its chunks, and waits for room for their KV
        more = True
        try:
            while (more or waiting or running) and not self._cancelled.is_set():
                for _ in range(AT_A_TIME):
                    if running and not self._backend.runtime.has_room:
                        break
                    question = waiting or _next(self._questions)
                    waiting = None
                    if question is None:
                        more = False
                        break
                    running.append(question)  # so that it is closed in any case
                    result = question.begin(self._start, wait=len(running) == 1)
                    if question.begun:
                        continue
                    running.remove(question)
                    if result is None:
                        waiting = question
                        break
                    yield result
                    if self._cancelled.is_set():
                        return
                if running and not self._backend.runtime.advance():
                    running[0].wait()  # until others release KV
                for question in list(running):
                    if (result := question.collect()) is not None:
                        running.remove(question)
                        yield result
        finally:
            for question in running:
                question.close()


class _One:
    """One of many questions, with its stream."""

    def __init__(self, number: int, asked: Asked) -> None:
        self._number = number
        self._asked = asked
        self._stream: AnswerStream | None = None
        self.begun = False

    def begin(self, start: Callable[[Asked], AnswerStream], *, wait: bool) -> Result | None:
        """Start it if there is room (`begun`); returns the result if it failed."""
        try:
            if self._stream is None:
                self._stream = start(self._asked)
            self.begun = self._stream.begin(wait=wait)
        except Exception as error:
            return self._failed(error)
        return None

    def collect(self) -> Result | None:
        """The result if complete, else None."""
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
        question = text_of(self._asked)
        tokens = 0 if self._stream is None else self._stream.tokens
        return Result(number=self._number, question=question, error=error, tokens=tokens)


def _next(questions: Iterator[tuple[int, Asked]]) -> _One | None:
    found = next(questions, None)
    return None if found is None else _One(*found)


class AsyncAnswers:
    """`Answers` for `async for`, run in a separate thread, so that the loop stays free.

    If the iterating task is cancelled or leaves early, the rest is cancelled and the thread joined. At most `AT_A_TIME`
    results wait for a slow task; then generation pauses.
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
        """End the iteration and all running answers, and wait for the thread."""
        await self._results.aclose()

    async def in_order(self) -> list[Answer]:
        """Like `Answers.in_order`."""
        async with self:
            found = {result.number: _answer_of(result) async for result in self}
        return [found[number] for number in sorted(found)]

    def _run(self) -> AsyncGenerator[Result]:
        room = threading.Semaphore(AT_A_TIME)
        left = threading.Event()
        answers: Answers | None = None

        def work(notify: Callable[[Result], None]) -> None:
            nonlocal answers
            with self._start() as answers:
                for result in answers:
                    notify(result)
                    while not (left.is_set() or room.acquire(timeout=_LOOK)):
                        self._index.require_open()
                    if left.is_set():
                        break

        def leave() -> None:
            left.set()
            if answers is not None:
                answers.cancel()
            room.release()

        return _from_thread(self._index, work, leave, name="ragkv-answers", on_taken=room.release)


async def _from_thread(
    index: Index,
    work: Callable[[Callable[[T], None]], None],
    leave: Callable[[], None],
    *,
    name: str,
    on_taken: Callable[[], object] = lambda: None,
) -> AsyncGenerator[T]:
    """Yields what `work`, in a thread, passes to its argument (None ends it); then raises the error of `work`, if any.

    If the iterating task is cancelled or leaves early, `leave` has to end the work, and the thread is joined.
    `on_taken` is called when the task comes back for the next item.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | None] = asyncio.Queue()
    failed: list[BaseException] = []

    def put(item: T | None) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the loop was closed, so no task waits any more
            leave()

    def run() -> None:
        try:
            work(put)
        except BaseException as error:
            failed.append(error)
        finally:
            put(None)

    # not the loop's executor: its few threads would limit the questions in a batch
    thread = index.start_thread(partial(contextvars.copy_context().run, run), name=name)
    try:
        while (item := await queue.get()) is not None:
            yield item
            on_taken()
    except BaseException:
        leave()
        if not loop.is_closed():  # otherwise no task can wait, and the thread ends by itself
            while await queue.get() is not None:
                continue
            thread.join()
        raise
    thread.join()  # it has delivered its last item
    if failed:
        raise failed[0]


class AsyncAnswerStream:
    """`AnswerStream` for `async for`: iterate once over its text; `answer` is complete when the iteration ends.

    `start` runs in the thread, because it may load the model. If the iterating task is cancelled or leaves early, the
    answer is cancelled and the thread joined at its next token, so that the index may be closed.

    With `announce`, an empty text comes for each of `queries`, and when the chunks are found and `sources` has them.
    """

    def __init__(self, index: Index, start: Callable[[], AnswerStream], *, announce: bool = False) -> None:
        self._start = start
        self._announce = announce
        self._stream: AnswerStream | None = None
        self._cancelled = threading.Event()
        self._deltas: AsyncGenerator[str] = _from_thread(index, self._decode, self.cancel, name="ragkv-answer")

    def __aiter__(self) -> AsyncIterator[str]:
        return self._deltas

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """End the iteration at the next token, from any thread; nothing happens to a finished answer."""
        self._cancelled.set()
        if self._stream is not None:
            self._stream.cancel()

    async def aclose(self) -> None:
        """Cancel, and wait for the thread."""
        self.cancel()
        await self._deltas.aclose()

    @property
    def answer(self) -> Answer:
        """Like `AnswerStream.answer`: ValueError before the end, unless cancelled."""
        if self._stream is None:
            raise ValueError("the answer has not begun: iterate over the stream first")
        return self._stream.answer

    @property
    def tokens(self) -> int:
        """Generated tokens so far."""
        return 0 if self._stream is None else self._stream.tokens

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 before the answer has begun."""
        return 0 if self._stream is None else self._stream.prompt_tokens

    @property
    def sources(self) -> tuple[Source, ...]:
        """Like `AnswerStream.sources`."""
        return () if self._stream is None else self._stream.sources

    @property
    def queries(self) -> Sequence[str]:
        """Like `AnswerStream.queries`, a growing list."""
        return () if self._stream is None else self._stream.queries

    @property
    def reasoning(self) -> str:
        """Like `AnswerStream.reasoning`."""
        return "" if self._stream is None else self._stream.reasoning

    @property
    def trace(self) -> Sequence[TracedToken]:
        """The tokens so far, a growing list."""
        return () if self._stream is None else self._stream.trace

    def _decode(self, notify: Callable[[str], None]) -> None:
        """Start the answer and pass on its text, in the thread."""
        self._stream = self._start()
        if self._cancelled.is_set():  # before there was a stream to cancel
            self._stream.cancel()
        if self._announce:
            self._stream.when_found = lambda: notify("")
        for delta in self._stream:
            notify(delta)
