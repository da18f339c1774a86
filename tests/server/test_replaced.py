"""An index is deleted or replaced while a server serves it."""

import json
import shutil
import threading
from contextlib import suppress
from functools import partial

import pytest
from indexed import indexed

from ragkv import RagKV
from ragkv.server.app import make_app
from ragkv.server.jobs import JobManager
from ragkv.server.schemas import ServedIndexes

QUESTION = "Who founded Halden Works?"
ORLA = {"orla.txt": "Halden Works was founded by Orla Brandt."}
ASKED = {"question": QUESTION, "max_new_tokens": 6}
CHAT = {"model": "lost", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
REQUESTS = [
    ("POST", "/v1/chat/completions", {"json": CHAT}),
    ("POST", "/v1/chat/completions", {"json": {**CHAT, "stream": True}}),
    ("POST", "/v1/embeddings", {"json": {"model": "lost", "input": "a"}}),
    ("POST", "/v1/rerank", {"json": {"model": "lost", "query": "a", "documents": ["b"]}}),
    ("GET", "/v1/models/lost", {}),
    ("POST", "/api/indexes/lost/query", {"json": ASKED}),
    ("GET", "/api/indexes/lost/documents", {}),
    ("GET", "/api/indexes/lost/documents/a", {}),
    ("GET", "/api/indexes/lost/documents/a/chunks", {}),
    ("GET", "/api/indexes/lost/chunks/a", {}),
    ("POST", "/api/indexes/lost/documents", {"files": [("files", ("a.txt", b"Kesk Mills makes flour."))]}),
    ("DELETE", "/api/indexes/lost/documents/a", {}),
    ("GET", "/api/indexes/lost/jobs", {}),
    ("GET", "/api/indexes/lost/jobs/0123456789abcdef", {}),
]


@pytest.fixture
def lost(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "a secret" / "lost")


@pytest.fixture
def serving(lost, rag, limiter, call_on):
    """The app over `lost` and an index that stays, and a function that sends it requests."""
    with RagKV.open(lost, device="cpu") as opened:
        served = ServedIndexes({"lost": opened, "two": rag})
        desk = JobManager(served, limiter)
        app = make_app(served, limiter, desk)
        app.state.ready = True

        yield partial(call_on, app)
        desk.close()
        settle()
        # the other one belongs to the module
        for name, each in served:
            if name != "two":
                each.close()


def settle():
    """Wait until no index is being reopened."""
    for thread in threading.enumerate():
        if thread.name == "ragkv-open":
            thread.join()


def all_refused(asked, tmp_path):
    for method, path, more in REQUESTS:
        response = asked(method, path, **more)
        assert response.status_code == 503, (method, path, response.text)
        assert str(tmp_path) not in response.text, (method, path)
        assert "secret" not in response.text, (method, path)
        assert "retry-after" in response.headers, (method, path)


@pytest.mark.parametrize("begun", [False, True])
def test_a_deleted_index_is_unavailable_and_stays_deleted(serving, lost, tmp_path, caplog, begun):
    if begun:  # its jobs are already managed
        assert serving("GET", "/api/indexes/lost/jobs").status_code == 200
        assert serving(*REQUESTS[0][:2], **REQUESTS[0][2]).status_code == 200
    assert serving("GET", "/readyz").json() == {"status": "ready", "unavailable": 0}
    shutil.rmtree(lost)
    all_refused(serving, tmp_path)
    settle()
    all_refused(serving, tmp_path)
    settle()
    assert not lost.exists()
    assert [each["name"] for each in serving("GET", "/api/indexes").json()["indexes"]] == ["two"]
    assert [each["id"] for each in serving("GET", "/v1/models").json()["data"]] == ["ragkv/two", "ragkv/two:plain"]
    assert serving("POST", "/api/indexes/two/query", json=ASKED).status_code == 200
    result = serving("GET", "/readyz")
    assert (result.status_code, result.json()) == (200, {"status": "ready", "unavailable": 1})
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_server_whose_only_index_is_gone_is_not_ready(lost, limiter, call_on):
    with RagKV.open(lost, device="cpu") as opened:
        served = ServedIndexes({"lost": opened})
        app = make_app(served, limiter, JobManager(served, limiter))
        app.state.ready = True
        shutil.rmtree(lost)
        result = call_on(app, "GET", "/readyz")
        assert (result.status_code, result.json()) == (503, {"status": "unavailable", "unavailable": 1})
        served.close()


def test_an_index_that_goes_away_under_a_request_is_named_by_no_path(serving, lost, tmp_path, monkeypatch):
    """It disappears between the check that it exists and its use."""
    shutil.rmtree(lost)
    monkeypatch.setattr(ServedIndexes, "_in_place", lambda *_: True)
    for method, path, more in REQUESTS:
        response = serving(method, path, **more)
        assert response.status_code in (200, 202, 400, 404, 503), (path, response.text)
        assert str(tmp_path) not in response.text, (method, path)
        assert "secret" not in response.text, (method, path)
    assert not lost.exists()


@pytest.mark.parametrize("begun", [False, True])
def test_a_replaced_index_is_answered_from_what_is_there_now(serving, lost, tmp_path, model_folder, begun):
    if begun:
        assert serving(*REQUESTS[10][:2], **REQUESTS[10][2]).status_code == 202
    with indexed(tmp_path / "new", ORLA, model=model_folder, chunk_tokens=128) as made:
        expected = made.query(QUESTION, max_new_tokens=6)
    copy = shutil.copytree(tmp_path / "new" / "index", tmp_path / "copy")
    while copy.exists():  # the running job may recreate files in the folder
        shutil.rmtree(lost, ignore_errors=True)
        with suppress(OSError):
            copy.rename(lost)
    response = serving("POST", "/api/indexes/lost/query", json=ASKED)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "index_unavailable")
    settle()
    result = serving("POST", "/api/indexes/lost/query", json=ASKED).json()
    assert result["answer"] == expected.text
    assert [item["chunk_id"] for item in result["sources"]] == [item.chunk_id for item in expected.sources]
    assert serving("GET", "/readyz").json() == {"status": "ready", "unavailable": 0}
    job = serving(*REQUESTS[10][:2], **REQUESTS[10][2]).json()["job"]
    message = serving("GET", f"/api/indexes/lost/jobs/{job['id']}/events").text
    assert json.loads(message.rpartition("data: ")[2])["job"]["state"] == "done"
    listed = serving("GET", "/api/indexes/lost/documents").json()["documents"]
    assert {item["name"] for item in listed} == {"orla.txt", "a.txt"}


def test_an_index_whose_model_has_changed_since_is_not_taken(serving, lost, tmp_path, model_folder):
    model = shutil.copytree(model_folder, tmp_path / "model")
    indexed(tmp_path / "new", ORLA, model=model).close()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    shutil.rmtree(lost)
    shutil.copytree(tmp_path / "new" / "index", lost)
    for _ in range(2):
        all_refused(serving, tmp_path)
        settle()
    assert serving("GET", "/readyz").json() == {"status": "ready", "unavailable": 1}
