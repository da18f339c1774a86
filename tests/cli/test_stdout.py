"""A stdout that takes nothing: a full disk, and one that was closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-c", "from ragkv.cli.main import main; main()"]


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("words", [["--help"], ["serve", "--new-key", "ann", "--keys"]], ids=["help", "serve"])
def test_a_full_disk_is_one_sentence(tmp_path, words, unbuffered):
    if words[-1] == "--keys":
        words = [*words, str(tmp_path / "keys")]
    with FULL.open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 1
    assert done.stderr == "ragkv: The result cannot be written: No space left on device.\n"


@pytest.mark.parametrize(
    "words", [["--help"], ["models", "--quiet"], ["models", "--json"]], ids=["help", "table", "json"]
)
def test_a_reader_that_leaves_is_no_failure(words):
    there, here = os.pipe()
    os.close(there)
    try:
        done = subprocess.run([*COMMAND, *words], stdout=here, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(here)
    assert (done.returncode, done.stderr) == (0, "")


def test_numba_sends_a_terminal_no_escape_sequence():
    """It would set up colorama, which resets the terminal's colours at the end."""
    pytest.importorskip("colorama")
    pytest.importorskip("numba")
    code = "import contextlib, sys; from ragkv.cli.main import main; sys.argv[1:] = ['--version']\n"
    code += "with contextlib.suppress(SystemExit): main()\nimport numba"
    terminal, stdout = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
        shown = os.read(terminal, 1000)
    finally:
        os.close(terminal)
        os.close(stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown.startswith(b"ragkv ")
    assert b"\x1b" not in shown


@pytest.mark.parametrize("closed", ["1>&-", pytest.param("1>&- 2>&-", marks=pytest.mark.nightly), "0<&- 1>&- 2>&-"])
def test_closed_streams_lead_nowhere(tmp_path, closed):
    """The next files that are opened do not get their numbers, and with them what is printed."""
    keys = tmp_path / "keys"
    line = f'"$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", *COMMAND, "serve", "--new-key", "ann", "--keys", keys],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(keys.read_text().splitlines()) == 1
    assert "rk-" not in keys.read_text()
