"""Many runs of the `ragkv` command in separate processes for the price of one import.

`fork_command` runs `ragkv ARGUMENTS` in a child of this process, which has imported everything and opened no store. As
a program: `command.py WAY INDEX…` reads a JSON list of `{"arguments": […], "stdin": "…", "terminal": …}` and prints a
list of `{code, out, err}`. The commands share the models of the indexes. WAY is "read-only mount" (of the first index),
"no permission" (permissions apply to root too) or "plain".
"""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401  (loaded before the forks)
import typer
from loaded import preload
from namespace import enter, obey_permissions
from outcome import Result

import ragkv.engines.ape
import ragkv.engines.full
import ragkv.model.language_model  # noqa: F401
from ragkv.cli.main import app, main

torch.set_num_threads(1)
dict(typer.main.get_command(app).commands)  # imports all commands


def run_command(arguments: list[str], prepare: Callable[[], object]) -> NoReturn:
    """Run `ragkv ARGUMENTS` in this fork after `prepare`, and exit with its code, or 70 after a traceback."""
    code = 70
    try:
        prepare()
        sys.argv = ["ragkv", *arguments]
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing may interrupt the output of a finished command
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_command(*arguments: object, stdin: str = "", terminal: bool = False) -> Result:
    """Run a command in a fork, whose output goes to files or to a terminal; `code` is negative if a signal ended it."""
    with tempfile.TemporaryDirectory() as folder:
        source, *paths = (Path(folder) / name for name in ("in", "out", "err"))
        source.write_bytes(stdin.encode("utf-8", "surrogateescape"))
        pairs = [pty.openpty() for _ in paths] if terminal else []

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
            sinks = [sink for _, sink in pairs] or [os.open(path, os.O_WRONLY | os.O_CREAT, 0o666) for path in paths]
            for number, stream in enumerate([os.open(source, os.O_RDONLY), *sinks]):
                os.dup2(stream, number)
            for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
                setattr(sys, name, open(number, mode, 1, "utf-8", closefd=False))  # noqa: SIM115

        pid = os.fork()
        if not pid:
            run_command([*map(str, arguments)], prepare)
        for _, sink in pairs:
            os.close(sink)
        waiting = dict(zip((screen for screen, _ in pairs), paths, strict=False))
        while waiting:
            for screen in select.select(waiting, [], [])[0]:
                try:
                    data = os.read(screen, 65536)
                except OSError:  # a terminal that nobody has open any more
                    data = b""
                with waiting[screen].open("ab") as file:
                    file.write(data)
                if not data:
                    del waiting[screen]
                    os.close(screen)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Result(code, *(path.read_bytes().decode() if path.exists() else "" for path in paths))


if __name__ == "__main__":
    way, *indexes = sys.argv[1:]
    if way == "read-only mount":
        enter()
        subprocess.run(["mount", "--bind", indexes[0], indexes[0]], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", indexes[0]], check=True)
    elif way == "no permission":
        obey_permissions()
    preload(*indexes)
    payload = json.loads(sys.stdin.read())
    print(json.dumps([asdict(fork_command(*each.pop("arguments"), **each)) for each in payload]))
