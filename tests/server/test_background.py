"""`ragkv serve --background`, what a question at a terminal leaves behind, and `ragkv stop` as commands, and which
modules a command imports if a server does its work.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clichild import CliChild
from live import PATIENCE, get
from outcome import typed

from ragkv.cli import serve
from ragkv.cli.main import main
from ragkv.server.local import FOLDER, connect, is_listening, server_process

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from ragkv.cli.main import main
from ragkv.server import local
local.ANSWER_SECONDS = 600.0  # however busy the machine is
"""
ASK = ("query", "Who founded Halden Works?", "--max-new-tokens", 2)
LOADED = f"""{PROGRAM}
try:
    main()
finally:
    heavy = ("torch", "transformers", "numpy", "lmdb", "uvicorn")
    print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def index(tmp_path, folder):
    index = shutil.copytree(folder, tmp_path / "index", ignore=shutil.ignore_patterns(FOLDER))
    yield index
    if (pid := server_process(index)) is not None:
        end(pid)


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
    assert json.loads(run("stop", "--json").stdout) == {"stopped": False}


def end(pid):
    """Kill the server if it still runs: it is not a child of this process, so it cannot be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.fixture
def at_a_terminal(index, tmp_path, monkeypatch):
    """Run a command with its stdin and stdout at a terminal; returns its stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("CI", raising=False)

    def run(*words, program=f"{PROGRAM}\nmain()"):
        ours, theirs = os.openpty()
        command = [sys.executable, "-c", program, *map(str, words), "--index", str(index)]
        with (tmp_path / "err").open("w") as err:
            process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=err)
            os.close(theirs)
            try:
                while os.read(ours, 4096):
                    continue
            except OSError:  # the command, the last that has it open, has ended: what it leaves behind has not
                os.close(ours)
            message = (tmp_path / "err").read_text()
            assert process.wait() == 0, message
        return message

    return run


def wait_until(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def response(index, request):
    """The response of the index's server."""
    with connect(index, seconds=PATIENCE) as connection, connection.makefile("rb") as reader:
        connection.sendall(request)
        return reader.read()


def test_a_question_leaves_a_process_behind_until_it_is_stopped(index, at_a_terminal):
    told = at_a_terminal(*ASK)
    assert f"`ragkv stop --index {index}` ends it, --no-resident prevents it" in told
    wait_until(lambda: is_listening(index))
    first = server_process(index)
    wait_until(lambda: b"ragkv:request_success_total{" in response(index, get("/metrics")))  # it has warmed up
    assert at_a_terminal(*ASK, "--quiet", program=LOADED) == "[]\n"  # nothing heavy was imported
    assert server_process(index) == first

    assert "ragkv keeps" not in at_a_terminal(*ASK, "--batch-tokens", 512)  # which the first one does not have
    wait_until(lambda: server_process(index) not in (None, first) and is_listening(index))
    assert at_a_terminal(*ASK, "--batch-tokens", 512, "--quiet", program=LOADED) == "[]\n"

    server = CliChild("serve", "--index", index, "--port", 0, "--device", "cpu")
    server.line()
    assert server_process(index) == server.process.pid  # it answers instead
    at_a_terminal("stop")
    assert server.end()[0] == 0
    assert server_process(index) is None


@pytest.mark.parametrize("ending", ["unused", "deleted", "stopped while it loads"])
def test_it_ends_by_itself(index, ending):
    child = CliChild(
        "serve", "--index", f"index={index}", "--idle-seconds", 1 if ending == "unused" else 9999, "--quiet"
    )
    wait_until(lambda: server_process(index) is not None or child.process.exitcode is not None)
    if ending == "stopped while it loads":
        assert serve._end_server(index)["pid"] == child.process.pid
        assert child.end()[0] in (0, -signal.SIGTERM)
        return
    if ending == "deleted":
        wait_until(lambda: is_listening(index))
        shutil.rmtree(index)
    child.process.join(PATIENCE)
    assert child.process.exitcode is not None
    code, _, message = child.end()
    assert (code, message) == (0, "")
    assert server_process(index) is None


WAYS = ("as usual", "a pipe", "CI", "--no-resident", "variable", "user file", "--no-server", "asked for")


@pytest.mark.parametrize("way", WAYS)
def test_who_leaves_a_process_behind(index, capsys, monkeypatch, way):
    left = []
    monkeypatch.setattr(serve, "leave_server", lambda *call: left.append(call))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: way != "a pipe")
    monkeypatch.setattr("ragkv.cli.query.sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("CI", "true" if way == "CI" else "")
    words = ["--resident"] if way == "asked for" else [way] if way.startswith("--") else []
    if way == "variable":
        monkeypatch.setenv("RAGKV_RESIDENT", "false")
    if way in ("user file", "asked for"):
        monkeypatch.setattr("ragkv.cli.query.user_file", lambda: index / "user.toml")
        (index / "user.toml").write_text("resident = false\n")
    assert typed(main, capsys, monkeypatch)(*ASK, "--index", index, *words).code == 0
    assert len(left) == (way in ("as usual", "asked for"))
