"""A ragkv command in a separate process without import time: forked from a process that has imported everything."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from multiprocessing import forkserver as servers
from multiprocessing import get_context, util
from pathlib import Path
from typing import NoReturn

__all__ = ["CliChild", "begin_forkserver", "forkserver", "one_thread", "run_script"]

PROGRAM = "from ragkv.cli.main import main; main()"
HEAVY = (
    "faiss hypothesis ragkv.cli.query ragkv.cli.doctor ragkv.cli.ingest ragkv.cli.main "
    "ragkv.cli.maintenance ragkv.cli.plan ragkv.cli.serve ragkv.engines.ape ragkv.engines.block ragkv.engines.full "
    "ragkv.engines.pced ragkv.doctor.report ragkv.ingest.ingester ragkv.ingest.web ragkv.model.language_model "
    "ragkv.model.self_check ragkv.pipeline ragkv.runtime ragkv.server.app ragkv.server.local ragkv.server.mcp "
    "rich.progress sentence_transformers tqdm.auto transformers.generation transformers.models.auto.modeling_auto "
    "transformers.models.llama.modeling_llama transformers.models.xlm_roberta.modeling_xlm_roberta"
)
"""Modules that most commands import, from the standard library to the models; missing ones are skipped."""


def forkserver():
    """The context of processes that have imported these modules."""
    context = get_context("forkserver")
    context.set_forkserver_preload(HEAVY.split())
    return context


def begin_forkserver() -> None:
    """Fork the fork server from this process, which has imported the modules while it collected the tests.

    multiprocessing would start a new interpreter, which imports them for seven seconds, in each process that runs
    tests. Call this where nothing is patched and no warning is an error.
    """

    def fork(_: object, arguments: Sequence[str], kept: Sequence[int]) -> int:
        util.spawnv_passfds = fresh  # also in the fork, which starts other processes
        return os.fork() or _serve(arguments[-1], kept)

    forkserver()
    fresh, util.spawnv_passfds = util.spawnv_passfds, fork
    servers.ensure_running()


def _serve(program: str, kept: Sequence[int]) -> NoReturn:
    """Run as the fork server without this process's files: it detects our end by a pipe that nothing else may hold
    open.
    """
    code = 1
    try:
        for before, after in pairwise((2, *sorted(kept), 1 << 20)):
            os.closerange(before + 1, after)
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        exec(program, {"__name__": "forkserver"})
        code = 0
    finally:
        os._exit(code)


class CliChild:
    """A process that runs `ragkv WORDS`: `say` writes to its stdin, `line` reads from its stdout, `end` waits for it.

    It can run another `program`, which gets the words in `sys.argv`.
    """

    def __init__(self, *words, program: str = PROGRAM) -> None:
        context = forkserver()
        theirs_in, ours_in = context.Pipe(duplex=False)
        ours_out, theirs_out = context.Pipe(duplex=False)
        ours_err, theirs_err = context.Pipe(duplex=False)
        theirs = (theirs_in, theirs_out, theirs_err)
        given = (program, [str(word) for word in words], dict(os.environ), *theirs)
        self.process = context.Process(target=_run, args=given, daemon=True)
        self.process.start()
        for each in theirs:
            each.close()
        self._stdin, self._stdout, self.stderr = _file(ours_in, "w"), _file(ours_out, "r"), _file(ours_err, "r")

    def say(self, line: str) -> None:
        self._stdin.write(f"{line}\n")
        self._stdin.flush()

    def line(self) -> str:
        """The next line of stdout; if the process has ended, an error with its stderr."""
        line = self._stdout.readline()
        assert line, self.stderr.read()
        return line

    def end(self, number=None) -> tuple[int, str, str]:
        """The exit code after this signal, or after the end of stdin, and the rest of stdout and stderr."""
        if number is not None:
            os.kill(self.process.pid, number)
        self._stdin.close()
        with self._stdout, self.stderr, ThreadPoolExecutor() as pool:
            out, err = pool.submit(self._stdout.read), pool.submit(self.stderr.read)
            self.process.join()
            return self.process.exitcode, out.result(), err.result()


def run_script(name: str, *words, stdin: str = "") -> str:
    """Run `tests/support/NAME.py` as a program, which must succeed; returns its output."""
    path = str(Path(__file__).with_name(f"{name}.py"))
    child = CliChild(*words, program=f"import runpy; runpy.run_path({path!r}, run_name='__main__')")
    if stdin:
        child.say(stdin)
    code, out, err = child.end()
    assert code == 0, f"{name} {words}: {err}"
    return out


def one_thread() -> None:
    """Make torch use one thread here and in forks of this process.

    A fork replaces torch's thread pool at its first use. Two threads that use it first at the same time would see none
    ("pool INTERNAL ASSERT FAILED"), so the fork does it before it has a second thread.
    """
    import torch

    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def _file(connection, mode):
    """The end of a pipe as a file object."""
    with connection:
        return os.fdopen(os.dup(connection.fileno()), mode, encoding="utf-8")


def _run(program, words, variables, into, out, err):
    os.environ.clear()
    os.environ.update(variables)  # this test's, not those of the test that started the first process
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes all of its children ignore it
    os.dup2(into.fileno(), 0)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    into.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.argv = ["ragkv", *words]
    gc.freeze()  # otherwise each collection would copy the pages of all inherited objects
    one_thread()
    exec(program, {"__name__": "__main__"})
