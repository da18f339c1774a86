"""An answer for an event loop: decoded in a thread, so that the loop stays free, and ended when nobody waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.index.index import Index
    from ragkv.types import Answer, Source, TracedToken

__all__ = ["AsyncAnswerStream"]


class AsyncAnswerStream:
    """`AnswerStream` for `async for`: iterate once over its text; `answer` is complete when the iteration ends.

    `start` is called in the thread, as it may load the model. When the iterating task is cancelled or leaves early,
    the answer is cancelled and the thread waited for: it ends at its next token, so that the index may be closed.

    With `announce`, the first piece is an empty one, which comes when the chunks are found: `sources` has them.
    """

    def __init__(self, index: Index, start: Callable[[], AnswerStream], *, announce: bool = False) -> None:
        self._index = index
        self._start = start
        self._announce = announce
        self._stream: AnswerStream | None = None
        self._cancelled = threading.Event()
        self._pieces = self._run()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._pieces

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
        """Cancel, and wait until the thread is done."""
        self.cancel()
        await self._pieces.aclose()

    @property
    def answer(self) -> Answer:
        """As `AnswerStream.answer`: ValueError before the end, unless cancelled."""
        if self._stream is None:
            raise ValueError("the answer has not begun: iterate over the stream first")
        return self._stream.answer

    @property
    def tokens(self) -> int:
        """How many were generated so far."""
        return 0 if self._stream is None else self._stream.tokens

    @property
    def prompt_tokens(self) -> int:
        """How many the prompt has; 0 before the answer has begun."""
        return 0 if self._stream is None else self._stream.prompt_tokens

    @property
    def sources(self) -> tuple[Source, ...]:
        """As `AnswerStream.sources`."""
        return () if self._stream is None else self._stream.sources

    @property
    def trace(self) -> Sequence[TracedToken]:
        """The tokens so far; it grows."""
        return () if self._stream is None else self._stream.trace

    async def _run(self) -> AsyncGenerator[str]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        failed: list[BaseException] = []

        def tell(piece: str | None) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, piece)
            except RuntimeError:  # the loop was closed, so nobody waits any more
                self.cancel()

        def work() -> None:
            try:
                self._stream = self._start()
                if self._cancelled.is_set():  # before there was a stream to tell
                    self._stream.cancel()
                if self._announce:
                    self._stream.when_found = lambda: tell("")
                for piece in self._stream:
                    tell(piece)
            except BaseException as error:
                failed.append(error)
            finally:
                tell(None)

        # not the loop's executor: its few threads would let only as many questions into a batch
        thread = self._index.start_thread(partial(contextvars.copy_context().run, work), name="ragkv-answer")
        try:
            while (piece := await queue.get()) is not None:
                yield piece
        except BaseException:
            self.cancel()
            if not loop.is_closed():  # else nobody can wait: the thread ends by itself
                while await queue.get() is not None:
                    continue
                thread.join()
            raise
        thread.join()  # it has said its last word
        if failed:
            raise failed[0]
