"""Requests that no real client sends, against live servers: each is refused or harmless, and the server keeps working.

After each test, the log has no traceback and no text of documents or questions, no request is still active, and an
ordinary request is answered.
"""

import gzip
import hmac
import itertools
import json
import logging
import re
import select
import socket
import time
from contextlib import contextmanager, suppress

import pytest
from live import CHAT, PATIENCE, PATIENT, get, live, post, received
from pydantic import ValidationError

from ragkv import RagKV
from ragkv.server.api import QueryRequest, SearchRequest
from ragkv.server.chat import MAX_CONTENT_PARTS, ChatRequest
from ragkv.server.embeddings import MAX_TEXTS, EmbeddingRequest, RerankRequest
from ragkv.server.settings import Keys, ServerLimits

pytestmark = pytest.mark.slow

QUESTION = "Who founded Halden Works, secretly?"
SECRETS = ("secretly", "Mira Oskel", "Ann Lee")
SERVERS = ("keyed", "patient", "hurried_heads", "hurried_bodies")


@pytest.fixture(scope="module")
def keyed(folder, key):
    """A server that requires a key, and allows one web page's origin."""
    settings = {"keys": Keys.read(key[0]), "origins": ("https://page.example",)}
    with RagKV.open(folder, device="cpu") as rag, live({"two": rag}, **settings) as server:
        yield server


@contextmanager
def limited(folder, **seconds):
    """A server without keys that answers one request at a time; its time limits are out of a test's reach, except for
    `seconds`.
    """
    limits = ServerLimits(body_bytes=4096, upload_bytes=4096, **{**PATIENT, **seconds})
    with RagKV.open(folder, device="cpu") as rag, live({"two": rag}, requests=1, limits=limits) as server:
        yield server


@pytest.fixture(scope="module")
def patient(folder):
    with limited(folder) as server:
        yield server


@pytest.fixture(scope="module")
def hurried_heads(folder):
    with limited(folder, head_seconds=0.2) as server:
        yield server


@pytest.fixture(scope="module")
def hurried_bodies(folder):
    with limited(folder, body_seconds=0.2, upload_seconds=0.2, unread_seconds=0.2) as server:
        yield server


@pytest.fixture(autouse=True)
def sound(request, caplog, key):
    """After the test, the server is idle, and its log contains nothing forbidden."""
    used = [request.getfixturevalue(name) for name in SERVERS if name in request.fixturenames]
    with caplog.at_level(logging.INFO):
        yield
        for server in used:
            for _ in waiting():
                metrics = server.send(get("/metrics", f"authorization: Bearer {key[1]}\r\n"))
                if b'num_requests_running{model_name="two"} 1.0' not in metrics and metrics.startswith(b"HTTP/1.1 200"):
                    break
    for record in caplog.records:
        assert record.exc_info is None, record.getMessage()
        assert record.levelno < logging.ERROR, record.getMessage()
    assert "Traceback" not in caplog.text
    assert [word for word in SECRETS if word in caplog.text] == []


def waiting():
    """Iterations of a loop that waits for a condition; the test fails after too long."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        yield
    pytest.fail("waited in vain")


def asked(**more):
    messages = [{"role": "user", "content": QUESTION}]
    return json.dumps({"model": "two", "messages": messages, "max_tokens": 4, **more}).encode()


def statuses(answer):
    """The status of every response in these bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


# keys


@pytest.mark.parametrize(
    "header",
    [
        "",
        "authorization: \r\n",
        "authorization: Bearer\r\n",
        "authorization: Bearer rk-wrong\r\n",
        "authorization: Basic KEY\r\n",
        "authorization: KEY\r\n",
        "authorization: Bearer KEY KEY\r\n",
        "authorization: Bearer KEYx\r\n",
        "authorization: Bearer sha256:HASH\r\n",
        "authorization: Bearer HASH\r\n",
        "authorization: Bearer " + "k" * 60000 + "\r\n",
        "authorization: Bearer \xe9\xff\r\n",
        "x-api-key: KEY\r\n",
        "cookie: authorization=Bearer KEY\r\n",
        "authorization: Bearer rk-wrong\r\nauthorization: Bearer KEY\r\n",
    ],
    ids=lambda header: header[:40],
)
def test_without_the_key_nothing_is_told(keyed, key, header):
    stored = key[0].read_text().partition("sha256:")[2].strip()
    given = header.replace("KEY", key[1]).replace("HASH", stored)
    for path in ("/v1/models", "/metrics", "/openapi.json", "/api/indexes/two/chunks/none", "/none"):
        answer = keyed.send(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{given}\r\n".encode("latin-1"))
        assert statuses(answer) == [401]
        assert b'"code":"invalid_api_key"' in answer.replace(b": ", b":")
        assert b"two" not in answer


def test_a_refused_upload_is_read_to_its_end_so_that_the_client_gets_the_reason(keyed):
    """A connection that is closed with unread data is reset, and a client that still sends loses the response."""
    body = bytes(64 << 20)
    head = f"POST /api/indexes/two/documents HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with keyed.connect() as connection:
        connection.sendall(head.encode() + body)
        assert statuses(received(connection)) == [401]


def test_every_key_is_compared_in_constant_time(monkeypatch):
    compared = []
    whole = hmac.compare_digest

    def counted(one, other):
        compared.append((len(one), len(other)))
        return whole(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys(dict.fromkeys("abc", "0" * 64))
    for given in ("", "rk-wrong", "\ud800", "k" * 100000):
        assert keys.owner(given) is None
    assert compared == [(64, 64)] * 3 * 4


# bodies


@pytest.mark.parametrize(
    "length", ["1099511627776", "4097", "-1", "+5", "1e3", "0x10", " ", "5, 6", "9" * 5000, "\u0665"], ids=repr
)
def test_a_length_that_cannot_be_is_refused_before_the_body(patient, length):
    answer = patient.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
        + f"content-length: {length}\r\n\r\n".encode()
    )
    assert statuses(answer) in ([400], [413])


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"FFFFFFFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"5\r\nabcdefgh\r\n", b"2;" + b"x" * 70000,
     b"0\r\nbad trailer\r\n\r\n"]
)  # fmt: skip
def test_chunks_that_are_none_are_refused(patient, body):
    answer = patient.send(post(body, "transfer-encoding: chunked\r\n", length=False))
    assert statuses(answer)[:1] in ([400], [413])


def test_two_lengths_of_one_body_are_refused(patient):
    smuggled = get("/v1/models")
    answer = patient.send(post(b"0\r\n\r\n" + smuggled, "transfer-encoding: chunked\r\n", close=False))
    assert statuses(answer) == [400]
    assert b"not both" in answer


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_body_that_is_compressed_is_refused_for_that(patient, encoding):
    answer = patient.send(post(gzip.compress(asked()), f"content-encoding: {encoding}\r\n"))
    assert statuses(answer) == [415]
    assert b"Content-Encoding is not supported" in answer


def test_a_seed_of_minus_1_is_none(patient):
    assert statuses(patient.send(post(asked(seed=-1)))) == [200]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"a"', b"\xff\xfe", b"\x00", b"[" * 4000, b'{"a":' * 800, b"{}" * 2, b"NaN",
        b'{"model": "two", "messages": [], "seed": 1' + b"0" * 4000 + b"}",
        b'{"model": "two", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "two", "messages": "x"}', b'{"model": {}, "messages": [{}]}', b'{"model": "two\x01"}',
    ],
    ids=lambda body: repr(body)[:40],
)  # fmt: skip
def test_bad_json_is_refused(patient, body):
    assert statuses(patient.send(post(body))) == [400]


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"a": DEEP}}, {"tools": DEEP}, {"stop": [""]}, {"stop": ["a"] * 300}, {"stop": ["\ud800"]},
        {"seed": 10**400}, {"seed": -(2**63)}, {"seed": 2**64}, {"max_tokens": 10**400, "stop": ["m", "z"]},
        {"temperature": 10**400}, {"temperature": 1e308}, {"top_p": -1}, {"top_k": 2**63}, {"top_k": -1},
        {"candidates": 10**30}, {"where": ["source=" + "*" * 500]}, {"where": ["=", "a=b=c"]},
        {"where": ["source=\x00"]},
        {"top_k_tokens": 10**30}, {"min_p": 7}, {"repetition_penalty": 0}, {"repetition_penalty": 1e-320},
        {"messages": [{"role": "user", "content": "Halden \ud800\x00\x1b[31m secretly"}]},
        {"messages": [{"role": "user", "content": "Halden " * 400}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Halden"}] * 100}]},
        {"model": "two" * 1000}, {"model": "../two"}, {"model": "two:../../etc"}, {"engine": "__class__"},
        {"retrieval": "\x00"}, {"response_format": {"type": "json_schema"}}, {"__proto__": 1}, {"a" * 3000: 1},
    ],
    ids=lambda more: repr(more)[:40],
)  # fmt: skip
def test_no_parameter_breaks_the_server(patient, more):
    [status] = statuses(patient.send(post(asked(stream=True, **more))))
    assert status < 500


# uploads


def form(body, headers="", *, length=True):
    whole = post(body, headers, length=length, kind="multipart/form-data; boundary=edge")
    return whole.replace(CHAT.encode(), b"/api/indexes/two/documents", 1)


def part(name, content=b"text"):
    quoted = name if isinstance(name, bytes) else name.encode()
    return b'--edge\r\ncontent-disposition: form-data; name="files"; filename="' + quoted + b'"\r\n\r\n' + content


MORE = "content-length: 4000\r\n"


@pytest.mark.parametrize(("request_of", "data"), [(post, b" "), (form, part("a.txt"))], ids=["body", "form"])
def test_a_body_of_chunks_without_end_is_refused(patient, request_of, data):
    with patient.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(request_of(b"", "transfer-encoding: chunked\r\n", length=False))
            while not select.select([connection], [], [], 0)[0]:
                connection.sendall(b"400\r\n" + data.ljust(1024) + b"\r\n")
        assert statuses(received(connection)) in ([413], [400], [])  # a reset may overtake the response


# slowness


def dripped(connection, first, data):
    """The response to a client that sends `first`, and then `data` repeatedly, byte by byte."""
    with suppress(ConnectionError):
        connection.sendall(first)
        for byte in itertools.cycle(data):
            if select.select([connection], [], [], 0.01)[0]:
                break
            connection.sendall(bytes([byte]))
    return received(connection)


@pytest.mark.parametrize("first", [b"", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"])
def test_headers_that_do_not_end_are_hung_up_on(hurried_heads, first):
    with hurried_heads.connect() as connection:
        assert (dripped(connection, first, b"x-a: b\r\n") if first else received(connection)) == b""


def test_a_later_request_of_a_connection_has_no_more_time(hurried_heads):
    for _ in waiting():
        with hurried_heads.connect() as connection, suppress(ConnectionError):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            if statuses(connection.recv(1 << 16)) == [200]:  # else this process was stopped meanwhile
                assert statuses(dripped(connection, b"GET /v1/models HTTP/1.1\r\n", b"x-a: b\r\n")) == []
                break


def test_a_body_that_does_not_end_or_come_is_told_so(hurried_bodies):
    for part_of_one in (post(b"", MORE, length=False), form(part("a.txt"), MORE, length=False)):
        with hurried_bodies.connect() as connection:
            assert statuses(dripped(connection, part_of_one, b" drop")) == [408]
        with hurried_bodies.connect() as connection:
            connection.sendall(part_of_one)
            assert statuses(received(connection)) == [408]


def test_an_answer_that_is_not_read_is_given_up(hurried_bodies):
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect(hurried_bodies.address)
        poll = select.poll()
        poll.register(connection, 0)  # only reports the end
        many = b"GET /page/purify.min.js HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200
        connection.setblocking(False)
        for _ in waiting():
            if poll.poll(10):
                break
            with suppress(BlockingIOError, ConnectionError):
                connection.send(many)


# the protocol


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n\r\n",
        b"GET /none HTTP/1.1\r\n\r\n",  # no host
        b"GET /none HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\nx: a\rb\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\n: a\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\nx y: a\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100000 + b"\r\n\r\n",
        b"GET /none HTTP/1.1\r\nhost: localhost\r\n" + b"x: a\r\n" * 20000 + b"\r\n",
        b"GET /" + b"a" * 100000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /none HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",  # TLS
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
        b"GET http://evil.example/healthz HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n",
        b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ],
    ids=lambda each: repr(each)[:40],
)  # fmt: skip
def test_what_is_no_request_is_refused(patient, data):
    [status] = statuses(patient.send(data, half=True))
    assert 400 <= status < 500


def test_requests_in_a_row_are_answered_in_a_row(patient):
    many = [b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n", post(asked(), close=False), post(b"{", close=False)]
    assert statuses(patient.send(b"".join(many) + get("/none"))) == [200, 200, 400, 404]


@pytest.mark.parametrize("stream", [False, True])
def test_garbage_after_a_request_that_runs_ends_the_connection(patient, stream):
    answer = patient.send(post(asked(stream=stream, max_tokens=24), close=False) + b"\x00garbage\r\n\r\n")
    assert statuses(answer) in ([200, 400], [200], [])


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_that_breaks_while_it_is_read_is_refused(patient, stream):
    body = asked(stream=stream)
    with patient.connect() as connection:
        connection.sendall(post(b"%x\r\n%b\r\n" % (len(body), body), "transfer-encoding: chunked\r\n", length=False))
        connection.sendall(b"zz\r\n")
        assert statuses(received(connection)) == [400]


def test_a_refused_body_that_breaks_ends_the_connection(keyed):
    """The response has begun, so there is no other one."""
    with keyed.connect() as connection:
        connection.sendall(post(b"", "transfer-encoding: chunked\r\n", length=False))
        assert statuses(connection.recv(1 << 16)) == [401]
        connection.sendall(b"zz\r\n")
        assert statuses(received(connection)) == []


def test_http_1_0(patient):
    body = asked(stream=True)
    head = f"POST {CHAT} HTTP/1.0\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    answer = patient.send(head.encode() + b"\r\n\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n")
    assert statuses(patient.send(b"GET /healthz HTTP/1.0\r\nhost: localhost\r\n\r\n")) == [200]


def test_a_client_that_waits_for_leave_gets_it(patient):
    with patient.connect() as connection:
        body = asked()
        connection.sendall(post(b"", f"expect: 100-continue\r\ncontent-length: {len(body)}\r\n", length=False))
        assert statuses(connection.recv(1 << 16)) == [100]
        connection.sendall(body)
        assert statuses(received(connection)) == [200]


def test_an_upgrade_is_not_made(patient):
    wanted = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: a\r\n"
    answer = patient.send(f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{wanted}\r\n".encode(), half=True)
    assert 101 not in statuses(answer)


def test_bodies_that_do_not_come_leave_room_for_whoever_asks_how_it_is(patient):
    """More requests than are admitted, without their bodies: further ones get 503, but `/healthz` still works."""
    head = post(b"a" * 100)[:-100]
    held = [patient.connect() for _ in range(80)]
    try:
        for connection in held:
            connection.sendall(head)
        refused, _, _ = select.select(held, [], [], PATIENCE)
        assert statuses(received(refused[0])) == [503]
        assert statuses(patient.send(get("/v1/models"))) == [503]
        assert statuses(patient.send(get("/healthz"))) == [200]
    finally:
        for connection in held:
            connection.close()
    for _ in waiting():
        if statuses(patient.send(get("/v1/models"))) == [200]:
            break


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (ChatRequest, {"messages": [{}] * 500}),
        (ChatRequest, {"stop": [{}] * 1000}),
        (EmbeddingRequest, {"input": [{}] * 1000}),
        (EmbeddingRequest, {"input": [[{}] * 1000] * 1000}),
        (RerankRequest, {"documents": [{}] * 1000}),
        (QueryRequest, {"history": [{}] * 1000}),
        (QueryRequest, {"where": [{}] * 1000, "stop": [{}] * 1000}),
        (SearchRequest, {"where": [{}] * 1000}),
    ],
)
def test_a_list_of_wrong_items_is_refused_at_its_first(kind, body):
    """A body may hold a million items; collecting an error for each would block the server."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() < 20


@pytest.mark.parametrize(
    ("kind", "body", "loc"),
    [
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}] * (MAX_CONTENT_PARTS + 1)}]},
            "messages",
        ),
        (EmbeddingRequest, {"input": [[]] * (MAX_TEXTS + 1)}, "input"),
    ],
)
def test_lists_that_cost_more_than_their_bytes_have_a_limit(kind, body, loc):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"model": "two", **body})
    assert any(each["type"] == "too_long" and each["loc"][0] == loc for each in raised.value.errors())


# paths


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../../etc/passwd", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/ragkv.toml", "/v1/models/..%2f..%2fragkv.toml",
        "/v1/models/%00", "/v1/models/%ff%fe", "/v1/models/two%0d%0ax:%20y", "//v1/models", "/v1/models/ragkv/../two",
        "/api/indexes/..%2f..%2fetc/chunks/passwd", "/api/indexes/two/chunks/..%2f..%2f..%2fragkv.toml",
        "/api/indexes/two/chunks/%00", "/api/indexes/two/chunks/" + "a" * 5000, "/api/indexes/two/chunks/%ed%a0%80",
        "/api/indexes/" + "%2e%2e%2f" * 20 + "/chunks/a", "/page/..%2f..%2fpyproject.toml", "/page/../../../etc/passwd",
        "/static/../x", "/.git/config", "/ragkv.toml", "/docs", "/redoc", "/v1/models?a=%00&a=%ff",
        "/%", "/%zz", "/v1//models",
    ],
)  # fmt: skip
def test_no_path_leads_out(patient, path):
    answer = patient.send(get(path))
    [status] = statuses(answer)
    assert status in (200, 307, 400, 404, 422)
    assert b"root:" not in answer
    assert b"chunk_tokens" not in answer  # ragkv.toml
    if status == 200:
        assert path.startswith("/v1/models?")


# browsers


def preflight(server, origin, method="POST", headers="authorization,content-type,x-stainless-lang"):
    asking = (
        f"origin: {origin}\r\naccess-control-request-method: {method}\r\naccess-control-request-headers: {headers}\r\n"
    )
    return server.send(
        f"OPTIONS {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{asking}\r\n".encode()
    ).lower()


def test_a_page_that_may_ask_is_told_so_and_reads_refusals(keyed, key):
    """The browser versions of OpenAI's client send additional headers."""
    result = preflight(keyed, "https://page.example")
    assert statuses(result.upper()) == [200]
    assert b"access-control-allow-origin: https://page.example" in result
    assert b"x-stainless-lang" in result
    for headers in ("", f"authorization: Bearer {key[1]}\r\n"):
        answer = keyed.send(get("/v1/models", f"origin: https://page.example\r\n{headers}"))
        assert b"access-control-allow-origin: https://page.example" in answer
    assert b"access-control-allow-credentials" not in answer


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "https://page.example.evil.example", "*"])
def test_another_page_is_not(keyed, patient, origin):
    for server in (keyed, patient):
        assert b"access-control-allow-origin" not in preflight(server, origin)
        assert b"access-control-allow-origin" not in server.send(get("/healthz", f"origin: {origin}\r\n")).lower()


def test_head_tells_the_headers_of_get_and_options_are_not_answered(patient):
    """Load balancers use HEAD for health checks."""
    for path in ("/healthz", "/", "/v1/models", "/none"):
        result = patient.send(get(path))
        body = result.partition(b"\r\n\r\n")[2]
        answer = patient.send(get(path).replace(b"GET", b"HEAD", 1))
        assert statuses(answer) == statuses(result)
        assert answer.endswith(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in answer
    for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
        answer = patient.send(get("/v1/models").replace(b"GET", method.encode()))
        assert statuses(answer)[0] in (405, 415)
