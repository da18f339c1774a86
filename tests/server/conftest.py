"""An index of two documents with a random model, and the server's app over it, called without a socket."""

import asyncio
import json
import shutil
import threading
from contextlib import ExitStack, closing
from functools import partial

import httpx
import pytest
from guarded import guarded
from heldmodel import call_at_third_piece
from indexed import PAIR, write_texts
from live import PATIENCE

from ragkv import RagKV
from ragkv.errors import RetrievalError
from ragkv.ingest.ingester import Ingester
from ragkv.server import local
from ragkv.server.app import make_app
from ragkv.server.jobs import JobManager
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.schemas import ServedIndexes
from ragkv.server.settings import add_key


@pytest.fixture(scope="session", autouse=True)
def patient_commands():
    """Commands wait for a running server, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "ANSWER_SECONDS", PATIENCE)
        patch.setattr(local, "SILENT_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    texts = {"halden.md": PAIR["halden.md"], "a [b](c).txt": PAIR["bolt.txt"]}
    return write_texts(tmp_path_factory.mktemp("documents"), texts)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory, model_folder, documents):
    folder = tmp_path_factory.mktemp("indexes") / "two"
    with RagKV.create(folder, model=str(model_folder), device="cpu", chunk_tokens=128) as rag:
        rag.ingest(documents)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pristine):
    """A copy of the index, for the tests of a module."""
    return shutil.copytree(pristine, tmp_path_factory.mktemp("indexes") / "two")


@pytest.fixture(scope="module")
def rag(folder):
    with RagKV.open(folder, device="cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def mini(tmp_path_factory, documents):
    """An index of the bundled model, which has an embedder."""
    with RagKV.create(tmp_path_factory.mktemp("indexes") / "two", device="cpu") as rag:
        rag.ingest(documents)
        yield rag


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    """A file of keys, and its key."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    return path, add_key(path, "ann")


@pytest.fixture(scope="module")
def app_of_all(rag):
    """(the app over the index, its limiter): building a FastAPI app takes longer than most tests."""
    served, limiter = ServedIndexes({"two": rag}), ConcurrencyLimiter(8, patience=0.0)
    with closing(JobManager(served, limiter)) as desk:
        yield make_app(served, limiter, desk), limiter


@pytest.fixture
def limiter(app_of_all):
    """The app's limiter, reset."""
    app_of_all[1].__init__(8, patience=0.0)
    return app_of_all[1]


@pytest.fixture
def desk_of(limiter):
    """A job manager for these indexes: `desk_of(name=rag)`; all jobs end with the test."""
    with ExitStack() as open_desks:

        def made(**indexes):
            desk = JobManager(ServedIndexes(indexes), limiter)
            open_desks.callback(desk.close)
            return desk

        yield made


@pytest.fixture
def app_of(limiter, desk_of):
    """The app over these indexes: `app_of(name=rag)`."""
    return lambda **indexes: make_app(ServedIndexes(indexes), limiter, desk_of(**indexes))


@pytest.fixture
def app(app_of_all, limiter):
    return app_of_all[0]


@pytest.fixture
def call_on():
    """Send a request to an app: `call_on(app, "GET", "/healthz")`."""

    def asked(app, method, path, *, around=guarded, **more):
        async def ask():
            transport = httpx.ASGITransport(app=around(app), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **more)

        return asyncio.run(ask())

    return asked


@pytest.fixture
def call(app, call_on):
    """Send a request to the app: `call("GET", "/healthz")`, `call("POST", path, json={…})`."""
    return partial(call_on, app)


@pytest.fixture
def chat(call):
    """Ask the index a question; returns the response."""

    def asked(question="Who founded Halden Works?", **more):
        messages = more.pop("messages", [{"role": "user", "content": question}])
        body = {"model": "ragkv/two", "messages": messages, "max_tokens": 6, **more}
        return call(
            "POST", "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
        )

    return asked


@pytest.fixture
def torn(monkeypatch):
    """Answers fail after their second text."""

    def tear(answer):
        raise RetrievalError("It broke.")

    call_at_third_piece(tear, monkeypatch.setattr)


@pytest.fixture
def stopped(monkeypatch):
    """Answers pause after their second text, until the returned event is set or they are cancelled."""
    resume = threading.Event()

    def stop(answer):
        while not resume.wait(0.01) and not answer._cancelled.is_set():
            continue

    call_at_third_piece(stop, monkeypatch.setattr)
    yield resume
    resume.set()


@pytest.fixture
def held(monkeypatch):
    """Hold ingests at their first document: wait for `begun`, then set `go`."""

    class Held:
        begun, go = threading.Event(), threading.Event()

    run = Ingester.run

    def waiting(ingester, *arguments, **more):
        Held.begun.set()
        assert Held.go.wait(600)
        return run(ingester, *arguments, **more)

    monkeypatch.setattr(Ingester, "run", waiting)
    yield Held
    Held.go.set()
