"""A stop while answers are on their way: they finish, or are told that they are cut short, and it comes to an end."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack

import pytest
from live import PATIENCE, live, received

from ragkv import RagKV
from ragkv.index.answer import AnswerStream
from ragkv.server import lifetime
from ragkv.server.setting import Limits

pytestmark = pytest.mark.slow

QUESTION = "Who founded Halden Works?"


@pytest.fixture
def held(monkeypatch):
    """Answers wait after their second piece, until the event is set or they are cancelled."""
    whole, resume = AnswerStream._run, threading.Event()

    def run(self):
        for count, piece in enumerate(whole(self)):
            if count == 2:
                for _ in range(int(PATIENCE * 100)):
                    if resume.wait(0.01) or self._cancelled.is_set():
                        break
            yield piece

    monkeypatch.setattr(AnswerStream, "_run", run)
    yield resume
    resume.set()


@pytest.fixture
def serve(folder, monkeypatch):
    monkeypatch.setattr(lifetime, "GRACE", 1)

    def served(**settings):
        return live({"two": RagKV.open(folder, device="cpu")}, **settings)

    return served


@pytest.fixture
def ask():
    """Ask a server for a long answer; the connection. Of a stream, the beginning has come."""
    with ExitStack() as stack:
        yield lambda server, *, stream: stack.enter_context(asked(server, stream=stream))


def asked(server, *, stream):
    body = {"model": "two", "messages": [{"role": "user", "content": QUESTION}], "stream": stream, "max_tokens": 12}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    connection = server.connect()
    connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    begun = b""
    while stream and b"data: " not in begun:
        begun += connection.recv(1 << 16)
    return connection


def test_streams_finish(serve, ask, held):
    with serve(stop_seconds=int(PATIENCE)) as server:
        streams = [ask(server, stream=True) for _ in range(4)]
        server.stop()
        while True:  # it takes nobody in any more
            try:
                server.connect().close()
            except OSError:
                break
        held.set()
        for connection in streams:
            told = received(connection)
            assert b'"finish_reason":"length"' in told
            assert b"data: [DONE]\n\n" in told
            assert b'"error"' not in told


def test_streams_that_do_not_finish_are_told_why(serve, ask, held, caplog):
    with serve(stop_seconds=0) as server:
        streams = [ask(server, stream=True) for _ in range(4)]
        whole = ask(server, stream=False)
        while b'waiting{model_name="two"} 1.0' not in server.send(
            b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        ):
            continue
        server.stop()
        for connection in streams:
            told = received(connection)
            assert b'"code":"unavailable"' in told
            assert b"the server is stopping" in told
            assert b"data: [DONE]\n\n" in told
        answer = received(whole)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"the server is stopping" in answer
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_whoever_only_waits_holds_up_nothing(serve, caplog):
    """Connections without a request, with half of its head, with half of its body, and with one that is not read."""
    with serve(stop_seconds=0, limits=Limits(head_seconds=PATIENCE, body_seconds=PATIENCE)) as server:
        begun = [server.connect() for _ in range(4)]
        begun[1].sendall(b"GET /v1/models HTTP/1.1\r\n")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        begun[2].sendall(head + b"content-length: 100\r\n\r\n{")
        begun[3].setblocking(False)
        many = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
        for _ in range(200):
            try:
                begun[3].send(many)
            except BlockingIOError:
                break
        server.send(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    for connection in begun:
        connection.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
