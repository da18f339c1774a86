"""Store what a question had to make, after it was answered, and record what was used.

Whoever waits for a first token waits for no write: what has to be stored is handed over and written by a thread that
ends when there is no more, and that `close` waits for. What questions have used is counted in memory and recorded some
hundred chunks at a time; a process that is killed loses the last of it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ragkv.errors import RetrievalError, StoreError
from ragkv.store import Store, Use

__all__ = ["Keeper", "Later"]

USES = 256
"""So many chunks are used before that is recorded."""
WAITING_BYTES = 256 << 20
"""So much KV may wait to be stored before an answer that has ended waits for it: a slow disk must not fill memory."""

logger = logging.getLogger(__name__)
_all: weakref.WeakSet[Keeper] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Later:
    """A write that waits, with the keys and the bytes of the KV that it stores."""

    write: Callable[[], object]
    keys: Sequence[bytes]
    nbytes: int


class Keeper:
    """Runs writes that an answer does not depend on; if the index is read-only, it logs that once and goes on.

    `open_budget` brings the store's budget up to the configured one, before the first write. Uses that are only
    `statistics`, because all KV is kept, are recorded where that costs next to nothing.
    """

    def __init__(
        self, store: Store, open_budget: Callable[[], object] = lambda: None, *, statistics: bool = False
    ) -> None:
        self._store = store
        self._statistics = statistics
        self._open_budget = open_budget
        self._told = False
        self._start()
        _all.add(self)

    def _start(self) -> None:
        self._lock = threading.Condition(threading.Lock())
        self._waiting: deque[Later] = deque()
        self.unstored: dict[bytes, None] = {}
        """Keys of KV that was made and is not stored yet."""
        self._bytes = 0  # of KV that waits
        self._thread: threading.Thread | None = None
        self._closed = False
        self._uses: dict[bytes, Use] = {}
        self._encoded = (0.0, 0)  # seconds and tokens, not recorded yet

    def keep(self, write: Callable[[], object]) -> None:
        """Run `write` now, unless the store is read-only; a failed write is logged, as the answer does not need it."""
        if self._store.readonly:
            if not self._told:
                logger.warning(
                    "%s is open read-only: what a question has to compute is not kept", self._store.directory.parent
                )
            self._told = True
            return
        try:
            write()
        except (StoreError, RetrievalError) as error:
            logger.warning("what a question computed is not kept: %s", error)

    def noted(self, write: Callable[[], object], keys: Sequence[bytes], nbytes: int) -> Later:
        """A write for `later`, whose KV counts as unstored from now on."""
        self.unstored.update(dict.fromkeys(keys))
        return Later(write, keys, nbytes)

    def later(self, write: Later) -> None:
        """Run a write beside what goes on; `settle` and `close` wait for it."""
        with self._lock:
            if self._closed:
                return
            self._waiting.append(write)
            self._bytes += write.nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragkv-keeper")
                self._thread.start()

    def settle(self, *, whole: bool = False) -> None:
        """Wait while more KV waits to be stored than memory should hold; with `whole`, until all is on the disk."""
        with self._lock:
            self._lock.wait_for(lambda: self._bytes <= (0 if whole else WAITING_BYTES) or self._thread is None)
            self._lock.wait_for(lambda: not whole or self._thread is None)
        if whole:
            self._record()
        elif len(self._uses) >= USES:
            self.later(Later(lambda: None, (), 0))

    def close(self) -> None:
        """Store what waits and record what was used; nothing is taken any more."""
        with self._lock:
            self._closed = True
        self.settle(whole=True)

    def note_encoded(self, tokens: int, seconds: float) -> None:
        """A question had so many tokens of chunks encoded, in so many seconds."""
        with self._lock:
            self._encoded = (self._encoded[0] + seconds, self._encoded[1] + tokens)

    def note_uses(self, uses: Sequence[tuple[bytes, Use]]) -> None:
        """A question has used these records, by KV key."""
        if self._store.readonly:
            return
        with self._lock:
            for key, use in uses:
                before = self._uses.get(key)
                self._uses[key] = (
                    use
                    if before is None
                    else replace(
                        use,
                        hits=use.hits + before.hits,
                        misses=use.misses + before.misses,
                        wanted=use.wanted + before.wanted,
                    )
                )

    def _work(self) -> None:
        """The thread: run what waits, until nothing does."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    self._lock.notify_all()
                    return
                later = self._waiting.popleft()
            try:
                self._record()  # first, because what is let in depends on how often it was used
                self.keep(later.write)
            except Exception:
                logger.exception("what a question computed is not kept")
            finally:
                with self._lock:
                    for key in later.keys:
                        self.unstored.pop(key, None)
                    self._bytes -= later.nbytes
                    self._lock.notify_all()
                del later

    def _record(self) -> None:
        with self._lock:
            uses, self._uses = self._uses, {}
            (seconds, tokens), self._encoded = self._encoded, (0.0, 0)
        if uses and not self._store.readonly and (not self._statistics or self._store.writes_cheaply):
            rate = seconds / tokens if tokens else None

            def write() -> None:
                self._open_budget()
                self._store.record_uses(uses, seconds_per_token=rate)

            self.keep(write)


def _forget_all() -> None:
    """In the child of a fork: the thread is not here, its lock is nobody's, and the store is the parent's."""
    for keeper in list(_all):
        keeper._start()


os.register_at_fork(after_in_child=_forget_all)
