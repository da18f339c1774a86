"""The whole command tree: every command has --json and --quiet, an example, and help for each option; completion and
colours.
"""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from ragkv.cli.console import percent_bar
from ragkv.cli.main import app
from ragkv.cli.options import Engine
from ragkv.engines import engine_names

COMMAND = Path(sys.executable).parent / "ragkv"


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """All commands that do something, as word sequences."""
    group = group or typer.main.get_command(app)
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


EVERY = dict(commands())


def test_the_tree_is_walked():
    assert {"query", "chat", "config show", "bench ttft", "finetune block"} <= EVERY.keys()


@pytest.mark.parametrize("name", EVERY)
def test_every_command_reads_the_same(name):
    command = EVERY[name]
    parameters = command.get_params(typer.Context(command))
    options = {flag: one for one in parameters for flag in (*one.opts, *one.secondary_opts)}
    assert {"--json", "--quiet"} <= options.keys()
    assert "Example: `" in command.help
    assert f"ragkv {name}" in command.help.split("Example:")[1]
    for one in parameters:
        assert one.help, f"ragkv {name}: {one.name} has no help text"


def test_the_help_of_engine_names_all_there_are():
    message = get_args(Engine)[1].help
    assert set(engine_names()) <= set(re.findall(r"[a-z-]+", message))


def test_debug_may_stand_before_and_after_the_command(ragkv, tmp_path):
    from ragkv.errors import ConfigError

    (tmp_path / "ragkv.toml").write_text("model = [")
    for arguments in (("--debug", "stats"), ("stats", "--debug"), ("config", "show", "--debug")):
        with pytest.raises(ConfigError):
            ragkv(*arguments, "--index", tmp_path)
    shown = ragkv("show", "--index", tmp_path, "--", "--debug")  # after `--` it is a chunk's name
    assert (shown.code, shown.sentence.startswith("ragkv: ")) == (2, True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ragkv query --engine p", ["pced"]),
        ("ragkv ingest --engines ape,p", ["ape,pced"]),
        ("ragkv ingest --codec int", ["int4", "int8"]),
        ("ragkv doctor --codecs zstd,r", ["zstd,raw"]),
        ("ragkv query --retrieval d", ["dense"]),
        ("ragkv ingest --kv ", ["all", "on-demand"]),
        ("ragkv ingest --dtype in", ["int8"]),
        ("ragkv chat --history p", ["prompt"]),
        ("ragkv stats --index ", ["mine", "other/"]),
        ("ragkv stats --index other/", ["other/nested"]),
        ("ragkv sta", ["stats"]),
        ("ragkv config ", ["path", "show", "set"]),
    ],
)
def test_completion(ragkv, monkeypatch, tmp_path, typed, offered):
    for folder in ("mine", "other/nested"):
        (tmp_path / "here" / folder).mkdir(parents=True)
        (tmp_path / "here" / folder / "ragkv.toml").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("_RAGKV_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    assert ragkv().out.split() == offered


def test_completion_can_be_installed(ragkv):
    assert "--install-completion" in ragkv("--help").out


def test_no_colour_and_no_bar_where_nobody_looks(ragkv, tmp_path):
    assert "\x1b" not in ragkv("query", "--help").out
    failed = ragkv("stats", "--index", tmp_path / "none")
    assert failed.err.startswith("ragkv: ")
    assert "\x1b" not in failed.err
    with percent_bar(silent=False) as show:
        assert show is None  # stderr is not a terminal here


def at_a_terminal(*arguments: object, **environment: str) -> tuple[subprocess.Popen[bytes], int]:
    """Run the command with its stderr at a new terminal, the second of the pair."""
    ours, theirs = pty.openpty()
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**known, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )
    os.close(theirs)
    return process, ours


def read(terminal: int) -> str:
    message = b""
    with suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 4096):
            message += part
    os.close(terminal)
    return message.decode()


@pytest.mark.slow
def test_colours_at_a_terminal_unless_told_otherwise(tmp_path):
    index = tmp_path / "none"
    coloured, plain = at_a_terminal("stats", "--index", index), at_a_terminal("stats", "--index", index, NO_COLOR="1")
    for (process, terminal), colours in ((coloured, True), (plain, False)):
        with process:
            message = read(terminal)
            assert process.wait(600) == 2
            assert process.stdout is not None
            assert process.stdout.read() == b""
        assert "There is no index at" in message
        assert bool(re.search(r"\x1b\[(3[0-7]|9[0-7]|38)", message)) is colours
