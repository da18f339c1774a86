"""Stopping a server with running answers: they finish, or end with a notice, and the process ends in time."""

import json
import signal
from contextlib import ExitStack

import pytest
from clichild import CliChild
from live import PATIENCE, get, live, post, received
from servechild import ServeChild

from ragkv import RagKV
from ragkv.server import app

pytestmark = pytest.mark.slow

QUESTION = "Who founded Halden Works?"


@pytest.fixture
def serve(folder, monkeypatch):
    """A server; `grace` is the time that connections have for their last event when it stops."""

    def served(*, grace=int(PATIENCE), **settings):
        monkeypatch.setattr(app, "GRACE", grace)
        return live({"two": RagKV.open(folder, device="cpu")}, **settings)

    return served


@pytest.fixture
def ask():
    """Ask a server for a long answer; returns the connection, for a stream after its first event."""
    with ExitStack() as stack:
        yield lambda server, *, stream: stack.enter_context(asked(server, stream=stream))


def asked(server, *, stream, model="two"):
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "stream": stream, "max_tokens": 12}
    connection = server.connect()
    connection.sendall(post(json.dumps(body).encode(), close=False))
    begun = b""
    while stream and b"data: " not in begun:
        begun += connection.recv(1 << 16)
    return connection


def test_streams_finish(serve, ask, stopped):
    with serve(stop_seconds=int(PATIENCE)) as server:
        streams = [ask(server, stream=True) for _ in range(4)]
        server.stop()
        while True:  # it accepts no more connections
            try:
                server.connect().close()
            except OSError:
                break
        stopped.set()
        for connection in streams:
            result = received(connection)
            assert b'"finish_reason":"length"' in result
            assert b"data: [DONE]\n\n" in result
            assert b'"error"' not in result


def test_streams_that_do_not_finish_are_told_why(serve, ask, stopped, caplog):
    with serve(stop_seconds=0) as server:
        streams = [ask(server, stream=True) for _ in range(4)]
        whole = ask(server, stream=False)
        while b'waiting{model_name="two"} 1.0' not in server.send(get("/metrics")):
            continue
        server.stop()
        for connection in streams:
            result = received(connection)
            assert b'"code":"unavailable"' in result
            assert b"the server is stopping" in result
            assert b"data: [DONE]\n\n" in result
        answer = received(whole)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"the server is stopping" in answer
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_whoever_only_waits_holds_up_nothing(serve, caplog):
    """Connections without a request, with partial headers, with a partial body, and with an unread response."""
    with serve(stop_seconds=0, grace=0) as server:
        begun = [server.connect() for _ in range(4)]
        begun[1].sendall(b"GET /v1/models HTTP/1.1\r\n")
        begun[2].sendall(post(b"{", "content-length: 100\r\n", length=False, close=False))
        begun[3].setblocking(False)
        many = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
        for _ in range(200):
            try:
                begun[3].send(many)
            except BlockingIOError:
                break
        server.send(get("/healthz"))
    for connection in begun:
        connection.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_process_ends_whatever_runs(folder):
    """An answer that never reaches its next token."""
    child = ServeChild(folder, 0, stop_seconds=0, grace=0.2)
    try:
        with asked(child.live, stream=True, model="own") as connection:
            assert child.stop() in (0, -signal.SIGALRM)  # SIGALRM if the process itself was stopped for that long
            received(connection)
    finally:
        child.kill()


@pytest.mark.parametrize(
    ("busy", "seconds", "status"),
    [
        ("threading.Event().wait()", (0.1, 600), 0),
        ("while True: pass", (0.1, 600), 0),
        ("re.match('(a+)+$', 'a' * 99 + 'b')", (600, 0.1), -signal.SIGALRM),  # holds the GIL
    ],
)
def test_the_last_second_comes_even_if_no_thread_may_run(busy, seconds, status):
    """A thread ends the process; if no thread can run, the kernel's alarm does, one second later."""
    assert app.LastSecond(0.5)._alarm == 1.5
    code = f"""
import re, threading
from ragkv.server.app import LastSecond
last = LastSecond({seconds[0]})
last._alarm = {seconds[1]}
last.begin()
def work():
    {busy}
threading.Thread(target=work).start()
"""
    assert CliChild(program=code).end()[0] == status


def test_the_last_second_comes_even_if_the_event_loop_never_runs_again():
    code = """
import uvicorn
from ragkv.server.app import GracefulServer, LastSecond, ServerHooks

def ready(url):
    print(flush=True)
    while True:
        pass

async def app(scope, receive, send):
    pass

last = LastSecond(600)
last._alarm = 0.1
config = uvicorn.Config(app, port=0, log_config=None, lifespan="off")
GracefulServer(config, "", ServerHooks(ready), 0, last).run()
"""
    server = CliChild(program=code)
    assert server.line() == "\n"
    assert server.end(signal.SIGTERM)[0] == -signal.SIGALRM


def test_what_has_ended_by_itself_is_not_ended():
    code = """
import signal, threading
from ragkv.server.app import LastSecond
last = LastSecond(1000)
last.begin()
assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
last.__exit__()
assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
last._timer.join()
raise SystemExit(7)
"""
    assert CliChild(program=code).end()[0] == 7
