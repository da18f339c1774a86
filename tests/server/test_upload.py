"""Uploading documents, ingest jobs and deletion, without a socket."""

import dataclasses
import errno
import io
import json
import logging
import shutil
import threading
from urllib.parse import quote

import pytest
from guarded import events, guarded
from heldmodel import HeldModel
from reading import docx_of, pdf_of
from starlette.datastructures import UploadFile

from ragkv import RagKV
from ragkv.errors import StoreBusyError
from ragkv.index.search import Finder
from ragkv.ingest import ParseLimits, from_bytes
from ragkv.ingest.ingester import Ingester
from ragkv.server.api import MAX_UPLOAD_FILES
from ragkv.server.app import make_app
from ragkv.server.errors import ApiError
from ragkv.server.schemas import ServedIndexes, made_indexes

DOCUMENTS = "/api/indexes/own/documents"
JOBS = "/api/indexes/own/jobs"
TEXT = b"Kesk Mills makes flour."


@pytest.fixture
def own(rag):
    """An index of two documents to which tests may add others; these are deleted after each test."""
    yield rag
    rag.delete(*[d.document for d in rag.store.document_stats() if d.document.startswith("stdin:")])


@pytest.fixture
def desk(desk_of, own):
    return desk_of(own=own)


@pytest.fixture
def app(own, limiter, desk):
    return make_app(ServedIndexes({"own": own}), limiter, desk)


@pytest.fixture
def send(call):
    """Upload files, given as pairs of name and content; returns the response."""
    return lambda *files, **more: call("POST", DOCUMENTS, files=[("files", file) for file in files], **more)


@pytest.fixture
def ended(call):
    """The ended job that this response has begun."""

    def wait(response):
        assert response.status_code == 202, response.text
        result = events(call("GET", f"{JOBS}/{response.json()['job']['id']}/events"))
        assert all(name == "progress" for name, _ in result[:-1])
        name, last = result[-1]
        assert name == last["job"]["state"]
        return last["job"]

    return wait


def names(rag):
    return {stored.document.source for stored in rag.store.documents()}


def test_files_of_every_kind_become_documents_as_an_ingest_keeps_them(own, send, ended, call):
    page = b"<html><head><title>Kesk</title></head><body><h1>Mills</h1><p>" + TEXT * 40 + b"</p></body></html>"
    files = [
        ("a.txt", TEXT), ("notes/b.md", b"# Kesk\n\n" + TEXT), ("c.html", page),
        ("d.pdf", pdf_of(TEXT.decode())), ("e.docx", docx_of(TEXT.decode())),
        ("f.csv", b"name,makes\nKesk Mills,flour\n"),
        ("g.jsonl", b'{"text": "Kesk Mills makes flour."}\n'), ("h", b'{"text": "Kesk Mills makes flour."}'),
    ]  # fmt: skip
    job = ended(send(*files))
    assert (job["state"], job["error"], job["files"]) == ("done", None, [name for name, _ in files])
    assert job["done"] == job["total"] == sum(len(data) for _, data in files)
    assert job["report"]["added"] == [f"stdin:{name}" for name, _ in files]
    assert job["report"]["skipped"] == []
    for name, _ in files:
        path = f"{DOCUMENTS}/{quote(f'stdin:{name}', safe='')}"
        assert call("GET", path).json()["source"] == name
        chunks = call("GET", f"{path}/chunks").json()["chunks"]
        assert "flour" in " ".join(chunk["text"] for chunk in chunks)
    answer = call("POST", "/api/indexes/own/query", json={"question": "What does Kesk make?", "max_new_tokens": 4})
    assert "Kesk" in answer.json()["sources"][0]["text"]
    document = own.store.document("stdin:c.html")
    text, chunks = own.store.text("stdin:c.html"), list(own.store.chunks("stdin:c.html"))
    own.delete("stdin:c.html")
    own.ingest(from_bytes(page, name="c.html"))
    again = own.store.document("stdin:c.html")
    assert (again.document, again.recipe) == (document.document, document.recipe)
    assert (own.store.text("stdin:c.html"), list(own.store.chunks("stdin:c.html"))) == (text, chunks)


def test_the_same_name_replaces_and_the_same_bytes_do_nothing(send, ended):
    assert ended(send(("a.txt", TEXT)))["report"]["added"] == ["stdin:a.txt"]
    assert ended(send(("a.txt", TEXT)))["report"]["unchanged"] == ["stdin:a.txt"]
    assert ended(send(("a.txt", b"Kesk Mills is closed.")))["report"]["updated"] == ["stdin:a.txt"]


def test_what_cannot_be_read_is_told_by_its_name(own, send, ended, limiter):
    job = ended(send(("a.pdf", b"no pdf"), ("b.txt", TEXT), ("c.txt", b"")))
    assert (job["state"], job["report"]["added"]) == ("done", ["stdin:b.txt"])
    assert [item["path"] for item in job["report"]["skipped"]] == ["a.pdf", "c.txt"]
    assert all(item["reason"] for item in job["report"]["skipped"])
    job = ended(send(("d.bin", b"\0\1\2\3" * 99)))
    assert job["state"] == "failed"
    assert str(own.folder) not in job["error"]
    assert [item["path"] for item in job["report"]["skipped"]] == ["d.bin"]
    assert 'ragkv:ingest_jobs_total{model_name="own",state="done"} 1.0' in limiter.text().decode()
    assert 'ragkv:ingest_jobs_total{model_name="own",state="failed"} 1.0' in limiter.text().decode()


def test_names_are_spelt_as_their_languages_spell_them(own, send, ended):
    """With an ideographic space, a joiner, an emoji of two, a narrow space, and a letter that Python does not know."""
    spelt = ["報告\u3000書.txt", "می\u200cخواهم.txt", "👩\u200d👧.txt", "n\u00a05\u202f.txt", "\U0001fae9.txt"]
    assert ended(send(*[(name, TEXT) for name in spelt]))["state"] == "done"
    assert names(own) >= set(spelt)


def test_names_that_are_paths_are_refused(own, call):
    around = own.folder.parent.parent
    before = sorted(around.rglob("*"))
    for name in (
        "", "../../etc/passwd", "/etc/passwd", "a/../../b", "a//b", "./a", "..", ".", " ", "a/", "C:a.txt", "a\\b.txt",
        "a\x00b.txt", "a\nb.txt", "a\x1b[31m.txt", "a\u202etxt.exe", "\x7f", "a" * 256, "a\ud800",
    ):  # fmt: skip
        raw = name.encode("utf-8", "surrogatepass")
        response = call("POST", DOCUMENTS, content=FORM.replace(b"a.txt", raw), headers={"content-type": KIND})
        assert response.status_code == 400, (name, response.text)
    assert sorted(around.rglob("*")) == before
    assert len(names(own)) == 2


FORM = b'--X\r\ncontent-disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhello\r\n--X--\r\n'
KIND = "multipart/form-data; boundary=X"


def test_forms_that_are_none_are_refused(own, call):
    for body, kind, status in (
        (b"", KIND, 400),
        (b"nothing", KIND, 400),
        (FORM[:-20], KIND, 400),
        *((FORM[:-cut], KIND, 400) for cut in (5, 7, 9, 11)),  # within the end of its only file
        (b"--X--\r\n", KIND, 400),
        (FORM.replace(b"files", b"other"), KIND, 400),
        (FORM.replace(b'; filename="a.txt"', b""), KIND, 400),
        (FORM.replace(b"content-disposition", b"x-nothing"), KIND, 400),
        (FORM.replace(b"--X--\r\n", FORM), KIND, 400),
        (FORM.replace(b"content", b"x" * 9000), KIND, 400),
        (FORM.replace(b"\r\n\r\n", b"\r\nx: y" * 9 + b"\r\n\r\n", 1), KIND, 400),
        (FORM.replace(b"--X--\r\n", FORM.replace(b"a.txt", b"b.txt"))[:-9], KIND, 400),
        (FORM, "multipart/form-data", 400),
        (FORM, "multipart/form-data; boundary=" + "X" * 300, 400),
        (FORM, "multipart/mixed; boundary=X", 415),
        (b"{}", "application/json", 415),
    ):
        response = call("POST", DOCUMENTS, content=body, headers={"content-type": kind})
        assert response.status_code == status, (body, response.text)
        assert response.json()["error"]["message"]


def test_files_have_limits(own, send, ended, call, monkeypatch):
    assert send(*((f"{n}.txt", b"a") for n in range(MAX_UPLOAD_FILES + 1))).status_code == 400
    small = {"around": lambda app: guarded(app, upload_bytes=1000)}
    assert send(("a.txt", b"a" * 1000), **small).status_code == 413
    pieces = FORM.replace(b"hello", b"a" * 2000)

    async def slowly():
        for start in range(0, len(pieces), 100):
            yield pieces[start : start + 100]

    kind = {"content-type": KIND}
    assert call("POST", DOCUMENTS, content=slowly(), headers=kind, **small).status_code == 413
    with monkeypatch.context() as changed:
        few = dataclasses.replace(ParseLimits.of(own.config.ingest), file=100)
        changed.setattr("ragkv.ingest.ParseLimits.of", lambda _: few)
        assert send(("a.txt", b"a" * 101)).status_code == 413
        assert len(names(own)) == 2
        just = [(f"{n}.txt", b"word " * (size // 5)) for n, size in enumerate((100, 60, 100))]
        assert ended(send(*just))["state"] == "done"
    assert len(names(own)) == 5


def test_a_full_temporary_folder_is_said(send, monkeypatch):
    async def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/secret")

    monkeypatch.setattr(UploadFile, "write", full)
    response = send(("a.txt", TEXT))
    assert (response.status_code, response.json()["error"]["code"]) == (507, "disk_full")
    assert "secret" not in response.text


FRIEND, EVIL = "http://friend.example", "http://evil.example"


@pytest.mark.parametrize(
    ("allowed", "headers", "status"),
    [
        (FRIEND, {}, 202),
        (FRIEND, {"origin": "http://localhost"}, 202),
        (FRIEND, {"origin": FRIEND}, 202),
        (FRIEND, {"origin": EVIL}, 403),
        (FRIEND, {"origin": "null"}, 403),
        (FRIEND, {"origin": "http://["}, 403),
        (FRIEND, {"sec-fetch-site": "cross-site"}, 403),
        (FRIEND, {"origin": "http://localhost", "sec-fetch-site": "same-origin"}, 202),
        ("*", {"origin": EVIL, "sec-fetch-site": "cross-site"}, 202),
    ],
)
def test_a_page_of_others_sends_no_files(send, ended, allowed, headers, status):
    def around(app):
        guard = guarded(app)
        guard._origins = frozenset({allowed})
        return guard

    response = send(("a.txt", TEXT), around=around, headers=headers)
    assert response.status_code == status
    if status == 202:
        ended(response)


def test_jobs_run_one_after_another_and_one_that_waits_is_cancelled_at_once(own, send, ended, held, call):
    first, second, third = (send((f"{name}.txt", TEXT)) for name in "abc")
    assert held.begun.wait(600)
    states = [call("GET", each.headers["location"]).json()["job"]["state"] for each in (first, second, third)]
    assert states == ["running", "queued", "queued"]
    assert [job["files"] for job in call("GET", JOBS).json()["jobs"]] == [["c.txt"], ["b.txt"], ["a.txt"]]
    assert call("DELETE", third.headers["location"]).json()["job"]["state"] == "cancelled"
    held.go.set()
    assert ended(second)["state"] == ended(first)["state"] == "done"
    assert names(own) & {"a.txt", "b.txt", "c.txt"} == {"a.txt", "b.txt"}
    assert call("DELETE", first.headers["location"]).json()["job"]["state"] == "done"
    assert call("DELETE", f"{JOBS}/0123456789abcdef").status_code == 404


def test_the_queue_is_bounded(send, held, ended, monkeypatch):
    monkeypatch.setattr("ragkv.server.jobs.MAX_WAITING_JOBS", 3)
    first = send(("first.txt", TEXT))
    assert held.begun.wait(600)
    waiting = [send((f"{n}.txt", TEXT)) for n in range(3)]
    assert {response.status_code for response in waiting} == {202}
    full = send(("last.txt", TEXT))
    assert (full.status_code, "retry-after" in full.headers) == (429, True)
    held.go.set()
    assert [ended(response)["state"] for response in (first, *waiting)] == ["done"] * 4
    assert send(("last.txt", TEXT)).status_code == 202


def test_files_on_their_way_have_a_place_in_the_queue(desk, own, monkeypatch):
    monkeypatch.setattr("ragkv.server.jobs.MAX_WAITING_JOBS", 2)
    queue = desk.queue("own")
    with queue.place():
        with queue.place(), pytest.raises(ApiError) as result, queue.place():
            pass
        assert result.value.status == 429
        with queue.place():
            pass


def test_only_the_last_jobs_are_remembered(own, desk, send, ended, call, monkeypatch):
    monkeypatch.setattr("ragkv.server.jobs.MAX_ENDED_JOBS", 3)
    first = send(("a.txt", TEXT))
    ended(first)
    queue = desk.queue("own")
    for _ in range(3):
        job = queue.cancel(queue.accept([]).facts.id)
        assert events(call("GET", f"{JOBS}/{job.facts.id}/events"))
    assert call("GET", first.headers["location"]).status_code == 404
    assert len(call("GET", JOBS).json()["jobs"]) == 3


def test_a_cancelled_job_tells_what_is_in_the_index(own, send, ended, call, monkeypatch):
    """It is cancelled when its first document is committed."""
    monkeypatch.setattr("ragkv.ingest.ingester.BATCH_TOKENS", 1)
    committed, go_on = threading.Event(), threading.Event()
    write = Ingester._write

    def slowly(ingester, *changes):
        write(ingester, *changes)
        committed.set()
        assert go_on.wait(600)

    monkeypatch.setattr(Ingester, "_write", slowly)
    response = send(*((f"{n}.txt", TEXT + b" %d" % n) for n in range(9)))
    assert committed.wait(600)
    assert call("DELETE", response.headers["location"]).json()["job"]["state"] == "running"
    go_on.set()
    job = ended(response)
    assert (job["state"], job["report"]["added"]) == ("cancelled", ["stdin:0.txt"])
    assert names(own) & {f"{n}.txt" for n in range(9)} == {"0.txt"}
    assert own.maintenance.verify().ok


def test_a_job_that_is_cancelled_at_the_search_indexes_has_committed_all(own, send, ended, call, monkeypatch):
    building, go_on = threading.Event(), threading.Event()
    current = Finder._current

    def slowly(finder, name, notify=None):
        building.set()
        assert go_on.wait(600)
        return current(finder, name, notify)

    monkeypatch.setattr(Finder, "_current", slowly)
    response = send(("a.txt", b"Quarrels about bobbins."), ("b.txt", TEXT))
    assert building.wait(600)
    job = call("DELETE", response.headers["location"]).json()["job"]
    assert (job["state"], job["done"]) == ("running", job["total"])
    go_on.set()
    job = ended(response)
    assert (job["state"], job["report"]["added"]) == ("cancelled", ["stdin:a.txt", "stdin:b.txt"])
    assert "bobbins" in own.retrieve("bobbins")[0].chunk.text


def test_a_job_waits_for_another_process_and_can_be_cancelled_meanwhile(own, send, ended, call, monkeypatch):
    waited = threading.Event()
    ingest, delete = RagKV.ingest, RagKV.delete

    def noted(rag, *sources, timeout, **more):
        try:
            return ingest(rag, *sources, timeout=timeout / 100, **more)
        except StoreBusyError:
            waited.set()
            raise

    monkeypatch.setattr(RagKV, "ingest", noted)
    monkeypatch.setattr(RagKV, "delete", lambda *given, timeout, **more: delete(*given, timeout=timeout / 100, **more))
    with own.store.writing("another ingest"):
        busy = call("DELETE", f"{DOCUMENTS}/a")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "busy")
        response = send(("a.txt", TEXT))
        assert waited.wait(600)
        assert call("GET", response.headers["location"]).json()["job"]["state"] == "running"
        call("DELETE", response.headers["location"])
        assert ended(response)["state"] == "cancelled"
        waited.clear()
        response = send(("a.txt", TEXT))
        assert waited.wait(600)
    assert ended(response)["state"] == "done"


def test_a_job_that_fails_says_so_and_the_next_one_runs(send, ended, monkeypatch, caplog):
    with monkeypatch.context() as broken:
        broken.setattr(Ingester, "_chunks", lambda *_: 1 / 0)
        job = ended(send(("secret name.txt", TEXT)))
    assert (job["state"], job["error"]) == ("failed", "The server failed; its log says more.")
    assert "secret" not in caplog.text
    assert "division" in caplog.text
    assert ended(send(("a.txt", TEXT)))["state"] == "done"


def test_an_index_that_is_read_only_is_not_written(own, desk_of, app_of, call_on):
    with RagKV.open(own.folder, device="cpu", readonly=True) as opened:
        app = app_of(own=opened)
        responses = [
            call_on(app, "POST", DOCUMENTS, files=[("files", ("a.txt", TEXT))]),
            call_on(app, "DELETE", f"{DOCUMENTS}/a"),
            call_on(app, "POST", "/api/indexes", json={"name": "more", "like": "own"}),
        ]
        assert [response.status_code for response in responses] == [403, 403, 403]
        assert "read-only" in responses[0].json()["error"]["message"]
        assert call_on(app, "GET", "/api/indexes").json()["indexes"][0]["writable"] is False
        assert call_on(app, "GET", JOBS).json() == {"jobs": []}


def test_an_index_is_made_beside_another_and_remembered(own, limiter, desk_of, call_on, tmp_path):
    """With its settings and its loaded model; names are no paths, and nothing that is there is touched."""
    memory, model = tmp_path / "state" / "made.json", own.model
    served = ServedIndexes({"own": own}, memory)
    (own.folder.parent / "taken").mkdir(exist_ok=True)
    app = make_app(served, limiter, desk_of(own=own))

    def make(name, like="own"):
        return call_on(app, "POST", "/api/indexes", json={"name": name, "like": like})

    for name in ("../more", "a/b", "_", "", ".x", "a b", "x" * 65):
        assert make(name).status_code == 400, name
    assert make("more", "none").status_code == 404
    refused = make("taken")
    assert refused.status_code == 409
    assert str(own.folder.parent) not in refused.text
    assert not memory.exists()
    response = make("more")
    assert response.status_code == 201, response.text
    facts = response.json()
    assert (facts["documents"], facts["writable"], facts["default_engine"]) == (0, True, own.config.default_engine)
    assert make("more").status_code == 409
    fresh = served.index("more")
    try:
        assert fresh.folder == own.folder.resolve().parent / "more"
        assert fresh.model is model
        assert fresh.config == own.config
        assert made_indexes(memory) == {"more": str(fresh.folder)}
        names = [each["name"] for each in call_on(app, "GET", "/api/indexes").json()["indexes"]]
        assert names == ["own", "more"]
    finally:
        fresh.close()
        shutil.rmtree(fresh.folder)
    assert made_indexes(memory) == {}


def test_two_servers_of_an_index_take_turns(own, ended, held, desk, desk_of, send):
    first = send(("a.txt", TEXT))
    assert held.begun.wait(600)
    second = desk_of(own=own).queue("own").accept([UploadFile(io.BytesIO(TEXT), size=len(TEXT), filename="b.txt")])
    held.go.set()
    assert ended(first)["state"] == "done"
    assert second.ended.wait(600)
    assert (second.facts.state, names(own) >= {"a.txt", "b.txt"}) == ("done", True)


def test_a_document_is_deleted(own, call, send, ended):
    ended(send(("notes/a.txt", TEXT)))
    path = f"{DOCUMENTS}/{quote('stdin:notes/a.txt', safe='')}"
    assert call("DELETE", path).json() == {"deleted": "stdin:notes/a.txt"}
    for gone in (path, f"{DOCUMENTS}/"):  # an empty id is no document's either
        assert call("DELETE", gone).status_code == call("GET", gone).status_code == 404
    assert "notes/a.txt" not in names(own)


def test_an_answer_keeps_a_document_that_is_deleted_meanwhile(own, call, send, ended, monkeypatch):
    ended(send(("a.txt", b"Kesk Mills was founded by Tova Lind."), ("b.txt", TEXT)))
    question = {"question": "What is Kesk Mills?", "engine": "ape", "max_new_tokens": 6, "where": ["source=?.txt"]}
    expected = call("POST", "/api/indexes/own/query", json=question).json()
    model = HeldModel(own, monkeypatch, last=2)
    replies = []
    asking = threading.Thread(target=lambda: replies.append(call("POST", "/api/indexes/own/query", json=question)))
    asking.start()
    assert model.begun.wait(600)
    for name in ("a.txt", "b.txt"):
        assert call("DELETE", f"{DOCUMENTS}/stdin:{name}").status_code == 200
    model.cancelled.set()
    asking.join()
    assert len(expected["sources"]) == 2
    answer = replies[0].json()
    assert answer["answer"] == expected["answer"]
    assert [source["text"] for source in answer["sources"]] == [source["text"] for source in expected["sources"]]


def test_the_log_names_no_document(own, call, caplog):
    with caplog.at_level(logging.INFO, logger="ragkv"):
        call("GET", f"{DOCUMENTS}/secret%2Fplan.txt")
        call("GET", f"{DOCUMENTS}/secret%2Fplan.txt/chunks")
    message = [record.getMessage() for record in caplog.records if record.name.startswith("ragkv")]
    assert [json.loads(line)["path"] for line in message] == [f"{DOCUMENTS}/…"] * 2


def test_a_stopping_server_interrupts_its_jobs(own, send, held, desk, call):
    first, second = send(("a.txt", TEXT)), send(("b.txt", TEXT))
    assert held.begun.wait(600)
    jobs = desk.jobs("own")
    desk.stop()
    assert send(("c.txt", TEXT)).status_code == 503
    held.go.set()
    desk.close()
    assert [job.facts.state for job in jobs] == ["interrupted", "interrupted"]
    assert {job.facts.id for job in jobs} == {response.json()["job"]["id"] for response in (first, second)}
