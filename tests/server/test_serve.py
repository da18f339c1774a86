"""`ragkv serve` as a command, used by clients of OpenAI's protocol over a socket."""

import asyncio
import json
import signal
import socket
from contextlib import ExitStack
from itertools import product
from urllib.parse import urlsplit

import httpx
import pytest
from clichild import CliChild

pytestmark = pytest.mark.slow

openai = pytest.importorskip("openai")
ASKED = {"messages": [{"role": "user", "content": "Who founded Halden Works?"}], "max_tokens": 6}

SEARCHED = """
import gc
from ragkv.server import app
app.run_server = lambda *_: print(len(gc.get_objects(2)))
from ragkv.cli.main import main; main()
"""
"""A server that ends as it begins, with the number of old objects that collections search."""


@pytest.fixture(scope="module")
def url(folder, key):
    """The URL of a server that is ended by Ctrl-C."""
    words = ("--index", f"two={folder}", "--index", f"again={folder}", "--keys", key[0])
    server = CliChild("serve", "--port", 0, "--device", "cpu", "--log-format", "json", *words)
    yield server.line().split()[-1]
    code, _, message = server.end(signal.SIGINT)
    assert (code, "Traceback" in message) == (0, False), message
    logged = [json.loads(line) for line in message.splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, logged))
    assert {"uvicorn.error", "ragkv"} <= {line["logger"] for line in logged}
    assert {line.get("path") for line in logged} >= {"/v1/chat/completions", None}


def test_openai_asks_many_at_once(url, key, rag):
    asked = list(product(["two", "again"], ["full", "ape", "block", "pced"]))
    expected = [rag.query("Who founded Halden Works?", engine=engine, max_new_tokens=6).text for _, engine in asked]

    async def ask():
        async with openai.AsyncOpenAI(base_url=url, api_key=key[1], max_retries=0) as asker:
            each = (asker.chat.completions.create(model=f"ragkv/{name}:{engine}", **ASKED) for name, engine in asked)
            return [result.choices[0].message.content for result in await asyncio.gather(*each)]

    assert asyncio.run(ask()) == expected


def test_no_garbage_collection_searches_what_was_loaded_before_the_first_question(folder):
    served = CliChild("serve", "--port", 0, "--device", "cpu", "--index", folder, program=SEARCHED)
    assert served.line() == "0\n"
    assert served.end()[0] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_it_with_0(folder, number):
    server = CliChild("serve", "--port", 0, "--device", "cpu", "--index", folder)
    server.line()
    code, _, message = server.end(number)
    assert (code, "Traceback" in message) == (0, False), message


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
from ragkv.server.settings import ServerLimits
ServerLimits.__init__.__kwdefaults__["head_seconds"] = 2.0
from ragkv.cli.main import main; main()
"""


def test_connections_without_end_leave_the_log_short_and_the_server_alive(folder):
    """They are closed after a while without a request."""
    server = CliChild("serve", "--port", 0, "--device", "cpu", "--index", folder, program=FEW_FILES)
    try:
        root = server.line().split()[-1].removesuffix("/v1")
        address = (urlsplit(root).hostname, urlsplit(root).port)
        with ExitStack() as held:
            for _ in range(200):
                connection = held.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(address)
            assert httpx.get(f"{root}/healthz", timeout=600).status_code == 200
    finally:
        code, _, message = server.end(signal.SIGTERM)
    assert (code, "Traceback" in message, len(message) < 4000) == (0, False, True), message[:4000]
