"""Many runs of the `ragkv` command in separate processes for the price of one import.

`fork_command` runs `ragkv ARGUMENTS` in a child of this process, which has imported everything and opened no store. As
a program: `command.py WAY '[["stats", "--index", "x"], ...]' INDEX` prints a JSON list of `{code, out, err}`. The
commands share the models of the index, which is mounted read-only, or whose permissions apply to root too.
"""

import json
import os
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


def fork_command(*arguments: object) -> Result:
    """Run a command in a fork; `code` is negative if a signal ended it."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("out", "err")]

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
            for number, path in enumerate(paths, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), number)

        pid = os.fork()
        if not pid:
            run_command([*map(str, arguments)], prepare)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Result(code, *(path.read_text() if path.exists() else "" for path in paths))


if __name__ == "__main__":
    way, commands, index = sys.argv[1:]
    if way == "read-only mount":
        enter()
        subprocess.run(["mount", "--bind", index, index], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", index], check=True)
    else:
        obey_permissions()
    preload(index)
    print(json.dumps([asdict(fork_command(*arguments)) for arguments in json.loads(commands)]))
