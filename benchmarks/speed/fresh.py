"""Run a piece of work in a fresh process, which has imported everything and opened nothing.

The first of anything in a process costs more than the second. The processes fork from a server that has only imported
the work's module, so that one costs milliseconds and not the seconds of importing torch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ragkv.errors import RagkvError

__all__ = ["run_fresh"]

T = TypeVar("T")
Progress = Callable[[int, int], None]
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def run_fresh(work: Callable[..., T], *arguments: Any, on_progress: Progress | None = None) -> T:
    """What `work(*arguments, progress)` returns; it may call `progress(done, total)`. One thread computes.

    An error of ragkv's is raised here; any other ends in a RagkvError with its traceback.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    here, there = context.Pipe(duplex=False)
    with _one_thread():
        process = context.Process(target=_work, args=(there, work, arguments), daemon=True)
        process.start()
    there.close()
    try:
        while True:
            kind, *told = here.recv()
            if kind == "progress":
                if on_progress is not None:
                    on_progress(*told)
            elif kind == "error":
                raise told[0]
            else:
                result: T = told[0]
                return result
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise RagkvError(f"The process that measured {work.__name__} ended {how}; is there enough memory?") from None
    finally:
        here.close()
        process.join(timeout=5)
        process.kill()
        process.join()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries read these variables when they are loaded, which is before any function of ours could set a number."""
    kept = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(there: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        there.send(("result", work(*arguments, lambda done, total: there.send(("progress", done, total)))))
    except RagkvError as error:
        there.send(("error", error))
    except KeyboardInterrupt:
        os._exit(130)  # the parent was interrupted too
    except Exception:
        there.send(("error", RagkvError(f"{work.__name__} failed:\n{traceback.format_exc()}")))
