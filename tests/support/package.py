"""Work in other processes: a new interpreter, optionally with a package that has entry points, and a fork."""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path


def run_beside(folder: Path, name: str, source: str, points: str, code: str, *arguments: object) -> tuple[str, str]:
    """The output of `code` with a package of one module and these entry points installed in `folder`."""
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return run_fresh(code, *arguments, PYTHONPATH=path)


def run_fresh(code: str, *arguments: object, **variables: str) -> tuple[str, str]:
    """The output of `code` in a new interpreter, which must succeed."""
    quiet = ("-W", "ignore::DeprecationWarning")  # Python warns about a fork with threads
    command = [sys.executable, *quiet, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout, run.stderr


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process that runs this: 0, 1 after an exception (which it prints), or minus the
    signal.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork with threads
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
