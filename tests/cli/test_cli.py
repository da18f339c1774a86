"""Commands: output on stdout, one sentence on stderr, exit codes 0, 1 and 2."""

import errno
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ragkv import RagKV
from ragkv.__main__ import main as entry_point
from ragkv.cli.console import count, size
from ragkv.index.maintenance import IndexMaintenance
from ragkv.store import Store


def test_ingest_then_query_with_every_engine(ragkv, documents, tmp_path, model_folder):
    index = tmp_path / "new"
    first = ragkv("ingest", documents, "--index", index, "--model", model_folder, "--chunk-tokens", 128)
    assert first.code == 0
    assert "2 added" in first.out
    assert "tokens/s" in first.out
    second = ragkv("ingest", documents, "--index", index)
    assert "2 unchanged" in second.out
    assert "Nothing re-encoded" in second.out
    for engine in ("full", "ape", "block", "pced"):
        answer = ragkv(
            "query", "Who founded Halden Works?", "--index", index, "--engine", engine, "--max-new-tokens", 4, "--json"
        )
        assert answer.code == 0
        found = json.loads(answer.out)
        assert found["engine"] == engine
        assert found["sources"][0]["document"] == "halden.md"
        assert found["kv"]["misses"] == 0


def test_streaming_prints_the_answer_on_stdout_and_sources_on_stderr(ragkv, index):
    plain = ragkv("query", "Who founded Halden Works?", "--index", index, "--max-new-tokens", 6)
    streamed = ragkv("query", "Who founded Halden Works?", "--index", index, "--max-new-tokens", 6, "--stream")
    assert streamed.out.strip() == plain.out.strip()
    assert "[1] halden.md, Halden Works (score" in streamed.err
    quiet = ragkv("query", "Who founded Halden Works?", "--index", index, "--max-new-tokens", 6, "--quiet")
    assert quiet.err == ""


def test_quiet_leaves_out_warnings_unless_everything_is_logged(ragkv, index, monkeypatch):
    log, stats = logging.getLogger("ragkv.store"), Store.stats

    def warn(rag):
        log.warning("a record is damaged")
        return stats(rag)

    monkeypatch.setattr(Store, "stats", warn)
    asked = ("stats", "--index", index)
    assert "a record is damaged" in ragkv(*asked).err
    assert ragkv(*asked, "--quiet").err == ""
    assert "a record is damaged" in ragkv(*asked, "--quiet", "--debug").err


def test_decoding_options_are_used_and_told(ragkv, index):
    ask = ("query", "Who founded Halden Works?", "--index", index, "--max-new-tokens", 12, "--json")
    sampled = ("--temperature", 1.5, "--top-p", 0.9, "--top-k-tokens", 50, "--min-p", 0.01)
    first = json.loads(ragkv(*ask, *sampled, "--seed", 3, "--repetition-penalty", 1.1).out)
    again = json.loads(ragkv(*ask, *sampled, "--seed", 3, "--repetition-penalty", 1.1).out)
    assert first["answer"] == again["answer"]
    told = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.9, "top_k_tokens": 50, "min_p": 0.01, "seed": 3}
    assert first["decoding"].items() >= (told | {"repetition_penalty": 1.1}).items()
    drawn = json.loads(ragkv(*ask, *sampled).out)["decoding"]["seed"]
    assert isinstance(drawn, int)
    greedy = json.loads(ragkv(*ask, "--stop", "zzz", "--stop", "yyy").out)
    assert greedy["decoding"]["stop"] == ["zzz", "yyy"]
    assert (greedy["decoding"]["temperature"], greedy["decoding"]["seed"]) == (0.0, None)


def test_an_answer_by_a_schema_or_a_sentence_about_it(ragkv, index, tmp_path):
    (tmp_path / "it.json").write_text('{"enum": ["valves", "bolts"]}')
    (tmp_path / "wrong.json").write_text('{"type": "x"}')
    ask = ("query", "Who founded Halden Works?", "--index", index, "--quiet")
    assert json.loads(ragkv(*ask, "--schema", tmp_path / "it.json").out) in ("valves", "bolts")
    assert ragkv(*ask, "--regex", "[0-9]{4}").out.strip().isdecimal()
    for wrong, message in (("wrong.json", "Invalid type: x"), ("none.json", "cannot be read: No such file")):
        failed = ragkv(*ask, "--schema", tmp_path / wrong)
        assert (failed.code, len(failed.err.splitlines())) == (2, 1)
        assert message in failed.err


def test_version(ragkv):
    assert ragkv("--version").out.startswith("ragkv ")


def test_interrupts_end_without_a_traceback(ragkv, index, documents, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    kept = "; what was committed is kept, and the same command continues from there"
    commands = ((RagKV, "ingest", "", [documents, "-q"]), (Store, "stats", "", []), (IndexMaintenance, "gc", kept, []))
    for owner, name, says, words in commands:
        monkeypatch.setattr(owner, name, interrupt)
        result = ragkv(name, *words, "--index", index)
        assert (result.code, result.err) == (130, f"ragkv: interrupted{says}.\n")
    monkeypatch.setattr("typer.main.get_group", interrupt)
    result = ragkv("stats", "--index", index)
    assert (result.code, result.err) == (130, "ragkv: interrupted.\n")
    interrupted = type("Interrupted", (), {"__getattr__": interrupt})()
    monkeypatch.setitem(sys.modules, "ragkv.cli.main", interrupted)
    with pytest.raises(SystemExit, match="130"):
        entry_point()
    assert capsys.readouterr().err == "ragkv: interrupted.\n"


def test_an_interrupt_within_a_destructor_is_not_lost(index):
    """Python cannot raise it there: it prints a traceback and goes on."""
    program = textwrap.dedent(
        """
        import os, signal, sys, time
        from ragkv.store import Store
        from ragkv.cli.main import main
        class Held:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0)
        def stats(self):
            Held()
            time.sleep(60)
        Store.stats = stats
        main()
        """
    )
    command = [sys.executable, "-c", program, "stats", "--index", str(index)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ragkv: interrupted.\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "Not enough memory: "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "Not enough memory: "),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "Not enough memory: "),
        (OSError(errno.EACCES, "Permission denied", "/a/file"), "/a/file cannot be used: Permission denied."),
        (RuntimeError("can't start new thread"), "Not enough memory: "),
        (RuntimeError("could not create a primitive"), "Not enough memory: "),
        (ImportError("/a/lib.so: failed to map segment from shared object"), "Not enough memory: "),
        (OSError(errno.EMFILE, "Too many open files", "/a/file"), "Too many files are open: "),
        (OSError(errno.ENFILE, "Too many open files in system"), "Too many files are open: "),
        (OSError(errno.EFBIG, "File too large", "/a/file"), "/a/file cannot be used: File too large."),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/a/file"), "/a/file cannot be used: File name too long."),
    ],
    ids=str,
)
def test_what_the_system_refuses_is_a_sentence(ragkv, index, monkeypatch, error, says):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("ragkv.index.kv_source.KVSource.get", refuse)
    result = ragkv("query", "Who founded Halden Works?", "--index", index, "--engine", "ape")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"ragkv: {says}")


def test_the_installed_command_answers(index):
    """Once in a new process: entry point, streams, exit code, and no import of vector search for a lexical query.
    Modules are counted, never times.
    """
    command = [Path(sys.executable).parent / "ragkv", "query", "Who founded Halden Works?", "--index", index, "--json"]
    words, counted = ("--max-new-tokens", "2", "--retrieval", "bm25"), {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=True, env=counted)
    assert json.loads(done.stdout)["sources"]
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded & {"torch", "faiss", "FlagEmbedding", "pandas"} == {"torch"}
    command[:1] = [sys.executable, "-m", "ragkv"]
    failed = subprocess.run([*command, "--top-k", "0"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert failed.stderr.strip() == "ragkv: --top-k must be at least 1, not 0."


def test_sizes_and_counts_are_for_people():
    assert [size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"]
    assert count(1, "chunk") == "1 chunk"
    assert count(1200, "chunk") == "1,200 chunks"


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
    "words", [["--help"], ["config", "show", "--quiet"], ["config", "show", "--json"]], ids=["help", "table", "json"]
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
    """numba would initialise colorama, which resets the terminal's colours at exit."""
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


def test_the_caches_of_torchs_kernels_are_small_unless_the_user_says_otherwise():
    """In a process that runs for long, they would fill a gigabyte with kernels for sizes that never come again."""
    names = ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"]
    code = "import atexit, os, sys; from ragkv.cli.main import main; sys.argv[1:] = ['--version']\n"
    code += f"atexit.register(lambda: print(*map(os.environ.get, {names})))\nmain()"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    for chosen, shown in (({}, "128 128"), ({names[0]: "9"}, "9 128")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment | chosen, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == shown


@pytest.mark.parametrize("closed", ["1>&-", pytest.param("1>&- 2>&-", marks=pytest.mark.nightly), "0<&- 1>&- 2>&-"])
def test_closed_streams_lead_nowhere(tmp_path, closed):
    """Files that are opened later do not get their descriptors, and with them the output."""
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
