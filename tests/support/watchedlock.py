"""A lock that reports when a thread has to wait for it, so that no test has to sleep to see that nothing happens."""

import threading
from collections.abc import Callable


class WatchedLock:
    """Replaces a `threading.Lock`; `on_wait` is called before a thread waits."""

    def __init__(self, on_wait: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._on_wait = on_wait

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._on_wait()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Alone:
    """Work that only one thread at a time may do: it calls `enter` inside.

    The first thread that enters starts a second one, and stays until that one waits for `lock`, has entered too, or has
    passed without using the lock.
    """

    def __init__(self, second: Callable[[], object]) -> None:
        self.lock = WatchedLock(self._wait)
        self.waited = self.together = False
        self._second = threading.Thread(target=self._run, args=(second,))
        self._moved = threading.Event()
        self._begun = False

    def enter(self) -> None:
        if self._begun:
            self.together = not self.waited
            self._moved.set()
            return
        self._begun = True
        self._second.start()
        assert self._moved.wait(600)

    def end(self) -> None:
        """Check that the second thread has waited for the first one."""
        self._second.join(600)
        assert not self._second.is_alive()
        assert self.waited
        assert not self.together

    def _wait(self) -> None:
        self.waited = True
        self._moved.set()

    def _run(self, second: Callable[[], object]) -> None:
        try:
            second()
        finally:
            self._moved.set()
