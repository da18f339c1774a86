"""`ragkv serve --background` and `ragkv stop` as commands, and which modules a command imports if a server does its
work.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from clichild import CliChild

from ragkv.server.local import FOLDER, server_process

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from ragkv.cli.main import main
from ragkv.server import local
local.ANSWER_SECONDS = 600.0  # however busy the machine is
"""
LOADED = f"""{PROGRAM}
try:
    main()
finally:
    heavy = ("torch", "transformers", "numpy", "lmdb", "uvicorn")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def index(tmp_path, folder):
    return shutil.copytree(folder, tmp_path / "index", ignore=shutil.ignore_patterns(FOLDER))


@pytest.fixture
def run(index, tmp_path):
    """Run a command; its log is in the test's folder."""
    around = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    def typed(*words, program=f"{PROGRAM}\nmain()"):
        command = [sys.executable, "-c", program, *map(str, words), "--index", str(index)]
        return subprocess.run(command, capture_output=True, text=True, env=around, check=False)

    return typed


def works_until_it_is_stopped(index, run, pid):
    """A command that imports nothing heavy queries the running server, and another stops it."""
    asked = run("query", "Who founded Halden Works?", "--max-new-tokens", 2, "--json", "--quiet", program=LOADED)
    assert (asked.returncode, asked.stderr) == (0, "[]\n")
    assert json.loads(asked.stdout)["sources"]
    stopped = run("stop", "--json")
    assert json.loads(stopped.stdout) == {"stopped": True, "pid": pid, "indexes": [str(index)]}
    assert server_process(index) is None


def test_a_server_works_for_commands_until_it_is_stopped(index, run):
    server = CliChild("serve", "--index", index, "--port", 0, "--device", "cpu")
    server.line()
    works_until_it_is_stopped(index, run, server.process.pid)
    code, _, message = server.end()
    assert (code, "Traceback" in message) == (0, False), message


@pytest.mark.nightly
def test_a_server_in_the_background_works_for_commands_until_it_is_stopped(index, run):
    begun = run("serve", "--background", "--json", "--port", 0, "--device", "cpu")
    assert begun.returncode == 0, begun.stderr
    payload = json.loads(begun.stdout)
    try:
        assert payload["url"].startswith("http://127.0.0.1:")
        assert payload["models"] == ["ragkv/index"]
        works_until_it_is_stopped(index, run, payload["pid"])
        assert "Traceback" not in Path(payload["log"]).read_text()
    finally:
        end(payload["pid"])


def test_a_server_that_does_not_come_up_says_why(run, tmp_path):
    """The error is the message of the server process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = run("serve", "--background", "--port", port)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith(f"ragkv: Another program listens on 127.0.0.1 port {port}; ")
    assert failed.stderr.count("\n") == 1
    [log] = (tmp_path / "state").rglob("*.log")
    assert log.read_text() == failed.stderr


def test_what_cannot_be_served_starts_nothing(run, tmp_path):
    failed = run("serve", "--background", "--host", "0.0.0.0")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("ragkv: Listening on 0.0.0.0 lets others ask")
    assert not (tmp_path / "state").exists()


@pytest.mark.nightly
def test_a_killed_server_is_not_missed(index, run):
    payload = json.loads(run("serve", "--background", "--json", "--port", 0, "--device", "cpu").stdout)
    end(payload["pid"])
    while server_process(index) is not None:  # the kernel is still cleaning up
        continue
    assert run("query", "Who founded Halden Works?", "--max-new-tokens", 2).returncode == 0
    assert run("stop").returncode == 1


def end(pid):
    """Kill the server if it still runs: it is not a child of this process, so it cannot be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
