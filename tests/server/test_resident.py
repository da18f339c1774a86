"""Commands through a running server: `ragkv query` and `chat` print exactly what they print without one."""

import io
import json
import re
import shutil
import sys
import threading
from contextlib import closing
from http.client import HTTPConnection

import pytest
from heldmodel import HeldModel
from live import PATIENCE, get, live
from outcome import typed

from ragkv import RagKV
from ragkv.cli.main import main
from ragkv.cli.query import Chat
from ragkv.config import load_config, save_config
from ragkv.errors import AnswerInterruptedError
from ragkv.server import local, streaming
from ragkv.server.local import FOLDER, LocalClient, LocalSocket, UnservedError, server_process

QUESTION = "Who founded Halden Works?"
LIMIT = ["--max-new-tokens", "5"]
_TIMES = re.compile(r"first token \d+ ms \(load \d+\), total \d+ ms")


@pytest.fixture(scope="module")
def served(folder):
    """The index, and a server that serves it."""
    with RagKV.open(folder, device="cpu") as opened, live({"two": opened}, resident=True):
        yield opened


@pytest.fixture
def ragkv(capsys, monkeypatch):
    return typed(main, capsys, monkeypatch)


@pytest.fixture
def index(tmp_path, folder):
    """A copy of the index, without a server."""
    return shutil.copytree(folder, tmp_path / "index", ignore=shutil.ignore_patterns(FOLDER))


def timeless(result):
    """A command's output without measurements."""
    out = result.out
    if out.startswith("{"):
        lines = [json.loads(line) for line in out.splitlines()]
        for payload in lines:
            payload.get("timing_ms", {}).clear()
            payload.get("kv", {}).pop("memory_hits", None)  # depends on what the server has read before
        out = json.dumps(lines)
    return result.code, out, _TIMES.sub("", result.err)


@pytest.fixture
def both(served, folder, ragkv, monkeypatch):
    """Run a command with the server, where it may open nothing, and without; returns both outputs without times."""

    def run(*arguments, typed=None):
        def asked(*more):
            if typed is not None:
                monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
            return timeless(ragkv(*arguments, "--index", folder, *more))

        with monkeypatch.context() as patched:
            patched.setattr(RagKV, "open", lambda *_, **__: pytest.fail("the command opened the index itself"))
            payload = asked()
        return payload, asked("--no-server")

    return run


def nightly(*cases):
    """More of the same."""
    return [pytest.param(case, marks=pytest.mark.nightly) for case in cases]


QUERIES = [
    [],
    ["--json", "--engine", "full", "--retrieval", "bm25"],
    ["--stream", "--quiet", "--engine", "pced", "--top-k", "2"],
    ["--where", "source=*.md", "--temperature", "0.8", "--seed", "3", "--top-p", "0.9", "--min-p", "0.01"],
    ["--model", "another"],
    ["--engine", "nothing"],
    ["--where", "source=nothing"],
    *nightly(
        ["--quiet"],
        ["--json"],
        ["--stream"],
        ["--engine", "ape"],
        ["--engine", "block", "--json", "--top-k", "2"],
        ["--temperature", "1.5", "--seed", "3", "--top-k-tokens", "40", "--json"],
        ["--repetition-penalty", "1.3", "--stop", "e", "--stop", "a"],
        ["--top-k", "0"],
        ["--retrieval", "dense"],
        ["--retrieval", "none"],
        ["--rerank", "--candidates", "3"],
        ["--where", "bad"],
        ["--temperature", "-1"],
        ["--max-new-tokens", "0"],
    ),
]


@pytest.mark.parametrize("options", QUERIES, ids=" ".join)
def test_a_question_is_answered_as_without_a_server(both, options):
    payload, expected = both("query", QUESTION, *LIMIT, *options)
    assert payload == expected


STRANGE = ["Who — \U0001f9e1 — «founded»?\x1b[31m \udcff", *nightly("", "xyzzy plugh")]


@pytest.mark.parametrize("question", STRANGE)
def test_a_strange_question_is_answered_as_without_a_server(both, question):
    payload, expected = both("query", question, *LIMIT, "--json")
    assert payload == expected


TALK = """Who founded Halden Works?
And what does Bolt make?
/engine
/engine pced
Where is it?
/engine nothing
/sources
/clear
/nonsense
Who founded Bolt Ltd?
"""


@pytest.mark.parametrize(
    "options", [[], *nightly(["--json"], ["--quiet", "--history-tokens", "0"], ["--top-k", "0"])], ids=" ".join
)
def test_a_conversation_goes_as_without_a_server(both, options):
    payload, expected = both("chat", *LIMIT, *options, typed=TALK)
    assert payload == expected


def test_the_comments_of_a_slow_answer_are_not_shown(both, monkeypatch):
    monkeypatch.setattr(streaming, "COMMENT_SECONDS", 0.001)
    payload, expected = both("query", QUESTION, *LIMIT, "--stream")
    assert payload == expected


@pytest.fixture
def opens(monkeypatch):
    """Counts how often a command opens the index itself."""
    found, opened = [], RagKV.open
    monkeypatch.setattr(RagKV, "open", lambda *given, **more: found.append(given) or opened(*given, **more))
    return found


def test_a_command_that_wants_it_otherwise_works_by_itself(served, folder, ragkv, opens, monkeypatch, tmp_path):
    (tmp_path / "questions").write_text(json.dumps({"question": QUESTION}))
    many = ["--questions", tmp_path / "questions", "--output", tmp_path / "answers"]
    commands = [
        ["query", QUESTION, *LIMIT, "--no-server"],
        ["query", QUESTION, *LIMIT, "--batch-tokens", "500"],
        ["query", *many, *LIMIT],
        ["query", QUESTION, *LIMIT, "--debug"],
    ]
    for place, command in enumerate(commands, start=1):
        assert ragkv(*command, "--index", folder).code == 0
        assert len(opens) == place
    monkeypatch.setenv("RAGKV_NO_SERVER", "1")
    assert ragkv("query", QUESTION, *LIMIT, "--index", folder).code == 0
    assert len(opens) == len(commands) + 1


def test_a_server_of_another_version_is_not_asked(served, folder, ragkv, opens, monkeypatch):
    monkeypatch.setattr(local, "identity", lambda: "0.0.1 elsewhere")
    assert ragkv("query", QUESTION, *LIMIT, "--index", folder).code == 0
    assert opens


def test_expectations_that_are_no_json_are_not_met(served, folder):
    for header in ("[" * 20_000, "{", "null", '"a"'):
        connection = HTTPConnection("localhost")
        connection.sock = local.connect(folder, seconds=PATIENCE)
        with closing(connection):
            connection.request("GET", "/api/indexes/_/documents", headers={"Ragkv-Expects": header})
            assert connection.getresponse().status == 409


def test_an_index_whose_settings_have_changed_is_opened_again(served, folder, ragkv, opens):
    before = load_config(folder)
    assert ragkv("config", "set", "top_k=1", "--index", folder).code == 0
    try:
        payload = json.loads(ragkv("query", QUESTION, *LIMIT, "--json", "--index", folder).out)
        assert (len(payload["sources"]), len(opens)) == (1, 1)
    finally:
        save_config(folder, before)


def test_documents_are_added_beside_a_server(served, folder, ragkv, both, tmp_path):
    (tmp_path / "new.txt").write_text("Quorl Ltd was founded by Pem Iskar.")
    assert ragkv("ingest", tmp_path / "new.txt", "--index", folder, "--no-wait").code == 0
    try:
        payload, expected = both("query", "Who founded Quorl Ltd?", *LIMIT, "--top-k", "1", "--json")
        assert payload == expected
        assert "Pem Iskar" in payload[1]
    finally:
        assert ragkv("delete", "new.txt", "--yes", "--index", folder).code == 0


def ask(folder):
    """Send a request to the server without reading the response."""
    return LocalClient(folder, {}).query({"question": QUESTION, "max_new_tokens": 50}, lambda message: None)


def test_who_hangs_up_ends_its_answer(served, folder, monkeypatch):
    held = HeldModel(served, monkeypatch, last=2)
    reply = ask(folder)
    assert held.begun.wait(PATIENCE)
    reply.close()
    assert held.cancelled.wait(PATIENCE)


def test_a_cancelled_answer_is_told_so_far(served, folder, monkeypatch):
    held, reply = HeldModel(served, monkeypatch, last=3), ask(folder)
    assert held.begun.wait(PATIENCE)
    reply.cancel()
    shown = "".join(reply)
    assert reply.answer.finish_reason == "cancelled"
    assert reply.answer.text == shown.strip()


def test_an_answer_of_a_server_that_stops_says_so(index, monkeypatch):
    with RagKV.open(index, device="cpu") as opened:
        held = HeldModel(opened, monkeypatch, last=2)
        with live({"index": opened}, resident=True, stop_seconds=0) as server:
            reply = ask(index)
            assert held.begun.wait(PATIENCE)
            server.stop()
            with pytest.raises(AnswerInterruptedError, match="stopping"):
                list(reply)
        assert server_process(index) is None


def test_a_moved_index_is_not_answered_from_the_one_in_its_place(index, folder):
    with RagKV.open(index, device="cpu") as opened, live({"index": opened}, resident=True) as server:
        assert LocalClient(index).check({"question": "?", "warnings": False})
        moved = index.rename(index.with_name("moved"))
        shutil.copytree(folder, index, ignore=shutil.ignore_patterns(FOLDER))
        while b"200 OK" not in server.send(get("/api/indexes/index/documents")):  # until it is open
            continue
        with pytest.raises(UnservedError):
            LocalClient(moved).check({"question": "?", "warnings": False})


def test_an_index_that_can_have_no_socket_is_served_all_the_same(index):
    (index / FOLDER).write_text("something else")
    with RagKV.open(index, device="cpu") as opened, live({"index": opened}, resident=True) as server:
        assert b"200 OK" in server.send(get("/readyz"))
        with pytest.raises(UnservedError):
            LocalClient(index).check({"question": "?", "warnings": False})
    assert (index / FOLDER).read_text() == "something else"


@pytest.fixture
def other_server(index):
    """A server with a fixed response: `other_server(b"…")`."""
    local_socket, threads = LocalSocket.make(index), []
    local_socket.listening.listen()

    def say(*parts, until=None):
        def serve():
            connection, _ = local_socket.listening.accept()
            with connection:
                asked = b""
                while not asked.endswith(b"}" if asked.startswith(b"POST") else b"\r\n\r\n"):  # a whole request
                    asked += connection.recv(1 << 16)
                for part in parts:
                    connection.sendall(part)
                if until is not None:
                    until.wait(PATIENCE)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()

    yield say
    for thread in threads:
        thread.join(PATIENCE)
    local_socket.close()


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "message",
    [
        [HEAD],
        [HEAD, b"12\r\nevent: token\ndata:\r\n"],
        [HEAD, b'2e\r\nevent: token\ndata: {"text":"a","source":null}\n\n\r\n'],
    ],
)
def test_a_server_that_dies_under_way_is_one_sentence(index, other_server, ragkv, message):
    other_server(*message)
    result = ragkv("query", QUESTION, "--quiet", "--index", index)
    assert result.code == 1
    assert result.err == f"ragkv: The server for {index} ended before its work was done; {_AGAIN}.\n"


_AGAIN = "ask again, and the command works by itself"


@pytest.mark.parametrize("message", [[], [b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"], [b"nonsense\r\n\r\n"]])
def test_a_server_that_answers_nothing_is_not_missed(index, other_server, ragkv, message):
    other_server(*message)
    assert ragkv("query", QUESTION, *LIMIT, "--index", index).code == 0


def test_a_server_that_hangs_is_not_waited_for(index, other_server, ragkv, monkeypatch):
    monkeypatch.setattr(local, "ANSWER_SECONDS", 0.1)
    done = threading.Event()
    other_server(until=done)
    assert ragkv("query", QUESTION, *LIMIT, "--index", index).code == 0
    done.set()


def test_a_conversation_goes_on_when_its_server_has_stopped(index, capsys):
    with Chat(index, None, {"max_new_tokens": 4}, {}, by_itself=False, as_json=True, quiet=False) as chat:
        with RagKV.open(index, device="cpu") as opened, live({"index": opened}, resident=True):
            chat.choose("block")
            for line in ("What does Bolt make?", QUESTION, "/clear", "What does Bolt make?"):
                assert chat.take(line)
            assert chat._server is not None
        assert chat.take(QUESTION)
    assert (chat._server, chat.code) == (None, 0)
    printed = capsys.readouterr()
    assert "not trained for Block-Attention" in printed.err
    answers = [json.loads(line)["answer"] for line in printed.out.splitlines()]
    assert answers[:2] == answers[2:]


def test_a_server_is_stopped(index, ragkv, caplog):
    with RagKV.open(index, device="cpu") as opened, live({"index": opened, "again": opened}, resident=True):
        payload = json.loads(ragkv("stop", "--json", "--index", index).out)
        assert payload["indexes"] == [str(index)] * 2
        assert server_process(index) is None
    assert "another server" not in caplog.text  # one server may serve it under two names
    result = ragkv("stop", "--index", index)
    assert (result.code, result.out) == (0, f"no server runs for {index}\n")
